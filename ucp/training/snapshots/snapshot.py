"""`ucp.snapshot`: full checkpoints of a running job without stopping it.

Between two optimizer steps the state does not change. In that time every tensor is copied in the background, in the
order in which the next step will update them; before each update, whatever is not copied yet is copied by the trainer.
Then a thread writes the copies to disk while training continues. If one iteration is too short, a snapshot is copied in
several parts: its parameters are then of different steps, and a gradient log brings them to the same one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ucp import settings
from ucp.errors import UcpError, UsageError
from ucp.storage.paths import local_path
from ucp.training.collect import LiveFragment
from ucp.training.collectives import all_gather, fail_together, new_background_group, raise_on_all, rank_and_size
from ucp.training.live_job import Hooks
from ucp.training.saved_index import steps_counted, steps_taken
from ucp.training.snapshots.background_copy import (
    BackgroundCopier,
    ExpectedTimings,
    SnapshotTimings,
    TensorCopy,
    Throttle,
    schedule_json,
)
from ucp.training.snapshots.copy_schedule import assign_parts, smoothed
from ucp.training.snapshots.snapshot_writer import (
    ClientState,
    JobInspector,
    JobView,
    SnapshotFolder,
    SnapshotLayout,
    SnapshotSaver,
    current_groups,
    make_layout,
    prepare_write,
    same_layout,
)

if TYPE_CHECKING:
    import torch

Busy = Literal["skip", "wait"]
Spread = int | Literal["auto"]


def snapshot(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    every: int | None = None,
    spread: Spread = 1,
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
    folder = SnapshotFolder(local_path(path, "snapshots go"), keep)
    inspector = JobInspector(model, optimizer, client_state, rules, preset)
    snapshots = Snapshots(folder, inspector, every, spread, busy, durable, Throttle(rate))
    if avoid_backward:
        snapshots._avoid_backward(model)
    return snapshots


class SnapshotRun:
    """One snapshot, copied in `count` parts, each after another step, then written.

    A part is a set of parameters, with all their states on all ranks, so that a parameter is always of one step.
    """

    def __init__(self, saver: SnapshotSaver, layout: SnapshotLayout, count: int) -> None:
        self.saver = saver
        self.layout = layout
        self.count = count
        self.parts: list[tuple[int, BackgroundCopier, ExpectedTimings]] = []  # taken so far
        self.prepared = 0.0  # seconds that the trainer spent preparing it
        self.failure: BaseException | None = None
        self._copies: dict[int, LiveFragment] = {}
        self._threads: list[threading.Thread] = []
        self._part_of: dict[str, int] = {}  # parameter → part; buffers are not listed and belong to the last part
        if count > 1:
            if count not in layout.parts:
                layout.parts[count] = assign_parts(layout.loads, count)
            self._part_of = layout.parts[count]

    def numbers(self, view: JobView, *, rest: bool) -> list[int]:
        """The fragments to copy now: the next part, or with `rest` all remaining ones."""
        if self.count == 1:
            return self.layout.wanted
        last, now = self.count - 1, len(self.parts)
        parts = ((number, self._part_of.get(view.fragments[number].name, last)) for number in self.layout.wanted)
        return [number for number, part in parts if part == now or (rest and part > now)]

    def start_copies(
        self, view: JobView, numbers: Iterable[int], buffers: dict[tuple[int, Any, int], torch.Tensor]
    ) -> tuple[list[TensorCopy], int]:
        """Copy at once what cannot be copied later; return a `TensorCopy` for the rest, and the bytes copied at once.

        `buffers` are reused from snapshot to snapshot.
        """
        import torch

        items: list[TensorCopy] = []
        copied_now = 0
        for number in numbers:
            fragment = view.fragments[number]
            live = fragment.tensor
            can_wait, keys = view.owner_of(number)
            nbytes = live.numel() * live.element_size()
            on_cpu = live.device.type == "cpu"
            if can_wait and nbytes >= settings.SNAPSHOT_SMALL_BYTES and on_cpu:
                key = (number, live.dtype, live.numel())
                if key not in buffers:
                    buffers[key] = torch.empty_like(live)
                copied = buffers[key]
                items.append(TensorCopy(fragment, live, copied, keys))
            else:
                copied = live.clone() if on_cpu else live.cpu()
                copied_now += nbytes
            self._copies[number] = replace(fragment, tensor=copied)
        return items, copied_now

    def add(self, step: int, copier: BackgroundCopier, expected: ExpectedTimings, *, in_background: bool) -> None:
        """Add a part that is copied after `step`; start its copier unless `write` will run it."""
        self.parts.append((step, copier, expected))
        if in_background:
            thread = threading.Thread(target=copier.run_in_thread, name="ucp-snapshot-part")
            self._threads.append(thread)
            thread.start()

    def write(self, view: JobView, state: tuple[Any, dict[str, Any]], counted: int | None) -> None:
        """Finish copying, then write. Runs in a background thread. Collective, in the saver's group.

        `counted` is the number of steps that the optimizer has counted.
        """
        self.parts[-1][1].run_in_thread()
        for thread in self._threads:
            thread.join()
        failures = [copier.error for _, copier, _ in self.parts if copier.error is not None]
        raise_on_all(self.failure or (failures[0] if failures else None), self.saver.group)
        taken = [step for step, _, _ in self.parts]
        if any(other != taken for other in all_gather(taken, self.saver.group)):
            raise UsageError(
                f"{self.saver.path}: ranks took the parts of this snapshot after different steps",
                hint="call wait(), take() and close() on all ranks after the same step",
            )
        last = taken[-1]
        part_of = {name: min(part, len(taken) - 1) for name, part in self._part_of.items()}
        steps = {name: taken[part] for name, part in part_of.items() if taken[part] != last}
        fragments = [self._copies.get(number, fragment) for number, fragment in enumerate(view.fragments)]
        prepare_write(self.saver, self.layout, view.job, fragments, state, last if steps else counted, steps)
        self.saver.write()


class Snapshots:
    """The snapshots of one job, at most one at a time. Call `close`, or use it as a context manager."""

    def __init__(
        self,
        folder: SnapshotFolder,
        inspector: JobInspector,
        every: int | None,
        spread: Spread,
        busy: Busy,
        durable: bool,
        throttle: Throttle,
    ) -> None:
        """Check the arguments and install the hooks. Collective."""
        self.path = folder.path
        self.taken = 0  # snapshots that were started
        self.skipped = 0  # because the previous one was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, path) of the snapshots on disk, oldest first
        self._folder, self._inspector = folder, inspector
        self._every, self._spread, self._busy, self._durable, self._throttle = every, spread, busy, durable, throttle
        self._view: JobView | None = None
        self._layout: SnapshotLayout | None = None
        self._run: SnapshotRun | None = None  # the snapshot in progress
        self._thread: threading.Thread | None = None  # writes it
        self._error: BaseException | None = None
        self._may_copy = threading.Event()
        self._may_copy.set()
        self._buffers: dict[Any, torch.Tensor] = {}
        self._timings = SnapshotTimings()
        self._last: dict[str, Any] = {}  # schedule of the last snapshot
        self._since = 0  # steps since the last snapshot
        self._hooks = Hooks()
        with fail_together():
            if every is not None and every < 1:
                raise UsageError(f"every={every}: must be at least 1 step")
            if spread != "auto" and spread < 1:
                raise UsageError(f"spread={spread}: must be at least 1 iteration")
            if folder.keep is not None and folder.keep < 1:
                raise UsageError("keep must be at least 1, or None")
            self._job = inspector.describe()
            if self._job.optimizer is None:
                raise UsageError("snapshots need an optimizer", hint="pass the optimizer, or use ucp.save")
            self.step = steps_taken(self._job)  # steps that the job has taken
            if rank_and_size()[0] == 0:
                try:
                    folder.make()
                except OSError as error:
                    raise UsageError(f"{self.path}: cannot be created: {error.strerror}") from error
        self._group = new_background_group()
        self._hooks.add(self._job.optimizer.register_step_pre_hook(self._before_update))
        self._hooks.after_step(self._job, self._end_step)
        self._timings.end_step()
        self._open = True

    def _avoid_backward(self, model: Any) -> None:
        """Pause the background copies while gradients are exchanged."""
        module = model.module if self._job.engine is not None else model

        def pause(is_paused: bool) -> None:
            self._timings.pause(is_paused)
            (self._may_copy.clear if is_paused else self._may_copy.set)()

        self._hooks.add(module.register_forward_pre_hook(lambda *_: pause(False)))
        self._hooks.add(module.register_forward_hook(lambda *_: pause(True)))

    # In the trainer's thread ------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """Copy whatever is not copied yet of the tensors that the optimizer is about to update."""
        start = time.thread_time()
        keys = frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self._timings.before_update(keys)
        if self._run is not None:
            for part in self._run.parts:
                part[1].guard(keys)
        self._timings.hook_cpu_seconds += time.thread_time() - start

    def _end_step(self) -> None:
        if not self._open:
            return
        start = time.thread_time()
        self._may_copy.set()
        self._timings.end_step()
        self.step = int(self._job.engine.global_steps) if self._job.engine is not None else self.step + 1
        self._since += 1
        if self._run is not None and self._thread is None:
            self._begin_part(time.perf_counter(), rest=False)
        if self._every is not None and self._since >= self._every:
            self._since = 0
            self._take(wait=self._busy == "wait")
        self._timings.hook_cpu_seconds += time.thread_time() - start

    def take(self) -> None:
        """Take a snapshot of the current state, between two steps. Waits for the previous one. Collective."""
        self._take(wait=True)

    def _take(self, *, wait: bool) -> None:
        """Start a snapshot of the current state; if one is in progress, skip it or `wait` for it. Collective."""
        start = time.perf_counter()
        if wait:
            self.wait()
        writing = self._run is not None and (self._thread is None or self._thread.is_alive())
        error: BaseException | None = None
        before, view, fits = self._view, None, False
        if not writing and before is not None:
            try:
                view = self._inspector.update(before)
                fits = self._layout is not None and same_layout(view, before)
            except Exception as caught:  # noqa: BLE001 - raised below, when the other ranks know
                error = caught
        name = self._folder.free_name(self.step)
        states = all_gather((writing, name, self._error is None, error is None, fits, self._iterations()))
        if not all(fine for _, _, fine, *_ in states):
            self.wait()  # raises on all ranks: a write fails on all of them together
        if any(writing for writing, *_ in states):
            self.skipped += 1
            return
        self.wait()
        if not all(seen for _, _, _, seen, _, _ in states):
            raise_on_all(error)
        saver = self._folder.saver(states[0][1], self._group, self._durable)
        self._view = view
        if not all(fits for *_, fits, _ in states):
            self._view = self._inspector.inspect()
            state = self._inspector.training_state(self._view)
            self._layout = make_layout(saver, self._view, state, spreads=self._spread != 1)
        assert self._layout is not None
        self._run = SnapshotRun(saver, self._layout, max(count for *_, count in states))
        self._begin_part(start, rest=False)
        self.taken += 1

    def _iterations(self) -> int:
        """The number of iterations over which this rank would spread the next snapshot."""
        if self._spread != "auto":
            count = self._spread
        elif self._layout is None or self._view is None:
            return 1
        else:
            fragments = [self._view.fragments[number] for number in self._layout.wanted]
            count = self._timings.iterations(sum(f.tensor.numel() * f.dtype.itemsize for f in fragments))
        return count if self._every is None else min(count, self._every)

    def _begin_part(self, start: float, *, rest: bool) -> None:
        """Start to copy the next part, or with `rest` all remaining ones; with the last part, start to write."""
        run, view = self._run, self._view
        assert run is not None
        assert view is not None
        if run.parts:
            try:
                now = self._inspector.update(view)
                if not same_layout(now, view):
                    raise UsageError(
                        f"{run.saver.path}: the tensors of the job have changed since the first part of this snapshot",
                        hint="only optimizer steps may happen between the parts; take a new snapshot",
                    )
                view = self._view = now
            except Exception as caught:  # noqa: BLE001 - raised by `write` on all ranks
                run.failure = run.failure or caught
        last = rest or len(run.parts) == run.count - 1
        copying = time.perf_counter()
        items, copied_now = run.start_copies(view, run.numbers(view, rest=rest), self._buffers)
        if copied_now > 1 << 20:
            self._timings.local = smoothed(self._timings.local, copied_now / (time.perf_counter() - copying))
        items.sort(key=self._timings.deadline)
        copier = BackgroundCopier(items, self._throttle, self._may_copy)
        run.add(self.step, copier, ExpectedTimings(self._timings, items), in_background=not last)
        if last:
            self._write_in_background(run, view)
        spent = time.perf_counter() - start
        run.prepared += spent
        self._timings.prepare_seconds += spent
        self._timings.released = time.perf_counter()

    def _write_in_background(self, run: SnapshotRun, view: JobView) -> None:
        state: tuple[Any, dict[str, Any]] = ([], {})
        try:
            state = (current_groups(view), copy.deepcopy(self._inspector.training_state(view)))
        except Exception as caught:  # noqa: BLE001 - raised by `write` on all ranks
            run.failure = run.failure or caught
        step = self.step
        counted = step if view.job.engine is not None else steps_counted(view.job)
        # The thread must not look at the optimizer, which training changes meanwhile.
        frozen = replace(view, job=replace(view.job, optimizer=None), fragments=list(view.fragments))

        def work() -> None:
            try:
                start = time.perf_counter()
                run.write(frozen, state, counted)
                written = time.perf_counter() - start
                self._timings.add_copies([copier for _, copier, _ in run.parts])
                self.finished.append((step, run.saver.path))
                self._last = schedule_json(step, run.parts, prepared=run.prepared, written=written)
                if rank_and_size()[0] == 0:
                    self._folder.write_schedule(self._last)
                    self._folder.drop_old(step)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name="ucp-snapshot")
        self._thread.start()

    # For the user -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the snapshot in progress is on disk; raise its error if it failed.

        If it is spread over several steps, the remaining parts are copied now, so every rank must call this.
        """
        if self._run is not None:
            if self._thread is None:
                self._begin_part(time.perf_counter(), rest=True)
            assert self._thread is not None
            self._may_copy.set()
            self._thread.join()
            self._thread, self._run = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def latest(self) -> Path | None:
        """The path of the newest snapshot on disk."""
        return self.finished[-1][1] if self.finished else None

    def stats(self) -> dict[str, Any]:
        """Numbers of snapshots, and the seconds that training waited to prepare them and for late copies.

        `hook_cpu_seconds` is the CPU time of the trainer's thread in all hooks, including both.
        """
        timings = self._timings
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "prepare_seconds": timings.prepare_seconds,
            "stall_seconds": timings.stall_seconds,
            "hook_cpu_seconds": timings.hook_cpu_seconds,
            "late_bytes": timings.late_bytes,
            "last": self._last,
        }

    def close(self) -> None:
        """Wait for the snapshot in progress, and remove the hooks."""
        self._open = False
        self._hooks.remove()
        self.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
            return
        self._open = False
        self._hooks.remove()
        # Other ranks may have died, so no collectives. A spread snapshot whose parts are not all copied is lost.
        if rank_and_size()[1] == 1 and self._thread is not None:
            with contextlib.suppress(UcpError):
                self.wait()
