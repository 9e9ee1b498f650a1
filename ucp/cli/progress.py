"""The progress bar: bytes, rate and time left on stderr; silent if that is not a terminal."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ucp.cli.output import stderr_is_terminal
from ucp.engine.pool import Progress


class ProgressBar(Progress):
    """A tqdm bar in bytes."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._lock = threading.Lock()

    def start(self, total: int) -> None:
        if stderr_is_terminal():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # without its thread: a process that has threads cannot fork workers
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
