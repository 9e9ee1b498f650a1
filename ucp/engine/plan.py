"""The plan: a target cut into parts, each a block of one atom and every place it goes to. Deterministic."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Final, TypeVar

from ucp import tunables
from ucp.engine.flat import Stored, are_long, can_flatten, stored_stripes
from ucp.engine.sweep import Sweep
from ucp.model.box import Box, Shape, flat_index, intersect
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Piece
from ucp.model.slabs import slabs
from ucp.model.stripes import Stripe, stripes
from ucp.model.target import Hole, Literal, OutputFile, Target, ZeroRange

# Parts that other versions of this module cut are not found again in a journal.
VERSION: Final = 3
# How many literals or zero ranges one part may write: each is small, and a part costs a line of the journal.
_RANGES_OF_A_PART: Final = 256

T = TypeVar("T")
_Places = Sequence[tuple[int, Hole]]  # of one atom: (file number, hole)


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range `[offset, offset + nbytes)` of one output file that one part writes in order."""

    file: int  # index into Target.files
    offset: int
    nbytes: int
    place: Box | Stripe | None  # in the atom, flattened where the part is; literals and zeros have none
    data: bytes | None = None  # of a literal; zeros have neither


@dataclass(frozen=True, slots=True)
class Part:
    """What one thread does at a time: a block of one atom and every place it goes to, or some literals and zeros.

    The block may reach past the atom's shape, where a hole does: what lies outside is zero.
    """

    atom: Atom | None
    flat: bool  # the block and all extents are those of the flattened atom
    block: Box
    extents: tuple[Extent, ...]
    stored: Stored | None = None  # of a flat part: where its bytes are, if they go as they are

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


def parts(target: Target) -> Iterator[Part]:
    """All the work that a target takes, in a fixed order that depends on the target and on the tunables alone."""
    return chain(*stretches(target, 1))


def stretches(target: Target, count: int, only: Container[int] | None = None) -> list[Iterator[Part]]:
    """All the work that a target takes in `count` stretches of about as many bytes, each for one worker to walk along.

    With `only`, the work for files of these numbers. Neighbours in the plan go to the same file, which Linux lets one
    worker write at a time: workers that walk far from each other do not wait for each other.
    """
    numbered = [(number, file) for number, file in enumerate(target.files) if only is None or number in only]
    holes: dict[int, list[tuple[int, Hole]]] = {}
    for number, file in numbered:
        for hole in file.holes:
            holes.setdefault(id(hole.atom), []).append((number, hole))
    files = _shares([(file.size, (number, file)) for number, file in numbered], count)
    together = _together(holes.values())
    atoms = _shares([(sum(hole.nbytes for at in some for _, hole in at), some) for some in together], count)
    return [_stretch(*shares) for shares in zip(files, atoms, strict=True)]


def first_stretch(worker: int, workers: int, stretches: int) -> int:
    """The stretch that a worker begins with, so that all of them begin far from each other."""
    return worker * stretches // workers


def _together(places: Iterable[_Places]) -> list[list[_Places]]:
    """Atoms that are written side by side: the states of a parameter, where computing one gives the others."""
    groups: dict[object, list[_Places]] = {}
    for some in places:
        atom = some[0][1].atom
        groups.setdefault(atom.name if atom.computed else id(atom), []).append(some)
    return list(groups.values())


def _stretch(files: Sequence[tuple[int, OutputFile]], atoms: Sequence[Sequence[_Places]]) -> Iterator[Part]:
    for number, file in files:
        yield from literal_parts(number, file.literals)
        yield from _batched(_zero_extents(number, file.zeros))
    for group in atoms:
        parts = [_parts_of(places[0][1].atom, places) for places in group]
        yield from parts[0] if len(parts) == 1 else merge(*parts, key=_first_element)


