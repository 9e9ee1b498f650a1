"""`ucp.snapshot`: full checkpoints of a live job without stopping it.

After an optimizer step nothing is written until the next one. In that time every tensor is copied aside in the
background, those first that the next step updates first; a guard before each update copies what is left. Then a thread
writes the copies to disk, while training is steps ahead. Where one iteration has no room for all of it, parts are
copied in several: each parameter is then of a step of its own, and a gradient log brings them to one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ucp.errors import UcpError, UsageError
from ucp.files.paths import local_path
from ucp.records import replace
from ucp.train.describe import describe
from ucp.train.hooks import Hooks
from ucp.train.live import LiveJob
from ucp.train.saved_index import steps_counted
from ucp.train.snapshot_copying import Copier, Throttle, in_order
from ucp.train.snapshot_costs import Expected, Measured, tell
from ucp.train.snapshot_eye import ClientState, Eye
from ucp.train.snapshot_layout import Layout, Sight, hyper_now, is_same
from ucp.train.snapshot_plan import smoothed
from ucp.train.snapshot_round import Round
from ucp.train.snapshot_saving import lay_out
from ucp.train.snapshot_shelf import Shelf
from ucp.train.talk import agree, gather, world

Busy = Literal["skip", "wait"]


def snapshot(
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
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
    if path is None:
        if not isinstance(optimizer, (str, os.PathLike)):
            raise TypeError("snapshot needs a path")
        optimizer, path = None, optimizer
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
        self.taken = 0
        self.skipped = 0  # because the one before was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, where) of what is on disk, oldest first
        self._model, self._optimizer = model, optimizer
        self._eye = Eye(model, optimizer, client_state, rules, preset)
        self._shelf = Shelf(path, keep)
        self._busy, self._durable, self._throttle = busy, durable, throttle
        self._hooks = Hooks()
        self._open = False
        self._every: int | None = None
        self._spread: int | Literal["auto"] = 1
        self._since = 0
        self._sight: Sight | None = None
        self._layout: Layout | None = None
        self._round: Round | None = None  # until it is written, or found to be
        self._thread: threading.Thread | None = None  # that writes it
        self._error: BaseException | None = None
        self._buffers: dict[Any, Any] = {}
        self._may_run = threading.Event()
        self._may_run.set()
        self._group: Any = None
        self._measured = Measured()
        self._last: dict[str, Any] = {}

    def _begin(self, every: int | None, spread: int | Literal["auto"], avoid_backward: bool) -> None:
        error: BaseException | None = None
        try:
            if every is not None and every < 1:
                raise UsageError(f"every={every}: snapshots are taken after 1 step or more")
            if spread != "auto" and spread < 1:
                raise UsageError(f"spread={spread}: parts are taken in 1 iteration or more")
            if self._shelf.keep is not None and self._shelf.keep < 1:
                raise UsageError("keep must be at least 1, or None")
            self._job = describe(self._model, self._optimizer)
            if self._job.optimizer is None:
                raise UsageError("snapshots need an optimizer", hint="give snapshot() the optimizer, or use ucp.save")
            self.step = _steps_taken(self._job)
            if world()[0] == 0:
                self._shelf.make()
        except OSError as caught:
            error = UsageError(f"{self.path}: cannot be made: {caught.strerror}")
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error)
        self._group = _own_group()
        self._every, self._spread = every, spread
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
        self._measured.end_step()
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
        self._measured.hold(busy)
        if busy:
            self._may_run.clear()
        else:
            self._may_run.set()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """The optimizer is about to write: nothing of it may still be waiting to be copied."""
        began = time.thread_time()
        keys = frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self._measured.updating(keys)
        if self._round is not None:
            self._round.guard(keys)
        self._measured.hook_cpu_seconds += time.thread_time() - began

    def _end_step(self) -> None:
        if not self._open:
            return
        began = time.thread_time()
        self._may_run.set()
        self._measured.end_step()
        self.step = int(self._job.engine.global_steps) if self._job.engine is not None else self.step + 1
        self._since += 1
        due = self._every is not None and self._since >= self._every
        if self._round is not None and self._thread is None:
            self._part(time.perf_counter(), rest=False)
        if due:
            self._since = 0
            self._take(wait=self._busy == "wait")
        self._measured.hook_cpu_seconds += time.thread_time() - began

    def take(self) -> None:
        """Take a snapshot of the state as it is now, between two steps. Waits for the one before. Collective."""
        self._take(wait=True)

    def _take(self, *, wait: bool) -> None:
        began = time.perf_counter()
        if wait:
            self.wait()
        writing = self._round is not None and (self._thread is None or self._thread.is_alive())
        error: BaseException | None = None
        before, sight, fits = self._sight, None, False
        if not writing and before is not None:
            try:
                sight = self._eye.look(before)
                fits = self._layout is not None and is_same(sight, before)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        name = self._shelf.free_name(self.step)
        states = gather((writing, name, self._error is None, error is None, fits, self._iterations()))
        if not all(fine for _, _, fine, *_ in states):
            self.wait()  # raises on the ranks that failed; the write agreed on it, so that all have
        if any(writing for writing, *_ in states):
            self.skipped += 1
            return
        self.wait()
        if not all(seen for _, _, _, seen, _, _ in states):
            agree(error)
        saver = self._shelf.saver(states[0][1], self._group, self._durable)
        self._sight = sight
        if not all(fits for *_, fits, _ in states):
            self._sight = self._eye.look_anew()
            self._layout = lay_out(saver, self._sight, self._eye.state(self._sight), spreads=self._spread != 1)
        assert self._layout is not None
        count = max(count for *_, count in states)
        self._round = Round(saver, self._layout, count)
        self._part(began, rest=False)
        self.taken += 1

    def _iterations(self) -> int:
        """Over how many iterations the next snapshot is spread, as far as this rank knows."""
        if self._spread != "auto":
            count = self._spread
        elif self._layout is None or self._sight is None:
            return 1
        else:
            pieces = self._sight.pieces
            count = self._measured.iterations(
                sum(pieces[n].tensor.numel() * pieces[n].dtype.itemsize for n in self._layout.wanted)
            )
        return count if self._every is None else min(count, self._every)

    def _part(self, began: float, *, rest: bool) -> None:
        """Begin to copy the next part, or all that is left; with the last part, begin to write."""
        run, sight = self._round, self._sight
        assert run is not None
        assert sight is not None
        if run.parts:
            try:
                now = self._eye.look(sight)
                if not is_same(now, sight):
                    raise UsageError(
                        f"{run.target}: the job's tensors are others than when the parts of this snapshot were begun",
                        hint="nothing but optimizer steps may come between; take a new one",
                    )
                sight = self._sight = now
            except Exception as caught:  # noqa: BLE001 - told to the other ranks before anything is written
                run.failure = run.failure or caught
        last = rest or len(run.parts) == run.count - 1
        copying = time.perf_counter()
        items, at_once = run.set_aside(sight, run.numbers(sight, rest=rest), self._buffers)
        if at_once > 1 << 20:
            self._measured.local = smoothed(self._measured.local, at_once / (time.perf_counter() - copying))
        items = in_order(items, self._measured.deadline)
        copier = Copier(items, self._throttle, self._may_run)
        run.add(self.step, copier, Expected(self._measured, items), in_background=not last)
        if last:
            self._write_in_background(run, sight)
        spent = time.perf_counter() - began
        run.prepared += spent
        self._measured.prepare_seconds += spent
        self._measured.released = time.perf_counter()

    def _write_in_background(self, run: Round, sight: Sight) -> None:
        told: tuple[Any, dict[str, Any]] = ([], {})
        try:
            told = (hyper_now(sight), copy.deepcopy(self._eye.state(sight)))
        except Exception as caught:  # noqa: BLE001 - told to the other ranks before anything is written
            run.failure = run.failure or caught
        step = self.step
        counted = step if sight.job.engine is not None else steps_counted(sight.job)
        seen = replace(sight, job=replace(sight.job, optimizer=None), pieces=list(sight.pieces))  # training goes on

        def work() -> None:
            try:
                began = time.perf_counter()
                run.write(seen, told, counted)
                self._finish(run, step, time.perf_counter() - began)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name="ucp-snapshot")
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------------------
    # In the background

    def _finish(self, run: Round, step: int, written: float) -> None:
        self._measured.copied([copier for _, copier, _ in run.parts])
        self.finished.append((step, run.target))
        self._last = tell(step, run.parts, prepared=run.prepared, written=written)
        if world()[0] == 0:
            self._shelf.tell(self._last)
            self._shelf.drop_old()

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    def wait(self) -> None:
        """Wait until the snapshot that is under way is on disk; raise what went wrong with it.

        Of one that is spread over steps, all parts that are left are taken now: every rank must call it.
        """
        if self._round is not None:
            if self._thread is None:
                self._part(time.perf_counter(), rest=True)
            assert self._thread is not None
            self._may_run.set()
            self._thread.join()
            self._thread, self._round = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def latest(self) -> Path | None:
        """The newest snapshot that is on disk."""
        return self.finished[-1][1] if self.finished else None

    def stats(self) -> dict[str, Any]:
        """Snapshots taken and skipped; seconds that training waited: to prepare them, and for late copies.

        `hook_cpu_seconds` is the CPU time of the trainer's thread in all hooks, both of these included.
        """
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "prepare_seconds": self._measured.prepare_seconds,
            "stall_seconds": self._measured.stall_seconds,
            "hook_cpu_seconds": self._measured.hook_cpu_seconds,
            "late_bytes": self._measured.late_bytes,
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
        # Other ranks may be gone: only what this one can do alone. Parts that are missing cannot be had any more.
        if world()[1] == 1 and self._thread is not None:
            with contextlib.suppress(UcpError):
                self.wait()


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
