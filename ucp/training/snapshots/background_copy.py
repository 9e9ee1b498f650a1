"""Copy a rank's tensors while training continues: a background copier, and a guard before every update.

`SnapshotTimings` measures updates, rates and waiting times. The schedule of the next snapshot is computed from them,
and `ucp snapshot plan` shows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from ucp import settings
from ucp.training.collect import LiveFragment
from ucp.training.live_job import LiveJob, storage_of
from ucp.training.snapshots.copy_schedule import CopyRates, iterations_needed, open_time, smoothed

if TYPE_CHECKING:
    import torch


ANY_UPDATE = None  # `keys` of a tensor that any optimizer update may overwrite


@dataclass(slots=True)
class TensorCopy:
    """A copy of a flat tensor in progress: elements before `at` are in `copy`. Times are of `time.perf_counter`."""

    fragment: LiveFragment
    live: torch.Tensor
    copy: torch.Tensor
    keys: frozenset[int] | None  # ids of the optimizer tensors whose update overwrites it
    at: int = 0
    started: float = 0.0
    finished: float = 0.0
    by_trainer: int = 0  # elements copied by the trainer because they were late
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        return bool(self.at == self.live.numel())

    @property
    def nbytes(self) -> int:
        return int(self.live.numel() * self.live.element_size())

    @property
    def name(self) -> str:
        return f"{self.fragment.name}|{self.fragment.kind}"

    def copy_next(self, count: int) -> int:
        """Copy up to `count` elements and return their number. The caller holds the lock."""
        stop = min(self.at + count, int(self.live.numel()))
        now = time.perf_counter()
        self.started = self.started or now
        self.copy[self.at : stop].copy_(self.live[self.at : stop])
        copied, self.at = stop - self.at, stop
        self.finished = time.perf_counter()
        return copied


class Throttle:
    """A token bucket that limits a rate in bytes per second (None: no limit)."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be sent."""
        if self.rate is None:
            return
        now = time.perf_counter()
        self._free_at = max(self._free_at, now) + nbytes / self.rate
        time.sleep(max(0.0, self._free_at - now))


