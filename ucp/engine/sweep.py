"""A sweep: which of many boxes a slab meets, without looking at all of them for every slab."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ucp.model.box import Box, Shape

T = TypeVar("T")


class Sweep(Generic[T]):
    """Boxes, each with what it stands for, met by slabs that come from first to last.

    Row-major order is the order of index tuples: a box is let in when its first index is reached and let go after its
    last one, whatever the shape of the tensor.
    """

    def __init__(self, boxes: Iterable[tuple[Box, T]]) -> None:
        self._waiting = sorted(boxes, key=lambda entry: entry[0].start, reverse=True)  # the next one is the last
        self._met: list[tuple[Shape, Box, T]] = []  # with the last index of each

    def meeting(self, slab: Box) -> list[tuple[Box, T]]:
        """All boxes that share elements with the slab, in the order of their first indices, and maybe some others."""
        last = last_index(slab)
        while self._waiting and self._waiting[-1][0].start <= last:
            box, value = self._waiting.pop()
            self._met.append((last_index(box), box, value))
        met = [(box, value) for _, box, value in self._met]
        self._met = [entry for entry in self._met if entry[0] > last]
        return met


def last_index(box: Box) -> Shape:
    """The index of the last element of a box."""
    return tuple(a + n - 1 for a, n in zip(box.start, box.shape, strict=True))
