"""Reading blocks whose elements are not contiguous in their file: transposed matrices, and rows with gaps between them.

A slab of a transposed matrix is a few columns of the stored matrix: a short run of every row. Read slab by slab, the
whole stored matrix would be read for each slab, because reading across a short gap is cheaper than a second system
call. So a strip of more columns than a slab needs is read at once and cached for the following slabs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Fragment
from ucp.read.casting import RawArray, raw_dtype, scratch_buffer
from ucp.storage.local import SourceFiles

_CACHED_STRIPS: Final = 4  # q, k and v of a fused matrix are read in turns
_GAP_BYTES: Final = 16 << 10  # reading across a gap of this length costs about as much as another system call
_CACHE_LINE_BYTES: Final = 64
_TILE_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class AtomBlock:
    """A block of an atom in a file: `box` starts at byte `offset`; `strides` are in elements."""

    box: Box
    offset: int
    strides: Shape
    fragment: Fragment

    def position(self, part: Box) -> int:
        """The byte of the file at which a part of this block starts."""
        index = (a - b for a, b in zip(part.start, self.box.start, strict=True))
        elements = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        return self.offset + elements * self.fragment.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Columns:
    """Bytes `[start, stop)` of a file, repeated every `step` bytes, `count` times in all."""

    file: str
    start: int
    stop: int
    step: int
    count: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.count

    def contains(self, other: _Columns) -> bool:
        same = (self.file, self.step, self.count) == (other.file, other.step, other.count)
        return same and self.start <= other.start and other.stop <= self.stop


class StridedReader:
    """Reads parts of strided blocks. Not thread-safe."""

    def __init__(self, files: SourceFiles, blocks: Iterable[AtomBlock] = ()) -> None:
        """`blocks` are the strided blocks of the atom: adjacent columns of several blocks are read together."""
        self._files = files
        self._strips: list[tuple[_Columns, RawArray]] = []  # most recently used last
        self._reach: dict[tuple[str, int, int, int], tuple[int, int]] = {}  # where columns end, and their blocks
        for block in blocks:
            columns = _columns(block, block.box)
            if columns is not None:
                key = _row_key(columns)
                stop, count = self._reach.get(key, (0, 0))
                self._reach[key] = max(stop, columns.stop), count + 1

    def read(self, block: AtomBlock, part: Box) -> RawArray:
        """The elements of `part`, a box inside the block, in its shape."""
        dtype = raw_dtype(block.fragment.dtype)
        wanted = _columns(block, part)
        if wanted is None:
            return self._read_spans(block, part)
        strip, data = self._strip(wanted, dtype.itemsize)
        skip = wanted.start - strip.start
        rows = data[:, skip : skip + wanted.stop - wanted.start].view(dtype)
        out = np.empty(rows.shape[::-1], dtype)
        short = max(1, _CACHE_LINE_BYTES // out.itemsize)  # transposed by tiles that stay in the CPU's cache
        for j in range(0, rows.shape[0], short):
            for i in range(0, rows.shape[1], _TILE_LENGTH):
                out[i : i + _TILE_LENGTH, j : j + short] = rows[j : j + short, i : i + _TILE_LENGTH].T
        return out.reshape(part.shape)

    def _strip(self, wanted: _Columns, itemsize: int) -> tuple[_Columns, RawArray]:
        """A cached strip that contains the wanted columns, read now if there is none."""
        for i, (strip, data) in enumerate(self._strips):
            if strip.contains(wanted):
                self._strips.append(self._strips.pop(i))
                return strip, data
        reach, blocks = self._reach.get(_row_key(wanted), (0, 1))
        limit = settings.TRANSPOSE_BUFFER_BYTES // (_CACHED_STRIPS if blocks > 1 else 1)
        width = limit // wanted.count // itemsize * itemsize
        strip = replace(wanted, stop=max(wanted.stop, min(wanted.start + width, reach)))
        while self._strips and sum(s.nbytes for s, _ in self._strips) + strip.nbytes > settings.TRANSPOSE_BUFFER_BYTES:
            self._strips.pop(0)
        data = np.empty((strip.count, strip.stop - strip.start), np.uint8)
        self._fill(strip, data)
        self._strips.append((strip, data))
        return strip, data

    def _fill(self, columns: _Columns, out: RawArray) -> None:
        width = columns.stop - columns.start
        if columns.step - width >= _GAP_BYTES:
            for row in range(columns.count):
                self._files.read_into(columns.file, columns.start + row * columns.step, out[row].data)
            return
        rows = max(1, settings.SLAB_BYTES // columns.step)
        for first in range(0, columns.count, rows):
            count = min(rows, columns.count - first)
            start, length = columns.start + first * columns.step, (count - 1) * columns.step + width
            raw = self._read_bytes(columns.file, start, length)
            out[first : first + count] = np.lib.stride_tricks.as_strided(raw, (count, width), (columns.step, 1))

    def _read_bytes(self, file: str, offset: int, nbytes: int) -> RawArray:
        """Bytes of a file; valid until the next call."""
        raw = scratch_buffer("strips", nbytes)
        self._files.read_into(file, offset, raw.data)
        return raw

    def _read_spans(self, block: AtomBlock, part: Box) -> RawArray:
        """Read spans of the file that fit into memory, gaps included, and pick the elements from them."""
        dtype = raw_dtype(block.fragment.dtype)
        out = np.empty(part.shape, dtype)
        steps = tuple(stride * dtype.itemsize for stride in block.strides)
        for box in _split_to_span(part, block.strides, max(1, settings.SLAB_BYTES // dtype.itemsize)):
            nbytes = _span(box.shape, block.strides) * dtype.itemsize
            raw = self._read_bytes(block.fragment.file, block.position(box), nbytes)
            index = tuple(slice(a - c, a - c + n) for a, c, n in zip(box.start, part.start, box.shape, strict=True))
            out[index] = np.lib.stride_tricks.as_strided(raw.view(dtype), box.shape, steps)
        return out


def _columns(block: AtomBlock, part: Box) -> _Columns | None:
    """The bytes of `part` if the file has the transpose of a matrix; None for any other strides."""
    wide = [d for d, n in enumerate(block.box.shape) if n > 1]
    if len(wide) != 2 or block.strides[wide[0]] != 1:
        return None
    itemsize = block.fragment.dtype.itemsize
    start, step = block.position(part), block.strides[wide[1]] * itemsize
    stop = start + part.shape[wide[0]] * itemsize
    if step < stop - start:
        return None
    return _Columns(block.fragment.file, start, stop, step, part.shape[wide[1]])


def _row_key(columns: _Columns) -> tuple[str, int, int, int]:
    """Equal for columns of the same rows of the same stored matrix."""
    return columns.file, columns.step, columns.count, columns.start // columns.step


def _span(shape: Shape, strides: Shape) -> int:
    """Elements from the first to the last of a block, gaps included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _split_to_span(box: Box, strides: Shape, limit: int) -> Iterator[Box]:
    """Split `box` until each part spans at most `limit` elements of the file: along the longest extent first."""
    if _span(box.shape, strides) <= limit or box.numel == 1:
        yield box
        return
    dim = max(range(box.ndim), key=lambda d: (box.shape[d] - 1) * strides[d])
    half = box.shape[dim] // 2
    for start, n in ((box.start[dim], half), (box.start[dim] + half, box.shape[dim] - half)):
        part = Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.shape[:dim], n, *box.shape[dim + 1 :]))
        yield from _split_to_span(part, strides, limit)
