"""A sweep: which of many boxes a slab meets, without looking at all of them for every slab.

The plan: a target cut into parts, each a block of one atom and every place it goes to. Deterministic.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Final, Generic, TypeVar

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, slabs
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import DType
from ucp.core.region import RegionPiece
from ucp.core.strided_runs import StridedRun, strided_runs
from ucp.core.target import Literal, OutputFile, Target, WriteItem, ZeroRange
from ucp.read.verbatim import StoredRuns, can_flatten, runs_are_long, stored_runs

Value = TypeVar("Value")


class OverlapSweep(Generic[Value]):
    """Boxes, each with what it stands for, met by slabs that come from first to last.

    Row-major order is the order of index tuples: a box is let in when its first index is reached and let go after its
    last one, whatever the shape of the tensor.
    """

    def __init__(self, boxes: Iterable[tuple[Box, Value]]) -> None:
        self._waiting = sorted(boxes, key=lambda entry: entry[0].start, reverse=True)  # the next one is the last
        self._met: list[tuple[Shape, Box, Value]] = []  # with the last index of each

    def meeting(self, slab: Box) -> list[tuple[Box, Value]]:
        """All boxes that share elements with the slab, in the order of their first indices, and maybe some others."""
        last = last_index(slab)
        while self._waiting and self._waiting[-1][0].start <= last:
            box, value = self._waiting.pop()
            self._met.append((last_index(box), box, value))
        met = [(box, value) for _, box, value in self._met]
        self._met = [entry for entry in self._met if entry[0] > last]
        return met


def last_index(box: Box) -> Shape:
    """The index of the last element of a box."""
    return tuple(a + n - 1 for a, n in zip(box.start, box.shape, strict=True))


# Parts that other versions of this module cut are not found again in a journal.
VERSION: Final = 3
# How many literals or zero ranges one part may write: each is small, and a part costs a line of the journal.
_MAX_RANGES_PER_TASK: Final = 256

T = TypeVar("T")
_AtomItems = Sequence[tuple[int, WriteItem]]  # of one atom: (file number, item)


@dataclass(frozen=True, slots=True)
class OutputRange:
    """A contiguous byte range `[offset, offset + nbytes)` of one output file that one part writes in order."""

    file: int  # index into Target.files
    offset: int
    nbytes: int
    place: Box | StridedRun | None  # in the atom, flattened where the part is; literals and zeros have none
    data: bytes | None = None  # of a literal; zeros have neither


@dataclass(frozen=True, slots=True)
class CopyTask:
    """What one thread does at a time: a block of one atom and every place it goes to, or some literals and zeros.

    The block may reach past the atom's shape, where a item does: what lies outside is zero.
    """

    atom: Atom | None
    flat: bool  # the block and all extents are those of the flattened atom
    block: Box
    extents: tuple[OutputRange, ...]
    stored: StoredRuns | None = None  # of a flat part: where its bytes are, if they go as they are

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


def copy_tasks(target: Target) -> Iterator[CopyTask]:
    """All the work that a target takes, in a fixed order that depends on the target and on the settings alone."""
    return chain(*task_queues(target, 1))


def task_queues(target: Target, count: int, only: Container[int] | None = None) -> list[Iterator[CopyTask]]:
    """All the work that a target takes in `count` stretches of about as many bytes, each for one worker to walk along.

    With `only`, the work for files of these numbers. Neighbours in the plan go to the same file, which Linux lets one
    worker write at a time: workers that walk far from each other do not wait for each other.
    """
    numbered = [(number, file) for number, file in enumerate(target.files) if only is None or number in only]
    items: dict[int, list[tuple[int, WriteItem]]] = {}
    for number, file in numbered:
        for item in file.items:
            items.setdefault(id(item.atom), []).append((number, item))
    files = _split_by_weight([(file.size, (number, file)) for number, file in numbered], count)
    together = _group_computed(items.values())
    atoms = _split_by_weight([(sum(item.nbytes for at in some for _, item in at), some) for some in together], count)
    return [_queue(*shares) for shares in zip(files, atoms, strict=True)]


def first_queue(worker: int, workers: int, stretches: int) -> int:
    """The stretch that a worker begins with, so that all of them begin far from each other."""
    return worker * stretches // workers


def _group_computed(places: Iterable[_AtomItems]) -> list[list[_AtomItems]]:
    """Atoms that are written side by side: the states of a parameter, where computing one gives the others."""
    groups: dict[object, list[_AtomItems]] = {}
    for some in places:
        atom = some[0][1].atom
        groups.setdefault(atom.name if atom.computed else id(atom), []).append(some)
    return list(groups.values())


def _queue(files: Sequence[tuple[int, OutputFile]], atoms: Sequence[Sequence[_AtomItems]]) -> Iterator[CopyTask]:
    for number, file in files:
        yield from literal_tasks(number, file.literals)
        yield from _known_byte_tasks(_zero_ranges(number, file.zeros))
    for group in atoms:
        parts = [_tasks_of_atom(places[0][1].atom, places) for places in group]
        yield from parts[0] if len(parts) == 1 else merge(*parts, key=_first_element)


def task_groups(parts: Iterable[CopyTask]) -> Iterator[list[CopyTask]]:
    """Parts one after the other, those together that one worker should write because they are computed together."""
    bundle: list[CopyTask] = []
    for part in parts:
        if bundle and not _is_computed_with(part, bundle[0]):
            yield bundle
            bundle = []
        bundle.append(part)
    if bundle:
        yield bundle


def _is_computed_with(part: CopyTask, other: CopyTask) -> bool:
    """Are both states of the same elements, of which computing one gives the other?"""
    a, b = part.atom, other.atom
    if a is None or b is None or not a.computed or not b.computed or a.name != b.name:
        return False
    return _first_element(part) == _first_element(other)


def _first_element(part: CopyTask) -> int:
    """Where a part begins in the flattened atom."""
    assert part.atom is not None
    return part.block.start[0] if part.flat else flat_index(part.block.start, part.atom.shape)


def _elements_per_task(atom: Atom) -> int:
    """What is computed is cut small, so that all states of some elements are written before the next are computed."""
    limit = settings.COPY_TASK_BYTES // atom.dtype.itemsize
    return max(1, min(limit, settings.LOG_BLOCK_ELEMENTS) if atom.computed else limit)


def _split_by_weight(weighted: Sequence[tuple[int, T]], count: int) -> list[list[T]]:
    """Cut a list with weights into `count` runs of about the same weight."""
    shares: list[list[T]] = [[] for _ in range(count)]
    total = max(1, sum(weight for weight, _ in weighted))
    before = 0
    for weight, value in weighted:
        shares[min(count - 1, (before + weight // 2) * count // total)].append(value)
        before += weight
    return shares


def literal_tasks(number: int, literals: Iterable[Literal]) -> Iterator[CopyTask]:
    """The parts that write literals of file `number`."""
    return _known_byte_tasks(
        OutputRange(number, literal.offset, len(literal.data), None, literal.data) for literal in literals
    )


def _zero_ranges(number: int, zeros: Iterable[ZeroRange]) -> Iterator[OutputRange]:
    for zero in zeros:
        for start in range(0, zero.nbytes, settings.COPY_TASK_BYTES):
            yield OutputRange(number, zero.offset + start, min(settings.COPY_TASK_BYTES, zero.nbytes - start), None)


def _known_byte_tasks(extents: Iterable[OutputRange]) -> Iterator[CopyTask]:
    batch: list[OutputRange] = []
    nbytes = 0
    for extent in extents:
        if batch and (len(batch) == _MAX_RANGES_PER_TASK or nbytes + extent.nbytes > settings.COPY_TASK_BYTES):
            yield CopyTask(None, True, Box((), ()), tuple(batch))
            batch, nbytes = [], 0
        batch.append(extent)
        nbytes += extent.nbytes
    if batch:
        yield CopyTask(None, True, Box((), ()), tuple(batch))


def _tasks_of_atom(atom: Atom, places: Sequence[tuple[int, WriteItem]]) -> Iterator[CopyTask]:
    found = [strided_runs(item.region, atom.shape) for _, item in places]
    held = [some for some in found if some is not None]
    if len(held) == len(found):
        stored = stored_runs(atom)
        if _is_flat(atom, held, stored):
            return _flat_tasks(atom, places, held, stored)
    return _shaped_tasks(atom, places)


def _is_flat(atom: Atom, held: Sequence[Sequence[StridedRun]], stored: StoredRuns | None) -> bool:
    """Can the atom be taken as if it had one dimension: where bytes go as they are, or all places are intervals?"""
    if stored is not None:
        return all(runs_are_long(some, atom.dtype) for some in held)
    return can_flatten(atom) and all(stripe.times == 1 for some in held for stripe in some)


def _flat_tasks(
    atom: Atom, places: Sequence[tuple[int, WriteItem]], held: Sequence[Sequence[StridedRun]], stored: StoredRuns | None
) -> Iterator[CopyTask]:
    """Parts of the flattened atom, of which each place holds some stripes."""
    itemsize = atom.dtype.itemsize
    waiting = sorted(
        (stripe, number, item.offset) for (number, item), some in zip(places, held, strict=True) for stripe in some
    )
    waiting.reverse()  # the next one is the last
    met: list[tuple[StridedRun, int, int]] = []
    step = _elements_per_task(atom)
    for start in range(0, atom.numel, step):
        stop = min(start + step, atom.numel)
        while waiting and waiting[-1][0].first < stop:
            met.append(waiting.pop())
        if not met:
            continue
        extents: list[OutputRange] = []
        for stripe, number, base in met:
            low, high = stripe.before(start), stripe.before(stop)
            if low < high:
                extents.append(
                    OutputRange(number, base + (stripe.offset + low) * itemsize, (high - low) * itemsize, stripe)
                )
        if extents:
            # From the first wanted element, which may be in the first stripe, to the last.
            begin, end = max(met[0][0].first, start), min(max(stripe.stop for stripe, _, _ in met), stop)
            yield CopyTask(atom, True, Box((begin,), (end - begin,)), tuple(extents), stored)
        met = [entry for entry in met if entry[0].stop > stop]


def _shaped_tasks(atom: Atom, places: Sequence[tuple[int, WriteItem]]) -> Iterator[CopyTask]:
    pieces = [(piece, number, item) for number, item in places for piece in item.region.pieces()]
    shape = _padded_shape(atom.shape, (piece.box for piece, _, _ in pieces))
    sweep = OverlapSweep((entry[0].box, entry) for entry in pieces)
    for block in slabs(shape, _elements_per_task(atom)):
        met = (entry for _, entry in sweep.meeting(block))
        found = (_output_range(number, item.offset, piece, block, atom.dtype) for piece, number, item in met)
        extents = tuple(extent for extent in found if extent is not None)
        if extents:
            yield CopyTask(atom, False, block, extents)


def _padded_shape(shape: Shape, boxes: Iterable[Box]) -> Shape:
    """The smallest shape that holds the atom and everything that items want of it."""
    for box in boxes:
        shape = tuple(max(n, stop) for n, stop in zip(shape, box.stop, strict=True))
    return shape


def _output_range(number: int, base: int, piece: RegionPiece, block: Box, dtype: DType) -> OutputRange | None:
    common = intersect(piece.box, block)
    if common is None:
        return None
    inside = flat_index(tuple(a - b for a, b in zip(common.start, piece.box.start, strict=True)), piece.box.shape)
    return OutputRange(number, base + (piece.offset + inside) * dtype.itemsize, common.numel * dtype.itemsize, common)
