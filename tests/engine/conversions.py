"""Small conversions without a format, for the tests of the engine."""

from __future__ import annotations

from pathlib import Path

from tests.engine.shards import Cut, regions
from ucp.core.checkpoint import Atom, Checkpoint, Mesh, Parameter
from ucp.core.target import Digests, LiteralBytes, OutputFile, Target, WriteItem
from ucp.engine.convert import RunOptions
from ucp.engine.pool import Progress
from ucp.engine.worker import WorkerBudget


def checkpoint(root: Path, atoms: list[Atom]) -> Checkpoint:
    parameters = {atom.name: Parameter(atom.name, atom.shape, atoms={atom.kind: atom}) for atom in atoms}
    sizes = {f.file: (root / f.file).stat().st_size for atom in atoms for f in atom.fragments}
    return Checkpoint("test", root, Mesh(), parameters, sizes=sizes)


def one_file_per_rank(atom: Atom, cut: Cut) -> Target:
    files = []
    for number, region in enumerate(regions(cut, atom.shape)):
        head = f"rank {number}:".encode()
        item = WriteItem(atom, region, len(head))
        files.append(OutputFile(f"{number}/shard", len(head) + item.nbytes, (LiteralBytes(0, head),), (item,)))
    return Target(tuple(files))


def nothing_last(_: Digests) -> None:
    return None


def options(jobs: int = 1, **more: bool) -> RunOptions:
    return RunOptions(WorkerBudget(jobs, 1 << 20), **more)


class StopAfter(Progress):
    """Ends the run with an exception after `nbytes` bytes."""

    def __init__(self, nbytes: int, error: BaseException) -> None:
        self.left, self.error = nbytes, error

    def advance(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise self.error
