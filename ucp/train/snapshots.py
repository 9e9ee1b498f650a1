"""`ucp.snapshot`: full checkpoints of a live job without stopping it.

After an optimizer step nothing is written until the next one. In that time every tensor is copied aside in the
background, those first that the next step updates first; a guard before each update copies what is left. Then a thread
writes the copies to disk, while training is steps ahead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from ucp.errors import UcpError, UsageError
from ucp.train.describe import describe
from ucp.train.live import LiveJob
from ucp.train.recording_hooks import Hooks
from ucp.train.saving import Saver
from ucp.train.snapshot_copying import ANY_UPDATE, Copier, Item, Owners, Throttle, in_order, make_items
from ucp.train.snapshot_plan import Costs, Schedule, Tensor, make_schedule, smoothed
from ucp.train.snapshot_store import SUFFIX, StoreSaver
from ucp.train.talk import agree, gather, world

SCHEDULE: Final = "schedule.json"
_NAME: Final = re.compile(r"step-(\d+)(?:-\d+)?")
Busy = Literal["skip", "wait"]


def snapshot(
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    every: int | None = None,
    keep: int | None = 2,
    busy: Busy = "skip",
    durable: bool = True,
    rate: float | None = None,
    avoid_backward: bool = False,
    client_state: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> Snapshots:
    """Take a snapshot of a live job after every `every` steps from now on, without stopping it. Every rank calls it.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`. `path` is a folder that
    gets a folder of atoms a snapshot (`keep` of them are kept, None: all), or a mapped store, `NAME.ucpstore`.

    When the one before is still being written, `busy` says whether the snapshot is skipped or waited for. With
    `durable`, a folder appears when the disk has all of it. `rate` limits the background copies to so many bytes a
    second. With `avoid_backward` they stand still from the end of a forward pass to the next one, when ranks exchange
    gradients. `client_state` may be a function, called at every snapshot.
    """
    if path is None:
        if not isinstance(optimizer, (str, os.PathLike)):
            raise TypeError("snapshot needs a path")
        optimizer, path = None, optimizer
    made = Snapshots(model, optimizer, Path(path), keep, busy, durable, Throttle(rate), client_state, rules, preset)
    made._begin(every, avoid_backward)
    return made


class Snapshots:
    """Snapshots of one job. `close` it, or use it as a context manager."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        path: Path,
        keep: int | None,
        busy: Busy,
        durable: bool,
        throttle: Throttle,
        client_state: dict[str, Any] | Callable[[], dict[str, Any]] | None,
        rules: str | Path | None,
        preset: str | None,
    ) -> None:
        self.path = path
        self.taken = 0
        self.skipped = 0  # because the one before was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, where) of what is on disk, oldest first
        self._model, self._optimizer = model, optimizer
        self._keep, self._busy, self._durable, self._throttle = keep, busy, durable, throttle
        self._client_state, self._rules, self._preset = client_state, rules, preset
        self._hooks = Hooks()
        self._open = False
        self._every: int | None = None
        self._since = 0
        self._copier: Copier | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[Any, Any] = {}
        self._may_run = threading.Event()
        self._may_run.set()
        self._group: Any = None
        # Measured, for the plan: seconds from the end of a step to the update of a tensor, and rates.
        self._released = 0.0
        self._deadlines: dict[int, float] = {}
        self._link: float | None = None
        self._local: float | None = None
        self._prepare_seconds = 0.0
        self._stall_seconds = 0.0
        self._late_bytes = 0
        self._last: dict[str, Any] = {}

    def _begin(self, every: int | None, avoid_backward: bool) -> None:
        error: BaseException | None = None
        try:
            if every is not None and every < 1:
                raise UsageError(f"every={every}: snapshots are taken after 1 step or more")
            if self._keep is not None and self._keep < 1:
                raise UsageError("keep must be at least 1, or None")
            self._job = describe(self._model, self._optimizer)
            if self._job.optimizer is None:
                raise UsageError("snapshots need an optimizer", hint="give snapshot() the optimizer, or use ucp.save")
            self.step = _steps_taken(self._job)
            if self.path.suffix != SUFFIX and world()[0] == 0:
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as caught:
            error = UsageError(f"{self.path}: cannot be made: {caught.strerror}")
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error)
        self._group = _own_group()
        self._every = every
        self._hooks.add(self._job.optimizer.register_step_pre_hook(self._before_update))
        engine = self._job.engine
        if engine is None:
            self._hooks.add(self._job.optimizer.register_step_post_hook(lambda *_: self._end_step()))
        else:
            self._hooks.wrap(engine, "_take_model_step", self._around_step)
        if avoid_backward:
            module = self._model.module if engine is not None else self._model
            self._hooks.add(module.register_forward_pre_hook(lambda *_: self._may_run.set()))
            self._hooks.add(module.register_forward_hook(lambda *_: self._may_run.clear()))
        self._released = time.perf_counter()
        self._open = True

    # ------------------------------------------------------------------------------------------------------------------
    # In the trainer's thread

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._end_step()
            return result

        return take_model_step

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """The optimizer is about to write: nothing of it may still be waiting to be copied."""
        keys = frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        since = time.perf_counter() - self._released
        for key in keys:
            self._deadlines[key] = smoothed(self._deadlines.get(key), since)
        if self._copier is not None:
            self._copier.guard(keys)

    def _end_step(self) -> None:
        if not self._open:
            return
        self._may_run.set()
        self._released = time.perf_counter()
        self.step = int(self._job.engine.global_steps) if self._job.engine is not None else self.step + 1
        self._since += 1
        if self._every is not None and self._since >= self._every:
            self._since = 0
            self._take(wait=self._busy == "wait")

    def take(self) -> None:
        """Take a snapshot of the state as it is now, between two steps. Waits for the one before. Collective."""
        self._take(wait=True)

    def _take(self, *, wait: bool) -> None:
        began = time.perf_counter()
        if wait:
            self.wait()
        states = gather((self._thread is not None and self._thread.is_alive(), self._free_name(), self._error is None))
        if not all(fine for _, _, fine in states):
            self.wait()  # raises on the ranks that failed; the write agreed on it, so that all have
        if any(writing for writing, _, _ in states):
            self.skipped += 1
            return
        self.wait()
        target = self.path if self.path.suffix == SUFFIX else self.path / states[0][1]
        saver = StoreSaver(target) if self.path.suffix == SUFFIX else Saver(target)
        given = self._client_state() if callable(self._client_state) else self._client_state
        saver.group, saver.durable = self._group, self._durable
        saver.prepare(self._model, self._optimizer, dict(given or {}), self._rules, self._preset)
        wanted = sorted({task.piece for task in saver.tasks})
        copying = time.perf_counter()
        self._job = describe(self._model, self._optimizer)  # tensors may be others than at the last snapshot
        items, at_once = make_items([saver.pieces[n] for n in wanted], Owners(self._job), self._buffers)
        if at_once:
            spent = time.perf_counter() - copying
            self._local = smoothed(self._local, at_once / spent) if at_once > 1 << 20 else self._local
        items = in_order(items, self._deadline)
        plan = self._plan(items)
        self._copier = copier = Copier(items, self._throttle, self._may_run)
        self.taken += 1
        step, prepared = self.step, time.perf_counter() - began
        self._prepare_seconds += prepared

        def work() -> None:
            try:
                failure: BaseException | None = None
                try:
                    copier.run()
                except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                    failure = caught
                agree(failure, self._group)
                aside = time.perf_counter()
                saver.write()
                self._finish(step, target, copier, plan, prepared, time.perf_counter() - aside)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._released = time.perf_counter()
        self._thread = threading.Thread(target=work, name="ucp-snapshot")
        self._thread.start()

    def _deadline(self, item: Item) -> float:
        if item.keys is ANY_UPDATE:
            return min(self._deadlines.values(), default=0.0)
        return min((self._deadlines.get(key, 0.0) for key in item.keys), default=inf)

    def _plan(self, items: list[Item]) -> tuple[Costs, list[Tensor], Schedule] | None:
        """What is expected, where enough was measured."""
        if self._link is None or not self._deadlines:
            return None
        costs = Costs(self._link, self._local or self._link)
        tensors = [Tensor(item.name, item.nbytes, 0.0, self._deadline(item)) for item in items]
        return costs, tensors, make_schedule(tensors, costs)

    # ------------------------------------------------------------------------------------------------------------------
    # In the background

    def _finish(self, step: int, target: Path, copier: Copier, plan: Any, prepared: float, written: float) -> None:
        if copier.nbytes and copier.seconds:
            self._link = smoothed(self._link, copier.nbytes / copier.seconds)
        if copier.trainer_bytes and copier.stall_seconds:
            self._local = smoothed(self._local, copier.trainer_bytes / copier.stall_seconds)
        self._stall_seconds += copier.stall_seconds
        self._late_bytes += copier.trainer_bytes
        self.finished.append((step, target))
        self._last = self._told(step, copier, plan, prepared, written)
        if world()[0] == 0:
            folder = self.path.parent if self.path.suffix == SUFFIX else self.path
            name = f"{self.path.stem}.{SCHEDULE}" if self.path.suffix == SUFFIX else SCHEDULE
            with contextlib.suppress(OSError):  # for people only
                (folder / name).write_text(json.dumps(self._last), encoding="utf-8")
            self._drop_old()

    def _told(self, step: int, copier: Copier, plan: Any, prepared: float, written: float) -> dict[str, Any]:
        start = min((item.started for item in copier.items if item.started), default=0.0)
        costs, tensors, schedule = plan if plan is not None else (None, [], None)
        deadlines = {tensor.name: tensor.deadline for tensor in tensors}
        return {
            "schema": 1,
            "step": step,
            "costs": None if costs is None else {"link": costs.link, "local": costs.local, "share": costs.share},
            "tensors": [
                {
                    "name": item.name,
                    "bytes": item.nbytes,
                    "deadline": None if deadlines.get(item.name, inf) == inf else deadlines[item.name],
                    "copied": [item.started - start, item.finished - start],
                    "by_trainer": item.by_trainer * item.live.element_size(),
                }
                for item in copier.items
            ],
            "predicted": None if schedule is None else schedule.to_json(),
            "measured": {
                "stall": copier.stall_seconds,
                "late_bytes": copier.trainer_bytes,
                "prepare": prepared,
                "write": written,
            },
        }

    def _drop_old(self) -> None:
        if self._keep is None or self.path.suffix == SUFFIX:
            return
        with contextlib.suppress(OSError):  # what is superfluous does no harm
            folders = [folder for folder in self.path.iterdir() if _NAME.fullmatch(folder.name)]
            folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
            for folder in folders[: -self._keep]:
                shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    def wait(self) -> None:
        """Wait until the snapshot that is under way is on disk; raise what went wrong with it."""
        if self._thread is not None:
            self._may_run.set()
            self._thread.join()
            self._thread, self._copier = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def latest(self) -> Path | None:
        """The newest snapshot that is on disk."""
        return self.finished[-1][1] if self.finished else None

    def stats(self) -> dict[str, Any]:
        """Snapshots taken and skipped; seconds that training waited: to prepare them, and for late copies."""
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "prepare_seconds": self._prepare_seconds,
            "stall_seconds": self._stall_seconds,
            "late_bytes": self._late_bytes,
            "last": self._last,
        }

    def close(self) -> None:
        """Wait for what is under way, and take the hooks off."""
        self._open = False
        self._hooks.remove()
        self.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._open = False
        self._hooks.remove()
        if world()[1] == 1:  # other ranks may be gone: only what this one can do alone
            with contextlib.suppress(UcpError):
                self.wait()

    def _free_name(self) -> str:
        name = f"step-{self.step:08d}"
        number = 2
        found = name
        while world()[0] == 0 and (self.path / found).exists():
            found = f"{name}-{number}"
            number += 1
        return found


def _own_group() -> Any:
    """A group that nothing but the writes of these snapshots uses. Collective."""
    if world()[1] == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def _steps_taken(job: LiveJob) -> int:
    if job.engine is not None:
        return int(job.engine.global_steps)
    steps = [state["step"] for state in job.optimizer.state.values() if "step" in state]
    return max((int(step) for step in steps), default=0)