class BackgroundCopier:
    """Copies the tensors of one snapshot in order; `guard` copies those that the trainer is about to overwrite."""

    def __init__(self, items: Sequence[TensorCopy], throttle: Throttle, may_run: threading.Event) -> None:
        self.items = items
        self.stall_seconds = 0.0  # spent in `guard`
        self.seconds = 0.0  # spent copying in the background
        self.nbytes = 0
        self.finished = False
        self.error: BaseException | None = None  # why `run_in_thread` has stopped
        self._throttle = throttle
        self._may_run = may_run

    def run(self) -> None:
        """Copy everything."""
        for item in self.items:
            step = max(1, settings.SNAPSHOT_CHUNK_BYTES // item.live.element_size())
            while not item.done:
                self._may_run.wait()
                start = time.perf_counter()
                with item.lock:
                    copied = item.copy_next(step) * item.live.element_size()
                self._throttle.wait(copied)
                self.seconds += time.perf_counter() - start
                self.nbytes += copied
        self.finished = True

    def run_in_thread(self) -> None:
        """Like `run`, but keep an exception in `error`."""
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - raised when the snapshot is written
            self.error = error

    def guard(self, keys: frozenset[int]) -> None:
        """Copy now whatever is still missing of these optimizer tensors. Call before they are updated."""
        if self.finished:
            return
        start = time.perf_counter()
        waited = False
        for item in self.items:
            if item.done or (item.keys is not ANY_UPDATE and not item.keys & keys):
                continue
            with item.lock:
                item.by_trainer += item.copy_next(item.live.numel())
            waited = True
        if waited:
            self.stall_seconds += time.perf_counter() - start

    @property
    def trainer_bytes(self) -> int:
        return sum(item.by_trainer * item.live.element_size() for item in self.items)


class UpdateOwners:
    """Which optimizer update overwrites which memory, by the storage of a tensor."""

    def __init__(self, job: LiveJob) -> None:
        self._keys: dict[int, set[int]] = {}
        for stepped in job.stepped:
            states = job.optimizer.state.get(stepped.key, {}).values()
            for tensor in (stepped.key, *states):
                if hasattr(tensor, "untyped_storage"):
                    self._keys.setdefault(storage_of(tensor), set()).add(id(stepped.key))
        self._any = {storage_of(held.tensor) for held in job.weights}
        self._never = {storage_of(held.tensor) for held in job.frozen}

    def of(self, tensor: torch.Tensor) -> tuple[bool, frozenset[int] | None]:
        """(whether it may be copied later, keys). Unknown tensors may not: forward passes write into buffers."""
        storage = storage_of(tensor)
        if storage in self._any:
            return True, ANY_UPDATE
        if storage in self._keys:
            return True, frozenset(self._keys[storage])
        return storage in self._never, frozenset()


class SnapshotTimings:
    """Measurements of a job's snapshots. Times are seconds since the end of the last step, rates bytes per second."""

    def __init__(self) -> None:
        self.released = time.perf_counter()  # end of the last step
        self.deadlines: dict[int, float] = {}  # id of optimizer tensor → start of its update
        self.blocked: list[tuple[float, float]] = []  # intervals of the last iteration in which copies were paused
        self.link: float | None = None
        self.local: float | None = None
        self.prepare_seconds = 0.0
        self.stall_seconds = 0.0
        self.hook_cpu_seconds = 0.0  # of the trainer's thread
        self.late_bytes = 0
        self._paused_at: float | None = None
        self._pauses: list[tuple[float, float]] = []

    def since(self) -> float:
        return time.perf_counter() - self.released

    def before_update(self, keys: Iterable[int]) -> None:
        """Note that these tensors are about to be updated."""
        now = self.since()
        for key in keys:
            self.deadlines[key] = smoothed(self.deadlines.get(key), now)

    def pause(self, pause: bool) -> None:
        """Note that copies are paused, or resumed."""
        now = self.since()
        if pause and self._paused_at is None:
            self._paused_at = now
        elif not pause and self._paused_at is not None:
            self._pauses.append((self._paused_at, now))
            self._paused_at = None

    def end_step(self) -> None:
        """Note the end of a step, from which times are counted."""
        self.pause(False)
        self.blocked, self._pauses = self._pauses, []
        self.released = time.perf_counter()

    def add_copies(self, copiers: Sequence[BackgroundCopier]) -> None:
        """Add the measurements of a snapshot that is completely copied."""
        for copier in copiers:
            if copier.nbytes and copier.seconds:
                self.link = smoothed(self.link, copier.nbytes / copier.seconds)
            if copier.trainer_bytes and copier.stall_seconds:
                self.local = smoothed(self.local, copier.trainer_bytes / copier.stall_seconds)
            self.stall_seconds += copier.stall_seconds
            self.late_bytes += copier.trainer_bytes

    def deadline(self, item: TensorCopy) -> float:
        if item.keys is ANY_UPDATE:
            return min(self.deadlines.values(), default=0.0)
        return min((self.deadlines.get(key, 0.0) for key in item.keys), default=inf)

    def costs(self) -> CopyRates | None:
        """The rates, or None if too little was measured for a schedule."""
        return CopyRates(self.link, self.local or self.link) if self.link is not None and self.deadlines else None

    def iterations(self, nbytes: int) -> int:
        """The number of iterations over which a snapshot of `nbytes` should be spread, by the measurements so far."""
        costs = self.costs()
        if costs is None:
            return 1
        return iterations_needed(nbytes, costs, open_time(0.0, min(self.deadlines.values()), self.blocked))


class ExpectedTimings:
    """Measurements before a part of a snapshot was copied; `ucp snapshot plan` computes the schedule from them."""

    def __init__(self, measured: SnapshotTimings, items: Sequence[TensorCopy]) -> None:
        self.costs = measured.costs()
        self.blocked = list(measured.blocked)
        self.deadlines = [measured.deadline(item) for item in items]


def schedule_json(
    step: int,
    parts: Sequence[tuple[int, BackgroundCopier, ExpectedTimings]],
    *,
    prepared: float,
    written: float,
) -> dict[str, Any]:
    """The contents of `schedule.json`, which `ucp snapshot plan` reads: when the tensors of each part were copied."""
    tensors: list[dict[str, Any]] = []
    for of_step, copier, expected in parts:
        start = min((item.started for item in copier.items if item.started), default=0.0)
        tensors += [
            {
                "name": item.name,
                "bytes": item.nbytes,
                "step": of_step,
                "deadline": None if deadline == inf or expected.costs is None else deadline,
                "copied": [item.started - start, item.finished - start],
                "by_trainer": item.by_trainer * item.live.element_size(),
            }
            for item, deadline in zip(copier.items, expected.deadlines, strict=True)
        ]
    costs, blocked = parts[-1][2].costs, parts[-1][2].blocked
    return {
        "schema": 1,
        "step": step,
        "parts": [of_step for of_step, _, _ in parts],
        "costs": None if costs is None else {"link": costs.link, "local": costs.local, "share": costs.share},
        "blocked": [list(interval) for interval in blocked],
        "tensors": tensors,
        "measured": {
            "stall": sum(copier.stall_seconds for _, copier, _ in parts),
            "late_bytes": sum(copier.trainer_bytes for _, copier, _ in parts),
            "prepare": prepared,
            "write": written,
        },
    }
