"""When each tensor of a snapshot is copied: a cost model and a schedule. Seconds and bytes.

Times count from the end of an optimizer step. A tensor may be copied from its *release* (its update is done) to its
*deadline* (its next update starts). A background copier copies at the rate of its link; whatever it has not copied at
the deadline is copied by the trainer, at the local rate, and training waits for that: the stall.

The copier works by earliest deadline first, which misses no deadline if any order misses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class TensorDeadline:
    """A tensor to copy, and the interval in which it can be copied."""

    name: str
    nbytes: int
    release: float = 0.0
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Rates in bytes per second: of the copier's link, of which it uses the fraction `share`, and of the trainer."""

    link: float
    local: float
    share: float = 1.0

    @property
    def rate(self) -> float:
        return self.link * self.share


@dataclass(frozen=True, slots=True)
class ScheduledCopy:
    """The copier works on a tensor from `start` to `stop`."""

    name: str
    start: float
    stop: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class LateCopy:
    """Bytes of a tensor that the trainer must copy itself, `at` the tensor's deadline."""

    name: str
    at: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """All copies of a snapshot. `end` is the time at which the last byte is copied."""

    copies: tuple[ScheduledCopy, ...]
    late: tuple[LateCopy, ...]
    stall: float  # seconds that training waits
    end: float

    @property
    def late_bytes(self) -> float:
        return sum(late.nbytes for late in self.late)

    def to_json(self) -> dict[str, Any]:
        return {
            "copies": [[copy.name, copy.start, copy.stop, copy.nbytes] for copy in self.copies],
            "late": [[late.name, late.at, late.nbytes] for late in self.late],
            "stall": self.stall,
            "end": self.end,
        }


# Intervals, sorted and disjoint, in which the copier must not use the link.
BlockedTimes = Sequence[tuple[float, float]]


def open_time(start: float, stop: float, blocked: BlockedTimes = ()) -> float:
    """Seconds of `[start, stop)` in which the link may be used."""
    return max(0.0, stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in blocked)


def is_feasible(tensors: Sequence[TensorDeadline], rate: float, blocked: BlockedTimes = ()) -> bool:
    """Whether all deadlines can be met: for every interval, the bytes that must be copied within it must fit."""
    deadlines = sorted({tensor.deadline for tensor in tensors if tensor.deadline < inf})
    for begin in {tensor.release for tensor in tensors}:
        due = sorted((t for t in tensors if t.release >= begin), key=lambda tensor: tensor.deadline)
        total, at = 0, 0
        for end in deadlines:
            while at < len(due) and due[at].deadline <= end:
                total += due[at].nbytes
                at += 1
            if total > rate * open_time(begin, end, blocked) * (1 + _ROUNDING) + _ROUNDING * rate:
                return False
    return True


def make_schedule(tensors: Sequence[TensorDeadline], costs: CopyRates, blocked: BlockedTimes = ()) -> CopySchedule:
    """Schedule by earliest deadline first. While training waits for a late copy, all later deadlines shift."""
    rate = costs.rate
    left = {number: float(tensor.nbytes) for number, tensor in enumerate(tensors) if tensor.nbytes > 0}
    copies: list[ScheduledCopy] = []
    late: list[LateCopy] = []
    now = shift = 0.0
    end = 0.0
    while left:
        ready = [n for n in left if tensors[n].release + shift <= now + _ROUNDING]
        due = min((tensors[n].deadline + shift for n in left), default=inf)
        if due <= now + _ROUNDING:
            waiting = 0.0
            for number in [n for n in left if tensors[n].deadline + shift <= now + _ROUNDING]:
                nbytes = left.pop(number)
                late.append(LateCopy(tensors[number].name, now, nbytes))
                waiting += nbytes / costs.local
            shift += waiting
            end = max(end, now + waiting)
            continue
        coming = [tensors[n].release + shift for n in left if tensors[n].release + shift > now + _ROUNDING]
        held = next(((a + shift, b + shift) for a, b in blocked if a + shift <= now + _ROUNDING < b + shift), None)
        opening = [a + shift for a, _ in blocked if a + shift > now + _ROUNDING]
        if held is not None or not ready:
            now = min([due, *([held[1]] if held is not None else coming)])
            continue
        number = min(ready, key=lambda n: (tensors[n].deadline, tensors[n].release, n))
        done = now + left[number] / rate
        until = min([done, due, *coming, *opening])
        if until >= done:
            nbytes = left.pop(number)
        else:
            nbytes = (until - now) * rate
            left[number] -= nbytes
        if copies and copies[-1].name == tensors[number].name and abs(copies[-1].stop - now) <= _ROUNDING:
            last = copies.pop()
            copies.append(ScheduledCopy(last.name, last.start, until, last.nbytes + nbytes))
        else:
            copies.append(ScheduledCopy(tensors[number].name, now, until, nbytes))
        now = until
        end = max(end, now)
    return CopySchedule(tuple(copies), tuple(late), shift, end)


def iterations_needed(total: int, costs: CopyRates, window: float) -> int:
    """The number of iterations over which `total` bytes must be spread so that training never waits.

    `window` is the time per iteration in which the link may be used.
    """
    return max(1, ceil(total / (costs.rate * window) - _ROUNDING)) if window > 0 else 1


def assign_parts(loads: Sequence[Mapping[str, int]], count: int) -> dict[str, int]:
    """Assign parameters to `count` parts, which are copied in different iterations: name → part.

    `loads` are the bytes of each parameter, for every rank. To keep the busiest rank's bytes per part small, parameters
    are assigned largest first, each to the part that is then least full.
    """
    import numpy as np

    names = sorted({name for load in loads for name in load})
    sizes = np.array([[load.get(name, 0) for load in loads] for name in names], np.int64)
    sizes = sizes.reshape(len(names), len(loads))  # a 2-D array even without parameters
    full = np.zeros((count, sizes.shape[1]), np.int64)
    parts: dict[str, int] = {}
    for number in sorted(range(len(names)), key=lambda n: (-int(sizes[n].max(initial=0)), n)):
        part = int((full + sizes[number]).max(axis=1).argmin())
        full[part] += sizes[number]
        parts[names[number]] = part
    return parts


def smoothed(before: float | None, measured: float, weight: float = 0.3) -> float:
    """Exponential moving average of a measurement."""
    return measured if before is None else before + weight * (measured - before)
