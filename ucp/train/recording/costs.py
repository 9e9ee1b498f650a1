"""What recording costs a job, counted in the trainer's thread, and the intervals that follow from it."""

from __future__ import annotations

import time
from typing import Any

from ucp.log.measured import REPLAY_SECONDS
from ucp.log.tuning import Choice, Costs, Tuner
from ucp.log.writer_stats import WriterStats
from ucp.records import dataclass, field
from ucp.train.talk import gather


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


def choose_intervals(
    tuner: Tuner,
    mtbf: float,
    spent: Spent,
    stats: WriterStats,
    *,
    steps: int,
    record_seconds: float,
    whole_base_seconds: float,
    numel: int,
) -> Choice:
    """The best intervals from what the slowest rank has measured in `steps` steps. Collective.

    `record_seconds` were spent in hooks, `whole_base_seconds` from a base's beginning to its end; `numel` elements are
    logged by this rank.
    """
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
    costs = Costs(max(step, 1e-9), mtbf, base_stall, sync_stall, record, replay, base_time, base_time)
    return tuner.update(costs)
