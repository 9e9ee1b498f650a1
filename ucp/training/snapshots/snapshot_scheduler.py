"""Take snapshots one after the other: what is copied when, and the thread that writes the copies.

A `SnapshotRun` is one snapshot in progress: its parts are copied after one step or several, then written.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ucp import settings
from ucp.errors import UsageError
from ucp.training.collect import LiveFragment
from ucp.training.collectives import all_gather, raise_on_all, rank_and_size
from ucp.training.saved_index import steps_counted
from ucp.training.snapshots.background_copy import (
    BackgroundCopier,
    ExpectedTimings,
    SnapshotTimings,
    TensorCopy,
    Throttle,
    UpdateOwners,
    by_deadline,
    schedule_json,
)
from ucp.training.snapshots.copy_schedule import assign_parts, smoothed
from ucp.training.snapshots.snapshot_layout import JobInspector, JobView, SnapshotLayout, current_groups, same_layout
from ucp.training.snapshots.snapshot_writer import SnapshotFolder, SnapshotSaver, make_layout, prepare_write

if TYPE_CHECKING:
    import torch


CopyBuffers = dict[tuple[int, Any, int], "torch.Tensor"]


class SnapshotRun:
    """One snapshot, copied in `count` parts, each after another step.

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

    @property
    def target(self) -> Path:
        return self.saver.path

    def numbers(self, view: JobView, *, rest: bool) -> list[int]:
        """The fragments to copy now: the next part, or with `rest` all remaining ones."""
        if self.count == 1:
            return self.layout.wanted
        last, now = self.count - 1, len(self.parts)
        parts = ((number, self._part_of.get(view.fragments[number].name, last)) for number in self.layout.wanted)
        return [number for number, part in parts if part == now or (rest and part > now)]

    def start_copies(self, view: JobView, numbers: Iterable[int], buffers: CopyBuffers) -> tuple[list[TensorCopy], int]:
        """Copy at once what cannot be copied later; return a `TensorCopy` for the rest, and the bytes copied at once.

        `buffers` are reused from snapshot to snapshot.
        """
        import torch

        items: list[TensorCopy] = []
        copied_now = 0
        finder: list[UpdateOwners] = []
        small = settings.SNAPSHOT_SMALL_BYTES
        for number in numbers:
            fragment = view.fragments[number]
            live = fragment.tensor
            can_wait, keys = view.owner_of(number, finder)
            nbytes = live.numel() * live.element_size()
            on_cpu = live.device.type == "cpu"
            if can_wait and nbytes >= small and on_cpu:
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

    def guard(self, keys: frozenset[int]) -> None:
        """Copy now whatever is still missing of these optimizer tensors. Call before they are updated."""
        for _, copier, _ in self.parts:
            copier.guard(keys)

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
                f"{self.target}: ranks took the parts of this snapshot after different steps",
                hint="call wait(), take() and close() on all ranks after the same step",
            )
        last = taken[-1]
        part_of = {name: min(part, len(taken) - 1) for name, part in self._part_of.items()}
        steps = {name: taken[part] for name, part in part_of.items() if taken[part] != last}
        fragments = list(view.fragments)
        for number, fragment in self._copies.items():
            fragments[number] = fragment
        prepare_write(self.saver, self.layout, view.job, fragments, state, last if steps else counted, steps)
        self.saver.write()


