"""Coverage: whether boxes tile a tensor exactly, and if not, every gap and every overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ucp.core.box import Box, Shape


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
    if 0 in shape:
        return
    if not shape:
        owners = tuple(range(len(boxes)))
        if not owners:
            yield Gap(Box((), ()))
        elif len(owners) > 1:
            yield Overlap(Box((), ()), owners)
        return
    yield from _sweep(shape, 0, boxes, range(len(boxes)), ())


def _sweep(
    shape: Shape, dim: int, boxes: Sequence[Box], alive: Sequence[int], prefix: tuple[tuple[int, int], ...]
) -> Iterator[Gap | Overlap]:
    """Sweep along dimension `dim`, then recurse into the next.

    `alive` are the boxes that contain the block fixed so far; `prefix` has its (start, length) in each outer dimension.
    """
    if dim == len(shape):
        if len(alive) > 1:
            yield Overlap(_box(prefix, shape), tuple(alive))
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
        here = (*prefix, (position, end - position))
        if not active:
            yield Gap(_box(here, shape))
        else:
            yield from _sweep(shape, dim + 1, boxes, sorted(active), here)
        position = end


def _box(prefix: tuple[tuple[int, int], ...], shape: Shape) -> Box:
    rest = shape[len(prefix) :]
    return Box((*(a for a, _ in prefix), *(0 for _ in rest)), (*(n for _, n in prefix), *rest))
