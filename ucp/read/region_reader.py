"""Reading one region of an atom: what a rank of any layout holds of it, whatever layout the source has.

Where slabs want whole rows of the logical tensor, a region may be narrow (a tensor-parallel slice) or start in the
middle of a row (a ZeRO share). Every byte of it is read once and nothing else is, except where the source keeps the
region in pieces so short that reading across the gaps is cheaper.

Atoms as numpy arrays and torch tensors, for people at a prompt and for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, is_contiguous_in, slabs, strides_of, whole
from ucp.core.checkpoint import Atom, ComputedFiles
from ucp.core.region import Region, RegionPiece
from ucp.errors import InconsistentError, UsageError
from ucp.read.aligned_buffers import scratch_buffer
from ucp.read.atom_reader import AtomBlock, AtomReader, FragmentCover, read_rows
from ucp.read.casting import RawArray, cast, raw_dtype, unscale, widen
from ucp.read.verbatim import can_flatten, flatten_box, pieces_are_intervals
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    import torch


def read_region(files: SourceFiles, atom: Atom, region: Region, out: RawArray) -> None:
    """Fill `out` (raw, one-dimensional, contiguous, of the atom's dtype) with the region's elements in order."""
    RegionReader(files, atom).read(region, out)


class RegionReader:
    """Reads regions of one atom. Not thread-safe, because of the scratch block."""

    def __init__(self, files: SourceFiles, atom: Atom) -> None:
        self.files = files
        self.atom = atom
        self._stored_as_is = atom.combine == "copy" and all(f.strides is None for f in atom.fragments)
        self._covers: dict[bool, FragmentCover] = {}

    def read(self, region: Region, out: RawArray) -> None:
        """Fill `out` with the region's elements in order. Elements outside the atom's shape (padding) become zero."""
        if out.ndim != 1 or out.size != region.numel or not out.flags.c_contiguous:
            raise AssertionError(f"{self.atom}: a block of shape {out.shape} for {region.numel} elements")
        pieces = list(region.pieces())
        if not self._stored_as_is:
            for piece in pieces:
                self._read_by_slabs(piece, out)
            return
        flat = can_flatten(self.atom) and pieces_are_intervals(pieces, self.atom.shape)
        if flat not in self._covers:
            self._covers[flat] = FragmentCover(self.atom.fragments, self.atom.shape, flat)
        for piece in pieces:
            if flat:
                piece = RegionPiece(flatten_box(piece.box, self.atom.shape), piece.offset)
            self._read_piece(self._covers[flat], piece, out)

    def _read_piece(self, cover: FragmentCover, piece: RegionPiece, out: RawArray) -> None:
        target = out[piece.offset : piece.offset + piece.box.numel].reshape(piece.box.shape)
        real = intersect(piece.box, whole(cover.shape))
        if real != piece.box:
            target[...] = 0
        if real is None:
            return
        filled = 0
        for common, extent in cover.overlapping(_enclosing_rows(real, cover.shape)):
            wanted = intersect(common, real)
            if wanted is not None:
                filled += wanted.numel
                self._copy(extent, wanted, piece.box, target)
        self._check_whole(filled, real)

    def _check_whole(self, filled: int, wanted: Box) -> None:
        if filled != wanted.numel:
            raise InconsistentError(
                f"parameter {self.atom.name}, {self.atom.kind}: {filled} of {wanted.numel} elements of {wanted}"
                " are there",
                hint="run `ucp verify` on the source to see which ranks are missing",
            )

    def _copy(self, extent: AtomBlock, wanted: Box, box: Box, target: RawArray) -> None:
        """Move the block `wanted` of a stored block to its place in `target`, which holds `box`."""
        fragment = extent.fragment
        as_is = fragment.dtype == self.atom.dtype and fragment.inline is None and fragment.scale == 1.0
        inner = _inside(wanted, box)
        if as_is and is_contiguous_in(inner, box.shape):
            at = flat_index(inner.start, box.shape)
            self._read_stored(extent, wanted, target.reshape(-1)[at : at + wanted.numel])
            return
        for block in slabs(wanted.shape, max(1, settings.SLAB_BYTES // fragment.dtype.itemsize)):
            part = block.shift(wanted.start)
            values = cast(self._stored(extent, part), fragment.dtype, self.atom.dtype)
            target[_slices(_inside(part, box))] = (
                values if fragment.scale == 1.0 else unscale(values, self.atom.dtype, fragment.scale)
            )

    def _stored(self, extent: AtomBlock, block: Box) -> RawArray:
        """The elements of `block` as stored, in its shape."""
        fragment = extent.fragment
        kind = raw_dtype(fragment.dtype)
        if fragment.inline is not None:
            stored: RawArray = np.frombuffer(fragment.inline, kind).reshape(extent.box.shape)
            return stored[_slices(_inside(block, extent.box))]
        nbytes = block.numel * fragment.dtype.itemsize
        values = scratch_buffer("regions", nbytes).view(kind)
        self._read_stored(extent, block, values)
        return values.reshape(block.shape)

    def _read_stored(self, extent: AtomBlock, block: Box, out: RawArray) -> None:
        """Read `block` of a stored block into `out`, row-major: one read a run of neighbours in the file."""
        stored, itemsize = extent.box, extent.fragment.dtype.itemsize
        inner = _inside(block, stored)
        length = _run_length(inner, stored.shape)
        if length < inner.numel and length * itemsize < settings.SHORT_RUN_BYTES:
            self._read_across(extent, inner, out)
            return
        data = out.view(np.uint8).data
        for number, first in enumerate(_run_starts(inner, stored.shape, length)):
            at = number * length * itemsize
            self.files.read_into(
                extent.fragment.file, extent.offset + first * itemsize, data[at : at + length * itemsize]
            )

    def _read_across(self, extent: AtomBlock, inner: Box, out: RawArray) -> None:
        """Read whole spans of the file and pick the short runs from them."""
        stored, itemsize = extent.box.shape, extent.fragment.dtype.itemsize
        strides = strides_of(stored)
        limit = max(1, settings.SLAB_BYTES // itemsize * inner.numel // _span(inner.shape, strides))
        done = 0
        for local in slabs(inner.shape, limit):
            block = local.shift(inner.start)
            first = flat_index(block.start, stored)
            span = np.frombuffer(
                self.files.read(
                    extent.fragment.file,
                    extent.offset + first * itemsize,
                    _span(block.shape, strides) * itemsize,
                ),
                out.dtype,
            )
            picked = np.lib.stride_tricks.as_strided(span, block.shape, tuple(s * itemsize for s in strides))
            out[done : done + block.numel] = picked.reshape(-1)
            done += block.numel

    def _read_by_slabs(self, piece: RegionPiece, out: RawArray) -> None:
        """Means of several versions and tensors that do not lie row-major: whole rows first, then what is wanted."""
        target = out[piece.offset : piece.offset + piece.box.numel].reshape(piece.box.shape)
        real = intersect(piece.box, whole(self.atom.shape))
        if real != piece.box:
            target[...] = 0
        if real is None:
            return
        reader = AtomReader(self.files, self.atom, flat=False)
        rows = _enclosing_rows(real, self.atom.shape)
        for local in slabs(rows.shape, max(1, settings.SLAB_BYTES // self.atom.dtype.itemsize)):
            slab = local.shift(rows.start)
            wanted = intersect(slab, real)
            if wanted is not None:
                values = np.empty(slab.shape, raw_dtype(self.atom.dtype))
                reader.read(slab, values)
                target[_slices(_inside(wanted, piece.box))] = values[_slices(_inside(wanted, slab))]


def _inside(box: Box, outer: Box) -> Box:
    """`box` in the coordinates of `outer`."""
    return box.shift(tuple(-a for a in outer.start))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def _enclosing_rows(box: Box, shape: Shape) -> Box:
    """The contiguous block of whole rows that `box` lies in."""
    if not shape:
        return box
    return Box((box.start[0], *(0,) * (len(shape) - 1)), (box.shape[0], *shape[1:]))


def _run_length(inner: Box, shape: Shape) -> int:
    """Elements of `inner` that lie side by side in a row-major tensor of `shape`, at least."""
    length = 1
    for n, extent in zip(reversed(inner.shape), reversed(shape), strict=True):
        length *= n
        if n != extent:
            break
    return length


def _run_starts(inner: Box, shape: Shape, length: int) -> Iterator[int]:
    """Positions in the tensor where the runs of `inner` start, in order."""
    lead = inner.ndim
    while prod(inner.shape[lead:]) < length:
        lead -= 1
    tail = inner.start[lead:]
    ranges: Sequence[range] = [range(a, a + n) for a, n in zip(inner.start[:lead], inner.shape[:lead], strict=True)]
    for index in product(*ranges):
        yield flat_index((*index, *tail), shape)


def _span(block: Shape, strides: Shape) -> int:
    """Elements from the first to the last of a block, in a tensor with these strides."""
    return 1 + sum((n - 1) * stride for n, stride in zip(block, strides, strict=True))


def read_array(
    root: Path, atom: Atom, rows: slice | None = None, computed: ComputedFiles | None = None
) -> np.ndarray[Any, Any]:
    """The atom, or rows of its first dimension, as numpy; bfloat16 is widened to float32."""
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
    count = atom.shape[0] if atom.shape else 1
    start, stop, step = (rows or slice(None)).indices(count)
    if step != 1:
        raise UsageError(f"{atom}: rows are read in steps of 1, not {step}")
    shape = (max(0, stop - start), *atom.shape[1:]) if atom.shape else ()
    out = np.empty(shape, raw_dtype(atom.dtype))
    with SourceFiles(root, computed=computed) as files:
        read_rows(files, atom, start, max(start, stop), out)
    return out
