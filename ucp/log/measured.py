"""What a log says about the costs of its own recording."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from ucp.errors import UsageError
from ucp.log.bases import list_bases
from ucp.log.reader import Log
from ucp.log.tuning import Costs

# Where nothing better is known: replay on one core of a few years' age, and a modest disk.
REPLAY_SECONDS: Final = 3e-9  # an element and step
READ_BYTES: Final = 500e6  # a second


def measure(log: Log, mtbf: float) -> Costs:
    """Costs from the newest epoch: wall clock and costs noted with its steps, and sizes. What is not known is assumed.

    Replay and restart are assumed to run on as many ranks as were recorded.
    """
    epoch = log.epochs[-1]
    steps = epoch.steps
    if len(steps) < 3:
        raise UsageError(
            f"{epoch.folder}: {len(steps)} steps are too few to measure anything", hint="give the costs as options"
        )
    stream = next(iter(epoch.streams.values()))
    times = [stream.record(step).time_ns for step in steps]
    step_time = median(b - a for a, b in pairwise(times)) / 1e9
    noted: dict[str, Any] = (stream.aux(steps[-1]) or {}).get("costs", {})
    count = max(1, int(noted.get("steps", len(steps))))
    record = float(noted.get("record_seconds", 0.0)) / count
    bases = int(noted.get("bases", 0))
    base_stall = float(noted.get("base_seconds", 0.0)) / bases if bases else 0.0
    syncs = int(noted.get("syncs", 0))
    sync_stall = float(noted.get("stall_seconds", 0.0)) / syncs if syncs else 0.0
    ranks = max(1, len(epoch.streams))
    numel = sum(schema.numel for schema in epoch.manifest.streams)
    size = sum(logged.nbytes for each in epoch.streams.values() for logged in [each.scan.steps[steps[-1]]])
    saved = list_bases(log.run_folder)
    restart = _size(saved[-1].path) / READ_BYTES / ranks if saved else 0.0
    return Costs(
        step=max(step_time - record, 1e-9),
        mtbf=mtbf,
        base_stall=base_stall,
        sync_stall=sync_stall,
        record=record,
        replay=numel * REPLAY_SECONDS / ranks,
        restart=restart,
        step_bytes=size,
    )


def _size(folder: Path) -> int:
    return sum((Path(at) / name).stat().st_size for at, _, names in os.walk(folder) for name in names)
