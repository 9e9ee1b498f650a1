"""The place of a target: where its unfinished form is, and what may stand in its way."""

from __future__ import annotations

import os
from pathlib import Path

from ucp.engine.journal import BusyError, Journal, is_held
from ucp.engine.shares import WHOLE, Share, found_shares
from ucp.errors import StorageError, UsageError
from ucp.files.local import remove_tree


def staging_folder(target: Path) -> Path:
    """Where the unfinished form of `target` lives: its files, and journals, whose names begin with `OUR_NOTES`."""
    return target.parent / f".{target.name}.ucp-partial"


def busy(path: Path, share: Share = WHOLE) -> BusyError:
    """What is said where another process writes `path`, or this share of it."""
    whose = "" if share.is_whole else f"{share}: "
    return BusyError(f"{path}: {whose}another process is writing it now", hint="wait for it, or choose another target")


def discard_half_done(path: Path) -> None:
    """Remove what an earlier run has left of `path`, in one piece or in parts; refused while a process is at it."""
    folder = staging_folder(path)
    if not folder.exists():
        return
    if any(is_held(folder / share.journal) for share in found_shares(folder)):
        raise busy(path)
    held = Journal(folder / WHOLE.journal, busy(path))  # so that nobody begins while it goes
    remove_tree(folder)
    held.close()


def check_place(path: Path) -> None:
    """Refuse a target that is there already, or that has no folder to be in."""
    if not path.parent.is_dir():
        raise StorageError(f"{path.parent}: no such folder", hint="make it first, or choose another target")
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
