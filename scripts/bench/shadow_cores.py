"""Assignment of cores in shadow.py: training on one, everything that saves its state on another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FREE = "threads that keep the state run on the free core, as the shadow does"
BESIDE = "threads of the trainer's process that keep the state run on its own core; the free one has the shadow alone"


class Cores:
    """The trainer's core and the free one. Without a core to spare (`both`), nothing is pinned."""

    def __init__(self, *, both: bool, background: str) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.pins = not both and len(self.cores) > 1
        self.background = background
        if self.pins:
            torch.set_num_threads(1)
            self._pin(self.trainer)
            if background == "free":
                self._send_threads_away()

    @property
    def trainer(self) -> int:
        return self.cores[0]

    @property
    def free(self) -> int:
        return self.cores[1]

    @contextmanager
    def on_the_free_one(self) -> Iterator[None]:
        """Whatever is started inside, with all its threads, runs on the free core."""
        if self.pins:
            self._pin(self.free)
        try:
            yield
        finally:
            if self.pins:
                self._pin(self.trainer)

    def describe(self) -> str:
        if not self.pins:
            return f"{torch.get_num_threads()} threads on all cores, nothing pinned"
        how = FREE if self.background == "free" else BESIDE
        return f"trained by 1 thread on core {self.trainer}, core {self.free} free: {how}"

    @staticmethod
    def _pin(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread; what it starts inherits it

    def _send_threads_away(self) -> None:
        run, free = threading.Thread.run, self.free

        def run_there(thread: Any) -> None:
            os.sched_setaffinity(0, {free})
            run(thread)

        threading.Thread.run = run_there  # type: ignore[method-assign, assignment]
