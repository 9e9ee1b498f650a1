"""Recognising a mapped store, apart from its reader: most checkpoints are none."""

from __future__ import annotations

from pathlib import Path

from ucp.errors import UsageError
from ucp.storage.paths import RemotePath


def recognises(path: Path) -> bool:
    """A file that begins like a store."""
    if not path.is_file():
        return False
    from ucp.formats.store.generations import is_store

    if not is_store(path):
        return False
    if isinstance(path, RemotePath):
        raise UsageError(f"{path}: a store is mapped into memory, where it is a file", hint="copy it to this machine")
    return True
