"""Counts where two raw arrays differ, element by element and bit by bit, over many slabs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucp.checks.values import is_nan, scannable
from ucp.engine.casting import RawArray
from ucp.model.box import Box, Shape, flat_index
from ucp.model.dtypes import DType


@dataclass(slots=True)
class Differences:
    """How many elements of an atom differ, and the first one: its row-major position, in elements."""

    shape: Shape
    count: int = 0
    first: int | None = None

    def compare(self, slab: Box, ours: RawArray, theirs: RawArray, whole: Shape, rounded: DType | None = None) -> None:
        """Take in one slab of a tensor of shape `whole` (the atom's own or flattened).

        With `rounded`, the dtype of both, any NaN equals any other: what a cast makes of one is nobody's contract.
        """
        a, b = _bits(ours), _bits(theirs)
        unequal = a != b
        if not unequal.any():
            return
        # An element of 16 bytes is compared as two halves.
        elements = unequal.reshape(ours.size, -1).any(axis=1)
        if rounded is not None and scannable(rounded):
            elements &= ~(is_nan(a, rounded) & is_nan(b, rounded))
        if not elements.any():
            return
        self.count += int(np.count_nonzero(elements))
        if self.first is None:
            self.first = flat_index(slab.start, whole) + int(np.argmax(elements))

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


def _bits(raw: RawArray) -> RawArray:
    return raw.reshape(-1).view(np.dtype(f"uint{8 * min(raw.dtype.itemsize, 8)}"))
