"""Copy tasks: the work that a target takes, cut into units for one worker each, in a deterministic order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, count, groupby
from typing import Final, Generic, TypeVar

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, slabs
from ucp.core.checkpoint import Atom
from ucp.core.strided_runs import StridedRun, strided_runs
from ucp.core.target import LiteralBytes, OutputFile, Target, WriteItem
from ucp.read.verbatim import StoredRuns, can_flatten, runs_are_long, stored_runs

# Part of a conversion's fingerprint: journals of a version that cuts tasks differently are not resumed.
VERSION: Final = 3
_MAX_RANGES_PER_TASK: Final = 256  # literals or zero ranges: each is small, and a task costs a line of the journal

Value = TypeVar("Value")
_NumberedItem = tuple[int, WriteItem]  # with the number of its file


@dataclass(frozen=True, slots=True)
class OutputRange:
    """Bytes `[offset, offset + nbytes)` of one output file, which one task writes in order."""

    file: int  # index into Target.files
    offset: int
    nbytes: int
    place: Box | StridedRun | None  # in the atom, or in the flattened atom; None for literals and zeros
    data: bytes | None = None  # of a literal


@dataclass(frozen=True, slots=True)
class CopyTask:
    """The unit of work for one worker: a block of one atom and every place it goes to, or some literals and zeros.

    The block may extend past the atom's shape if a write item does: the padding is zero.
    """

    atom: Atom | None
    flat: bool  # the block and all places are those of the flattened atom
    block: Box
    ranges: tuple[OutputRange, ...]
    stored: StoredRuns | None = None  # of a flat task: where its bytes are, if they are copied unchanged

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(output_range.nbytes for output_range in self.ranges)


def copy_tasks(target: Target) -> Iterator[CopyTask]:
    """All tasks of a target, in an order that depends only on the target and the settings."""
    return chain(*task_queues(target, 1))


def task_queues(target: Target, count: int, only: Container[int] | None = None) -> list[Iterator[CopyTask]]:
    """All tasks of a target in `count` queues of about the same number of bytes, each for one worker.

    With `only`, the tasks for the files of these numbers. Consecutive tasks write to the same file, and Linux lets only
    one thread write to a file at a time: workers on different queues do not wait for each other.
    """
    numbered = [(number, file) for number, file in enumerate(target.files) if only is None or number in only]
    items: dict[int, list[_NumberedItem]] = {}
    for number, file in numbered:
        for item in file.items:
            items.setdefault(id(item.atom), []).append((number, item))
    # States of one parameter are written side by side if computing one of them computes all.
    groups: dict[object, list[Sequence[_NumberedItem]]] = {}
    for some in items.values():
        atom = some[0][1].atom
        groups.setdefault(atom.name if atom.computed else id(atom), []).append(some)
    weighted = [(sum(item.nbytes for some in group for _, item in some), group) for group in groups.values()]
    files = _split_by_weight([(file.size, (number, file)) for number, file in numbered], count)
    return [_queue(*share) for share in zip(files, _split_by_weight(weighted, count), strict=True)]


def _split_by_weight(weighted: Sequence[tuple[int, Value]], count: int) -> list[list[Value]]:
    """Split a list into `count` consecutive parts of about the same weight."""
    parts: list[list[Value]] = [[] for _ in range(count)]
    total = max(1, sum(weight for weight, _ in weighted))
    before = 0
    for weight, value in weighted:
        parts[min(count - 1, (before + weight // 2) * count // total)].append(value)
        before += weight
    return parts


def _queue(
    files: Sequence[tuple[int, OutputFile]], groups: Sequence[Sequence[Sequence[_NumberedItem]]]
) -> Iterator[CopyTask]:
    step = settings.COPY_TASK_BYTES
    for number, file in files:
        yield from literal_tasks(number, file.literals)
        yield from _known_byte_tasks(
            OutputRange(number, zero.offset + start, min(step, zero.nbytes - start), None)
            for zero in file.zeros
            for start in range(0, zero.nbytes, step)
        )
    for group in groups:
        tasks = [_tasks_of_atom(items[0][1].atom, items) for items in group]
        yield from tasks[0] if len(tasks) == 1 else merge(*tasks, key=_first_element)


def task_groups(tasks: Iterable[CopyTask]) -> Iterator[list[CopyTask]]:
    """Tasks in order, grouped if they write states of the same elements, so that computing one computes the others."""
    unique = count()

    def key(task: CopyTask) -> object:
        atom = task.atom
        return next(unique) if atom is None or not atom.computed else (atom.name, _first_element(task))

    return (list(group) for _, group in groupby(tasks, key))


def _first_element(task: CopyTask) -> int:
    """Position of the task's first element in the flattened atom."""
    assert task.atom is not None
    return task.block.start[0] if task.flat else flat_index(task.block.start, task.atom.shape)


def _elements_per_task(atom: Atom) -> int:
    """Computed atoms are cut small, so that all states of some elements are written before the next are computed."""
    limit = settings.COPY_TASK_BYTES // atom.dtype.itemsize
    return max(1, min(limit, settings.LOG_BLOCK_ELEMENTS) if atom.computed else limit)


