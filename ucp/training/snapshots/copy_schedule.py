"""When each tensor of a snapshot is copied aside: a cost model and a schedule. Pure arithmetic; seconds and bytes.

Time runs from the end of an optimizer step. A tensor may be copied from its *release* (its update is done) to its
*deadline* (its next update begins). A background copier has a link of so many bytes a second; what it has not copied at
its deadline, the trainer copies itself, at the local rate, and waits for that: this is the stall.

The copier takes the earliest deadline first, which misses none if any order misses none.

The schedule of a snapshot as a picture: planned and measured copies along time, an SVG or a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, inf
from pathlib import Path
from typing import Any, Final

from ucp.storage.pictures import write_picture

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class TensorDeadline:
    """What is to be copied, and when it can be."""

    name: str
    nbytes: int
    release: float = 0.0
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Rates in bytes a second: of the copier's link, of which it takes a `share`, and of the trainer's own copies."""

    link: float
    local: float
    share: float = 1.0

    @property
    def rate(self) -> float:
        return self.link * self.share


@dataclass(frozen=True, slots=True)
class ScheduledCopy:
    """The copier is at this tensor from `start` to `stop`."""

    name: str
    start: float
    stop: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class LateCopy:
    """Bytes of a tensor that the trainer has to copy itself when it wants to update it, `at` its deadline."""

    name: str
    at: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """What happens when. `end` is when the last byte is aside."""

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


BlockedTimes = Sequence[
    tuple[float, float]
]  # stretches of time, sorted and apart, in which the copier must not use the link


def open_time(start: float, stop: float, blocked: BlockedTimes = ()) -> float:
    """Seconds of `[start, stop)` in which the link may be used."""
    return max(0.0, stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in blocked)


def is_feasible(tensors: Sequence[TensorDeadline], rate: float, blocked: BlockedTimes = ()) -> bool:
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


def make_schedule(tensors: Sequence[TensorDeadline], costs: CopyRates, blocked: BlockedTimes = ()) -> CopySchedule:
    """Earliest deadline first. While training waits for a late copy, everything that training does comes later."""
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
    """Over how many iterations a snapshot of `total` bytes must be spread so that none of them waits.

    `window` is the time of an iteration in which the link may be used.
    """
    return max(1, ceil(total / (costs.rate * window) - _ROUNDING)) if window > 0 else 1


def assign_parts(loads: Sequence[Mapping[str, int]], count: int) -> dict[str, int]:
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


_ROWS: Final = 60  # tensors that get a line of their own
_ROW: Final = 18
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 300, 24, 64, 40, 760
_LEGEND: Final = "light: planned, dark: measured, red: by the trainer; red line: next update; grey: left to gradients"
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.held{fill:#e5e7eb}.grid{stroke:#e4e7ec}.plan{fill:#93c5fd}.did{fill:#1e40af}.late{fill:#dc2626}.end{stroke:#dc2626}
"""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One tensor: when it is to be copied, when it was, and when its next update begins. Seconds."""

    name: str
    nbytes: int
    planned: Sequence[tuple[float, float]]
    measured: tuple[float, float] | None
    deadline: float | None
    late: bool = False
    step: int | None = None  # after which it is copied; times count from there


_Blocked = Sequence[tuple[float, float]]


def draw_schedule(rows: Sequence[ScheduleRow], path: Path, title: str, blocked: _Blocked = ()) -> None:
    """Draw to `path`, an SVG or PNG by its suffix. `blocked` is when nothing is copied."""
    shown = list(rows[:_ROWS])
    write_picture(
        path,
        lambda: schedule_svg(shown, title, len(rows) - len(shown), blocked),
        lambda axes: _draw_axes(axes, shown, title, blocked),
        inches=(11.0, 1.5 + 0.22 * len(shown)),
    )


def _end(rows: Sequence[ScheduleRow]) -> float:
    times = [stop for row in rows for _, stop in row.planned]
    times += [row.measured[1] for row in rows if row.measured is not None]
    times += [row.deadline for row in rows if row.deadline is not None]
    return max(times, default=0.0) or 1.0


def row_label(row: ScheduleRow, rows: Sequence[ScheduleRow]) -> str:
    """The name of a row, with its step where there are several."""
    steps = {other.step for other in rows}
    return row.name if len(steps) < 2 else f"{row.step}: {row.name}"


def schedule_svg(rows: Sequence[ScheduleRow], title: str, more: int = 0, blocked: _Blocked = ()) -> str:
    """The picture as text: a line a tensor, light what is planned, dark what was measured, red what was late."""
    end = _end(rows)
    height = _TOP + _ROW * len(rows) + _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _RIGHT) * min(max(seconds / end, 0.0), 1.0)

    size = f'width="{_LEFT + _WIDTH}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        f'<text class="muted" x="12" y="44">{_LEGEND}</text>',
    ]
    for tick in range(6):
        at = x(end * tick / 5)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{height - _BOTTOM}"/>')
        out.append(f'<text class="muted" x="{at:.1f}" y="{height - 20}">{1000 * end * tick / 5:.1f} ms</text>')
    for start, stop in blocked:
        out.append(_bar("held", x(start), x(stop), _TOP - 6, height - _BOTTOM - _TOP + 6))
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        name = row_label(row, rows)
        name = name if len(name) <= 44 else "…" + name[-43:]
        out.append(f'<text x="12" y="{y + 12}">{escape(name)}</text>')
        for start, stop in row.planned:
            out.append(_bar("plan", x(start), x(stop), y, 6))
        if row.measured is not None:
            out.append(_bar("late" if row.late else "did", x(row.measured[0]), x(row.measured[1]), y + 7, 6))
        if row.deadline is not None:
            at = x(row.deadline)
            out.append(f'<line class="end" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 14}"/>')
    if more > 0:
        out.append(f'<text class="muted" x="12" y="{height - 6}">… and {more} more tensors</text>')
    return "\n".join([*out, "</svg>\n"])


def _bar(style: str, start: float, stop: float, y: float, height: float) -> str:
    width = max(1.0, stop - start)
    return f'<rect class="{style}" x="{start:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"/>'


def _draw_axes(axes: Any, rows: Sequence[ScheduleRow], title: str, blocked: _Blocked) -> None:
    for start, stop in blocked:
        axes.axvspan(start * 1e3, stop * 1e3, color="#e5e7eb")
    for number, row in enumerate(rows):
        axes.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in row.planned], (number, 0.4), color="#93c5fd")
        if row.measured is not None:
            start, stop = row.measured
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)], (number + 0.4, 0.4), color="#dc2626" if row.late else "#1e40af"
            )
        if row.deadline is not None:
            axes.plot([row.deadline * 1e3] * 2, [number, number + 0.9], color="#dc2626", linewidth=1)
    axes.set_yticks([number + 0.4 for number in range(len(rows))], [row_label(row, rows) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the step")
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.set_title(title, parse_math=False)
