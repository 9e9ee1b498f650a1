"""Stripes: a box as it lies in the flattened tensor, runs of equal length at equal distances. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ucp.core.box import Box, Shape, flat_index, interval_boxes, is_contiguous_in, strides_of
from ucp.core.region import Region


class StridedSpan(NamedTuple):
    """The part of a stripe that lies in an interval of the flattened tensor: `times` runs of `run` elements each.

    A run begins `step` positions after the one before it. Positions are counted from the first of the interval, whose
    two ends may cut the first and the last run short.
    """

    first: int  # where the first run would begin if it were whole: negative where the interval cuts it
    run: int
    step: int
    times: int
    head: int  # elements that the first one lacks
    tail: int  # elements that the last one lacks

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.times * self.run - self.head - self.tail

    def intervals(self) -> list[tuple[int, int]]:
        """First position, and one past the last, of each."""
        if not self.times:
            return []
        first, run, step = self.first, self.run, self.step
        last = first + (self.times - 1) * step
        if self.times == 1:
            return [(first + self.head, first + run - self.tail)]
        between = [(at, at + run) for at in range(first + step, last, step)]
        return [(first + self.head, first + run), *between, (last, last + run - self.tail)]


class StridedRun(NamedTuple):
    """`times` runs of `run` elements each, in a flattened tensor and in the memory or file of who holds them.

    In the tensor the first run begins at position `first`, each next one `step` positions further on. Where they are
    held they lie end to end, from `offset` on. All numbers count elements (after `scaled`, bytes).
    """

    first: int
    run: int
    step: int
    times: int
    offset: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.first + (self.times - 1) * self.step + self.run

    def scaled(self, size: int, offset: int = 0) -> StridedRun:
        """The same in bytes, for elements of `size` bytes held from byte `offset` on."""
        return StridedRun(self.first * size, self.run * size, self.step * size, self.times, offset + self.offset * size)

    def before(self, position: int) -> int:
        """How many of its elements lie before a position of the tensor."""
        if position <= self.first:
            return 0
        runs, inside = divmod(position - self.first, self.step)
        return runs * self.run + min(inside, self.run) if runs < self.times else self.times * self.run

    def within(self, low: int, high: int) -> StridedSpan:
        """What of it lies at positions `[low, high)` of the tensor; positions of the result count from `low`."""
        if self.times == 1:  # as most are, and slab after slab alike
            first = max(low, self.first)
            length = max(0, min(high, self.first + self.run) - first)
            return StridedSpan(first - low, length, length, 1 if length else 0, 0, 0)
        begin, end = self.before(low), self.before(high)
        if begin == end:
            return StridedSpan(0, self.run, self.step, 0, 0, 0)
        number, head = divmod(begin, self.run)
        after = -(-end // self.run)
        first = self.first + number * self.step - low
        return StridedSpan(first, self.run, self.step, after - number, head, after * self.run - end)


def strided_runs(region: Region, shape: Shape, *, padded: bool = False) -> list[StridedRun] | None:
    """A region in stripes, in its order, neighbours joined. None where it reaches past a tensor of `shape`.

    With `padded`, rows after the last one of the tensor are left out instead.
    """
    found: list[StridedRun] = []
    position = 0  # of the current box in the region's boxes laid end to end
    for box in region.boxes:
        numel = box.numel
        low, high = max(region.start, position), min(region.stop, position + numel)
        if low < high:
            offset = low - region.start
            if is_contiguous_in(box, shape) and _is_inside(box, shape):
                _add(
                    found, StridedRun(flat_index(box.start, shape) + low - position, high - low, high - low, 1, offset)
                )
            else:
                for part in interval_boxes(box.shape, low - position, high - position):
                    held = part.shift(box.start)
                    kept = _real_rows(held, shape) if padded else held
                    if kept is not None:
                        if not _is_inside(kept, shape):
                            return None
                        for stripe in _of_box(kept, shape, offset):
                            _add(found, stripe)
                    offset += part.numel
        position += numel
    return found


def _add(found: list[StridedRun], stripe: StridedRun) -> None:
    """Append, or make the last one longer."""
    if found and stripe.times == 1:
        last = found[-1]
        if last.times == 1 and last.stop == stripe.first and last.offset + last.run == stripe.offset:
            run = last.run + stripe.run
            found[-1] = StridedRun(last.first, run, run, 1, last.offset)
            return
    found.append(stripe)


def _is_inside(box: Box, shape: Shape) -> bool:
    return all(a + n <= m for a, n, m in zip(box.start, box.shape, shape, strict=True))


def _real_rows(box: Box, shape: Shape) -> Box | None:
    """Without the rows that a tensor of `shape` does not have."""
    if not shape or box.start[0] + box.shape[0] <= shape[0]:
        return box
    rows = shape[0] - box.start[0]
    return Box(box.start, (rows, *box.shape[1:])) if rows > 0 else None


def _of_box(box: Box, shape: Shape, offset: int) -> Iterator[StridedRun]:
    dim, run = box.ndim, 1
    while dim and (dim == box.ndim or box.shape[dim] == shape[dim]):  # a run ends with the first dimension cut short
        dim -= 1
        run *= box.shape[dim]
    strides = strides_of(shape)
    times, step = 1, run
    while dim and (box.shape[dim - 1] == 1 or times == 1 or strides[dim - 1] == times * step):
        dim -= 1
        if box.shape[dim] > 1:
            times, step = times * box.shape[dim], strides[dim] if times == 1 else step
    for index in product(*(range(a, a + n) for a, n in zip(box.start[:dim], box.shape[:dim], strict=True))):
        yield StridedRun(flat_index((*index, *box.start[dim:]), shape), run, step, times, offset)
        offset += run * times
