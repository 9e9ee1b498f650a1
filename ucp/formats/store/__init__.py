"""The mapped store as a checkpoint: its file layout, its generations, and the index of one. See docs/spec/atoms.md.

`ucp.training.store` writes stores from a running job.
"""

from __future__ import annotations

from pathlib import Path

from ucp.errors import UsageError
from ucp.storage.storage import storage_of


def recognises(path: Path) -> bool:
    """Whether `path` is a file that starts like a store."""
    if not path.is_file():
        return False
    from ucp.formats.store.generations import is_store  # most checkpoints are folders, and do without it

    if not is_store(path):
        return False
    if storage_of(path).is_remote:
        raise UsageError(
            f"{path}: a store must be a local file, to be mapped into memory", hint="copy it to this machine"
        )
    return True
