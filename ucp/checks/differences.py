"""Counts where two forms of one atom differ, element by element and bit by bit, over many blocks and threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from ucp.checks.values import is_nan, scannable
from ucp.engine.casting import RawArray, cast
from ucp.model.box import Box, Shape, flat_index
from ucp.model.dtypes import BFLOAT16, FLOAT32, DType


@dataclass(slots=True)
class Differences:
    """How many elements of an atom differ, and the first one: its row-major position, in elements."""

    shape: Shape
    count: int = 0
    first: int | None = None
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
            self._widened = np.full(limit, 0x7FFF, np.uint32)
            self._halves = self._widened.view(np.uint16)[1::2]  # little-endian: the upper half of each
            self._distance = np.empty(limit, np.uint32)
            self._far = np.empty(limit, np.bool_)

    def wrong(self, precise: RawArray, saved: RawArray, finite: bool) -> RawArray:
        """Positions of raw masters that do not round to the saved raw weights; `finite`: no master is NaN or infinite.

        A finite float32 rounds to a bfloat16 if their bits, as integers, are less than half a unit apart. This is
        quicker than rounding. Only what is just half a unit apart, or wrong, has to be rounded.
        """
        if not self._screens or not finite:
            return unequal(saved, cast(precise, self._master, self._weight), self._weight)
        n = precise.size
        self._halves[:n] = saved
        distance = np.subtract(self._widened[:n], precise.view(np.uint32), out=self._distance[:n])
        far = np.greater_equal(distance, np.uint32(0xFFFF), out=self._far[:n])
        places = np.flatnonzero(far)
        if not places.size:
            return places
        found: RawArray = places[
            unequal(saved[places], cast(precise[places], self._master, self._weight), self._weight)
        ]
        return found


def _bits(raw: RawArray) -> RawArray:
    return raw.reshape(-1).view(np.dtype(f"uint{8 * min(raw.dtype.itemsize, 8)}"))
