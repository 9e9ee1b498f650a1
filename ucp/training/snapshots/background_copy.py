"""Copying a rank's tensors aside while training goes on: a background copier, and a guard before every update.

What was measured of a job's snapshots: when tensors are updated, when the link is busy, rates, and waiting.

From it follows the plan of the next snapshot, and what `ucp snapshot plan` shows of the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from ucp import settings
from ucp.training.collect import LiveFragment
from ucp.training.live_job import LiveJob, local_tensor
from ucp.training.snapshots.copy_schedule import CopyRates, iterations_needed, open_time, smoothed

if TYPE_CHECKING:
    import torch


ANY_UPDATE = None  # keys of what any update may overwrite


@dataclass(slots=True)
class TensorCopy:
    """A flat tensor on its way: elements before `at` are in `copy`. Times are seconds of `time.perf_counter`."""

    piece: LiveFragment
    live: torch.Tensor
    copy: torch.Tensor
    keys: frozenset[int] | None  # ids of the optimizer tensors whose update ends its time
    at: int = 0
    started: float = 0.0
    finished: float = 0.0
    by_trainer: int = 0  # elements that the trainer had to copy
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        return bool(self.at == self.live.numel())

    @property
    def nbytes(self) -> int:
        return int(self.live.numel() * self.live.element_size())

    @property
    def name(self) -> str:
        return f"{self.piece.name}|{self.piece.kind}"

    def copy_some(self, count: int) -> int:
        """Copy up to `count` elements; the number copied. Hold the lock."""
        stop = min(self.at + count, int(self.live.numel()))
        now = time.perf_counter()
        self.started = self.started or now
        self.copy[self.at : stop].copy_(self.live[self.at : stop])
        some, self.at = stop - self.at, stop
        self.finished = time.perf_counter()
        return some


class Throttle:
    """A bucket of bytes that fills at a rate: how a slow link is imitated, or a share of a fast one kept free."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Return when so many bytes more may be sent."""
        if self.rate is None:
            return
        now = time.perf_counter()
        self._free_at = max(self._free_at, now) + nbytes / self.rate
        time.sleep(max(0.0, self._free_at - now))


