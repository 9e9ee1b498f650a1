"""Regions: what one rank holds of an atom. One shape describes every layout in this field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ucp.core.box import Box, Shape, interval_boxes, whole


class RegionPiece(NamedTuple):
    """A box whose elements lie row-major and contiguous, `offset` elements after the region's first element."""

    box: Box
    offset: int


class Region(NamedTuple):
    """Boxes laid end to end, each row-major, and of that concatenation the flat interval `[start, stop)`.

    Tensor and expert parallelism and fused sub-parameters make the boxes; ZeRO makes the interval. A box may reach
    past the atom's shape: what lies outside is padding (vocabulary rows added so that a split comes out even).
    """

    boxes: tuple[Box, ...]
    start: int
    stop: int

    @staticmethod
    def of(boxes: Iterable[Box]) -> Region:
        """Everything in these boxes."""
        held = tuple(boxes)
        return Region(held, 0, sum(box.numel for box in held))

    @staticmethod
    def all_of(shape: Shape) -> Region:
        """A whole tensor."""
        return Region.of((whole(shape),))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Region:
        """The sub-interval `[start, stop)` of this region, counted from its first element and clipped to it."""
        lo = min(max(self.start + start, self.start), self.stop)
        hi = min(max(self.start + stop, lo), self.stop)
        return Region(self.boxes, lo, hi)

    def pieces(self) -> Iterator[RegionPiece]:
        """The region as contiguous boxes in order; offsets are in elements from the region's first element."""
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
