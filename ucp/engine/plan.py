"""The plan: a target cut into parts, each a block of one atom and every place it goes to. Deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from ucp import tunables
from ucp.engine.flat import can_flatten, flatten, is_flat
from ucp.model.box import Box, Shape, flat_index, intersect
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Piece
from ucp.model.slabs import slabs
from ucp.model.target import Hole, Literal, Target, ZeroRange

# How many output files one part may write: they are open at the same time.
_FILES_OF_A_PART: Final = 128
# How many literals or zero ranges one part may write: each is small, and a part costs a line of the journal.
_RANGES_OF_A_PART: Final = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range `[offset, offset + nbytes)` of one output file that one part writes in order."""

    file: int  # index into Target.files
    offset: int
    nbytes: int
    box: Box | None  # block of the atom that lies there, in the part's own geometry; None for literals and zeros
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

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


def parts(target: Target) -> Iterator[Part]:
    """All the work that a target takes, in a fixed order that depends on the target and on the tunables alone."""
    holes: dict[int, list[tuple[int, Hole]]] = {}
    atoms: dict[int, Atom] = {}
    for number, file in enumerate(target.files):
        yield from literal_parts(number, file.literals)
        yield from _batched(_zero_extents(number, file.zeros))
        for hole in file.holes:
            holes.setdefault(id(hole.atom), []).append((number, hole))
            atoms[id(hole.atom)] = hole.atom
    for key, places in holes.items():
        yield from _parts_of(atoms[key], places)


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
    pieces = [list(hole.region.pieces()) for _, hole in places]
    flat = can_flatten(atom) and all(is_flat(held, atom.shape) for held in pieces)
    shape: Shape = (prod(atom.shape),) if flat else _padded(atom.shape, pieces)
    targets = [
        (number, hole.offset, Piece(flatten(piece.box, atom.shape) if flat else piece.box, piece.offset))
        for (number, hole), held in zip(places, pieces, strict=True)
        for piece in held
    ]
    for block in slabs(shape, max(1, tunables.PART_BYTES // atom.dtype.itemsize)):
        found = (_extent(number, base, piece, block, atom.dtype) for number, base, piece in targets)
        extents = [extent for extent in found if extent is not None]
        for some in _by_files(extents):
            yield Part(atom, flat, block, some)


def _padded(shape: Shape, pieces: Iterable[Iterable[Piece]]) -> Shape:
    """The smallest shape that holds the atom and everything that holes want of it."""
    for held in pieces:
        for piece in held:
            shape = tuple(max(n, stop) for n, stop in zip(shape, piece.box.stop, strict=True))
    return shape


def _by_files(extents: Sequence[Extent]) -> Iterator[tuple[Extent, ...]]:
    """The extents, cut where they would touch too many files at once."""
    some: list[Extent] = []
    files: set[int] = set()
    for extent in extents:
        if extent.file not in files and len(files) == _FILES_OF_A_PART:
            yield tuple(some)
            some, files = [], set()
        some.append(extent)
        files.add(extent.file)
    if some:
        yield tuple(some)


def _extent(number: int, base: int, piece: Piece, block: Box, dtype: DType) -> Extent | None:
    common = intersect(piece.box, block)
    if common is None:
        return None
    inside = flat_index(tuple(a - b for a, b in zip(common.start, piece.box.start, strict=True)), piece.box.shape)
    return Extent(number, base + (piece.offset + inside) * dtype.itemsize, common.numel * dtype.itemsize, common)
