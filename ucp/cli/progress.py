"""Progress on stderr: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from ucp import settings
from ucp.cli.output import echo, format_seconds, is_dumb_terminal, is_terminal
from ucp.engine.pool import Progress
from ucp.errors import format_bytes


class ProgressBar(Progress):
    """A tqdm bar in bytes; without a terminal, lines. `written` is what this run has done itself."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.written = 0
        self.resumed = 0
        self._quiet = quiet
        self._bar: Any = None
        self._lock = threading.Lock()
        self._total = 0
        self._shown = 0  # bytes at the time of the last line
        self._started = self._shown_at = time.monotonic()

    def start(self, total: int) -> None:
        self._total = total
        self._started = self._shown_at = time.monotonic()
        if not self._quiet and is_terminal(sys.stderr) and not is_dumb_terminal():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # without its thread: a process that has threads cannot fork workers
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)

    def resume(self, nbytes: int) -> None:
        self.resumed = self._shown = nbytes
        if self._bar is not None:
            self._bar.initial = self._bar.n = nbytes  # not part of the rate
            self._bar.refresh()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            elif not self._quiet:
                self._show_line()

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show_line(self) -> None:
        """Print a line after 30 s, or after 5 % if those took some time: short runs print none."""
        now, done = time.monotonic(), self.resumed + self.written
        waited = now - self._shown_at
        is_much = done - self._shown >= settings.PROGRESS_LINE_SHARE * self._total
        if not self._total or waited < settings.PROGRESS_LINE_SECONDS[0 if is_much else 1]:
            return
        self._shown, self._shown_at = done, now
        rate = self.written / (now - self._started)
        left = f", {format_seconds((self._total - done) / rate)} left" if rate else ""
        echo(
            f"progress: {done / self._total:.0%} of {format_bytes(self._total)}, {format_bytes(rate)}/s{left}",
            err=True,
        )
