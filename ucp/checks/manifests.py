"""Folders of atoms: the files that the manifest lists, and those that virtual atoms point at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext
from ucp.errors import IntegrityError
from ucp.formats.atoms import MANIFEST
from ucp.formats.atoms import manifest as manifests

_RESTORE: Final = "restore the file, or convert again"


def run_check(context: CheckContext) -> Iterator[Finding]:
    """What the folder holds against what its manifest lists."""
    checkpoint = context.checkpoint
    if checkpoint.format == "atoms":
        yield from compare_folder(checkpoint.root)


def compare_folder(root: Path) -> Iterator[Finding]:
    """Files that are missing, of another size or not listed, and changed sources of virtual atoms."""
    content = manifests.load_manifest(root)
    yield from _files(root, content)
    yield from changed_sources(content)


def _files(root: Path, content: dict[str, Any]) -> Iterator[Finding]:
    listed = {file: entry["bytes"] for file, entry in content["files"].items()}
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    for file, size in listed.items():
        actual = found[file].stat().st_size if file in found else None
        if actual == size:
            continue
        yield Finding(
            "manifest-files",
            "error",
            f"{file}: is missing ({size:,} bytes)" if actual is None else f"{file}: {actual:,} bytes, not {size:,}",
            file,
            hint=_RESTORE,
            exit_code=IntegrityError.exit_code,
        )
    for file in sorted(found.keys() - listed.keys() - {MANIFEST}):
        yield Finding(
            "manifest-files",
            "warning",
            f"{file}: is not in the manifest",
            file,
            hint="it does not belong to these atoms: remove it, or keep it elsewhere",
        )


def changed_sources(content: dict[str, Any]) -> Iterator[Finding]:
    """Source files of virtual atoms whose size or time is not what it was, or that are gone."""
    links = content.get("links")
    if links is None:
        return
    for file, size, time in links["files"]:
        if not file:
            continue
        path = Path(links["root"]) / file
        try:
            status = os.stat(path)
        except OSError as error:
            what = f"{path}: {error.strerror}, but virtual atoms point at it"
        else:
            if (status.st_size, status.st_mtime_ns) == (size, time):
                continue
            what = (
                f"{path}: changed since virtual atoms were made to point at it"
                f" ({size:,} bytes then, {status.st_size:,} now)"
            )
        yield Finding(
            "source-unchanged",
            "error",
            what,
            str(path),
            hint="make the virtual atoms again with `ucp convert --link`, or real ones without it",
            exit_code=IntegrityError.exit_code,
        )
