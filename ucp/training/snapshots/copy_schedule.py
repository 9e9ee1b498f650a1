"""When each tensor of a snapshot is copied: a cost model, a schedule, and a chart of it. Seconds and bytes.

Times count from the end of an optimizer step. A tensor may be copied from its *release* (its update is done) to its
*deadline* (its next update starts). A background copier copies at the rate of its link; whatever it has not copied at
the deadline is copied by the trainer, at the local rate, and training waits for that: the stall.

The copier works by earliest deadline first, which misses no deadline if any order misses none.
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
    sizes = sizes.reshape(len(names), len(loads))  # a 2-D array even if there are no parameters
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


_ROWS: Final = 60  # at most this many tensors are drawn
_ROW: Final = 18
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 300, 24, 64, 40, 760
_LEGEND: Final = "light: planned, dark: measured, red: by the trainer; red line: next update; grey: left to gradients"
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.held{fill:#e5e7eb}.grid{stroke:#e4e7ec}.plan{fill:#93c5fd}.did{fill:#1e40af}.late{fill:#dc2626}.end{stroke:#dc2626}
"""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One tensor of the chart: planned and measured times of its copy, and the start of its next update. Seconds."""

    name: str
    nbytes: int
    planned: Sequence[tuple[float, float]]
    measured: tuple[float, float] | None
    deadline: float | None
    late: bool = False
    step: int | None = None  # after which it is copied; times count from the end of this step


def draw_schedule(rows: Sequence[ScheduleRow], path: Path, title: str, blocked: BlockedTimes = ()) -> None:
    """Draw a chart to `path`, SVG or PNG by its suffix. `blocked` are the intervals without copies."""
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
    """The name of a row, with its step if rows have different steps."""
    steps = {other.step for other in rows}
    return row.name if len(steps) < 2 else f"{row.step}: {row.name}"


def schedule_svg(rows: Sequence[ScheduleRow], title: str, more: int = 0, blocked: BlockedTimes = ()) -> str:
    """The chart as SVG: one line per tensor; light is planned, dark measured, red late."""
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


def _draw_axes(axes: Any, rows: Sequence[ScheduleRow], title: str, blocked: BlockedTimes) -> None:
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
