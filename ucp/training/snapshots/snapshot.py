"""`ucp.snapshot`: full checkpoints of a live job without stopping it.

After an optimizer step nothing is written until the next one. In that time every tensor is copied aside in the
background, those first that the next step updates first; a guard before each update copies what is left. Then a thread
writes the copies to disk, while training is steps ahead. Where one iteration has no room for all of it, parts are
copied in several: each parameter is then of a step of its own, and a gradient log brings them to one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ucp.errors import UcpError, UsageError
from ucp.storage.paths import local_path
from ucp.training.adapters import describe_job
from ucp.training.collectives import raise_on_all, rank_and_size
from ucp.training.live_job import Hooks, LiveJob
from ucp.training.saved_index import steps_counted
from ucp.training.snapshots.background_copy import Throttle
from ucp.training.snapshots.snapshot_layout import ClientState, JobInspector
from ucp.training.snapshots.snapshot_scheduler import SnapshotScheduler
from ucp.training.snapshots.snapshot_writer import SnapshotFolder

Busy = Literal["skip", "wait"]


def snapshot(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    every: int | None = None,
    spread: int | Literal["auto"] = 1,
    keep: int | None = 2,
    busy: Busy = "skip",
    durable: bool = True,
    rate: float | None = None,
    avoid_backward: bool = False,
    client_state: ClientState = None,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> Snapshots:
    """Take a snapshot of a live job after every `every` steps from now on, without stopping it. Every rank calls it.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`. `path` is a folder that
    gets a folder of atoms a snapshot (`keep` of them are kept, None: all), or a mapped store, `NAME.ucpstore`.

    With `spread`, the parts of a snapshot are taken in so many iterations, each parameter after a step of its own;
    `"auto"` takes as many as the copies need to be in time. To be read, such a snapshot needs the gradient log of the
    job (`ucp.record`), which brings all parts to one step.

    When the one before is still being written, `busy` says whether the snapshot is skipped or waited for. With
    `durable`, a folder appears when the disk has all of it. `rate` limits the background copies to so many bytes a
    second. With `avoid_backward` they stand still from the end of a forward pass to the next one, when ranks exchange
    gradients. `client_state` may be a function, called at every snapshot.
    """
    folder = local_path(path, "snapshots go")
    made = Snapshots(model, optimizer, folder, keep, busy, durable, Throttle(rate), client_state, rules, preset)
    made._begin(every, spread, avoid_backward)
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
        client_state: ClientState,
        rules: str | Path | None,
        preset: str | None,
    ) -> None:
        self.path = path
        self._model, self._optimizer = model, optimizer
        self._shelf = SnapshotFolder(path, keep)
        self.taking = SnapshotScheduler(
            JobInspector(model, optimizer, client_state, rules, preset), self._shelf, durable, throttle
        )
        self._busy = busy
        self._hooks = Hooks()
        self._open = False
        self._since = 0

    def _begin(self, every: int | None, spread: int | Literal["auto"], avoid_backward: bool) -> None:
        error: BaseException | None = None
        try:
            if every is not None and every < 1:
                raise UsageError(f"every={every}: snapshots are taken after 1 step or more")
            if spread != "auto" and spread < 1:
                raise UsageError(f"spread={spread}: parts are taken in 1 iteration or more")
            if self._shelf.keep is not None and self._shelf.keep < 1:
                raise UsageError("keep must be at least 1, or None")
            self._job = describe_job(self._model, self._optimizer)
            if self._job.optimizer is None:
                raise UsageError("snapshots need an optimizer", hint="give snapshot() the optimizer, or use ucp.save")
            self.taking.step = _steps_taken(self._job)
            if rank_and_size()[0] == 0:
                self._shelf.make()
        except OSError as caught:
            error = UsageError(f"{self.path}: cannot be made: {caught.strerror}")
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        raise_on_all(error)
        self.taking.group = _snapshot_group()
        self.taking.every, self.taking.spread = every, spread
        self._hooks.add(self._job.optimizer.register_step_pre_hook(self._before_update))
        engine = self._job.engine
        if engine is None:
            self._hooks.add(self._job.optimizer.register_step_post_hook(lambda *_: self._end_step()))
        else:
            self._hooks.wrap(engine, "_take_model_step", self._around_step)
        if avoid_backward:
            module = self._model.module if engine is not None else self._model
            self._hooks.add(module.register_forward_pre_hook(lambda *_: self._hold(False)))
            self._hooks.add(module.register_forward_hook(lambda *_: self._hold(True)))
        self.taking.measured.end_step()
        self._open = True

    # ------------------------------------------------------------------------------------------------------------------
    # In the trainer's thread

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._end_step()
            return result

        return take_model_step

    def _hold(self, busy: bool) -> None:
        """Leave the link to the exchange of gradients, or use it again."""
        self.taking.measured.hold(busy)
        if busy:
            self.taking.may_run.clear()
        else:
            self.taking.may_run.set()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """The optimizer is about to write: nothing of it may still be waiting to be copied."""
        began = time.thread_time()
        keys = frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        taking = self.taking
        taking.measured.updating(keys)
        if taking.round is not None:
            taking.round.guard(keys)
        taking.measured.hook_cpu_seconds += time.thread_time() - began

    def _end_step(self) -> None:
        if not self._open:
            return
        began = time.thread_time()
        taking = self.taking
        taking.may_run.set()
        taking.measured.end_step()
        taking.step = int(self._job.engine.global_steps) if self._job.engine is not None else taking.step + 1
        self._since += 1
        due = taking.every is not None and self._since >= taking.every
        if taking.round is not None and taking.thread is None:
            taking.part(time.perf_counter(), rest=False)
        if due:
            self._since = 0
            taking.take(wait=self._busy == "wait")
        taking.measured.hook_cpu_seconds += time.thread_time() - began

    def take(self) -> None:
        """Take a snapshot of the state as it is now, between two steps. Waits for the one before. Collective."""
        self.taking.take(wait=True)

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    def wait(self) -> None:
        """Wait until the snapshot that is under way is on disk; raise what went wrong with it.

        Of one that is spread over steps, all parts that are left are taken now: every rank must call it.
        """
        self.taking.wait()

    @property
    def step(self) -> int:
        """Steps that the job has behind it."""
        return self.taking.step

    @property
    def taken(self) -> int:
        """Snapshots that were begun."""
        return self.taking.taken

    @property
    def skipped(self) -> int:
        """Snapshots that were not, because the one before was still being written."""
        return self.taking.skipped

    @property
    def finished(self) -> list[tuple[int, Path]]:
        """(Step, where) of what is on disk, oldest first."""
        return self.taking.finished

    @property
    def latest(self) -> Path | None:
        """The newest snapshot that is on disk."""
        return self.finished[-1][1] if self.finished else None

    def stats(self) -> dict[str, Any]:
        """Snapshots taken and skipped; seconds that training waited: to prepare them, and for late copies.

        `hook_cpu_seconds` is the CPU time of the trainer's thread in all hooks, both of these included.
        """
        measured = self.taking.measured
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "prepare_seconds": measured.prepare_seconds,
            "stall_seconds": measured.stall_seconds,
            "hook_cpu_seconds": measured.hook_cpu_seconds,
            "late_bytes": measured.late_bytes,
            "last": self.taking.last,
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
        # Other ranks may be gone: only what this one can do alone. Parts that are missing cannot be had any more.
        if rank_and_size()[1] == 1 and self.taking.thread is not None:
            with contextlib.suppress(UcpError):
                self.wait()


def _snapshot_group() -> Any:
    """A group that nothing but the writes of these snapshots uses. Collective."""
    if rank_and_size()[1] == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def _steps_taken(job: LiveJob) -> int:
    if job.engine is not None:
        return int(job.engine.global_steps)
    return steps_counted(job) or 0
