"""Checks of Megatron checkpoints: rank folders that were left over, files that are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Final

from ucp.containers.distcp import read_dcp_folder
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding
from ucp.formats.megatron.folder import OPTIMIZER_FILE, OPTIMIZER_MISSING, find
from ucp.formats.registry import FormatChecks, files_of, missing_sidecar, stray_file

_RANK_FOLDER_NAME: Final = re.compile(r"mp_rank_\d{2,}(?:_\d{3,})*")
_OBJECT: Final = re.compile(r"(.*/shard_)(\d[\d.]*)_(\d{1,9}(?:\.\d{1,9})*)\.pt", re.ASCII)
_MAX_OBJECTS: Final = 1_000_000


class MegatronChecks(FormatChecks):
    """`grid` of the legacy layout."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Missing optimizer files, and rank folders beyond the ranks of the job."""
        if any(note.id == OPTIMIZER_MISSING for note in checkpoint.notes):
            yield Finding(
                "grid",
                "error",
                f"saved with the distributed optimizer, but no rank's {OPTIMIZER_FILE} is here: only weights could be"
                " read",
                hint=f"restore the {OPTIMIZER_FILE} files; without them training cannot continue from here",
            )
        mesh = checkpoint.mesh
        used = {
            PurePosixPath(fragment.file).parts[0]
            for atom in atoms
            for cover in (atom.fragments, *atom.replicas)
            for fragment in cover
            if fragment.rank.tp < mesh.tp and fragment.rank.pp < mesh.pp and (fragment.rank.ep or 0) < mesh.ep
        }
        for file in checkpoint.sizes:
            folder, *below = PurePosixPath(file).parts
            if below and _RANK_FOLDER_NAME.fullmatch(folder) and folder not in used:
                yield stray_file(file, f"belongs to no rank of {mesh}")

    def torch_files(self, path: Path, tag: str | None) -> Iterable[Path]:
        """All of the iteration's folder."""
        folder = find(path, tag)
        return () if folder is None else sorted(folder.root.rglob("*.pt"))


class TorchDistChecks(FormatChecks):
    """`grid` of the sharded layouts."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Data files that no `.metadata` names, and missing objects."""
        used = files_of(atoms)
        unused = [
            file for file, size in checkpoint.sizes.items() if size and file.endswith(".distcp") and file not in used
        ]
        # The index has all files of the folder. Most contain parameters: the metadata is only read for the others.
        listed = read_dcp_folder(checkpoint.root).files if unused else {}
        for file in unused:
            if file not in listed:
                yield stray_file(file, "is not named in .metadata")
        yield from missing_objects(checkpoint)


def missing_objects(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Objects of folders from before `.distcp`: one file each, with its position in a grid and the grid's shape."""
    grids: dict[tuple[str, str], set[str]] = {}
    for match in filter(None, map(_OBJECT.fullmatch, checkpoint.sizes)):
        grids.setdefault((match[1], match[3]), set()).add(match[2])
    for (prefix, shape), found in grids.items():
        ranges = [range(int(size)) for size in shape.split(".")]
        if prod(map(len, ranges)) > _MAX_OBJECTS:
            continue
        for position in product(*ranges):
            name = ".".join(map(str, position))
            if name not in found:
                file = f"{prefix}{name}_{shape}.pt"
                content = "an object that is not a parameter"
                yield missing_sidecar(checkpoint, file, content, "Megatron's state in it is lost")
