"""Strided runs: a box in the flattened tensor, as runs of equal length at equal distances. Integers only.

A column slice of a matrix, for instance, is one run per row. Copying runs needs no arrays and no numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ucp.core.box import Box, Shape, flat_index, interval_boxes, is_contiguous_in, strides_of
from ucp.core.region import Region


class StridedSpan(NamedTuple):
    """The part of a `StridedRun` inside an interval of the flattened tensor: `times` runs of `run` elements each.

    Each run starts `step` positions after the previous one. Positions are relative to the start of the interval, which
    may cut off the beginning of the first run and the end of the last.
    """

    first: int  # start of the first run before cutting: negative if the interval cuts it
    run: int
    step: int
    times: int
    head: int  # elements cut off the first run
    tail: int  # elements cut off the last run

    @property
    def numel(self) -> int:
        """Number of elements in all runs."""
        return self.times * self.run - self.head - self.tail

    def intervals(self) -> list[tuple[int, int]]:
        """Half-open interval of positions of each run."""
        if not self.times:
            return []
        first, run, step = self.first, self.run, self.step
        last = first + (self.times - 1) * step
        if self.times == 1:
            return [(first + self.head, first + run - self.tail)]
        between = [(at, at + run) for at in range(first + step, last, step)]
        return [(first + self.head, first + run), *between, (last, last + run - self.tail)]


class StridedRun(NamedTuple):
    """`times` runs of `run` elements each, scattered in a flattened tensor and packed in a buffer or file.

    In the tensor, the first run starts at position `first` and each further one `step` positions later. In the buffer
    or file, the runs are contiguous from `offset` on. All numbers count elements (after `scaled`, bytes).
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
        """The same runs counted in bytes, for elements of `size` bytes stored from byte `offset` on."""
        return StridedRun(self.first * size, self.run * size, self.step * size, self.times, offset + self.offset * size)

    def before(self, position: int) -> int:
        """Number of its elements before a position of the tensor."""
        if position <= self.first:
            return 0
        runs, inside = divmod(position - self.first, self.step)
        return runs * self.run + min(inside, self.run) if runs < self.times else self.times * self.run

    def within(self, low: int, high: int) -> StridedSpan:
        """The part at positions `[low, high)` of the tensor; positions in the result are relative to `low`."""
        if self.times == 1:  # the common case, called once per slab
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
    """A region as strided runs, in its order, adjacent ones joined. None if it extends beyond a tensor of `shape`.

    With `padded`, rows beyond the end of the tensor are left out instead.
    """
    runs: list[StridedRun] = []
    position = 0  # of the current box in the region's boxes laid end to end
    for box in region.boxes:
        numel = box.numel
        low, high = max(region.start, position), min(region.stop, position + numel)
        if low < high:
            offset = low - region.start
            if is_contiguous_in(box, shape) and _is_inside(box, shape):
                _add(runs, StridedRun(flat_index(box.start, shape) + low - position, high - low, high - low, 1, offset))
            else:
                for part in interval_boxes(box.shape, low - position, high - position):
                    stored = part.shift(box.start)
                    kept = _without_padding_rows(stored, shape) if padded else stored
                    if kept is not None:
                        if not _is_inside(kept, shape):
                            return None
                        for run in _runs_of_box(kept, shape, offset):
                            _add(runs, run)
                    offset += part.numel
        position += numel
    return runs


def _add(runs: list[StridedRun], run: StridedRun) -> None:
    """Append `run`, or extend the last one if the two are adjacent."""
    if runs and run.times == 1:
        last = runs[-1]
        if last.times == 1 and last.stop == run.first and last.offset + last.run == run.offset:
            length = last.run + run.run
            runs[-1] = StridedRun(last.first, length, length, 1, last.offset)
            return
    runs.append(run)


def _is_inside(box: Box, shape: Shape) -> bool:
    return all(a + n <= m for a, n, m in zip(box.start, box.shape, shape, strict=True))


def _without_padding_rows(box: Box, shape: Shape) -> Box | None:
    """The box without rows beyond the end of a tensor of `shape`; None if no row is left."""
    if not shape or box.start[0] + box.shape[0] <= shape[0]:
        return box
    rows = shape[0] - box.start[0]
    return Box(box.start, (rows, *box.shape[1:])) if rows > 0 else None


def _runs_of_box(box: Box, shape: Shape, offset: int) -> Iterator[StridedRun]:
    dim, run = box.ndim, 1
    while dim and (dim == box.ndim or box.shape[dim] == shape[dim]):  # a run ends at the first dimension not covered
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
