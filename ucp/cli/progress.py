"""The progress bar: bytes, rate and time left on stderr; silent when that is no terminal."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ucp.cli.parameters import stderr_is_terminal
from ucp.engine.pool import Progress


class ProgressBar(Progress):
    """A tqdm bar in bytes."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._lock = threading.Lock()

    def start(self, total: int) -> None:
        if stderr_is_terminal():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own: a process that has others cannot fork workers
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
