"""Folders of the project that tests read."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tarfile
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
FIXTURES = PROJECT / "fixtures"
CORPUS = Path(os.environ["UCP_CORPUS"]) if os.environ.get("UCP_CORPUS") else None  # further real checkpoints


@functools.cache
def unpacked() -> Path:
    """The folder in which the archives of `fixtures/packed/` are unpacked, as `<family>/<variant>/…`.

    It is named for the content of the archives, in `.fixtures` or `UCP_TEST_CACHE`; the first process that needs it
    makes it, and others wait.
    """
    archives = sorted((FIXTURES / "packed").rglob("*.tar.xz"))
    content = hashlib.sha256(b"".join(hashlib.sha256(archive.read_bytes()).digest() for archive in archives))
    cache = Path(os.environ.get("UCP_TEST_CACHE") or PROJECT / ".fixtures")
    target = cache / content.hexdigest()[:16]
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = Path(tempfile.mkdtemp(dir=cache))
            for archive in archives:
                with tarfile.open(archive) as tar:
                    tar.extractall(partial, filter="data")
            partial.chmod(0o755)
            partial.rename(target)
    return target


def fixture(name: str) -> Path:
    """A checkpoint of `fixtures/`, or a packed one, as `<family>/<variant>`."""
    return unpacked() / name if "/" in name else FIXTURES / name


def variants(*families: str) -> list[Path]:
    """Every packed checkpoint of these families, and those of `UCP_CORPUS` that are not packed under the same name."""
    found = []
    for family in families:
        packed = {path.name: path for path in (unpacked() / family).glob("*")}
        more = {path.name: path for path in (CORPUS / family).glob("*") if path.is_dir()} if CORPUS else {}
        found += [path for _, path in sorted((more | packed).items())]
    return found
