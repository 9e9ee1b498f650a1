"""What a writer of a log counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class WriterStats:
    """What a writer has done so far. Seconds are of the wall clock, unless they say CPU."""

    steps: int = 0
    bytes: int = 0
    syncs: int = 0
    segments: int = 0
    dropped_segments: int = 0
    rewrites: int = 0  # a failed write or sync was made good in a new segment
    stalls: int = 0  # the trainer found no free slot
    stall_seconds: float = 0.0
    sync_seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the writer's thread
    durable_step: int = -1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
