"""Reading atoms slab by slab: every read is one contiguous range of one file.

Slabs that are rearranged or computed on their way: cut along inner dimensions, strided, cast, averaged, padded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, is_contiguous_in, slabs, strides_of, whole
from ucp.core.checkpoint import Atom, Fragment
from ucp.errors import InconsistentError
from ucp.read.aligned_buffers import scratch_buffer
from ucp.read.casting import RawArray, cast, mean, raw_dtype, unscale
from ucp.read.strided_reader import StridedBlock, StridedReader
from ucp.read.verbatim import can_flatten, flatten_box
from ucp.storage.local import SourceFiles


@dataclass(frozen=True, slots=True)
class AtomBlock:
    """A contiguous block of the atom in a file: `box` starts at byte `offset`."""

    box: Box
    offset: int
    fragment: Fragment


class FragmentCover:
    """One exact cover of an atom by fragments, searchable by slab.

    With `flat`, slabs and blocks are those of the flattened atom, which makes the arithmetic one-dimensional.
    """

    def __init__(self, fragments: Sequence[Fragment], shape: Shape, flat: bool) -> None:
        self.shape = (prod(shape),) if flat else shape
        extents: list[tuple[int, int, AtomBlock]] = []
        for fragment in fragments:
            for piece in fragment.region.pieces():
                box = flatten_box(piece.box, shape) if flat else _clip(piece.box, shape)
                if box is not None:
                    offset = fragment.offset + piece.offset * fragment.dtype.itemsize
                    if not flat and box.start != piece.box.start:
                        raise AssertionError("padding lies after the real rows, never before")
                    first = flat_index(box.start, self.shape)
                    last = flat_index(tuple(stop - 1 for stop in box.stop), self.shape)
                    # The block keeps its stored box: rows beyond the shape are stepped over, not forgotten.
                    stored = box if flat else piece.box
                    extents.append((first, last, AtomBlock(stored, offset, fragment)))
        extents.sort(key=lambda e: e[0])
        self._extents = [extent for _, _, extent in extents]
        self._first = [first for first, _, _ in extents]
        self._last_so_far = list(accumulate((last for _, last, _ in extents), max))

    @property
    def blocks(self) -> Sequence[AtomBlock]:
        """All stored blocks, first ones first."""
        return self._extents

    def overlapping(self, slab: Box) -> Iterator[tuple[Box, AtomBlock]]:
        """Every stored block that shares elements with the slab, with the shared box."""
        first = flat_index(slab.start, self.shape)
        last = first + slab.numel - 1  # slabs are contiguous
        for extent in self._extents[bisect_left(self._last_so_far, first) : bisect_right(self._first, last)]:
            common = intersect(extent.box, slab)
            if common is not None:
                yield common, extent


def _clip(box: Box, shape: Shape) -> Box | None:
    return intersect(box, Box((0,) * len(shape), shape))


class AtomReader:
    """Reads slabs of one atom. Not thread-safe: each worker has its own, because of the scratch block."""

    def __init__(self, files: SourceFiles, atom: Atom, *, flat: bool | None = None) -> None:
        """`flat` says whether slabs are boxes of the flattened atom; by default it is so wherever that is possible."""
        self.files = files
        self.atom = atom
        covers: list[Sequence[Fragment]] = [atom.fragments]
        if atom.combine == "average":
            covers.extend(atom.replicas)
        self.flat = can_flatten(atom) if flat is None else flat
        self.shape: Shape = (atom.numel,) if self.flat else atom.shape
        self._covers = [FragmentCover(cover, atom.shape, self.flat) for cover in covers]
        self._across: StridedReader | None = None

    def read(self, slab: Box, out: RawArray) -> None:
        """Fill `out` (raw, C-contiguous, of the slab's shape and the atom's dtype) with the slab's elements."""
        if self.atom.combine == "average":
            raws = []
            for cover in self._covers:
                part = np.empty_like(out)
                self._read_whole(cover, slab, part)
                raws.append(part)
            out[...] = mean(raws, self.atom.dtype)
        else:
            self._read_whole(self._covers[0], slab, out)

    def overlay(self, slab: Box, out: RawArray) -> int:
        """Like `read`, but elements that no fragment holds stay as they are; gives the number of filled ones."""
        return self._read_cover(self._covers[0], slab, out)

    def _read_whole(self, cover: FragmentCover, slab: Box, out: RawArray) -> None:
        filled = self._read_cover(cover, slab, out)
        if filled != slab.numel:
            raise InconsistentError(
                f"parameter {self.atom.name}, {self.atom.kind}: {filled} of {slab.numel} elements of {slab} are there",
                hint="run `ucp verify` on the source to see which ranks are missing",
            )

    def _read_cover(self, cover: FragmentCover, slab: Box, out: RawArray) -> int:
        """Fill what the cover holds of the slab; gives the number of elements."""
        filled = 0
        itemsize = self.atom.dtype.itemsize
        for common, extent in cover.overlapping(slab):
            fragment = extent.fragment
            filled += common.numel
            inner = common.shift(tuple(-a for a in slab.start))
            plain = (
                fragment.dtype == self.atom.dtype
                and _strides(extent, common) is None
                and fragment.inline is None
                and fragment.scale == 1.0
            )
            if plain and is_contiguous_in(inner, slab.shape):
                at = flat_index(inner.start, slab.shape) * itemsize
                target = out.reshape(-1).view(np.uint8).data[at : at + common.numel * itemsize]
                self.files.read_into(fragment.file, _position(extent, common), target)
                continue
            where = tuple(slice(a, a + n) for a, n in zip(inner.start, inner.shape, strict=True))
            values = cast(self._stored(extent, common), fragment.dtype, self.atom.dtype)
            out[where] = values if fragment.scale == 1.0 else unscale(values, self.atom.dtype, fragment.scale)
        return filled

    def _stored(self, extent: AtomBlock, common: Box) -> RawArray:
        """The elements of `common` as stored, in its shape."""
        fragment = extent.fragment
        kind = raw_dtype(fragment.dtype)
        if fragment.inline is not None:
            return np.frombuffer(fragment.inline, kind).reshape(common.shape)
        strides = _strides(extent, common)
        if strides is not None:
            return self._strided(strides, extent, common)
        nbytes = common.numel * fragment.dtype.itemsize
        block = scratch_buffer("rows", nbytes)
        self.files.read_into(fragment.file, _position(extent, common), block.data)
        return block.view(kind).reshape(common.shape)

    def _strided(self, strides: Shape, extent: AtomBlock, common: Box) -> RawArray:
        """Elements that do not lie side by side in the file."""
        if self._across is None:
            blocks = (block for cover in self._covers for block in cover.blocks if block.fragment.strides is not None)
            self._across = StridedReader(self.files, (_strided(b, b.fragment.strides or ()) for b in blocks))
        return self._across.read(_strided(extent, strides), common)


