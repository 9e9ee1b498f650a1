"""Blocks whose elements do not lie side by side in their file: transposed matrices, and rows with gaps between them.

A slab of a transposed matrix is a few columns of the stored one: a short run of every row. Read slab by slab, all of
the stored matrix would be read for each, because gaps are cheaper to read than to step over. So a strip of more columns
than a slab needs is read at once, and kept for the slabs that come; they are turned over tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Fragment
from ucp.read.aligned_buffers import scratch_buffer
from ucp.read.casting import RawArray, raw_dtype
from ucp.storage.local import SourceFiles

_CACHED_STRIPS: Final = 4  # at once: q, k and v of a fused matrix take turns
_GAP_BYTES: Final = 16 << 10  # a gap of this length costs as much to read as it costs to begin anew behind it
_LINE_BYTES: Final = 64  # of the CPU's cache
_TILE_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """A block of an atom in a file: `box` starts at byte `offset`, and has these strides, in elements."""

    box: Box
    offset: int
    strides: Shape
    fragment: Fragment


@dataclass(frozen=True, slots=True)
class _Columns:
    """Bytes `[start, stop)` of a file, and the same again `step` bytes further on, `count` times in all."""

    file: str
    start: int
    stop: int
    step: int
    count: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.count

    def holds(self, other: _Columns) -> bool:
        same = (self.file, self.step, self.count) == (other.file, other.step, other.count)
        return same and self.start <= other.start and other.stop <= self.stop


class StridedReader:
    """Reads blocks of stored blocks with strides. Not thread-safe."""

    def __init__(self, files: SourceFiles, stored: Iterable[StridedBlock] = ()) -> None:
        """`stored` are those of the atom that is read: columns beside each other are read together."""
        self._files = files
        self._strips: list[tuple[_Columns, RawArray]] = []
        self._reach: dict[tuple[str, int, int, int], tuple[int, int]] = {}  # where columns end, and blocks of them
        for block in stored:
            columns = _columns(block, block.box)
            if columns is not None:
                row = columns.start // columns.step
                key = (columns.file, columns.step, columns.count, row)
                stop, blocks = self._reach.get(key, (0, 0))
                self._reach[key] = max(stop, columns.stop), blocks + 1

    def read(self, stored: StridedBlock, block: Box) -> RawArray:
        """The elements of `block`, a part of the stored block, in its shape."""
        kind = raw_dtype(stored.fragment.dtype)
        wanted = _columns(stored, block)
        if wanted is None:
            return self._read(stored, block)
        held, data = self._strip(wanted, kind.itemsize)
        skip = wanted.start - held.start
        rows = data[:, skip : skip + wanted.stop - wanted.start].view(kind)
        out = np.empty(rows.shape[::-1], kind)
        _transpose_into(out, rows)
        return out.reshape(block.shape)

    def _strip(self, wanted: _Columns, itemsize: int) -> tuple[_Columns, RawArray]:
        for i, (held, data) in enumerate(self._strips):
            if held.holds(wanted):
                self._strips.append(self._strips.pop(i))
                return held, data
        key = (wanted.file, wanted.step, wanted.count, wanted.start // wanted.step)
        reach, blocks = self._reach.get(key, (0, 1))
        width = (
            settings.TRANSPOSE_BUFFER_BYTES
            // (_CACHED_STRIPS if blocks > 1 else 1)
            // wanted.count
            // itemsize
            * itemsize
        )
        held = replace(wanted, stop=max(wanted.stop, min(wanted.start + width, reach)))
        while (
            self._strips
            and sum(strip.nbytes for strip, _ in (*self._strips, (held, None))) > settings.TRANSPOSE_BUFFER_BYTES
        ):
            self._strips.pop(0)
        data = np.empty((held.count, held.stop - held.start), np.uint8)
        self._fill(held, data)
        self._strips.append((held, data))
        return held, data

    def _fill(self, columns: _Columns, out: RawArray) -> None:
        width = columns.stop - columns.start
        if columns.step - width >= _GAP_BYTES:
            for row in range(columns.count):
                self._files.read_into(columns.file, columns.start + row * columns.step, out[row].data)
            return
        rows = max(1, settings.SLAB_BYTES // columns.step)
        for first in range(0, columns.count, rows):
            count = min(rows, columns.count - first)
            raw = self._bytes(columns.file, columns.start + first * columns.step, (count - 1) * columns.step + width)
            out[first : first + count] = np.lib.stride_tricks.as_strided(raw, (count, width), (columns.step, 1))

    def _bytes(self, file: str, at: int, length: int) -> RawArray:
        """Bytes of a file, until the next call."""
        raw = scratch_buffer("strips", length)
        self._files.read_into(file, at, raw.data)
        return raw

    def _read(self, stored: StridedBlock, block: Box) -> RawArray:
        """Read spans that fit memory, and pick from them."""
        kind, strides = raw_dtype(stored.fragment.dtype), stored.strides
        out = np.empty(block.shape, kind)
        steps = tuple(s * kind.itemsize for s in strides)
        for box in _split_to_span(block, strides, max(1, settings.SLAB_BYTES // kind.itemsize)):
            raw = self._bytes(stored.fragment.file, _position(stored, box), _span(box.shape, strides) * kind.itemsize)
            view = np.lib.stride_tricks.as_strided(raw.view(kind), box.shape, steps)
            out[tuple(slice(a - c, a - c + n) for a, c, n in zip(box.start, block.start, box.shape, strict=True))] = (
                view
            )
        return out


def _columns(stored: StridedBlock, block: Box) -> _Columns | None:
    """What the block is in its file where that has the transpose of it; None for anything else."""
    wide = [d for d, n in enumerate(stored.box.shape) if n > 1]
    if len(wide) != 2 or stored.strides[wide[0]] != 1:
        return None
    itemsize = stored.fragment.dtype.itemsize
    start, step = _position(stored, block), stored.strides[wide[1]] * itemsize
    stop = start + block.shape[wide[0]] * itemsize
    if step < stop - start:
        return None
    return _Columns(stored.fragment.file, start, stop, step, block.shape[wide[1]])


def _transpose_into(out: RawArray, rows: RawArray) -> None:
    """Copy a matrix into its transpose, by tiles that stay in the CPU's cache."""
    short = max(1, _LINE_BYTES // out.itemsize)
    for j in range(0, rows.shape[0], short):
        for i in range(0, rows.shape[1], _TILE_LENGTH):
            out[i : i + _TILE_LENGTH, j : j + short] = rows[j : j + short, i : i + _TILE_LENGTH].T


def _position(stored: StridedBlock, block: Box) -> int:
    """The byte of the file at which a block of the stored one starts."""
    local = (a - b for a, b in zip(block.start, stored.box.start, strict=True))
    return stored.offset + sum(i * s for i, s in zip(local, stored.strides, strict=True)) * (
        stored.fragment.dtype.itemsize
    )


def _span(shape: Shape, strides: Shape) -> int:
    """Elements from the first to the last of a block."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _split_to_span(box: Box, strides: Shape, limit: int) -> Iterator[Box]:
    """Cut `box` until the span of each part in the file is at most `limit` elements: along the longest stride first."""
    if _span(box.shape, strides) <= limit or box.numel == 1:
        yield box
        return
    dim = max(range(box.ndim), key=lambda d: (box.shape[d] - 1) * strides[d])
    half = box.shape[dim] // 2
    for start, n in ((box.start[dim], half), (box.start[dim] + half, box.shape[dim] - half)):
        yield from _split_to_span(
            Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.shape[:dim], n, *box.shape[dim + 1 :])),
            strides,
            limit,
        )
