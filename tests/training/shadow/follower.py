"""What tests of shadows need: wait for a step, and compare what is held with what a job held."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucp.core.checkpoint import Checkpoint
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.training.shadow.shadow import Shadow
from ucp.training.shadow.to_checkpoint import SnapshotFiles, assemble


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until something is so. The time is for machines that do other things as well."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def wait_for(shadow: Shadow, step: int, seconds: float = 120.0) -> dict[str, Any]:
    """Wait until the shadow holds a step; gives its status then."""
    end = time.monotonic() + seconds
    while True:
        told = shadow.status()
        if told["step"] is not None and told["step"] >= step:
            return told
        if told["condition"] == "stale" or time.monotonic() > end:
            raise AssertionError(f"the shadow does not come to step {step}: {told}")
        time.sleep(0.002)


def held(shadow: Shadow) -> Checkpoint:
    """The state that the shadow holds now, as a checkpoint in this process."""
    snapshot = shadow.snapshot()
    base = open_checkpoint(Path(snapshot.description["base"]), ReadOptions(spread=True))
    return assemble(base, snapshot.description, SnapshotFiles(snapshot))
