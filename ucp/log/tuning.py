"""How often to save a base, and how many steps to make durable together, so that the least time is wasted.

Time is wasted while a base stalls training, while steps are recorded, while a batch becomes durable, and after a
failure: the steps that were not durable are trained again, a base is loaded, and the log since it is replayed.
`measure_costs` takes the costs from a log, `write_plot` draws the waste.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from ucp.errors import UsageError
from ucp.log.base_folders import list_bases
from ucp.log.reader import Log
from ucp.storage.pictures import write_picture


@dataclass(frozen=True, slots=True)
class RecordingCosts:
    """Costs of a job and of its recording, in seconds unless the name ends in `bytes`."""

    step: float  # one training step without recording
    mtbf: float  # mean time between failures of the whole job
    base_stall: float  # training waits this long for one base
    sync_stall: float = 0.0  # training waits this long for one durable batch
    record: float = 0.0  # recording one step
    replay: float = 0.0  # replaying one step
    restart: float = 0.0  # loading a base
    base_time: float = 0.0  # saving one base in the background
    step_bytes: float = 0.0  # log of one step
    quota_bytes: float = math.inf  # largest size of the log between two bases

    def check(self) -> None:
        """Refuse impossible values."""
        if not (self.step > 0 and self.mtbf > 0):
            raise UsageError("the time of a step and the mean time between failures must be more than zero")
        for name in ("base_stall", "sync_stall", "record", "replay", "restart", "base_time", "step_bytes"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name.replace('_', ' ')} must be zero or more, not {value}")


@dataclass(frozen=True, slots=True)
class Waste:
    """Fractions of the training time that are wasted, by cause."""

    bases: float
    recording: float
    syncs: float
    lost_steps: float  # trained again after a failure
    restarts: float
    replay: float

    @property
    def total(self) -> float:
        return self.bases + self.recording + self.syncs + self.lost_steps + self.restarts + self.replay

    @property
    def overhead(self) -> float:
        """The cost of recording and bases without failures."""
        return self.bases + self.recording + self.syncs


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """A base every `base_every` steps, a durable batch every `batch_steps`."""

    base_every: int
    batch_steps: int
    waste: Waste


def waste(costs: RecordingCosts, base_every: float, batch_steps: float) -> Waste:
    """The expected waste."""
    return Waste(
        bases=costs.base_stall / (base_every * costs.step),
        recording=costs.record / costs.step,
        syncs=costs.sync_stall / (batch_steps * costs.step),
        lost_steps=batch_steps * costs.step / 2 / costs.mtbf,
        restarts=costs.restart / costs.mtbf,
        replay=costs.replay * base_every / 2 / costs.mtbf,
    )


def best_interval(costs: RecordingCosts) -> float:
    """Steps between bases with the least waste, as a real number: √(2 σ M / (ρ τ)). Infinite if replay is free."""
    if costs.replay == 0:
        return math.inf if costs.base_stall > 0 else 1.0
    return math.sqrt(2 * costs.base_stall * costs.mtbf / (costs.replay * costs.step))


def best_batch(costs: RecordingCosts) -> float:
    """Steps per durable batch with the least waste, as a real number: √(2 σ M) / τ."""
    return math.sqrt(2 * costs.sync_stall * costs.mtbf) / costs.step


def young_interval(costs: RecordingCosts) -> float:
    """Steps between checkpoints without a log: Young's √(2 σ M), in steps."""
    return math.sqrt(2 * costs.base_stall * costs.mtbf) / costs.step


def collapsed(base_bytes: float, bandwidth: float, merge: float, mtbf: float) -> tuple[float, float]:
    """(batch time, base frequency) by LowDiff's closed form, for logs whose differences are merged before use.

    `merge` is the time to merge one difference; it equals frequency × batch time².
    """
    batch = (2 * base_bytes * merge * mtbf / bandwidth) ** (1 / 3)
    frequency = (merge * bandwidth**2 / (4 * base_bytes**2 * mtbf**2)) ** (1 / 3)
    return batch, frequency


