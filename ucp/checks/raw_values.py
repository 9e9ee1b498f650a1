"""Raw elements as read from files: blocks to read into, values that should not occur, elements that differ.

A raw element is the unsigned integer of its bits, so that NaNs, signed zeros and dtypes without numpy equivalent
(bfloat16, float8) are handled exactly.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, index_at
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.read.casting import RawArray, cast, scratch_buffer, words

# On some machines the kernel copies four times slower if the target is 1 to 31 bytes after the source, modulo the page
# size, which is where large blocks of malloc are if the source is aligned. Equal offsets within a cache line are fast.
_CACHE_LINE: Final = 64

_ROUNDED_AT_ONCE: Final = 1 << 16  # elements; fits into the CPU cache

# name → bits of infinity, as an unsigned integer. Larger magnitudes are NaN.
_INFINITY: Final = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,  # has no infinity; this is its only NaN
}


def block_bytes() -> int:
    """Bytes to read at a time. More than a slab: data that is only looked at gains more from long reads than from the
    cache."""
    return 4 * settings.SLAB_BYTES


class ReadBlock:
    """A buffer of `nbytes` bytes for file contents. Blocks of one thread with the same number share their memory."""

    __slots__ = ("_raw",)

    def __init__(self, number: int, nbytes: int) -> None:
        self._raw = scratch_buffer(f"checks: block {number}", nbytes + _CACHE_LINE)

    def for_range(self, offset: int, nbytes: int) -> RawArray:
        """Memory for `nbytes` bytes at byte `offset` of a file. Overwritten by the next call."""
        shift = offset % _CACHE_LINE
        memory: RawArray = self._raw[shift : shift + nbytes]
        return memory


def aligned(data: RawArray, itemsize: int) -> RawArray:
    """The complete elements in `data`, aligned for numpy: a copy if their address is not."""
    data = data[: len(data) // itemsize * itemsize]
    return data if data.view(f"u{min(itemsize, 8)}").flags.aligned else data.copy()


def can_scan(dtype: DType) -> bool:
    """Whether the bits of NaN and infinity are known for this dtype."""
    return dtype.name in _INFINITY


def bits_of(data: RawArray, dtype: DType) -> RawArray:
    """Bytes or raw elements as unsigned integers of the size of an element."""
    return data.reshape(-1).view(np.dtype(f"uint{8 * dtype.itemsize}"))


def all_valid(bits: RawArray, dtype: DType, squares: bool) -> bool:
    """Whether every element is finite and, with `squares`, not negative. Takes at least one element.

    As integers, invalid elements are larger than valid ones, so the maximum decides: one or two passes in the cache.
    """
    infinity, sign = _INFINITY[dtype.name], 1 << (8 * dtype.itemsize - 1)
    largest = int(bits.max())
    if largest < infinity:
        return True
    if largest >= sign | infinity or (squares and largest > sign):
        return False
    return int(bits.view(f"int{8 * dtype.itemsize}").max()) < infinity


def not_finite(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """Number of NaN or infinite elements, and the position of the first."""
    bad = _magnitude(bits, dtype) >= _INFINITY[dtype.name]
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def negative(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """Number of elements below zero (NaN and -0 are not), and the position of the first."""
    sign = 1 << (8 * dtype.itemsize - 1)
    if int(bits.max()) <= sign:
        return 0, 0
    bad = (bits > sign) & (bits <= sign | _INFINITY[dtype.name])
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def is_mask(bits: RawArray, dtype: DType) -> bool:
    """Whether there are several elements, all zero or negative infinity: an attention mask, not a weight."""
    hidden = bits == (1 << (8 * dtype.itemsize - 1) | _INFINITY[dtype.name])
    return bits.size > 1 and bool((hidden | (bits == 0)).all()) and dtype.name != "float8_e4m3fn"


def is_nan(bits: RawArray, dtype: DType) -> RawArray:
    """Mask of the elements that are NaN."""
    magnitude = _magnitude(bits, dtype)
    infinity = _INFINITY[dtype.name]
    return magnitude >= infinity if dtype.name == "float8_e4m3fn" else magnitude > infinity


def _magnitude(bits: RawArray, dtype: DType) -> RawArray:
    magnitude: RawArray = bits & bits.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)
    return magnitude


@dataclass(slots=True)
class ElementMismatches:
    """Number of elements of an atom that differ between two stored forms, and the row-major position of the first.

    Shared by threads, and merged over processes (see `ForkMergeable`).
    """

    shape: Shape
    count: int = 0
    first: int | None = None
    _known: int = field(default=0, init=False, repr=False, compare=False)  # part of `count` that the parent has
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def compare(self, slab: Box, ours: RawArray, theirs: RawArray, whole: Shape, rounded: DType | None = None) -> None:
        """Compare one slab of a tensor of shape `whole` (that of the atom, or flattened). See `unequal`."""
        positions = unequal(ours, theirs, rounded)
        if positions.size:
            self._add(int(positions.size), flat_index(slab.start, whole) + int(positions[0]))

    def add(self, boxes: tuple[Box, ...], positions: RawArray) -> None:
        """Count differing elements, given by position in the flat space of `boxes`.

        Positions outside the shape are padding and are not counted.
        """
        at = 0
        for box in boxes:
            inside = positions[(positions >= at) & (positions < at + box.numel)] - at
            at += box.numel
            if not inside.size:
                continue
            index = [a + b for a, b in zip(np.unravel_index(inside, box.shape or (1,)), box.start or (0,), strict=True)]
            real = np.logical_and.reduce([i < n for i, n in zip(index, self.shape or (1,), strict=True)])
            if real.any():
                flat = np.ravel_multi_index(tuple(i[real] for i in index), self.shape or (1,))
                self._add(int(flat.size), int(flat.min()))

    def _add(self, count: int, first: int) -> None:
        with self._lock:
            self.count += count
            self.first = first if self.first is None else min(first, self.first)

    @property
    def first_index(self) -> str:
        """The first differing element as text, `[3, 0]`."""
        assert self.first is not None
        return str(list(index_at(self.first, self.shape)))

    def mark_known(self) -> None:
        self._known = self.count

    def changes(self) -> Any:
        return (self.count - self._known, self.first) if self.count > self._known else None

    def merge_changes(self, changes: Any) -> None:
        self._add(*changes)


def unequal(ours: RawArray, theirs: RawArray, rounded: DType | None = None) -> RawArray:
    """Positions of elements that differ in any bit.

    With `rounded`, the dtype of both, all NaNs are equal: the bits of a NaN after a cast are not defined.
    """
    a, b = words(ours), words(theirs)
    differing = a != b
    if not differing.any():
        return np.empty(0, np.int64)
    # An element of 16 bytes is compared as two words.
    elements = differing.reshape(ours.size, -1).any(axis=1)
    if rounded is not None and can_scan(rounded):
        elements &= ~(is_nan(a, rounded) & is_nan(b, rounded))
    return np.flatnonzero(elements)


class RoundingComparison:
    """Finds masters that do not round to the saved weight. Has scratch memory, so each thread needs its own."""

    def __init__(self, master: DType, weight: DType, limit: int) -> None:
        """`limit` is the largest number of elements per call."""
        self._master, self._weight = master, weight
        self._is_bfloat16 = (master, weight) == (FLOAT32, BFLOAT16)
        if self._is_bfloat16:
            self._step = min(limit, _ROUNDED_AT_ONCE)
            self._distance = scratch_buffer("rounding: distance", 4 * self._step).view(np.uint32)
            self._is_far = scratch_buffer("rounding: far", self._step).view(np.bool_)

    def mismatches(self, masters: RawArray, weights: RawArray, finite: bool) -> RawArray:
        """Positions of raw masters that do not round to the raw weights. `finite`: no master is NaN or infinite.

        A finite float32 rounds to a bfloat16 if their bits, as integers, are less than half a unit apart. Testing that
        is faster than rounding; only elements that are exactly half a unit apart, or wrong, have to be rounded.
        """
        if not self._is_bfloat16 or not finite:
            return unequal(weights, cast(masters, self._master, self._weight), self._weight)
        candidates = [
            start + far
            for start in range(0, masters.size, self._step)
            if (far := self._far_apart(masters[start : start + self._step], weights[start : start + self._step])).size
        ]
        if not candidates:
            return np.empty(0, np.int64)
        positions: RawArray = np.concatenate(candidates)
        rounded = cast(masters[positions], self._master, self._weight)
        return positions[unequal(weights[positions], rounded, self._weight)]

    def _far_apart(self, masters: RawArray, weights: RawArray) -> RawArray:
        """Positions where a float32 and a bfloat16 are half a unit or more apart."""
        distance = self._distance[: masters.size]
        np.copyto(distance, weights)
        np.left_shift(distance, np.uint32(16), out=distance)
        np.subtract(masters.view(np.uint32), distance, out=distance)
        np.add(distance, np.uint32(0x7FFF), out=distance)  # maps -0x7FFF … 0x7FFF to 0 … 0xFFFE
        return np.flatnonzero(np.greater_equal(distance, np.uint32(0xFFFF), out=self._is_far[: masters.size]))
