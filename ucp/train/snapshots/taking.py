"""Taking snapshots one after the other: what of the job is copied when, and the thread that writes it."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ucp.errors import UsageError
from ucp.train.saved_index import steps_counted
from ucp.train.snapshots.copying import Copier, Throttle, in_order
from ucp.train.snapshots.costs import Expected, Measured, tell
from ucp.train.snapshots.eye import Eye
from ucp.train.snapshots.layout import Layout, Sight, hyper_now, is_same
from ucp.train.snapshots.plan import smoothed
from ucp.train.snapshots.round import Round
from ucp.train.snapshots.saving import lay_out
from ucp.train.snapshots.shelf import Shelf
from ucp.train.talk import agree, gather, world


class Taking:
    """The snapshots of one job, at most one of them under way. In the trainer's thread, unless it says otherwise."""

    def __init__(self, eye: Eye, shelf: Shelf, durable: bool, throttle: Throttle) -> None:
        self.step = 0  # that the state is of
        self.taken = 0
        self.skipped = 0  # because the one before was still being written
        self.finished: list[tuple[int, Path]] = []  # (step, where) of what is on disk, oldest first
        self.every: int | None = None
        self.spread: int | Literal["auto"] = 1
        self.durable, self.throttle = durable, throttle
        self.sight: Sight | None = None
        self.layout: Layout | None = None
        self.round: Round | None = None  # until it is written, or found to be
        self.thread: threading.Thread | None = None  # that writes it
        self.may_run = threading.Event()
        self.may_run.set()
        self.measured = Measured()
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
                fits = self.layout is not None and is_same(sight, before)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        name = self._shelf.free_name(self.step)
        states = gather((writing, name, self._error is None, error is None, fits, self.iterations()))
        if not all(fine for _, _, fine, *_ in states):
            self.wait()  # raises on the ranks that failed; the write agreed on it, so that all have
        if any(writing for writing, *_ in states):
            self.skipped += 1
            return
        self.wait()
        if not all(seen for _, _, _, seen, _, _ in states):
            agree(error)
        saver = self._shelf.saver(states[0][1], self.group, self.durable)
        self.sight = sight
        if not all(fits for *_, fits, _ in states):
            self.sight = self._eye.look_anew()
            self.layout = lay_out(saver, self.sight, self._eye.state(self.sight), spreads=self.spread != 1)
        assert self.layout is not None
        count = max(count for *_, count in states)
        self.round = Round(saver, self.layout, count)
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
                if not is_same(now, sight):
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
        items = in_order(items, self.measured.deadline)
        copier = Copier(items, self.throttle, self.may_run)
        run.add(self.step, copier, Expected(self.measured, items), in_background=not last)
        if last:
            self._write_in_background(run, sight)
        spent = time.perf_counter() - began
        run.prepared += spent
        self.measured.prepare_seconds += spent
        self.measured.released = time.perf_counter()

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

        self.thread = threading.Thread(target=work, name="ucp-snapshot")
        self.thread.start()

    def _finish(self, run: Round, step: int, written: float) -> None:
        self.measured.copied([copier for _, copier, _ in run.parts])
        self.finished.append((step, run.target))
        self.last = tell(step, run.parts, prepared=run.prepared, written=written)
        if world()[0] == 0:
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
