"""How often to save a base, and how many steps to make durable together, so that the least time is wasted.

Time is wasted while a base stalls training, while steps are recorded, while a batch becomes durable, and after a
failure: the steps that were not durable are trained again, a base is loaded, and the log since it is replayed.
`measure_costs` takes the costs from a log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Final

from ucp.errors import ImpossibleError, UsageError
from ucp.log.base_folders import list_bases
from ucp.log.reader import Log
from ucp.storage.paths import list_files


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
        return float(sum(astuple(self)))

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


def choose(costs: RecordingCosts, longest: int = 1_000_000) -> TuningChoice:
    """The whole numbers of steps with the least waste, within the limits of disk space and base duration."""
    costs.check()
    low = max(1, math.ceil(costs.base_time / costs.step))  # a base must be finished before the next starts
    high = longest
    if costs.step_bytes > 0 and math.isfinite(costs.quota_bytes):
        high = min(high, int(costs.quota_bytes // costs.step_bytes))
    if high < low:
        raise ImpossibleError(
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
        raise ImpossibleError(
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
    restart = sum(size for _, size in list_files(saved[-1].path)) / READ_BYTES / ranks if saved else 0.0
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
