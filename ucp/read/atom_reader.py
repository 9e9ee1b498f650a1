"""Reading atoms as arrays, whatever layout the source has: cast, unscaled, averaged, strided or padded on the way.

Bytes that need none of this go through `ucp.read.verbatim`, which does not import numpy.

Atoms as numpy arrays and torch tensors, for interactive use and for tests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, is_contiguous_in, slabs, strides_of, whole
from ucp.core.checkpoint import Atom, ComputedFiles, Fragment
from ucp.core.region import Region
from ucp.errors import InconsistentError, UsageError
from ucp.read.casting import RawArray, cast, mean, raw_dtype, scratch_buffer, unscale, widen
from ucp.read.strided_reader import AtomBlock, StridedReader
from ucp.read.verbatim import can_flatten, flatten_box, pieces_are_intervals
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    import torch


class FragmentCover:
    """One exact cover of an atom by fragments, searchable by box.

    With `flat`, boxes and blocks are those of the flattened atom, which makes the arithmetic one-dimensional.
    """

    def __init__(self, fragments: Sequence[Fragment], shape: Shape, flat: bool) -> None:
        self.shape = (prod(shape),) if flat else shape
        found: list[tuple[int, int, AtomBlock]] = []
        for fragment in fragments:
            for piece in fragment.region.pieces():
                box = flatten_box(piece.box, shape) if flat else intersect(piece.box, whole(shape))
                if box is None:
                    continue
                if not flat and box.start != piece.box.start:
                    raise AssertionError("padding comes after the real rows, never before")
                # The block keeps its stored box: padding rows are skipped, but they still determine the strides.
                stored = box if flat else piece.box
                strides = fragment.strides or strides_of(stored.shape)
                offset = fragment.offset + piece.offset * fragment.dtype.itemsize
                found.append((*_flat_bounds(box, self.shape), AtomBlock(stored, offset, strides, fragment)))
        found.sort(key=lambda entry: entry[0])
        self.blocks = [block for _, _, block in found]
        self._first = [first for first, _, _ in found]
        self._last_so_far = list(accumulate((last for _, last, _ in found), max))

    def overlapping(self, box: Box) -> Iterator[tuple[Box, AtomBlock]]:
        """Every stored block that shares elements with `box`, and the shared box."""
        first, last = _flat_bounds(box, self.shape)
        for block in self.blocks[bisect_left(self._last_so_far, first) : bisect_right(self._first, last)]:
            common = intersect(block.box, box)
            if common is not None:
                yield common, block


def _flat_bounds(box: Box, shape: Shape) -> tuple[int, int]:
    """Row-major positions of the first and the last element of a box."""
    return flat_index(box.start, shape), flat_index(tuple(stop - 1 for stop in box.stop), shape)


class AtomReader:
    """Reads boxes and regions of one atom. Not thread-safe, because of its buffers: every worker has its own."""

    def __init__(self, files: SourceFiles, atom: Atom, *, flat: bool | None = None) -> None:
        """With `flat`, `read` takes boxes of the flattened atom; by default it does if the atom can be flattened."""
        self.files = files
        self.atom = atom
        self._can_flatten: bool | None = None  # not known yet
        self.flat = self._flattens() if flat is None else flat
        self.shape: Shape = (atom.numel,) if self.flat else atom.shape
        self._covers_by_form: dict[bool, list[FragmentCover]] = {}
        self._strided: StridedReader | None = None

    def read(self, box: Box, out: RawArray) -> None:
        """Fill `out` (raw, C-contiguous, of the box's shape and the atom's dtype); padding outside the atom is zero."""
        self._read(self._covers(self.flat), box, out)

    def slabs(self) -> Iterator[tuple[Box, RawArray]]:
        """Every slab of the atom (of the flattened atom if `flat`), with its raw elements in a new array."""
        for slab in slabs(self.shape, self._slab_elements(self.atom.dtype.itemsize)) if self.atom.numel else ():
            values = np.empty(slab.shape, raw_dtype(self.atom.dtype))
            self.read(slab, values)
            yield slab, values

    def overlay(self, box: Box, out: RawArray) -> int:
        """Like `read`, but elements that no fragment has are left unchanged; returns the number of elements read."""
        return self._read_cover(self._covers(self.flat)[0], box, box, out)

    def read_region(self, region: Region, out: RawArray) -> None:
        """Fill `out` (raw, one-dimensional, contiguous, of the atom's dtype) with the elements of a region, in order.

        Every byte of the region is read once and no others, unless the source stores it in runs so short that reading
        across the gaps between them is cheaper. Elements outside the atom's shape (padding) become zero.
        """
        if out.ndim != 1 or out.size != region.numel or not out.flags.c_contiguous:
            raise AssertionError(f"{self.atom}: an array of shape {out.shape} for {region.numel} elements")
        pieces = list(region.pieces())
        flat = self._flattens() and pieces_are_intervals(pieces, self.atom.shape)
        covers = self._covers(flat)
        for piece in pieces:
            box = flatten_box(piece.box, self.atom.shape) if flat else piece.box
            self._read(covers, box, out[piece.offset : piece.offset + box.numel].reshape(box.shape))

    def _flattens(self) -> bool:
        if self._can_flatten is None:
            self._can_flatten = can_flatten(self.atom)
        return self._can_flatten

    def _covers(self, flat: bool) -> list[FragmentCover]:
        """The covers whose mean is the atom; mostly a single one."""
        covers = self._covers_by_form.get(flat)
        if covers is None:
            atom = self.atom
            fragments = [atom.fragments, *(atom.replicas if atom.combine == "average" else ())]
            covers = self._covers_by_form[flat] = [FragmentCover(some, atom.shape, flat) for some in fragments]
        return covers

    def _read(self, covers: Sequence[FragmentCover], box: Box, out: RawArray) -> None:
        real = intersect(box, whole(covers[0].shape))
        if real != box:
            out[...] = 0
        if real is None:
            return
        if self.atom.combine != "average":
            self._read_whole(covers[0], real, box, out)
            return
        for local in slabs(real.shape, self._slab_elements(self.atom.dtype.itemsize)):
            slab = local.shift(real.start)
            versions = [np.empty(slab.shape, out.dtype) for _ in covers]
            for cover, values in zip(covers, versions, strict=True):
                self._read_whole(cover, slab, slab, values)
            out[_slices(slab, box)] = mean(versions, self.atom.dtype)

    def _read_whole(self, cover: FragmentCover, real: Box, box: Box, out: RawArray) -> None:
        count = self._read_cover(cover, real, box, out)
        if count != real.numel:
            raise InconsistentError(
                f"parameter {self.atom.name}, {self.atom.kind}: {count} of {real.numel} elements of {real} are stored",
                hint="run `ucp verify` on the source to see which ranks are missing",
            )

    def _read_cover(self, cover: FragmentCover, real: Box, box: Box, out: RawArray) -> int:
        """Put what a cover has of `real` into its place in `out`, which is the array of `box`; returns the number."""
        count = 0
        for common, block in cover.overlapping(real):
            count += common.numel
            fragment = block.fragment
            is_plain = fragment.dtype == self.atom.dtype and fragment.inline is None and fragment.scale == 1.0
            inner = _within(common, box)
            if is_plain and fragment.strides is None and is_contiguous_in(inner, box.shape):
                start = flat_index(inner.start, box.shape)
                self._read_rows(block, common, out.reshape(-1)[start : start + common.numel])
                continue
            for local in slabs(common.shape, self._slab_elements(fragment.dtype.itemsize)):
                part = local.shift(common.start)
                values = cast(self._stored(block, part), fragment.dtype, self.atom.dtype)
                if fragment.scale != 1.0:
                    values = unscale(values, self.atom.dtype, fragment.scale)
                out[_slices(part, box)] = values
        return count

    @staticmethod
    def _slab_elements(itemsize: int) -> int:
        return max(1, settings.SLAB_BYTES // itemsize)

    def _stored(self, block: AtomBlock, part: Box) -> RawArray:
        """The elements of `part` as stored, in its shape; valid until the next call."""
        fragment = block.fragment
        dtype = raw_dtype(fragment.dtype)
        if fragment.inline is not None:
            values: RawArray = np.frombuffer(fragment.inline, dtype).reshape(block.box.shape)
            return values[_slices(part, block.box)]
        if fragment.strides is not None:
            return self._strided_reader().read(block, part)
        values = scratch_buffer("stored", part.numel * dtype.itemsize).view(dtype)
        self._read_rows(block, part, values)
        return values.reshape(part.shape)

    def _read_rows(self, block: AtomBlock, part: Box, out: RawArray) -> None:
        """Read `part` of a row-major block into `out`, one-dimensional: one read per run that is contiguous on disk."""
        itemsize = out.itemsize
        inner, shape = _within(part, block.box), block.box.shape
        length, step = _runs(inner, shape)
        is_short = min(length, step - length) * itemsize < settings.SHORT_RUN_BYTES
        if length < inner.numel and is_short:
            out[...] = self._strided_reader().read(block, part).reshape(-1)
            return
        data = out.view(np.uint8).data
        for number, first in enumerate(_run_starts(inner, shape, length)):
            start = number * length * itemsize
            target = data[start : start + length * itemsize]
            self.files.read_into(block.fragment.file, block.offset + first * itemsize, target)

    def _strided_reader(self) -> StridedReader:
        if self._strided is None:
            covers = chain.from_iterable(self._covers_by_form.values())
            blocks = (block for cover in covers for block in cover.blocks if block.fragment.strides is not None)
            self._strided = StridedReader(self.files, blocks)
        return self._strided


def extract_bytes(values: RawArray, slab: Box, box: Box) -> memoryview:
    """The bytes of those elements of a slab that are in `box`, in order; none if the two do not overlap."""
    common = intersect(box, slab)
    if common is None:
        return memoryview(b"")
    inner = _within(common, slab)
    if is_contiguous_in(inner, slab.shape):
        start = flat_index(inner.start, slab.shape)
        wanted = values.reshape(-1)[start : start + common.numel]
    else:
        wanted = np.ascontiguousarray(values[_slices(common, slab)]).reshape(-1)
    return wanted.view(np.uint8).data


def _within(box: Box, outer: Box) -> Box:
    """`box` in the coordinates of `outer`."""
    return box.shift(tuple(-a for a in outer.start))


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` in the array of `outer`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.start, box.shape, outer.start, strict=True))


def _runs(inner: Box, shape: Shape) -> tuple[int, int]:
    """(length, step) in elements of the contiguous runs of `inner` in a row-major tensor of `shape`."""
    length, dim = 1, inner.ndim
    while dim:
        dim -= 1
        length *= inner.shape[dim]
        if inner.shape[dim] != shape[dim]:
            break
    while dim and inner.shape[dim - 1] == 1:
        dim -= 1
    return length, prod(shape[dim:])


def _run_starts(inner: Box, shape: Shape, length: int) -> Iterator[int]:
    """Row-major positions where the runs of `inner` start, in order."""
    lead = inner.ndim
    while prod(inner.shape[lead:]) < length:
        lead -= 1
    tail = inner.start[lead:]
    for index in product(*(range(a, a + n) for a, n in zip(inner.start[:lead], inner.shape[:lead], strict=True))):
        yield flat_index((*index, *tail), shape)


def read_array(
    root: Path, atom: Atom, rows: slice | None = None, computed: ComputedFiles | None = None
) -> np.ndarray[Any, Any]:
    """The atom, or rows of its first dimension, as a numpy array; bfloat16 is widened to float32."""
    raw = _read_raw(root, atom, rows, computed)
    if raw.dtype.kind == "u" and atom.dtype.family == "float" and atom.dtype.name != "bfloat16":
        raise UsageError(f"{atom}: numpy has no {atom.dtype}", hint="read it with as_torch=True")
    return widen(raw, atom.dtype)


def read_tensor(
    root: Path, atom: Atom, rows: slice | None = None, computed: ComputedFiles | None = None
) -> torch.Tensor:
    """The atom, or rows of its first dimension, as a torch tensor of exactly its dtype."""
    import torch

    raw = _read_raw(root, atom, rows, computed)
    dtype: torch.dtype = getattr(torch, atom.dtype.name)
    if raw.size == 0:
        return torch.empty(raw.shape, dtype=dtype)
    # Through bytes, because torch and numpy do not share all types.
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
    return flat.view(dtype).reshape(raw.shape)


def _read_raw(root: Path, atom: Atom, rows: slice | None, computed: ComputedFiles | None) -> RawArray:
    if rows is not None and not atom.shape:
        raise UsageError(f"{atom}: is a scalar and has no rows")
    start, stop, step = (rows or slice(None)).indices(atom.shape[0] if atom.shape else 1)
    if step != 1:
        raise UsageError(f"{atom}: rows are read in steps of 1, not {step}")
    shape: Shape = (max(0, stop - start), *atom.shape[1:]) if atom.shape else ()
    corner = (start, *(0,) * (len(shape) - 1)) if shape else ()
    out = np.empty(shape, raw_dtype(atom.dtype))
    if out.size == 0:
        return out
    with SourceFiles(root, computed=computed) as files:
        reader = AtomReader(files, atom, flat=False)
        for slab in slabs(shape, max(1, settings.SLAB_BYTES // atom.dtype.itemsize)):
            position = flat_index(slab.start, shape)
            target = out.reshape(-1)[position : position + slab.numel].reshape(slab.shape)
            reader.read(slab.shift(corner), target)
    return out
