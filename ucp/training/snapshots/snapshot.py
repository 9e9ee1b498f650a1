"""`ucp.snapshot`: full checkpoints of a running job without stopping it.

Between two optimizer steps the state does not change. In that time every tensor is copied in the background, in the
order in which the next step will update them; before each update, whatever is not copied yet is copied by the trainer.
Then a thread writes the copies to disk while training continues. If one iteration is too short, a snapshot is copied in
several parts: its parameters are then of different steps, and a gradient log brings them to the same one.
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
from ucp.training.collectives import fail_together, rank_and_size
from ucp.training.live_job import Hooks
from ucp.training.saved_index import steps_taken
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
    """Take a snapshot of a running job after every `every` steps, without stopping it. Every rank must call it.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`. `path` is a folder that
    gets one folder of atoms per snapshot (the newest `keep` are kept, None: all), or a mapped store, `NAME.ucpstore`.

    With `spread=N`, a snapshot is copied over N iterations, different parameters after different steps; `"auto"` uses
    as many iterations as the copies need to finish in time. Such a snapshot can only be read together with the gradient
    log of the job (`ucp.record`), which brings all parameters to the same step.

    If the previous snapshot is still being written, the new one is skipped, or waited for with `busy="wait"`. With
    `durable`, a folder appears only after it has been synced to disk. `rate` limits the background copies, in bytes per
    second. With `avoid_backward` they pause from the end of a forward pass to the start of the next one, when ranks
    exchange gradients. `client_state` may be a function, which is called for every snapshot.
    """
    folder = local_path(path, "snapshots go")
    made = Snapshots(model, optimizer, folder, keep, busy, durable, Throttle(rate), client_state, rules, preset)
    made._begin(every, spread, avoid_backward)
    return made


class Snapshots:
    """The snapshots of one job. Call `close`, or use it as a context manager."""

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
        self._folder = SnapshotFolder(path, keep)
        self.scheduler = SnapshotScheduler(
            JobInspector(model, optimizer, client_state, rules, preset), self._folder, durable, throttle
        )
        self._busy = busy
        self._hooks = Hooks()
        self._open = False
        self._since = 0

    def _begin(self, every: int | None, spread: int | Literal["auto"], avoid_backward: bool) -> None:
        with fail_together():
            if every is not None and every < 1:
                raise UsageError(f"every={every}: must be at least 1 step")
            if spread != "auto" and spread < 1:
                raise UsageError(f"spread={spread}: must be at least 1 iteration")
            if self._folder.keep is not None and self._folder.keep < 1:
                raise UsageError("keep must be at least 1, or None")
            self._job = describe_job(self._model, self._optimizer)
            if self._job.optimizer is None:
                raise UsageError("snapshots need an optimizer", hint="pass the optimizer, or use ucp.save")
            self.scheduler.step = steps_taken(self._job)
            if rank_and_size()[0] == 0:
                try:
                    self._folder.make()
                except OSError as error:
                    raise UsageError(f"{self.path}: cannot be created: {error.strerror}") from error
        self.scheduler.group = _snapshot_group()
        self.scheduler.every, self.scheduler.spread = every, spread
        self._hooks.add(self._job.optimizer.register_step_pre_hook(self._before_update))
        engine = self._job.engine
        if engine is None:
            self._hooks.add(self._job.optimizer.register_step_post_hook(lambda *_: self._end_step()))
        else:
            self._hooks.wrap(engine, "_take_model_step", self._around_step)
        if avoid_backward:
            module = self._model.module if engine is not None else self._model
            self._hooks.add(module.register_forward_pre_hook(lambda *_: self._pause_copies(False)))
            self._hooks.add(module.register_forward_hook(lambda *_: self._pause_copies(True)))
        self.scheduler.timings.end_step()
        self._open = True

    # ------------------------------------------------------------------------------------------------------------------
    # In the trainer's thread

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._end_step()
            return result

        return take_model_step

    def _pause_copies(self, pause: bool) -> None:
        """Pause the background copies while gradients are exchanged, or resume them."""
        self.scheduler.timings.pause(pause)
        if pause:
            self.scheduler.may_run.clear()
        else:
            self.scheduler.may_run.set()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """Copy whatever is not copied yet of the tensors that the optimizer is about to update."""
        start = time.thread_time()
        keys = frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        scheduler = self.scheduler
        scheduler.timings.before_update(keys)
        if scheduler.run is not None:
            scheduler.run.guard(keys)
        scheduler.timings.hook_cpu_seconds += time.thread_time() - start

    def _end_step(self) -> None:
        if not self._open:
            return
        start = time.thread_time()
        scheduler = self.scheduler
        scheduler.may_run.set()
        scheduler.timings.end_step()
        scheduler.step = int(self._job.engine.global_steps) if self._job.engine is not None else scheduler.step + 1
        self._since += 1
        due = scheduler.every is not None and self._since >= scheduler.every
        if scheduler.run is not None and scheduler.thread is None:
            scheduler.begin_part(time.perf_counter(), rest=False)
        if due:
            self._since = 0
            scheduler.take(wait=self._busy == "wait")
        scheduler.timings.hook_cpu_seconds += time.thread_time() - start

    def take(self) -> None:
        """Take a snapshot of the current state, between two steps. Waits for the previous one. Collective."""
        self.scheduler.take(wait=True)

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    def wait(self) -> None:
        """Wait until the snapshot in progress is on disk; raise its error if it failed.

        If it is spread over several steps, the remaining parts are copied now, so every rank must call this.
        """
        self.scheduler.wait()

    @property
    def step(self) -> int:
        """The number of steps that the job has taken."""
        return self.scheduler.step

    @property
    def taken(self) -> int:
        """The number of snapshots that were started."""
        return self.scheduler.taken

    @property
    def skipped(self) -> int:
        """The number of snapshots that were skipped because the previous one was still being written."""
        return self.scheduler.skipped

    @property
    def finished(self) -> list[tuple[int, Path]]:
        """(step, path) of the snapshots on disk, oldest first."""
        return self.scheduler.finished

    @property
    def latest(self) -> Path | None:
        """The path of the newest snapshot on disk."""
        return self.finished[-1][1] if self.finished else None

    def stats(self) -> dict[str, Any]:
        """Numbers of snapshots, and the seconds that training waited to prepare them and for late copies.

        `hook_cpu_seconds` is the CPU time of the trainer's thread in all hooks, including both.
        """
        timings = self.scheduler.timings
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "prepare_seconds": timings.prepare_seconds,
            "stall_seconds": timings.stall_seconds,
            "hook_cpu_seconds": timings.hook_cpu_seconds,
            "late_bytes": timings.late_bytes,
            "last": self.scheduler.last,
        }

    def close(self) -> None:
        """Wait for the snapshot in progress, and remove the hooks."""
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
        # Other ranks may have died, so no collectives. A spread snapshot whose parts are not all copied is lost.
        if rank_and_size()[1] == 1 and self.scheduler.thread is not None:
            with contextlib.suppress(UcpError):
                self.wait()


def _snapshot_group() -> Any:
    """A process group for the thread that writes snapshots. Collective."""
    if rank_and_size()[1] == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")