def choose(costs: RecordingCosts, longest: int = 1_000_000) -> TuningChoice:
    """The whole numbers of steps with the least waste, within the limits of disk space and base duration."""
    costs.check()
    low = max(1, math.ceil(costs.base_time / costs.step))  # a base must be finished before the next starts
    high = longest
    if costs.step_bytes > 0 and math.isfinite(costs.quota_bytes):
        high = min(high, int(costs.quota_bytes // costs.step_bytes))
    if high < low:
        raise UsageError(
            f"a base takes {low} steps to save, but the log may only hold {high} steps",
            hint="allow the log more space, or save bases faster",
        )
    every = _best_integer(best_interval(costs), low, high, lambda k: waste(costs, k, 1).total)
    batch = _best_integer(best_batch(costs), 1, every, lambda b: waste(costs, every, b).total)
    return TuningChoice(every, batch, waste(costs, every, batch))


def _best_integer(real: float, low: int, high: int, total: Callable[[int], float]) -> int:
    """The better of the whole numbers next to the best real one, within [low, high]."""
    if not math.isfinite(real):
        return high
    neighbours = {min(max(number, low), high) for number in (math.floor(real), math.ceil(real))}
    return min(sorted(neighbours), key=total)


def curve(costs: RecordingCosts, batch_steps: int, longest: int = 1_000_000) -> Iterator[tuple[int, Waste]]:
    """Waste by interval: intervals around the best one, each 1.1 times the previous."""
    centre = best_interval(costs)
    centre = 1000.0 if not math.isfinite(centre) else max(centre, 1.0)
    seen = set()
    for power in range(-36, 37):
        every = min(max(round(centre * 1.1**power), 1), longest)
        if every not in seen:
            seen.add(every)
            yield every, waste(costs, every, min(batch_steps, every))


class Tuner:
    """Repeats the choice while costs are measured; changes it only if that saves enough."""

    def __init__(self, improvement: float = 0.05) -> None:
        self.improvement = improvement
        self.choice: TuningChoice | None = None

    def update(self, costs: RecordingCosts) -> TuningChoice:
        """The choice for the next steps. A new one must waste at least the fraction `improvement` less."""
        new = choose(costs)
        if self.choice is not None:
            old = waste(costs, self.choice.base_every, self.choice.batch_steps)
            if new.waste.total > old.total * (1 - self.improvement):
                self.choice = replace(self.choice, waste=old)
                return self.choice
        self.choice = new
        return new


def estimated_mtbf(seconds: float, failures: int, prior_seconds: float, prior_failures: float = 1.0) -> float:
    """Mean time between failures from an observation and a prior."""
    return (prior_seconds + seconds) / (prior_failures + failures)


# Assumed if nothing better is known: replay on one core that is a few years old, and a modest disk.
REPLAY_SECONDS: Final = 3e-9  # per element and step
READ_BYTES: Final = 500e6  # per second


def measure_costs(log: Log, mtbf: float) -> RecordingCosts:
    """Measure costs from the newest epoch: times and costs logged with its steps, and sizes. The rest is assumed.

    Replay and restart are assumed to run on as many ranks as were recorded.
    """
    epoch = log.epochs[-1]
    steps = epoch.steps
    if len(steps) < 3:
        raise UsageError(
            f"{epoch.folder}: {len(steps)} steps are too few to measure costs", hint="give the costs as options"
        )
    stream = next(iter(epoch.streams.values()))
    times = [stream.record(step).time_ns for step in steps]
    step_time = median(b - a for a, b in pairwise(times)) / 1e9
    logged: dict[str, Any] = (stream.aux(steps[-1]) or {}).get("costs", {})
    count = max(1, int(logged.get("steps", len(steps))))
    record = float(logged.get("record_seconds", 0.0)) / count
    bases = int(logged.get("bases", 0))
    base_stall = float(logged.get("base_seconds", 0.0)) / bases if bases else 0.0
    syncs = int(logged.get("syncs", 0))
    sync_stall = float(logged.get("stall_seconds", 0.0)) / syncs if syncs else 0.0
    ranks = max(1, len(epoch.streams))
    numel = sum(schema.numel for schema in epoch.manifest.streams)
    size = sum(each.scan.steps[steps[-1]].nbytes for each in epoch.streams.values())
    saved = list_bases(log.run_folder)
    restart = _folder_bytes(saved[-1].path) / READ_BYTES / ranks if saved else 0.0
    return RecordingCosts(
        step=max(step_time - record, 1e-9),
        mtbf=mtbf,
        base_stall=base_stall,
        sync_stall=sync_stall,
        record=record,
        replay=numel * REPLAY_SECONDS / ranks,
        restart=restart,
        step_bytes=size,
    )


def _folder_bytes(folder: Path) -> int:
    return sum((Path(at) / name).stat().st_size for at, _, names in os.walk(folder) for name in names)


_SIZE: Final = (760, 420)
_MARGIN: Final = (64, 24, 64, 84)  # top, right, bottom, left
_LINES: Final = (("total", "#1e40af"), ("overhead", "#0f766e"), ("after failures", "#b45309"))
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.grid{stroke:#e4e7ec}.best{stroke:#98a2b3;stroke-dasharray:4 3}
@media(prefers-color-scheme:dark){text{fill:#e6e8ee}.muted{fill:#98a2b3}.back{fill:#14161b}.grid{stroke:#2a2f3a}}
"""


def write_plot(costs: RecordingCosts, choice: TuningChoice, path: Path, title: str) -> None:
    """Draw the waste over the interval between bases to `path`: an SVG, or a PNG with matplotlib."""
    points = list(curve(costs, choice.batch_steps))
    write_picture(
        path,
        lambda: waste_svg(points, choice, title),
        lambda axes: _draw(axes, points, choice, title),
        inches=(8.0, 4.5),
    )


def _values(waste: Waste) -> tuple[float, float, float]:
    return waste.total, waste.overhead, waste.total - waste.overhead


def waste_svg(points: list[tuple[int, Waste]], choice: TuningChoice, title: str) -> str:
    """The plot as SVG: wasted time over steps between bases, on a logarithmic axis."""
    top, right, bottom, left = _MARGIN
    width, height = _SIZE
    inner_w, inner_h = width - left - right, height - top - bottom
    first, last = math.log(points[0][0]), math.log(max(points[-1][0], points[0][0] + 1))
    ceiling = min(max(waste.total for _, waste in points), 4 * choice.waste.total) or 1.0

    def x(every: float) -> float:
        return left + inner_w * (math.log(every) - first) / (last - first)

    def y(value: float) -> float:
        return top + inner_h * (1 - min(value / ceiling, 1.0))

    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="{left}" y="28">{escape(title)}</text>',
        f'<text class="muted" x="{left}" y="48">time wasted, by steps between bases</text>',
    ]
    for part in range(5):
        value = ceiling * part / 4
        at = y(value)
        out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="muted" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.2%}</text>')
    for part in range(5):
        every = round(math.exp(first + (last - first) * part / 4))
        out.append(
            f'<text class="muted" x="{x(every):.1f}" y="{height - bottom + 20}" text-anchor="middle">{every}</text>'
        )
    at = x(min(max(choice.base_every, points[0][0]), points[-1][0]))
    out.append(f'<line class="best" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - bottom}"/>')
    out.append(f'<text x="{at + 6:.1f}" y="{top + 12}">{choice.base_every} steps: {choice.waste.total:.2%}</text>')
    for number, (name, colour) in enumerate(_LINES):
        path = " ".join(f"{x(every):.1f},{y(_values(waste)[number]):.1f}" for every, waste in points)
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"><title>{name}</title></polyline>'
        )
        out.append(f'<text x="{left + 130 * number}" y="{height - 14}" style="fill:{colour}">{name}</text>')
    return "\n".join([*out, "</svg>\n"])


def _draw(axes: Any, points: list[tuple[int, Waste]], choice: TuningChoice, title: str) -> None:
    for number, (name, colour) in enumerate(_LINES):
        shown = [100 * _values(waste)[number] for _, waste in points]
        axes.plot([every for every, _ in points], shown, color=colour, label=name)
    axes.axvline(choice.base_every, linestyle="--", color="#98a2b3")
    axes.set_xscale("log")
    axes.set_ylim(0, 400 * choice.waste.total or 1)
    axes.set_xlabel("steps between bases")
    axes.set_ylabel("time wasted, %")
    axes.set_title(title, parse_math=False)
    axes.legend()
