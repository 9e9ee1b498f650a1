"""One snapshot on its way: parts that are copied aside after one step or several, then written.

Taking snapshots one after the other: what of the job is copied when, and the thread that writes it.
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


Buffers = dict[tuple[int, Any, int], "torch.Tensor"]


class SnapshotRun:
    """A snapshot of `count` parts, each of another step. Parts are sets of parameters: all states of one belong to one
    step, on all ranks."""

    def __init__(self, saver: SnapshotSaver, layout: SnapshotLayout, count: int) -> None:
        self.saver = saver
        self.layout = layout
        self.count = count
        self.parts: list[tuple[int, BackgroundCopier, ExpectedTimings]] = []  # taken so far
        self.prepared = 0.0  # seconds of the trainer
        self.failure: BaseException | None = None
        self._copies: dict[int, LiveFragment] = {}
        self._threads: list[threading.Thread] = []
        self._of: dict[str, int] = {}  # parameter → part; what it does not name (buffers) comes last
        if count > 1:
            if count not in layout.parts:
                layout.parts[count] = assign_parts(layout.loads, count)
            self._of = layout.parts[count]

    @property
    def target(self) -> Path:
        return self.saver.path

    def numbers(self, sight: JobView, *, rest: bool) -> list[int]:
        """Which pieces are to be taken now: the next part, or all that is left."""
        if self.count == 1:
            return self.layout.wanted
        last, now = self.count - 1, len(self.parts)
        of = ((number, self._of.get(sight.pieces[number].name, last)) for number in self.layout.wanted)
        return [number for number, part in of if part == now or (rest and part > now)]

    def set_aside(self, sight: JobView, numbers: Iterable[int], buffers: Buffers) -> tuple[list[TensorCopy], int]:
        """Copy what cannot wait; items for what can. Gives the bytes that were copied, too.

        `buffers` are reused from snapshot to snapshot.
        """
        import torch

        items: list[TensorCopy] = []
        at_once = 0
        owners: list[UpdateOwners] = []
        small = settings.SNAPSHOT_SMALL_BYTES
        for number in numbers:
            piece = sight.pieces[number]
            live = piece.tensor
            later, keys = sight.owned(number, owners)
            nbytes = live.numel() * live.element_size()
            on_cpu = live.device.type == "cpu"
            if later and nbytes >= small and on_cpu:
                place = (number, live.dtype, live.numel())
                if place not in buffers:
                    buffers[place] = torch.empty_like(live)
                aside = buffers[place]
                items.append(TensorCopy(piece, live, aside, keys))
            else:
                aside = live.clone() if on_cpu else live.cpu()
                at_once += nbytes
            self._copies[number] = LiveFragment(piece.name, piece.kind, piece.shape, piece.dtype, piece.region, aside)
        return items, at_once

    def add(self, step: int, copier: BackgroundCopier, expected: ExpectedTimings, *, in_background: bool) -> None:
        """A part was begun after this step."""
        self.parts.append((step, copier, expected))
        if in_background:
            thread = threading.Thread(target=copier.run_quietly, name="ucp-snapshot-part")
            self._threads.append(thread)
            thread.start()

    def guard(self, keys: frozenset[int]) -> None:
        """Call before these tensors are updated: copies now what of them was not copied aside yet."""
        for _, copier, _ in self.parts:
            copier.guard(keys)

    def write(self, sight: JobView, told: tuple[Any, dict[str, Any]], counted: int | None) -> None:
        """Copy what is left, then write all of it. Collective, in the saver's group; in the background.

        `counted` is what the optimizer says that it has taken of steps.
        """
        self.parts[-1][1].run_quietly()
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
        spread_over = {name: min(part, len(taken) - 1) for name, part in self._of.items()}
        steps = {name: taken[part] for name, part in spread_over.items() if taken[part] != last}
        pieces = list(sight.pieces)
        for number, piece in self._copies.items():
            pieces[number] = piece
        prepare_write(self.saver, self.layout, sight.job, pieces, told, last if steps else counted, steps)
        self.saver.write()


class SnapshotScheduler:
    """The snapshots of one job, at most one of them under way. In the trainer's thread, unless it says otherwise."""

    def __init__(self, eye: JobInspector, shelf: SnapshotFolder, durable: bool, throttle: Throttle) -> None:
        self.step = 0  # that the state is of
        self.taken = 0
        self.skipped = 0  # because the one before was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, where) of what is on disk, oldest first
        self.every: int | None = None
        self.spread: int | Literal["auto"] = 1
        self.durable, self.throttle = durable, throttle
        self.sight: JobView | None = None
        self.layout: SnapshotLayout | None = None
        self.round: SnapshotRun | None = None  # until it is written, or found to be
        self.thread: threading.Thread | None = None  # that writes it
        self.may_run = threading.Event()
        self.may_run.set()
        self.measured = SnapshotTimings()
        self.last: dict[str, Any] = {}
        self.group: Any = None  # of ranks, which nothing else uses
        self._eye, self._shelf = eye, shelf
        self._error: BaseException | None = None
        self._buffers: dict[Any, Any] = {}

    def take(self, *, wait: bool) -> None:
        """Begin a snapshot of the state as it is now, unless one is under way that is not waited for. Collective."""
        began = time.perf_counter()
        if wait:
            self.wait()
        writing = self.round is not None and (self.thread is None or self.thread.is_alive())
        error: BaseException | None = None
        before, sight, fits = self.sight, None, False
        if not writing and before is not None:
            try:
                sight = self._eye.look(before)
                fits = self.layout is not None and same_layout(sight, before)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        name = self._shelf.free_name(self.step)
        states = all_gather((writing, name, self._error is None, error is None, fits, self.iterations()))
        if not all(fine for _, _, fine, *_ in states):
            self.wait()  # raises on the ranks that failed; the write agreed on it, so that all have
        if any(writing for writing, *_ in states):
            self.skipped += 1
            return
        self.wait()
        if not all(seen for _, _, _, seen, _, _ in states):
            raise_on_all(error)
        saver = self._shelf.saver(states[0][1], self.group, self.durable)
        self.sight = sight
        if not all(fits for *_, fits, _ in states):
            self.sight = self._eye.look_anew()
            self.layout = make_layout(saver, self.sight, self._eye.state(self.sight), spreads=self.spread != 1)
        assert self.layout is not None
        count = max(count for *_, count in states)
        self.round = SnapshotRun(saver, self.layout, count)
        self.part(began, rest=False)
        self.taken += 1

    def iterations(self) -> int:
        """Over how many iterations the next snapshot is spread, as far as this rank knows."""
        if self.spread != "auto":
            count = self.spread
        elif self.layout is None or self.sight is None:
            return 1
        else:
            pieces = self.sight.pieces
            count = self.measured.iterations(
                sum(pieces[n].tensor.numel() * pieces[n].dtype.itemsize for n in self.layout.wanted)
            )
        return count if self.every is None else min(count, self.every)

    def part(self, began: float, *, rest: bool) -> None:
        """Begin to copy the next part, or all that is left; with the last part, begin to write."""
        run, sight = self.round, self.sight
        assert run is not None
        assert sight is not None
        if run.parts:
            try:
                now = self._eye.look(sight)
                if not same_layout(now, sight):
                    raise UsageError(
                        f"{run.target}: the job's tensors are others than when the parts of this snapshot were begun",
                        hint="nothing but optimizer steps may come between; take a new one",
                    )
                sight = self.sight = now
            except Exception as caught:  # noqa: BLE001 - told to the other ranks before anything is written
                run.failure = run.failure or caught
        last = rest or len(run.parts) == run.count - 1
        copying = time.perf_counter()
        items, at_once = run.set_aside(sight, run.numbers(sight, rest=rest), self._buffers)
        if at_once > 1 << 20:
            self.measured.local = smoothed(self.measured.local, at_once / (time.perf_counter() - copying))
        items = by_deadline(items, self.measured.deadline)
        copier = BackgroundCopier(items, self.throttle, self.may_run)
        run.add(self.step, copier, ExpectedTimings(self.measured, items), in_background=not last)
        if last:
            self._write_in_background(run, sight)
        spent = time.perf_counter() - began
        run.prepared += spent
        self.measured.prepare_seconds += spent
        self.measured.released = time.perf_counter()

    def _write_in_background(self, run: SnapshotRun, sight: JobView) -> None:
        told: tuple[Any, dict[str, Any]] = ([], {})
        try:
            told = (current_groups(sight), copy.deepcopy(self._eye.state(sight)))
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

        self.thread = threading.Thread(target=work, name="ucp-snapshot")
        self.thread.start()

    def _finish(self, run: SnapshotRun, step: int, written: float) -> None:
        self.measured.copied([copier for _, copier, _ in run.parts])
        self.finished.append((step, run.target))
        self.last = schedule_json(step, run.parts, prepared=run.prepared, written=written)
        if rank_and_size()[0] == 0:
            self._shelf.tell(self.last)
            self._shelf.drop_old(step)

    def wait(self) -> None:
        """Wait until the snapshot that is under way is on disk; raise what went wrong with it.

        Of one that is spread over steps, all parts that are left are taken now: every rank must call it.
        """
        if self.round is not None:
            if self.thread is None:
                self.part(time.perf_counter(), rest=True)
            assert self.thread is not None
            self.may_run.set()
            self.thread.join()
            self.thread, self.round = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
