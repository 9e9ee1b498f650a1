"""Checks of Megatron checkpoints: rank folders that were exchanged or left over, files that are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations, product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Final

from ucp.containers.distcp import read_dcp_folder
from ucp.containers.inert import Inert
from ucp.core.checkpoint import Atom, Checkpoint, Rank
from ucp.core.findings import Finding
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, OPTIMIZER_MISSING, RANK_FOLDER, find
from ucp.formats.registry import FormatChecks, files_of, missing_sidecar, stray_file

_RANK_FOLDER_NAME: Final = re.compile(r"mp_rank_\d{2,}(?:_\d{3,})*")
_OBJECT: Final = re.compile(r"(.*/shard_)(\d[\d.]*)_(\d{1,9}(?:\.\d{1,9})*)\.pt", re.ASCII)
_MAX_OBJECTS: Final = 1_000_000

FolderNumbers = tuple[int, ...]
"""The numbers in a rank folder's name: tensor-parallel, then pipeline and expert-parallel rank."""


class MegatronChecks(FormatChecks):
    """`grid` of the legacy layout."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Exchanged rank folders, missing optimizer files, and rank folders beyond the ranks of the job."""
        yield from exchanged_ranks(checkpoint)
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


def exchanged_ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Rank files that another rank wrote: their global ranks do not increase along the numbers of the folder names.

    Which number varies fastest depends on the job, so the order that the fewest files contradict is assumed.
    """
    writers = _writers(checkpoint)
    if all(writers[one] < writers[other] for line in _lines(writers) for one, other in pairwise(line)):
        return
    orders = permutations(range(_number_count(writers)))
    for numbers, rank in min((_misplaced(writers, order) for order in orders), key=len):
        file = f"mp_rank_{numbers[0]:02d}{''.join(f'_{number:03d}' for number in numbers[1:])}/{MODEL_FILE}"
        yield Finding(
            "grid",
            "error",
            f"{file}: was written by rank {writers[numbers]}, where a file of rank {rank} belongs",
            file,
            Rank(tp=numbers[0]),
            hint="rename the folders of these ranks back, or restore the files of one save",
        )


def _writers(checkpoint: Checkpoint) -> dict[FolderNumbers, int]:
    """The global rank that wrote each folder; empty if tools without ranks wrote the files."""
    found: dict[FolderNumbers, int] = {}
    for file, tree in checkpoint.extras.trees.items():
        folder, slash, name = file.partition("/")
        match = RANK_FOLDER.fullmatch(folder) if slash and name == MODEL_FILE else None
        arguments = tree.get("args") if isinstance(tree, dict) else None
        rank = arguments.get("rank") if isinstance(arguments, Inert) else None
        if match is not None and type(rank) is int:
            found[tuple(int(number) for number in match.groups() if number is not None)] = rank
    return found if len(set(found.values())) == len(found) else {}


def _lines(writers: Mapping[FolderNumbers, int]) -> Iterator[list[FolderNumbers]]:
    """Folders that differ in one number only, in increasing order of it."""
    for position in range(_number_count(writers)):
        lines: dict[FolderNumbers, list[FolderNumbers]] = {}
        for numbers in sorted(numbers for numbers in writers if len(numbers) > position):
            lines.setdefault((*numbers[:position], -1, *numbers[position + 1 :]), []).append(numbers)
        yield from lines.values()


def _misplaced(writers: Mapping[FolderNumbers, int], order: Sequence[int]) -> list[tuple[FolderNumbers, int]]:
    """Folders with another rank's file, and the rank that belongs there, if numbers are significant in this order."""
    folders = sorted(writers, key=lambda numbers: [numbers[position] for position in order if position < len(numbers)])
    expected = zip(folders, sorted(writers.values()), strict=True)
    return [(numbers, rank) for numbers, rank in expected if writers[numbers] != rank]


def _number_count(writers: Mapping[FolderNumbers, int]) -> int:
    return max(map(len, writers), default=0)
