"""Counts where two forms of one atom differ, element by element and bit by bit, over many blocks and threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ucp.checks.values import is_nan, scannable
from ucp.engine.casting import RawArray, cast
from ucp.engine.pages import scratch
from ucp.model.box import Box, Shape, flat_index
from ucp.model.dtypes import BFLOAT16, FLOAT32, DType

_IN_CACHE: Final = 1 << 16  # elements that are rounded at a time


@dataclass(slots=True)
class Differences:
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


class Rounding:
    """Finds where a master does not round to the weight. Keeps scratch blocks: one thread's own."""

    def __init__(self, master: DType, weight: DType, limit: int) -> None:
        """`limit` is the most elements of a block."""
        self._master, self._weight = master, weight
        self._screens = (master, weight) == (FLOAT32, BFLOAT16)
        if self._screens:
            self._step = min(limit, _IN_CACHE)
            self._wide = scratch("rounding: bits", 4 * self._step).view(np.uint32)
            self._far = scratch("rounding: far", self._step).view(np.bool_)

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
