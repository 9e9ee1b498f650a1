"""Numbers that should not be there: NaN, infinities, negative second moments. Found on raw elements, by their bits.

Counts where two forms of one atom differ, element by element and bit by bit, over many blocks and threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ucp.core.box import Box, Shape, flat_index
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.read.aligned_buffers import scratch_buffer
from ucp.read.casting import RawArray, cast

# name → bits of infinity (the largest finite magnitude is below it) in the unsigned integer of the element's size.
_INFINITY: Final = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,  # has no infinity; this is its only NaN
}


def scannable(dtype: DType) -> bool:
    """Is it known how NaN and infinity look in this dtype?"""
    return dtype.name in _INFINITY


def bits_of(data: RawArray, dtype: DType) -> RawArray:
    """Bytes or raw elements as unsigned integers of the element's size."""
    return data.reshape(-1).view(np.dtype(f"uint{8 * dtype.itemsize}"))


def all_valid(bits: RawArray, dtype: DType, squares: bool) -> bool:
    """Is every element finite and, with `squares`, none below zero? At least one element.

    As integers, what is wrong is larger than what is right, so the largest one tells: one or two passes in the cache.
    """
    infinity, sign = _INFINITY[dtype.name], 1 << (8 * dtype.itemsize - 1)
    top = int(bits.max())
    if top < infinity:
        return True
    if top >= sign | infinity or (squares and top > sign):
        return False
    return int(bits.view(f"int{8 * dtype.itemsize}").max()) < infinity


