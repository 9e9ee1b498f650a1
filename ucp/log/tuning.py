"""How often to save a base, and how many steps to make durable together, so that the least time is wasted.

Time is wasted while a base stalls training, while steps are recorded, while a batch becomes durable, and after a
failure: the steps that were not durable are trained again, a base is loaded, and the log since it is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ucp.errors import UsageError


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take, in seconds. A step takes `step` without any recording."""

    step: float
    mtbf: float  # mean time between failures of the whole job
    base_stall: float  # that training waits for one base
    sync_stall: float = 0.0  # that training waits for one durable batch
    record: float = 0.0  # to record one step
    replay: float = 0.0  # to replay one step
    restart: float = 0.0  # to load a base
    base_time: float = 0.0  # from the beginning of a base to its end, in the background
    step_bytes: float = 0.0  # of the log
    quota_bytes: float = math.inf  # that the log may take between two bases

    def check(self) -> None:
        """Refuse numbers that mean nothing."""
        if not (self.step > 0 and self.mtbf > 0):
            raise UsageError("the time of a step and the mean time between failures must be more than zero")
        for name in ("base_stall", "sync_stall", "record", "replay", "restart", "base_time", "step_bytes"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name.replace('_', ' ')} must be zero or more, not {value}")


@dataclass(frozen=True, slots=True)
class Waste:
    """Fractions of the time of training that are wasted, by cause."""

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
        """What recording and bases cost while nothing fails."""
        return self.bases + self.recording + self.syncs


@dataclass(frozen=True, slots=True)
class Choice:
    """A base every `base_every` steps, a durable batch every `batch_steps`."""

    base_every: int
    batch_steps: int
    waste: Waste


def waste(costs: Costs, base_every: float, batch_steps: float) -> Waste:
    """The expected waste."""
    return Waste(
        bases=costs.base_stall / (base_every * costs.step),
        recording=costs.record / costs.step,
        syncs=costs.sync_stall / (batch_steps * costs.step),
        lost_steps=batch_steps * costs.step / 2 / costs.mtbf,
        restarts=costs.restart / costs.mtbf,
        replay=costs.replay * base_every / 2 / costs.mtbf,
    )


def best_interval(costs: Costs) -> float:
    """Steps between bases that waste least, as a real number: √(2 σ M / (ρ τ)). Infinite where replay costs nothing."""
    if costs.replay == 0:
        return math.inf if costs.base_stall > 0 else 1.0
    return math.sqrt(2 * costs.base_stall * costs.mtbf / (costs.replay * costs.step))


def best_batch(costs: Costs) -> float:
    """Steps that should become durable together, as a real number: √(2 σ M) / τ."""
    return math.sqrt(2 * costs.sync_stall * costs.mtbf) / costs.step


def young_interval(costs: Costs) -> float:
    """Steps between checkpoints without any log: Young's √(2 σ M), in steps."""
    return math.sqrt(2 * costs.base_stall * costs.mtbf) / costs.step


def collapsed(base_bytes: float, bandwidth: float, merge: float, mtbf: float) -> tuple[float, float]:
    """(batch time, base frequency) of LowDiff's closed form, for logs whose differences are merged before use.

    `merge` is the time to merge one difference. In these, frequency × time² is the merge time.
    """
    batch = (2 * base_bytes * merge * mtbf / bandwidth) ** (1 / 3)
    frequency = (merge * bandwidth**2 / (4 * base_bytes**2 * mtbf**2)) ** (1 / 3)
    return batch, frequency


def choose(costs: Costs, longest: int = 1_000_000) -> Choice:
    """The whole numbers of steps that waste least, within what disk and bases allow."""
    costs.check()
    low = max(1, math.ceil(costs.base_time / costs.step))  # a base must be finished before the next begins
    high = longest
    if costs.step_bytes > 0 and math.isfinite(costs.quota_bytes):
        high = min(high, int(costs.quota_bytes // costs.step_bytes))
    if high < low:
        raise UsageError(
            f"a base takes {low} steps to save, but the log may only hold {high}",
            hint="allow the log more space, or save bases faster",
        )
    every = _best_integer(best_interval(costs), low, high, lambda k: waste(costs, k, 1).total)
    batch = _best_integer(best_batch(costs), 1, every, lambda b: waste(costs, every, b).total)
    return Choice(every, batch, waste(costs, every, batch))


def _best_integer(about: float, low: int, high: int, total: Callable[[int], float]) -> int:
    """The whole number in [low, high] beside the best real one that wastes less; waste grows away from that."""
    if not math.isfinite(about):
        return high
    beside = {min(max(number, low), high) for number in (math.floor(about), math.ceil(about))}
    return min(sorted(beside), key=total)


def curve(costs: Costs, batch_steps: int, longest: int = 1_000_000) -> Iterator[tuple[int, Waste]]:
    """Waste over intervals, two a factor of 1.1 apart, around the best one."""
    centre = best_interval(costs)
    centre = 1000.0 if not math.isfinite(centre) else max(centre, 1.0)
    seen = set()
    for power in range(-36, 37):
        every = min(max(round(centre * 1.1**power), 1), longest)
        if every not in seen:
            seen.add(every)
            yield every, waste(costs, every, min(batch_steps, every))


class Tuner:
    """Chooses again and again while costs are measured; changes its mind only where that saves enough."""

    def __init__(self, improvement: float = 0.05) -> None:
        self.improvement = improvement
        self.choice: Choice | None = None

    def update(self, costs: Costs) -> Choice:
        """The choice to go on with. A new one must waste `improvement` less than the old one would."""
        new = choose(costs)
        if self.choice is not None:
            old = waste(costs, self.choice.base_every, self.choice.batch_steps)
            if new.waste.total > old.total * (1 - self.improvement):
                self.choice = replace(self.choice, waste=old)
                return self.choice
        self.choice = new
        return new


def estimated_mtbf(seconds: float, failures: int, prior_seconds: float, prior_failures: float = 1.0) -> float:
    """Mean time between failures from what was seen and what was believed before."""
    return (prior_seconds + seconds) / (prior_failures + failures)
