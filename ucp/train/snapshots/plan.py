"""When each tensor of a snapshot is copied aside: a cost model and a schedule. Pure arithmetic; seconds and bytes.

Time runs from the end of an optimizer step. A tensor may be copied from its *release* (its update is done) to its
*deadline* (its next update begins). A background copier has a link of so many bytes a second; what it has not copied at
its deadline, the trainer copies itself, at the local rate, and waits for that: this is the stall.

The copier takes the earliest deadline first, which misses none if any order misses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is to be copied, and when it can be."""

    name: str
    nbytes: int
    release: float = 0.0
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates in bytes a second: of the copier's link, of which it takes a `share`, and of the trainer's own copies."""

    link: float
    local: float
    share: float = 1.0

    @property
    def rate(self) -> float:
        return self.link * self.share


@dataclass(frozen=True, slots=True)
class Copy:
    """The copier is at this tensor from `start` to `stop`."""

    name: str
    start: float
    stop: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes of a tensor that the trainer has to copy itself when it wants to update it, `at` its deadline."""

    name: str
    at: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens when. `end` is when the last byte is aside."""

    copies: tuple[Copy, ...]
    late: tuple[Late, ...]
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


Blocked = Sequence[
    tuple[float, float]
]  # stretches of time, sorted and apart, in which the copier must not use the link


def open_time(start: float, stop: float, blocked: Blocked = ()) -> float:
    """Seconds of `[start, stop)` in which the link may be used."""
    return max(0.0, stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in blocked)


def is_feasible(tensors: Sequence[Tensor], rate: float, blocked: Blocked = ()) -> bool:
    """Can everything be copied in time? For every stretch: what must be copied within it must fit into it."""
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


def make_schedule(tensors: Sequence[Tensor], costs: Costs, blocked: Blocked = ()) -> Schedule:
    """Earliest deadline first. While training waits for a late copy, everything that training does comes later."""
    rate = costs.rate
    left = {number: float(tensor.nbytes) for number, tensor in enumerate(tensors) if tensor.nbytes > 0}
    copies: list[Copy] = []
    late: list[Late] = []
    now = shift = 0.0
    end = 0.0
    while left:
        ready = [n for n in left if tensors[n].release + shift <= now + _ROUNDING]
        due = min((tensors[n].deadline + shift for n in left), default=inf)
        if due <= now + _ROUNDING:
            waiting = 0.0
            for number in [n for n in left if tensors[n].deadline + shift <= now + _ROUNDING]:
                nbytes = left.pop(number)
                late.append(Late(tensors[number].name, now, nbytes))
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
            copies.append(Copy(last.name, last.start, until, last.nbytes + nbytes))
        else:
            copies.append(Copy(tensors[number].name, now, until, nbytes))
        now = until
        end = max(end, now)
    return Schedule(tuple(copies), tuple(late), shift, end)


def spread(total: int, costs: Costs, window: float) -> int:
    """Over how many iterations a snapshot of `total` bytes must be spread so that none of them waits.

    `window` is the time of an iteration in which the link may be used.
    """
    return max(1, ceil(total / (costs.rate * window) - _ROUNDING)) if window > 0 else 1


def deal_parts(loads: Sequence[Mapping[str, int]], count: int) -> dict[str, int]:
    """Parameters over `count` parts, each taken in an iteration of its own: name → part.

    `loads` has for every rank the bytes of each parameter that it copies. What the busiest rank copies in one part is
    kept small: the largest first, each to the part that it makes least full.
    """
    import numpy as np

    names = sorted({name for load in loads for name in load})
    sizes = np.array([[load.get(name, 0) for load in loads] for name in names], np.int64)
    sizes = sizes.reshape(len(names), len(loads))  # also where there is nothing
    full = np.zeros((count, sizes.shape[1]), np.int64)
    parts: dict[str, int] = {}
    for number in sorted(range(len(names)), key=lambda n: (-int(sizes[n].max(initial=0)), n)):
        part = int((full + sizes[number]).max(axis=1).argmin())
        full[part] += sizes[number]
        parts[names[number]] = part
    return parts


def smoothed(before: float | None, measured: float, weight: float = 0.3) -> float:
    """An estimate that follows what is measured."""
    return measured if before is None else before + weight * (measured - before)