class BackgroundCopier:
    """Copies items of one snapshot in order. The trainer's guard takes over what it is about to overwrite."""

    def __init__(self, items: Sequence[TensorCopy], throttle: Throttle, may_run: threading.Event) -> None:
        self.items = items
        self.stall_seconds = 0.0  # that the guard took
        self.seconds = 0.0  # that the copier was at it
        self.nbytes = 0
        self.finished = False
        self.error: BaseException | None = None  # why `run_quietly` has stopped
        self._throttle = throttle
        self._may_run = may_run

    def run(self) -> None:
        """Copy everything; in the background."""
        for item in self.items:
            step = max(1, settings.SNAPSHOT_CHUNK_BYTES // item.live.element_size())
            while not item.done:
                self._may_run.wait()
                began = time.perf_counter()
                with item.lock:
                    some = item.copy_some(step) * item.live.element_size()
                self._throttle.wait(some)
                self.seconds += time.perf_counter() - began
                self.nbytes += some
        self.finished = True

    def run_quietly(self) -> None:
        """`run` in a thread of its own; what goes wrong is in `error`."""
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - looked at when the snapshot is written
            self.error = error

    def guard(self, keys: frozenset[int]) -> None:
        """Call before these tensors are updated: copies now what of them was not copied aside yet."""
        if self.finished:
            return
        began = time.perf_counter()
        waited = False
        for item in self.items:
            if item.done or (item.keys is not ANY_UPDATE and not item.keys & keys):
                continue
            with item.lock:
                item.by_trainer += item.copy_some(item.live.numel())
            waited = True
        if waited:
            self.stall_seconds += time.perf_counter() - began

    @property
    def trainer_bytes(self) -> int:
        return sum(item.by_trainer * item.live.element_size() for item in self.items)


class UpdateOwners:
    """Which update overwrites which memory, by the storage that a tensor lies in."""

    def __init__(self, job: LiveJob) -> None:
        self._keys: dict[int, set[int]] = {}
        self._any: set[int] = set()
        self._never: set[int] = set()
        for stepped in job.stepped:
            states = job.optimizer.state.get(stepped.key, {}).values()
            for tensor in (stepped.key, *states):
                if hasattr(tensor, "untyped_storage"):
                    self._keys.setdefault(_storage(tensor), set()).add(id(stepped.key))
        self._any = {_storage(held.tensor) for held in job.weights}
        self._never = {_storage(held.tensor) for held in job.frozen}

    def of(self, tensor: torch.Tensor) -> tuple[bool, frozenset[int] | None]:
        """(may it be copied later?, keys). What nothing is known of (buffers, which forward passes write) may not."""
        storage = _storage(tensor)
        if storage in self._any:
            return True, ANY_UPDATE
        if storage in self._keys:
            return True, frozenset(self._keys[storage])
        return storage in self._never, frozenset()


def _storage(tensor: Any) -> int:
    return int(local_tensor(tensor).untyped_storage().data_ptr())


def by_deadline(items: list[TensorCopy], deadline: Callable[[TensorCopy], float]) -> list[TensorCopy]:
    """Earliest deadline first."""
    return sorted(items, key=deadline)


class SnapshotTimings:
    """Times are seconds since the end of the last optimizer step, rates bytes a second."""

    def __init__(self) -> None:
        self.released = time.perf_counter()  # when the last step ended
        self.deadlines: dict[int, float] = {}  # optimizer tensor → when its update began
        self.blocked: list[tuple[float, float]] = []  # when the link was left to others, in the last iteration
        self.link: float | None = None
        self.local: float | None = None
        self.prepare_seconds = 0.0
        self.stall_seconds = 0.0
        self.hook_cpu_seconds = 0.0  # of the trainer's thread
        self.late_bytes = 0
        self._holding: float | None = None  # since when the link is left to others
        self._held: list[tuple[float, float]] = []

    def since(self) -> float:
        return time.perf_counter() - self.released

    def updating(self, keys: Iterable[int]) -> None:
        """These tensors are about to be updated."""
        now = self.since()
        for key in keys:
            self.deadlines[key] = smoothed(self.deadlines.get(key), now)

    def hold(self, busy: bool) -> None:
        """The link is left to others from now on, or is free again."""
        now = self.since()
        if busy and self._holding is None:
            self._holding = now
        elif not busy and self._holding is not None:
            self._held.append((self._holding, now))
            self._holding = None

    def end_step(self) -> None:
        """A step has ended: time begins anew."""
        self.hold(False)
        self.blocked, self._held = self._held, []
        self.released = time.perf_counter()

    def copied(self, copiers: Sequence[BackgroundCopier]) -> None:
        """All of a snapshot is aside."""
        for copier in copiers:
            if copier.nbytes and copier.seconds:
                self.link = smoothed(self.link, copier.nbytes / copier.seconds)
            if copier.trainer_bytes and copier.stall_seconds:
                self.local = smoothed(self.local, copier.trainer_bytes / copier.stall_seconds)
            self.stall_seconds += copier.stall_seconds
            self.late_bytes += copier.trainer_bytes

    # ------------------------------------------------------------------------------------------------------------------

    def deadline(self, item: TensorCopy) -> float:
        if item.keys is ANY_UPDATE:
            return min(self.deadlines.values(), default=0.0)
        return min((self.deadlines.get(key, 0.0) for key in item.keys), default=inf)

    def costs(self) -> CopyRates | None:
        """Rates, where enough was measured for a plan."""
        return CopyRates(self.link, self.local or self.link) if self.link is not None and self.deadlines else None

    def iterations(self, nbytes: int) -> int:
        """Over how many iterations a snapshot of so many bytes should be spread, as far as is known."""
        costs = self.costs()
        if costs is None:
            return 1
        return iterations_needed(nbytes, costs, open_time(0.0, min(self.deadlines.values()), self.blocked))


class ExpectedTimings:
    """What was known when a part of a snapshot began: a plan follows from it, for who asks (`ucp snapshot plan`)."""

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
    """What `ucp snapshot plan` reads: when the tensors of each part (step, copier, what was known) were copied."""
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
        "blocked": [list(stretch) for stretch in blocked],
        "tensors": tensors,
        "measured": {
            "stall": sum(copier.stall_seconds for _, copier, _ in parts),
            "late_bytes": sum(copier.trainer_bytes for _, copier, _ in parts),
            "prepare": prepared,
            "write": written,
        },
    }