def bundles(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts one after the other, those together that one worker should write because they are computed together."""
    bundle: list[Part] = []
    for part in parts:
        if bundle and not _is_computed_with(part, bundle[0]):
            yield bundle
            bundle = []
        bundle.append(part)
    if bundle:
        yield bundle


def _is_computed_with(part: Part, other: Part) -> bool:
    """Are both states of the same elements, of which computing one gives the other?"""
    a, b = part.atom, other.atom
    if a is None or b is None or not a.computed or not b.computed or a.name != b.name:
        return False
    return _first_element(part) == _first_element(other)


def _first_element(part: Part) -> int:
    """Where a part begins in the flattened atom."""
    assert part.atom is not None
    return part.block.start[0] if part.flat else flat_index(part.block.start, part.atom.shape)


def _elements_of_a_part(atom: Atom) -> int:
    """What is computed is cut small, so that all states of some elements are written before the next are computed."""
    limit = tunables.PART_BYTES // atom.dtype.itemsize
    return max(1, min(limit, tunables.LOG_BLOCK_ELEMENTS) if atom.computed else limit)


def _shares(weighted: Sequence[tuple[int, T]], count: int) -> list[list[T]]:
    """Cut a list with weights into `count` runs of about the same weight."""
    shares: list[list[T]] = [[] for _ in range(count)]
    total = max(1, sum(weight for weight, _ in weighted))
    before = 0
    for weight, value in weighted:
        shares[min(count - 1, (before + weight // 2) * count // total)].append(value)
        before += weight
    return shares


def literal_parts(number: int, literals: Iterable[Literal]) -> Iterator[Part]:
    """The parts that write literals of file `number`."""
    return _batched(Extent(number, literal.offset, len(literal.data), None, literal.data) for literal in literals)


def _zero_extents(number: int, zeros: Iterable[ZeroRange]) -> Iterator[Extent]:
    for zero in zeros:
        for start in range(0, zero.nbytes, tunables.PART_BYTES):
            yield Extent(number, zero.offset + start, min(tunables.PART_BYTES, zero.nbytes - start), None)


def _batched(extents: Iterable[Extent]) -> Iterator[Part]:
    batch: list[Extent] = []
    nbytes = 0
    for extent in extents:
        if batch and (len(batch) == _RANGES_OF_A_PART or nbytes + extent.nbytes > tunables.PART_BYTES):
            yield Part(None, True, Box((), ()), tuple(batch))
            batch, nbytes = [], 0
        batch.append(extent)
        nbytes += extent.nbytes
    if batch:
        yield Part(None, True, Box((), ()), tuple(batch))


def _parts_of(atom: Atom, places: Sequence[tuple[int, Hole]]) -> Iterator[Part]:
    found = [stripes(hole.region, atom.shape) for _, hole in places]
    held = [some for some in found if some is not None]
    if len(held) == len(found):
        stored = stored_stripes(atom)
        if _is_flat(atom, held, stored):
            return _flat_parts(atom, places, held, stored)
    return _shaped_parts(atom, places)


def _is_flat(atom: Atom, held: Sequence[Sequence[Stripe]], stored: Stored | None) -> bool:
    """Can the atom be taken as if it had one dimension: where bytes go as they are, or all places are intervals?"""
    if stored is not None:
        return all(are_long(some, atom.dtype) for some in held)
    return can_flatten(atom) and all(stripe.times == 1 for some in held for stripe in some)


def _flat_parts(
    atom: Atom, places: Sequence[tuple[int, Hole]], held: Sequence[Sequence[Stripe]], stored: Stored | None
) -> Iterator[Part]:
    """Parts of the flattened atom, of which each place holds some stripes."""
    itemsize = atom.dtype.itemsize
    waiting = sorted(
        (stripe, number, hole.offset) for (number, hole), some in zip(places, held, strict=True) for stripe in some
    )
    waiting.reverse()  # the next one is the last
    met: list[tuple[Stripe, int, int]] = []
    step = _elements_of_a_part(atom)
    for start in range(0, atom.numel, step):
        stop = min(start + step, atom.numel)
        while waiting and waiting[-1][0].first < stop:
            met.append(waiting.pop())
        if not met:
            continue
        extents: list[Extent] = []
        for stripe, number, base in met:
            low, high = stripe.before(start), stripe.before(stop)
            if low < high:
                extents.append(Extent(number, base + (stripe.offset + low) * itemsize, (high - low) * itemsize, stripe))
        if extents:
            # From the first wanted element, which may be in the first stripe, to the last.
            begin, end = max(met[0][0].first, start), min(max(stripe.stop for stripe, _, _ in met), stop)
            yield Part(atom, True, Box((begin,), (end - begin,)), tuple(extents), stored)
        met = [entry for entry in met if entry[0].stop > stop]


def _shaped_parts(atom: Atom, places: Sequence[tuple[int, Hole]]) -> Iterator[Part]:
    pieces = [(piece, number, hole) for number, hole in places for piece in hole.region.pieces()]
    shape = _padded(atom.shape, (piece.box for piece, _, _ in pieces))
    sweep = Sweep((entry[0].box, entry) for entry in pieces)
    for block in slabs(shape, _elements_of_a_part(atom)):
        met = (entry for _, entry in sweep.meeting(block))
        found = (_extent(number, hole.offset, piece, block, atom.dtype) for piece, number, hole in met)
        extents = tuple(extent for extent in found if extent is not None)
        if extents:
            yield Part(atom, False, block, extents)


def _padded(shape: Shape, boxes: Iterable[Box]) -> Shape:
    """The smallest shape that holds the atom and everything that holes want of it."""
    for box in boxes:
        shape = tuple(max(n, stop) for n, stop in zip(shape, box.stop, strict=True))
    return shape


def _extent(number: int, base: int, piece: Piece, block: Box, dtype: DType) -> Extent | None:
    common = intersect(piece.box, block)
    if common is None:
        return None
    inside = flat_index(tuple(a - b for a, b in zip(common.start, piece.box.start, strict=True)), piece.box.shape)
    return Extent(number, base + (piece.offset + inside) * dtype.itemsize, common.numel * dtype.itemsize, common)
