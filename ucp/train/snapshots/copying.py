"""Copying a rank's tensors aside while training goes on: a background copier, and a guard before every update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucp import tunables
from ucp.train.live import LiveJob, local_part
from ucp.train.pieces import Piece

if TYPE_CHECKING:
    import torch

ANY_UPDATE = None  # keys of what any update may overwrite


@dataclass(slots=True)
class Item:
    """A flat tensor on its way: elements before `at` are in `copy`. Times are seconds of `time.perf_counter`."""

    piece: Piece
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


class Copier:
    """Copies items of one snapshot in order. The trainer's guard takes over what it is about to overwrite."""

    def __init__(self, items: Sequence[Item], throttle: Throttle, may_run: threading.Event) -> None:
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
            step = max(1, tunables.SNAPSHOT_CHUNK_BYTES // item.live.element_size())
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


class Owners:
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
    return int(local_part(tensor).untyped_storage().data_ptr())


def in_order(items: list[Item], deadline: Callable[[Item], float]) -> list[Item]:
    """Earliest deadline first."""
    return sorted(items, key=deadline)