# Known bytes --------------------------------------------------------------------------------------------------------


def literal_tasks(number: int, literals: Iterable[LiteralBytes]) -> Iterator[CopyTask]:
    """The tasks that write literals of file `number`."""
    ranges = (OutputRange(number, literal.offset, len(literal.data), None, literal.data) for literal in literals)
    return _known_byte_tasks(ranges)


def _known_byte_tasks(ranges: Iterable[OutputRange]) -> Iterator[CopyTask]:
    batch: list[OutputRange] = []
    nbytes = 0
    for one in ranges:
        if batch and (len(batch) == _MAX_RANGES_PER_TASK or nbytes + one.nbytes > settings.COPY_TASK_BYTES):
            yield CopyTask(None, True, Box((), ()), tuple(batch))
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield CopyTask(None, True, Box((), ()), tuple(batch))


# Atoms --------------------------------------------------------------------------------------------------------------


def _tasks_of_atom(atom: Atom, items: Sequence[_NumberedItem]) -> Iterator[CopyTask]:
    runs = [some for _, item in items if (some := strided_runs(item.region, atom.shape)) is not None]
    if len(runs) == len(items):
        stored = stored_runs(atom)
        if stored is not None:
            is_flat = all(runs_are_long(some, atom.dtype) for some in runs)
        else:
            is_flat = can_flatten(atom) and all(run.times == 1 for some in runs for run in some)
        if is_flat:
            return _flat_tasks(atom, items, runs, stored)
    return _shaped_tasks(atom, items)


def _flat_tasks(
    atom: Atom, items: Sequence[_NumberedItem], runs: Sequence[Sequence[StridedRun]], stored: StoredRuns | None
) -> Iterator[CopyTask]:
    """Tasks of the flattened atom; `runs` are those of each item."""
    itemsize = atom.dtype.itemsize
    pending = sorted(
        (run, number, item.offset) for (number, item), some in zip(items, runs, strict=True) for run in some
    )
    pending.reverse()  # the next one is the last
    active: list[tuple[StridedRun, int, int]] = []
    step = _elements_per_task(atom)
    for start in range(0, atom.numel, step):
        stop = min(start + step, atom.numel)
        while pending and pending[-1][0].first < stop:
            active.append(pending.pop())
        if not active:
            continue
        ranges: list[OutputRange] = []
        for run, number, base in active:
            low, high = run.before(start), run.before(stop)
            if low < high:
                ranges.append(OutputRange(number, base + (run.offset + low) * itemsize, (high - low) * itemsize, run))
        if ranges:
            # From the first wanted element, which may be in the first run, to the last.
            first, last = max(active[0][0].first, start), min(max(run.stop for run, _, _ in active), stop)
            yield CopyTask(atom, True, Box((first,), (last - first,)), tuple(ranges), stored)
        active = [entry for entry in active if entry[0].stop > stop]


def _shaped_tasks(atom: Atom, items: Sequence[_NumberedItem]) -> Iterator[CopyTask]:
    itemsize = atom.dtype.itemsize
    pieces = [(piece, number, item.offset) for number, item in items for piece in item.region.pieces()]
    # The smallest shape that contains the atom and everything that write items want of it.
    shape = tuple(map(max, zip(atom.shape, *(piece.box.stop for piece, _, _ in pieces), strict=True)))
    sweep = OverlapSweep((entry[0].box, entry) for entry in pieces)
    for block in slabs(shape, _elements_per_task(atom)):
        ranges: list[OutputRange] = []
        for (start, extent), (piece, number, base) in sweep.overlapping(block):
            common = intersect(piece.box, block)
            if common is not None:
                inside = flat_index(tuple(a - b for a, b in zip(common.start, start, strict=True)), extent)
                offset = base + (piece.offset + inside) * itemsize
                ranges.append(OutputRange(number, offset, common.numel * itemsize, common))
        if ranges:
            yield CopyTask(atom, False, block, tuple(ranges))


class OverlapSweep(Generic[Value]):
    """Finds the boxes that overlap a slab, for slabs that come in row-major order, without testing every box each time.

    Row-major order is the order of index tuples: a box becomes active when its first index is reached, and inactive
    after its last one, whatever the shape of the tensor.
    """

    def __init__(self, boxes: Iterable[tuple[Box, Value]]) -> None:
        """Each box comes with the value that stands for it."""
        self._pending = sorted(boxes, key=lambda entry: entry[0].start, reverse=True)  # the next one is the last
        self._active: list[tuple[Shape, Box, Value]] = []  # with the last index of each box

    def overlapping(self, slab: Box) -> list[tuple[Box, Value]]:
        """All boxes that share elements with the slab, in the order of their first indices; maybe a few others."""
        last = _last_index(slab)
        while self._pending and self._pending[-1][0].start <= last:
            box, value = self._pending.pop()
            self._active.append((_last_index(box), box, value))
        found = [(box, value) for _, box, value in self._active]
        self._active = [entry for entry in self._active if entry[0] > last]
        return found


def _last_index(box: Box) -> Shape:
    return tuple(a + n - 1 for a, n in zip(box.start, box.shape, strict=True))
