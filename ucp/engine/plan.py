"""The plan: a target cut into parts, each a block of one atom and every place it goes to. Deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ucp import tunables
from ucp.engine.reading import can_flatten, flatten, is_flat
from ucp.model.box import Box, Shape, flat_index, intersect
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Piece
from ucp.model.slabs import slabs
from ucp.model.target import Hole, Target


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range `[offset, offset + nbytes)` of one output file that one part writes in order."""

    file: int  # index into Target.files
    offset: int
    nbytes: int
    box: Box | None  # block of the atom that lies there, in the part's own geometry; None for literals
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one thread does at a time: a block of one atom (or one literal), and every place it goes to."""

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
        for literal in file.literals:
            extent = Extent(number, literal.offset, len(literal.data), None, literal.data)
            yield Part(None, True, Box((), ()), (extent,))
        for hole in file.holes:
            holes.setdefault(id(hole.atom), []).append((number, hole))
            atoms[id(hole.atom)] = hole.atom
    for key, places in holes.items():
        yield from _parts_of(atoms[key], places)


def _parts_of(atom: Atom, places: Sequence[tuple[int, Hole]]) -> Iterator[Part]:
    pieces = [list(hole.region.pieces()) for _, hole in places]
    flat = can_flatten(atom) and all(is_flat(held, atom.shape) for held in pieces)
    shape: Shape = (prod(atom.shape),) if flat else atom.shape
    targets = [
        (number, hole.offset, Piece(flatten(piece.box, atom.shape) if flat else piece.box, piece.offset))
        for (number, hole), held in zip(places, pieces, strict=True)
        for piece in held
    ]
    for block in slabs(shape, max(1, tunables.PART_BYTES // atom.dtype.itemsize)):
        found = (_extent(number, base, piece, block, atom.dtype) for number, base, piece in targets)
        extents = tuple(extent for extent in found if extent is not None)
        if extents:
            yield Part(atom, flat, block, extents)


def _extent(number: int, base: int, piece: Piece, block: Box, dtype: DType) -> Extent | None:
    common = intersect(piece.box, block)
    if common is None:
        return None
    inside = flat_index(tuple(a - b for a, b in zip(common.start, piece.box.start, strict=True)), piece.box.shape)
    return Extent(number, base + (piece.offset + inside) * dtype.itemsize, common.numel * dtype.itemsize, common)