class SnapshotScheduler:
    """Takes the snapshots of one job, at most one at a time. Methods run in the trainer's thread unless noted."""

    def __init__(self, inspector: JobInspector, folder: SnapshotFolder, durable: bool, throttle: Throttle) -> None:
        self.step = 0  # of the job's state
        self.taken = 0
        self.skipped = 0  # because the previous one was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, path) of complete snapshots, oldest first
        self.every: int | None = None
        self.spread: int | Literal["auto"] = 1
        self.durable, self.throttle = durable, throttle
        self.view: JobView | None = None
        self.layout: SnapshotLayout | None = None
        self.run: SnapshotRun | None = None  # the snapshot in progress
        self.thread: threading.Thread | None = None  # writes it
        self.may_run = threading.Event()
        self.may_run.set()
        self.timings = SnapshotTimings()
        self.last: dict[str, Any] = {}
        self.group: Any = None  # process group of the writer thread
        self._inspector, self._folder = inspector, folder
        self._error: BaseException | None = None
        self._buffers: dict[Any, Any] = {}

    def take(self, *, wait: bool) -> None:
        """Start a snapshot of the current state; if one is in progress, skip it or `wait` for it. Collective."""
        start = time.perf_counter()
        if wait:
            self.wait()
        writing = self.run is not None and (self.thread is None or self.thread.is_alive())
        error: BaseException | None = None
        before, view, fits = self.view, None, False
        if not writing and before is not None:
            try:
                view = self._inspector.update(before)
                fits = self.layout is not None and same_layout(view, before)
            except Exception as caught:  # noqa: BLE001 - raised below, when the other ranks know
                error = caught
        name = self._folder.free_name(self.step)
        states = all_gather((writing, name, self._error is None, error is None, fits, self.iterations()))
        if not all(fine for _, _, fine, *_ in states):
            self.wait()  # raises on all ranks: a write fails on all of them together
        if any(writing for writing, *_ in states):
            self.skipped += 1
            return
        self.wait()
        if not all(seen for _, _, _, seen, _, _ in states):
            raise_on_all(error)
        saver = self._folder.saver(states[0][1], self.group, self.durable)
        self.view = view
        if not all(fits for *_, fits, _ in states):
            self.view = self._inspector.inspect()
            state = self._inspector.training_state(self.view)
            self.layout = make_layout(saver, self.view, state, spreads=self.spread != 1)
        assert self.layout is not None
        count = max(count for *_, count in states)
        self.run = SnapshotRun(saver, self.layout, count)
        self.begin_part(start, rest=False)
        self.taken += 1

    def iterations(self) -> int:
        """The number of iterations over which this rank would spread the next snapshot."""
        if self.spread != "auto":
            count = self.spread
        elif self.layout is None or self.view is None:
            return 1
        else:
            fragments = self.view.fragments
            count = self.timings.iterations(
                sum(fragments[n].tensor.numel() * fragments[n].dtype.itemsize for n in self.layout.wanted)
            )
        return count if self.every is None else min(count, self.every)

    def begin_part(self, start: float, *, rest: bool) -> None:
        """Start to copy the next part, or with `rest` all remaining ones; with the last part, start to write."""
        run, view = self.run, self.view
        assert run is not None
        assert view is not None
        if run.parts:
            try:
                now = self._inspector.update(view)
                if not same_layout(now, view):
                    raise UsageError(
                        f"{run.target}: the tensors of the job have changed since the first part of this snapshot",
                        hint="only optimizer steps may happen between the parts; take a new snapshot",
                    )
                view = self.view = now
            except Exception as caught:  # noqa: BLE001 - raised by `write` on all ranks
                run.failure = run.failure or caught
        last = rest or len(run.parts) == run.count - 1
        copying = time.perf_counter()
        items, copied_now = run.start_copies(view, run.numbers(view, rest=rest), self._buffers)
        if copied_now > 1 << 20:
            self.timings.local = smoothed(self.timings.local, copied_now / (time.perf_counter() - copying))
        items = by_deadline(items, self.timings.deadline)
        copier = BackgroundCopier(items, self.throttle, self.may_run)
        run.add(self.step, copier, ExpectedTimings(self.timings, items), in_background=not last)
        if last:
            self._write_in_background(run, view)
        spent = time.perf_counter() - start
        run.prepared += spent
        self.timings.prepare_seconds += spent
        self.timings.released = time.perf_counter()

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
                self._finish(run, step, time.perf_counter() - start)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self.thread = threading.Thread(target=work, name="ucp-snapshot")
        self.thread.start()

    def _finish(self, run: SnapshotRun, step: int, written: float) -> None:
        self.timings.add_copies([copier for _, copier, _ in run.parts])
        self.finished.append((step, run.target))
        self.last = schedule_json(step, run.parts, prepared=run.prepared, written=written)
        if rank_and_size()[0] == 0:
            self._folder.write_schedule(self.last)
            self._folder.drop_old(step)

    def wait(self) -> None:
        """Wait until the snapshot in progress is on disk; raise its error if it failed.

        If it is spread over several steps, the remaining parts are copied now, so every rank must call this.
        """
        if self.run is not None:
            if self.thread is None:
                self.begin_part(time.perf_counter(), rest=True)
            assert self.thread is not None
            self.may_run.set()
            self.thread.join()
            self.thread, self.run = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
