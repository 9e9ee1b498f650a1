"""Helpers for tests of shadows: wait for a step, and read the current state."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucp.core.checkpoint import Checkpoint
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.training.shadow.shadow import Shadow
from ucp.training.shadow.shadow_checkpoint import SnapshotFiles, assemble


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true; the limit is generous for busy machines."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def wait_for(shadow: Shadow, step: int, seconds: float = 120.0) -> dict[str, Any]:
    """Wait until the shadow has a step; returns its status."""
    end = time.monotonic() + seconds
    while True:
        found = shadow.status()
        if found["step"] is not None and found["step"] >= step:
            return found
        if found["condition"] == "stale" or time.monotonic() > end:
            raise AssertionError(f"the shadow does not reach step {step}: {found}")
        time.sleep(0.002)


def held(shadow: Shadow) -> Checkpoint:
    """The current state of the shadow, as a checkpoint in this process."""
    snapshot = shadow.snapshot()
    base = open_checkpoint(Path(snapshot.description["base"]), ReadOptions(spread=True))
    return assemble(base, snapshot.description, SnapshotFiles(snapshot))
