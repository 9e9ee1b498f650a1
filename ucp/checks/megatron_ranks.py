"""Megatron's rank files say which rank wrote them: folders that were exchanged contradict the order of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Final

from ucp.checks.findings import Finding
from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint
from ucp.core.mesh import Rank
from ucp.formats.megatron.folder import MODEL_FILE, RANK_FOLDER

_HINT: Final = "give the folders of these ranks their names back, or restore the files of one save"

Numbers = tuple[int, ...]
"""What stands in a folder's name: the tensor-parallel rank, then the pipeline's and the expert-parallel one."""


def exchanged_ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that contradict the others, where ranks do not grow along every number in the folders' names.

    Which of the numbers counts first is up to the job: the order that the fewest files contradict is taken for its own.
    """
    writers = _writers(checkpoint)
    if all(writers[one] < writers[other] for line in _lines(writers) for one, other in pairwise(line)):
        return
    for numbers, rank in min((_misplaced(writers, order) for order in permutations(range(_places(writers)))), key=len):
        file = f"{_folder(numbers)}/{MODEL_FILE}"
        yield Finding(
            "grid",
            "error",
            f"{file}: was written by rank {writers[numbers]}, where a file of rank {rank} belongs",
            file,
            Rank(tp=numbers[0]),
            hint=_HINT,
        )


def _misplaced(writers: Mapping[Numbers, int], order: Sequence[int]) -> list[tuple[Numbers, int]]:
    """Folders that have not the file of the rank which belongs there, and that rank, if numbers count in this order."""
    folders = sorted(writers, key=lambda numbers: [numbers[place] for place in order if place < len(numbers)])
    expected = zip(folders, sorted(writers.values()), strict=True)
    return [(numbers, rank) for numbers, rank in expected if writers[numbers] != rank]


def _places(writers: Mapping[Numbers, int]) -> int:
    return max(map(len, writers), default=0)


def _writers(checkpoint: Checkpoint) -> dict[Numbers, int]:
    """The folders' numbers, and the rank that wrote each; nothing where tools without ranks made the files."""
    found: dict[Numbers, int] = {}
    for file, tree in checkpoint.extras.trees.items():
        folder, slash, name = file.partition("/")
        match = RANK_FOLDER.fullmatch(folder) if slash and name == MODEL_FILE else None
        arguments = tree.get("args") if isinstance(tree, dict) else None
        rank = arguments.get("rank") if isinstance(arguments, Inert) else None
        if match is not None and type(rank) is int:
            found[tuple(int(number) for number in match.groups() if number is not None)] = rank
    return found if len(set(found.values())) == len(found) else {}


def _lines(writers: Mapping[Numbers, int]) -> Iterator[list[Numbers]]:
    """Folders that differ in one number only, in its order."""
    for place in range(_places(writers)):
        lines: dict[Numbers, list[Numbers]] = {}
        for numbers in sorted(numbers for numbers in writers if len(numbers) > place):
            lines.setdefault((*numbers[:place], -1, *numbers[place + 1 :]), []).append(numbers)
        yield from lines.values()


def _folder(numbers: Numbers) -> str:
    return f"mp_rank_{numbers[0]:02d}" + "".join(f"_{number:03d}" for number in numbers[1:])
