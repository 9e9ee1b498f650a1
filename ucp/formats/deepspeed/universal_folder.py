"""Locate a universal checkpoint: the path itself, or the folder in it that `latest_universal` or a tag names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ucp.errors import StorageError, UsageError
from ucp.storage.paths import scan_folder

STATES_FOLDER: Final = "zero"
STATE_SUFFIX: Final = ".pt"  # of the state files: zero/<parameter>/<state>.pt
MASTER_FILE: Final = "fp32"
OPTIMIZER_STATE: Final = "zero/optimizer_state.pt"
LATEST_UNIVERSAL: Final = "latest_universal"


def recognises(path: Path) -> bool:
    """Whether `path` is a universal folder, or a save folder that names one and has no native checkpoint."""
    try:
        if _is_universal(path):
            return True
        named = _latest_universal_tag(path)
        return named is not None and _is_universal(path / named) and not (path / "latest").is_file()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def _is_universal(path: Path) -> bool:
    if not (path / STATES_FOLDER).is_dir():
        return False
    if (path / OPTIMIZER_STATE).is_file():
        return True
    with scan_folder(path / STATES_FOLDER) as entries:
        return any((path / STATES_FOLDER / entry.name / "fp32.pt").is_file() for entry in entries)


def _latest_universal_tag(path: Path) -> str | None:
    latest = path / LATEST_UNIVERSAL
    if not latest.is_file() or latest.stat().st_size > 4096:
        return None
    text = latest.read_bytes().decode("utf-8", "replace").strip()
    return text if text not in ("", ".", "..") and "/" not in text and "\0" not in text else None


def find(path: Path, tag: str | None) -> Path:
    """The universal folder at `path`, or the one below it with this `tag`."""
    if _is_universal(path):
        if tag is not None and tag != path.name:
            raise UsageError(f"{path} is a universal folder itself, not one named {tag!r}", hint="leave out --tag")
        return path
    named = tag if tag is not None else _latest_universal_tag(path)
    if named is None or not _is_universal(path / named):
        raise UsageError(f"{path}: no universal folder {named or ''} here", hint="give the folder that contains zero/")
    return path / named
