"""Checks of torch.distributed.checkpoint folders: data files without metadata, and Megatron's folders in disguise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding
from ucp.formats.registry import FormatChecks, stray_file
from ucp.storage.paths import scan_folder

_DATA: Final = ".distcp"
_MAX_METADATA_JSON: Final = 1_000_000  # bytes


class DcpChecks(FormatChecks):
    """`grid`."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """A missing `common.pt`, and data files that no `.metadata` names."""
        del atoms
        yield from _missing_common(checkpoint)
        for folder in sorted({PurePosixPath(file).parent for file in checkpoint.sizes if file.endswith(_DATA)}):
            with scan_folder(checkpoint.root / folder) as entries:  # a rank without data leaves an empty file
                names = sorted(entry.name for entry in entries if entry.name.endswith(_DATA) and entry.stat().st_size)
            for name in names:
                file = (folder / name).as_posix()
                if file not in checkpoint.sizes:
                    yield stray_file(file, "is not named in .metadata")


def _missing_common(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Megatron's folders have a file that all ranks share; without it they look like any other folder of DCP."""
    if "metadata.json" not in checkpoint.sizes or "common.pt" in checkpoint.sizes:
        return
    path = checkpoint.root / "metadata.json"
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size < _MAX_METADATA_JSON else None
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and "sharded_backend" in content:
        yield Finding(
            "grid",
            "error",
            f"{checkpoint.root / 'common.pt'}: is missing, but according to metadata.json Megatron wrote this folder",
            "common.pt",
            hint="copy it from where the checkpoint is complete: it contains iteration, arguments and scheduler",
        )
