"""Whether a job is the only one that records into its folder."""

from __future__ import annotations

import time
from pathlib import Path

from ucp.errors import UsageError
from ucp.log.reader import epoch_folder

LOOK_EVERY = 1.0  # seconds


class Alone:
    """Looks now and then whether another job has begun a newer epoch: then what this one logs leads nowhere."""

    def __init__(self, run: Path | None, epoch: int) -> None:
        """Without a `run` there is nothing to look at."""
        self._run = run
        self._epoch = epoch
        self._looked = time.monotonic()

    def check(self, step: int) -> None:
        """Raise where it is so. `step` is the last that was recorded."""
        if self._run is None or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        if epoch_folder(self._run / "log", self._epoch + 1).exists():
            raise UsageError(
                f"{self._run}: another job records here since this one began (epoch {self._epoch + 1}): steps of this"
                f" one after step {step} do not count",
                hint="give every job a folder of its own; where the other is a restart of this one, end this one",
            )
