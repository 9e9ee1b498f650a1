"""Lanes: several stored forms of one tensor, read side by side, each byte once.

A master and its weight, or a state and its copies, are cut by the same boxes wherever one layout wrote them: what one
rank holds of one is, element by element, what a rank holds of the other. Then no geometry is needed to compare them:
both are flat, and the same interval of each is contiguous in a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ucp.model.box import Box
from ucp.model.checkpoint import Atom, Fragment

Boxes = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[start, stop)` of the flat space of some boxes: contiguous in the fragment's file."""

    start: int
    stop: int
    fragment: Fragment

    def byte(self, element: int) -> int:
        """Where an element of the space lies in the file."""
        return self.fragment.offset + (element - self.start) * self.fragment.dtype.itemsize


@dataclass(slots=True)
class Lane:
    """One cover of an atom (0: its fragments, then its replicas) as runs in the flat spaces of its boxes."""

    atom: Atom
    cover: int
    spaces: dict[Boxes, list[Run]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        elements = sum(run.stop - run.start for runs in self.spaces.values() for run in runs)
        return elements * self.atom.dtype.itemsize


def lane_of(atom: Atom, cover: int) -> Lane | None:
    """A cover as a lane; None where its bytes are not simply elements side by side, in order and once each."""
    lane = Lane(atom, cover)
    for fragment in atom.fragments if cover == 0 else atom.replicas[cover - 1]:
        region = fragment.region
        if fragment.strides is not None or fragment.inline is not None or fragment.scale != 1.0:
            return None
        if fragment.dtype != atom.dtype:
            return None
        if region.numel:
            lane.spaces.setdefault(region.boxes, []).append(Run(region.start, region.stop, fragment))
    for runs in lane.spaces.values():
        runs.sort(key=lambda run: run.start)
        if any(one.stop > other.start for one, other in pairwise(runs)):
            return None
    return lane


def fits(lane: Lane, other: Lane, *, partly: bool) -> bool:
    """Does `other` hold the same elements of the same spaces as `lane`, or (with `partly`) none beyond them?"""
    if other.spaces.keys() - lane.spaces.keys():
        return False
    if partly:
        return all(_within(runs, lane.spaces[boxes]) for boxes, runs in other.spaces.items())
    if lane.spaces.keys() - other.spaces.keys():
        return False
    return all(_joined(runs) == _joined(other.spaces[boxes]) for boxes, runs in lane.spaces.items())


def _within(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Is every element of `runs` one of `others`?"""
    joined = _joined(others)
    starts = [start for start, _ in joined]
    for start, stop in _joined(runs):
        number = bisect_right(starts, start) - 1
        if number < 0 or stop > joined[number][1]:
            return False
    return True


def _joined(runs: Sequence[Run]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for run in runs:
        if joined and joined[-1][1] == run.start:
            joined[-1] = (joined[-1][0], run.stop)
        else:
            joined.append((run.start, run.stop))
    return joined


def steps(
    lanes: Sequence[Sequence[Run]], within: tuple[int, int], limit: int
) -> Iterator[tuple[int, int, list[Run | None]]]:
    """Intervals of at most `limit` elements of a space, in order, with the run of each lane that holds all of it.

    A lane that does not reach there has None. The first lane says where there is something; `within` cuts the space.
    """
    at = [0] * len(lanes)
    for first in lanes[0]:
        start, end = max(first.start, within[0]), min(first.stop, within[1])
        while start < end:
            stop = min(end, start + limit)
            found: list[Run | None] = []
            for number, runs in enumerate(lanes):
                while at[number] < len(runs) and runs[at[number]].stop <= start:
                    at[number] += 1
                run = runs[at[number]] if at[number] < len(runs) else None
                if run is not None and run.start > start:
                    stop = min(stop, run.start)
                    run = None
                elif run is not None:
                    stop = min(stop, run.stop)
                found.append(run)
            yield start, stop, found
            start = stop
