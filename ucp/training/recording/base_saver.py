"""What recording costs a job, counted in the trainer's thread, and the intervals that follow from it.

The bases that a recorder takes: saved in the background, and what they make superfluous dropped.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ucp.errors import StorageError
from ucp.log.base_folders import ATOMS, BaseCheckpoint, base_folder, list_bases, write_base
from ucp.log.reader import EPOCH
from ucp.log.tuning import REPLAY_SECONDS, RecordingCosts, Tuner, TuningChoice
from ucp.log.writer import StreamWriter, WriterStats
from ucp.training.collectives import all_gather
from ucp.training.save import SaveHandle

TUNE_EVERY: Final = 100  # steps, with an automatic interval between bases


@dataclass(slots=True)
class RecorderTimings:
    """Seconds of the wall clock, unless they say CPU."""

    hook_seconds: float = 0.0  # at the ends of steps
    hook_cpu_seconds: float = 0.0
    base_seconds: float = 0.0  # that training waited for bases after the first
    bases: int = 0  # after the first
    first_base_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def to_json(self, steps: int, record_seconds: float, stats: WriterStats) -> dict[str, Any]:
        """For the log: `ucp tune` reads it. `record_seconds` were spent in hooks, all told."""
        return {
            "steps": steps,
            "record_seconds": round(record_seconds, 6),
            "stall_seconds": round(stats.stall_seconds, 6),
            "syncs": stats.syncs,
            "bases": self.bases,
            "base_seconds": round(self.base_seconds, 6),
        }


class BaseInterval:
    """How many steps lie between bases: so many, none, or what is best by what was measured (`"auto"`)."""

    def __init__(self, base_every: int | Literal["auto"] | None, mtbf: float, start: int) -> None:
        """`mtbf` are seconds, for `"auto"`; `start` is the step that recording began with."""
        self.base_every = None if base_every == "auto" else base_every
        self._tuner = Tuner() if base_every == "auto" else None
        self._mtbf = mtbf
        self._start = start

    def are_chosen_after(self, step: int) -> bool:
        """Is it time to choose again?"""
        return self._tuner is not None and (step - self._start) % TUNE_EVERY == 0

    def want_base(self, step: int, last: int) -> bool:
        """Is it time for a base after `step`? The newest is of step `last`."""
        return self.base_every is not None and step - last >= self.base_every

    def want_all(self, step: int, last: int) -> bool:
        """Do the ranks do something together after `step`, unless one of them has failed?"""
        return self.are_chosen_after(step) or self.want_base(step, last)

    def choose(
        self,
        spent: RecorderTimings,
        stats: WriterStats,
        *,
        steps: int,
        record_seconds: float,
        whole_base_seconds: float,
        numel: int,
    ) -> TuningChoice:
        """The best intervals from what the slowest rank has measured in `steps` steps. Collective.

        `record_seconds` were spent in hooks, `whole_base_seconds` from a base's beginning to its end; `numel` elements
        are logged by this rank.
        """
        assert self._tuner is not None
        record = record_seconds / steps
        mine = (
            (time.perf_counter() - spent.started - spent.base_seconds) / steps - record,
            spent.base_seconds / spent.bases if spent.bases else spent.first_base_seconds,
            stats.stall_seconds / stats.syncs if stats.syncs else 0.0,
            record,
            numel * REPLAY_SECONDS,
            whole_base_seconds,
        )
        step, base_stall, sync_stall, record, replay, base_time = map(max, zip(*all_gather(mine), strict=True))
        costs = RecordingCosts(
            max(step, 1e-9), self._mtbf, base_stall, sync_stall, record, replay, base_time, base_time
        )
        choice = self._tuner.update(costs)
        self.base_every = choice.base_every
        return choice


class BaseSaver:
    """Bases of one epoch. `save(folder, asynchronous)` saves the live job; every rank calls alike."""

    def __init__(
        self,
        run: Path,
        epoch: int,
        start: int,
        first_number: int,
        keep: int | None,
        save: Callable[[Path, bool], SaveHandle],
        rank: int,
        beside: Callable[[Path], None] | None = None,
    ) -> None:
        """`beside` puts this rank's own things into the folder of a base."""
        self._run = run
        self._epoch = epoch
        self._start = start
        self._next = first_number
        self._keep = keep
        self._save = save
        self._rank = rank
        self._beside = beside
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[int] = []  # steps of whole bases of this run, oldest first
        self.last_step = start
        self.taken = 0
        self.seconds = 0.0  # that the last whole base took from beginning to end

    def begin_with(self, step: int) -> str:
        """Take the first base now; gives its folder relative to the run's."""
        base = self._new(step)
        try:
            self._save(base.path, False).wait()
            self._publish(base)
        except (OSError, StorageError) as error:
            raise _base_error(base, error) from error
        return str(base.folder.relative_to(self._run))

    def take(self, step: int) -> None:
        """Take a base of the state as it is now, in the background. Collective."""
        self.wait()
        base = self._new(step)
        begin = time.perf_counter()
        try:
            handle = self._save(base.path, True)
        except (OSError, StorageError) as error:
            raise _base_error(base, error) from error

        def finish() -> None:
            try:
                handle.wait()
                self._publish(base)
                self.seconds = time.perf_counter() - begin
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = _base_error(base, error)

        self._thread = threading.Thread(target=finish, name="ucp-base")
        self._thread.start()

    def drop_superfluous(self, writer: StreamWriter) -> None:
        """Let the writer drop what the second newest base has made superfluous. Cheap when there is nothing new."""
        keep = self._keep
        while keep is not None and len(self._finished) > keep:
            self._finished.pop(0)
            writer.drop_segments_upto(self._finished[0])

    def wait(self) -> None:
        """Wait for the base that is under way; raise what went wrong with it."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BaseException | None:
        """Wait for the base that is under way; what went wrong with it, told once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raise what went wrong with the last base, if that is known by now. Cheap."""
        if self._error is not None:
            self.wait()

    def _new(self, step: int) -> BaseCheckpoint:
        base = BaseCheckpoint(base_folder(self._run, self._next), self._next, step, self._epoch, ATOMS)
        try:
            base.folder.mkdir(parents=True, exist_ok=True)
            if self._beside is not None:
                self._beside(base.folder)  # before the save, which ends when every rank has begun it
        except OSError as error:
            raise _base_error(base, error) from error
        self._next += 1
        self.taken += 1
        self.last_step = step
        return base

    def _publish(self, base: BaseCheckpoint) -> None:
        if self._rank == 0:
            write_base(base)
            self._drop_old()
        self._finished.append(base.step)

    def _drop_old(self) -> None:
        """Older bases than are kept, and epochs that lie altogether before them. On rank 0."""
        if self._keep is None:
            return
        bases = list_bases(self._run)
        for base in bases[: -self._keep]:
            shutil.rmtree(base.folder)
        kept = bases[-self._keep :]
        if len(bases) > self._keep and kept[0].step >= self._start and kept[0].epoch == self._epoch:
            for folder in (self._run / "log").iterdir():
                named = EPOCH.fullmatch(folder.name)
                if named is not None and int(named[1]) < self._epoch:
                    shutil.rmtree(folder)


def _base_error(base: BaseCheckpoint, error: BaseException) -> BaseException:
    """What a user is told when the disk refuses a base: which one, and that nothing before it is lost."""
    if not isinstance(error, (StorageError, OSError)):
        return error
    reason = error.what if isinstance(error, StorageError) else error.strerror or str(error)
    reason = reason.removeprefix(f"{base.folder}: ")
    return StorageError(
        f"{base.folder}: the base of step {base.step} cannot be saved: {reason}",
        hint="older bases and the log are safe; make room, or see to the disk, and start recording again",
    )
