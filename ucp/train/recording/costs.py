"""What recording costs a job, counted in the trainer's thread, and the intervals that follow from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ucp.log.measured import REPLAY_SECONDS
from ucp.log.tuning import Choice, Costs, Tuner
from ucp.log.writer_stats import WriterStats
from ucp.train.talk import gather

TUNE_EVERY: Final = 100  # steps, with an automatic interval between bases


@dataclass(slots=True)
class Spent:
    """Seconds of the wall clock, unless they say CPU."""

    hook_seconds: float = 0.0  # at the ends of steps
    hook_cpu_seconds: float = 0.0
    base_seconds: float = 0.0  # that training waited for bases after the first
    bases: int = 0  # after the first
    first_base_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def to_json(self, steps: int, record_seconds: float, stats: WriterStats) -> dict[str, Any]:
        """For the log: `ucp tune` reads it. `record_seconds` were spent in hooks, all told."""
        return {
            "steps": steps,
            "record_seconds": round(record_seconds, 6),
            "stall_seconds": round(stats.stall_seconds, 6),
            "syncs": stats.syncs,
            "bases": self.bases,
            "base_seconds": round(self.base_seconds, 6),
        }


class Intervals:
    """How many steps lie between bases: so many, none, or what is best by what was measured (`"auto"`)."""

    def __init__(self, base_every: int | Literal["auto"] | None, mtbf: float, start: int) -> None:
        """`mtbf` are seconds, for `"auto"`; `start` is the step that recording began with."""
        self.base_every = None if base_every == "auto" else base_every
        self._tuner = Tuner() if base_every == "auto" else None
        self._mtbf = mtbf
        self._start = start

    def are_chosen_after(self, step: int) -> bool:
        """Is it time to choose again?"""
        return self._tuner is not None and (step - self._start) % TUNE_EVERY == 0

    def want_base(self, step: int, last: int) -> bool:
        """Is it time for a base after `step`? The newest is of step `last`."""
        return self.base_every is not None and step - last >= self.base_every

    def want_all(self, step: int, last: int) -> bool:
        """Do the ranks do something together after `step`, unless one of them has failed?"""
        return self.are_chosen_after(step) or self.want_base(step, last)

    def choose(
        self,
        spent: Spent,
        stats: WriterStats,
        *,
        steps: int,
        record_seconds: float,
        whole_base_seconds: float,
        numel: int,
    ) -> Choice:
        """The best intervals from what the slowest rank has measured in `steps` steps. Collective.

        `record_seconds` were spent in hooks, `whole_base_seconds` from a base's beginning to its end; `numel` elements
        are logged by this rank.
        """
        assert self._tuner is not None
        record = record_seconds / steps
        mine = (
            (time.perf_counter() - spent.started - spent.base_seconds) / steps - record,
            spent.base_seconds / spent.bases if spent.bases else spent.first_base_seconds,
            stats.stall_seconds / stats.syncs if stats.syncs else 0.0,
            record,
            numel * REPLAY_SECONDS,
            whole_base_seconds,
        )
        step, base_stall, sync_stall, record, replay, base_time = map(max, zip(*gather(mine), strict=True))
        costs = Costs(max(step, 1e-9), self._mtbf, base_stall, sync_stall, record, replay, base_time, base_time)
        choice = self._tuner.update(costs)
        self.base_every = choice.base_every
        return choice