def not_finite(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """How many elements are NaN or infinite, and the position of the first."""
    bad = _magnitude(bits, dtype) >= _INFINITY[dtype.name]
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def negative(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """How many elements are below zero (NaN and -0 are not), and the position of the first."""
    sign = 1 << (8 * dtype.itemsize - 1)
    if int(bits.max()) <= sign:
        return 0, 0
    bad = (bits > sign) & (bits <= sign | _INFINITY[dtype.name])
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def is_mask(bits: RawArray, dtype: DType) -> bool:
    """Are there several elements, all of them zero or negative infinity? So are masks of attention, and no weights."""
    hidden = bits == (1 << (8 * dtype.itemsize - 1) | _INFINITY[dtype.name])
    return bits.size > 1 and bool((hidden | (bits == 0)).all()) and dtype.name != "float8_e4m3fn"


def is_nan(bits: RawArray, dtype: DType) -> RawArray:
    """Which elements are NaN."""
    magnitude = _magnitude(bits, dtype)
    infinity = _INFINITY[dtype.name]
    return magnitude >= infinity if dtype.name == "float8_e4m3fn" else magnitude > infinity


def _magnitude(bits: RawArray, dtype: DType) -> RawArray:
    magnitude: RawArray = bits & bits.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)
    return magnitude


_IN_CACHE: Final = 1 << 16  # elements that are rounded at a time


@dataclass(slots=True)
class ElementMismatches:
    """How many elements of an atom differ, and the first one: its row-major position, in elements."""

    shape: Shape
    count: int = 0
    first: int | None = None
    _known: int = field(default=0, init=False, repr=False, compare=False)  # of the count, to the parent
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def compare(self, slab: Box, ours: RawArray, theirs: RawArray, whole: Shape, rounded: DType | None = None) -> None:
        """Take in one slab of a tensor of shape `whole` (the atom's own or flattened).

        With `rounded`, the dtype of both, any NaN equals any other: what a cast makes of one is nobody's contract.
        """
        found = unequal(ours, theirs, rounded)
        if found.size:
            self._take(int(found.size), flat_index(slab.start, whole) + int(found[0]))

    def take(self, boxes: tuple[Box, ...], found: RawArray) -> None:
        """Elements of the flat space of `boxes` differ, at these positions. Those outside the shape are padding."""
        at = 0
        for box in boxes:
            inside = found[(found >= at) & (found < at + box.numel)] - at
            at += box.numel
            if not inside.size:
                continue
            index = [a + b for a, b in zip(np.unravel_index(inside, box.shape or (1,)), box.start or (0,), strict=True)]
            real = np.logical_and.reduce([i < n for i, n in zip(index, self.shape or (1,), strict=True)])
            if real.any():
                flat = np.ravel_multi_index(tuple(i[real] for i in index), self.shape or (1,))
                self._take(int(flat.size), int(flat.min()))

    def begin(self) -> None:
        """As `Shared.begin`."""
        self._known = self.count

    def told(self) -> Any:
        """As `Shared.told`."""
        return (self.count - self._known, self.first) if self.count > self._known else None

    def hear(self, told: Any) -> None:
        """As `Shared.hear`."""
        self._take(*told)

    def _take(self, count: int, first: int) -> None:
        with self._lock:
            self.count += count
            self.first = first if self.first is None else min(first, self.first)

    @property
    def where(self) -> str:
        """The first differing element as an index."""
        assert self.first is not None
        index: list[int] = []
        rest = self.first
        for n in reversed(self.shape):
            rest, i = divmod(rest, n)
            index.append(i)
        return "[" + ", ".join(map(str, reversed(index))) + "]"


def unequal(ours: RawArray, theirs: RawArray, rounded: DType | None = None) -> RawArray:
    """Positions of elements that differ in a bit; with `rounded` (their dtype) any NaN equals any other."""
    a, b = _bits(ours), _bits(theirs)
    differing = a != b
    if not differing.any():
        return np.empty(0, np.int64)
    # An element of 16 bytes is compared as two halves.
    elements = differing.reshape(ours.size, -1).any(axis=1)
    if rounded is not None and scannable(rounded):
        elements &= ~(is_nan(a, rounded) & is_nan(b, rounded))
    return np.flatnonzero(elements)


class RoundingComparison:
    """Finds where a master does not round to the weight. Keeps scratch blocks: one thread's own."""

    def __init__(self, master: DType, weight: DType, limit: int) -> None:
        """`limit` is the most elements of a block."""
        self._master, self._weight = master, weight
        self._screens = (master, weight) == (FLOAT32, BFLOAT16)
        if self._screens:
            self._step = min(limit, _IN_CACHE)
            self._wide = scratch_buffer("rounding: bits", 4 * self._step).view(np.uint32)
            self._far = scratch_buffer("rounding: far", self._step).view(np.bool_)

    def wrong(self, precise: RawArray, saved: RawArray, finite: bool) -> RawArray:
        """Positions of raw masters that do not round to the saved raw weights; `finite`: no master is NaN or infinite.

        A finite float32 rounds to a bfloat16 if their bits, as integers, are less than half a unit apart. This is
        quicker than rounding. Only what is just half a unit apart, or wrong, has to be rounded.
        """
        if not self._screens or not finite:
            return unequal(saved, cast(precise, self._master, self._weight), self._weight)
        found = [
            start + far
            for start in range(0, precise.size, self._step)
            if (far := self._screen(precise[start : start + self._step], saved[start : start + self._step])).size
        ]
        if not found:
            return np.empty(0, np.int64)
        places: RawArray = np.concatenate(found)
        rounded = cast(precise[places], self._master, self._weight)
        return places[unequal(saved[places], rounded, self._weight)]

    def _screen(self, precise: RawArray, saved: RawArray) -> RawArray:
        """Positions where float32 and bfloat16 are half a unit or more apart."""
        wide = self._wide[: precise.size]
        np.copyto(wide, saved)
        np.left_shift(wide, np.uint32(16), out=wide)
        np.subtract(precise.view(np.uint32), wide, out=wide)
        np.add(wide, np.uint32(0x7FFF), out=wide)  # what was from -0x7FFF to 0x7FFF is now below 0xFFFF
        return np.flatnonzero(np.greater_equal(wide, np.uint32(0xFFFF), out=self._far[: precise.size]))


def _bits(raw: RawArray) -> RawArray:
    return raw.reshape(-1).view(np.dtype(f"uint{8 * min(raw.dtype.itemsize, 8)}"))