def _strided(extent: AtomBlock, strides: Shape) -> StridedBlock:
    return StridedBlock(extent.box, extent.offset, strides, extent.fragment)


def _strides(extent: AtomBlock, common: Box) -> Shape | None:
    """In elements, where `common` does not lie row-major and without gaps in the file; None where it does."""
    if extent.fragment.strides is not None:
        return extent.fragment.strides
    local = common.shift(tuple(-a for a in extent.box.start))
    # Padding along an inner dimension lies between the rows.
    return None if is_contiguous_in(local, extent.box.shape) else strides_of(extent.box.shape)


def _position(extent: AtomBlock, common: Box) -> int:
    """Byte offset in the file of the first element of `common`, a block that is contiguous in the stored box."""
    local = tuple(a - b for a, b in zip(common.start, extent.box.start, strict=True))
    return extent.offset + flat_index(local, extent.box.shape) * extent.fragment.dtype.itemsize


def read_rows(files: SourceFiles, atom: Atom, start: int, stop: int, out: RawArray) -> None:
    """Rows `[start, stop)` of the first dimension into `out`, slab by slab."""
    if out.size == 0:
        return
    reader = AtomReader(files, atom, flat=False)
    shape: Shape = (stop - start, *atom.shape[1:]) if atom.shape else ()
    corner = (start, *(0,) * (len(shape) - 1)) if shape else ()
    for slab in slabs(shape, max(1, settings.SLAB_BYTES // atom.dtype.itemsize)):
        at = flat_index(slab.start, shape)
        target = out.reshape(-1)[at : at + slab.numel].reshape(slab.shape)
        reader.read(slab.shift(corner), target)


class SlabReader:
    """Reads slabs of one atom into a block of bytes, as arrays. Not thread-safe."""

    def __init__(self, files: SourceFiles, atom: Atom, *, flat: bool) -> None:
        self.atom = atom
        self.flat = flat
        self._reader = AtomReader(files, atom, flat=flat)

    def read(self, slab: Box, block: memoryview) -> RawArray:
        """The slab, at the start of `block`; it may reach past the atom's shape, and what lies outside is zero."""
        dtype = self.atom.dtype
        values: RawArray = np.frombuffer(block, raw_dtype(dtype), slab.numel).reshape(slab.shape)
        inside = intersect(slab, whole(self._reader.shape))
        if inside == slab:
            self._reader.read(slab, values)
            return values
        values[...] = 0
        if inside is None:
            return values
        # Padding lies after the real elements, so what is inside begins where the slab does.
        corner = values[tuple(slice(0, n) for n in inside.shape)]
        if corner.flags.c_contiguous:
            self._reader.read(inside, corner)
        else:
            real = np.empty(inside.shape, values.dtype)
            self._reader.read(inside, real)
            corner[...] = real
        return values


def extract_bytes(values: RawArray, slab: Box, box: Box) -> memoryview:
    """The bytes of those elements of a slab that lie in `box`, in order; none where they do not meet."""
    common = intersect(box, slab)
    if common is None:
        return memoryview(b"")
    inner = common.shift(tuple(-a for a in slab.start))
    if is_contiguous_in(inner, slab.shape):
        at = flat_index(inner.start, slab.shape)
        picked = values.reshape(-1)[at : at + common.numel]
    else:
        where = tuple(slice(a, a + n) for a, n in zip(inner.start, inner.shape, strict=True))
        picked = np.ascontiguousarray(values[where]).reshape(-1)
    return picked.view(np.uint8).data
