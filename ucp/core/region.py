"""Regions: the part of an atom that one rank holds. One form describes every layout: TP, EP, fused weights, ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ucp.core.box import Box, Shape, interval_boxes, whole


class RegionPiece(NamedTuple):
    """A box whose elements are stored contiguously in row-major order, `offset` elements into the region."""

    box: Box
    offset: int


class Region(NamedTuple):
    """The flat interval `[start, stop)`, in elements, of a concatenation of boxes, each row-major.

    Tensor parallelism, expert parallelism and fused parameters determine the boxes; ZeRO determines the interval. A
    box may extend beyond the atom's shape: elements outside are padding (vocabulary rows added to make a split even).
    """

    boxes: tuple[Box, ...]
    start: int
    stop: int

    @staticmethod
    def of(boxes: Iterable[Box]) -> Region:
        """All elements of these boxes."""
        boxes = tuple(boxes)
        return Region(boxes, 0, sum(box.numel for box in boxes))

    @staticmethod
    def all_of(shape: Shape) -> Region:
        """All elements of a tensor of this shape."""
        return Region.of((whole(shape),))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Region:
        """The elements `[start, stop)` of this region, counted from its first element and clipped to its end."""
        lo = min(max(self.start + start, self.start), self.stop)
        hi = min(max(self.start + stop, lo), self.stop)
        return Region(self.boxes, lo, hi)

    def pieces(self) -> Iterator[RegionPiece]:
        """Yield the region as contiguous boxes, in order; offsets count elements from the region's first element."""
        position = 0  # of the current box in the concatenation
        for box in self.boxes:
            numel = box.numel
            lo, hi = max(self.start, position), min(self.stop, position + numel)
            if lo < hi:
                offset = lo - self.start
                if hi - lo == numel:
                    yield RegionPiece(box, offset)
                else:
                    for part in interval_boxes(box.shape, lo - position, hi - position):
                        yield RegionPiece(part.shift(box.start), offset)
                        offset += part.numel
            position += numel
