"""Boxes: axis-aligned n-dimensional blocks, the slabs that a tensor is processed in, and coverage. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A block of an atom: along dimension `d` the half-open range `[start[d], start[d] + shape[d])`, in elements.

    Inside a box elements are counted row-major. A box of no dimensions is the single element of a scalar.
    """

    start: Shape
    shape: Shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> Shape:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def shift(self, by: Shape) -> Box:
        """The same block with its corner moved by `by`."""
        return Box(tuple(a + d for a, d in zip(self.start, by, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    """The box that covers a whole tensor of this shape."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common block of two boxes with the same number of dimensions, or None if they share no element."""
    start: list[int] = []
    shape: list[int] = []
    for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True):
        lo = a0 if a0 > b0 else b0
        hi = a0 + an if a0 + an < b0 + bn else b0 + bn
        if hi <= lo:
            return None
        start.append(lo)
        shape.append(hi - lo)
    return Box(tuple(start), tuple(shape))


def strides_of(shape: Shape) -> Shape:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def flat_index(index: Shape, shape: Shape) -> int:
    """Row-major position of the element at `index` in a tensor of `shape`."""
    flat = 0
    for i, n in zip(index, shape, strict=True):
        flat = flat * n + i
    return flat


def index_at(position: int, shape: Shape) -> Shape:
    """The index of the element at a row-major position of a tensor of `shape`; the inverse of `flat_index`."""
    index: list[int] = []
    for n in reversed(shape):
        position, i = divmod(position, n)
        index.append(i)
    return tuple(reversed(index))


def is_contiguous_in(box: Box, shape: Shape) -> bool:
    """Whether the elements of `box` are contiguous in a row-major tensor of `shape`."""
    seen = False
    for n, extent in zip(box.shape, shape, strict=True):
        if seen and n != extent:
            return False
        seen = seen or n > 1
    return True


def interval_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Split the flat row-major interval `[start, stop)` of a tensor of `shape` into boxes, in order.

    Yields at most `2 * ndim - 1` boxes, each contiguous in row-major order; concatenated, they are the interval.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    if last > first:
        yield Box((first, *([0] * (len(shape) - 1))), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in interval_boxes(shape[1:], start, stop):
        yield Box((row, *box.start), (1, *box.shape))


def slabs(shape: Shape, limit: int) -> Iterator[Box]:
    """Split a tensor into slabs: boxes of at most `limit` elements, contiguous in row-major order, first to last.

    Every slab fixes some leading indices, takes a range of one dimension and all of the dimensions after it. Because
    of this form, the intersection of a slab with any row-major box is contiguous in that box.
    """
    if 0 in shape:
        return
    limit = max(limit, 1)
    if prod(shape) <= limit:
        yield whole(shape)
        return
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit)
    inner = shape[dim + 1 :]
    rows = max(1, limit // prod(inner))
    zeros = (0,) * len(inner)
    for lead in product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            yield Box((*lead, row, *zeros), ((1,) * dim) + (min(rows, shape[dim] - row), *inner))


@dataclass(frozen=True, slots=True)
class Gap:
    """A block that no box covers."""

    box: Box


@dataclass(frozen=True, slots=True)
class Overlap:
    """A block that several boxes cover. `owners` are the indices of these boxes in the list that was checked."""

    box: Box
    owners: tuple[int, ...]


def coverage(shape: Shape, boxes: Sequence[Box]) -> Iterator[Gap | Overlap]:
    """Yield every gap and overlap of `boxes` in a tensor of `shape`, in row-major order; nothing if they tile it.

    Parts of boxes outside the shape are padding and are ignored.
    """
    if 0 not in shape:
        yield from _sweep(shape, boxes, range(len(boxes)), ())


def _sweep(
    shape: Shape, boxes: Sequence[Box], alive: Sequence[int], prefix: tuple[tuple[int, int], ...]
) -> Iterator[Gap | Overlap]:
    """Sweep along the first dimension after `prefix`, then recurse into the next.

    `alive` are the boxes that contain the block fixed so far; `prefix` has its (start, length) in each outer dimension.
    """
    dim = len(prefix)
    if not alive:
        rest = shape[dim:]
        yield Gap(Box((*(a for a, _ in prefix), *(0 for _ in rest)), (*(n for _, n in prefix), *rest)))
        return
    if dim == len(shape):
        if len(alive) > 1:
            yield Overlap(Box(tuple(a for a, _ in prefix), tuple(n for _, n in prefix)), tuple(alive))
        return
    events: list[tuple[int, bool, int]] = []
    for i in alive:
        lo = max(boxes[i].start[dim], 0)
        hi = min(boxes[i].start[dim] + boxes[i].shape[dim], shape[dim])
        if lo < hi:
            events.append((lo, True, i))
            events.append((hi, False, i))
    events.sort(key=lambda event: event[0])
    active: dict[int, None] = {}
    at = position = 0
    while position < shape[dim]:
        while at < len(events) and events[at][0] == position:
            _, opens, i = events[at]
            if opens:
                active[i] = None
            else:
                del active[i]
            at += 1
        end = events[at][0] if at < len(events) else shape[dim]
        yield from _sweep(shape, boxes, sorted(active), (*prefix, (position, end - position)))
        position = end
