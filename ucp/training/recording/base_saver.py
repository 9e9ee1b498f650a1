"""The bases of a recording: when to save one, saving it in the background, and dropping old bases and log segments."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ucp.errors import StorageError
from ucp.log.base_folders import ATOMS, BaseCheckpoint, base_folder, list_bases, write_base
from ucp.log.reader import EPOCH
from ucp.log.tuning import REPLAY_SECONDS, RecordingCosts, Tuner, TuningChoice
from ucp.log.writer import StreamWriter, WriterStats
from ucp.training.collectives import all_gather
from ucp.training.save import SaveHandle, run_in_background

TUNE_EVERY: Final = 100  # steps between two choices of an automatic interval


@dataclass(slots=True)
class RecorderTimings:
    """Time spent on recording in the trainer's thread. Wall-clock seconds unless named CPU."""

    hook_seconds: float = 0.0  # at the ends of steps
    hook_cpu_seconds: float = 0.0
    base_seconds: float = 0.0  # waiting for bases, except the first
    bases: int = 0  # except the first
    first_base_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def to_json(self, steps: int, record_seconds: float, stats: WriterStats) -> dict[str, Any]:
        """The costs that `ucp tune` reads from the log. `record_seconds` is the total time in all hooks."""
        return {
            "steps": steps,
            "record_seconds": round(record_seconds, 6),
            "stall_seconds": round(stats.stall_seconds, 6),
            "syncs": stats.syncs,
            "bases": self.bases,
            "base_seconds": round(self.base_seconds, 6),
        }


class BaseInterval:
    """The number of steps between bases: fixed, none, or chosen from measurements (`"auto"`)."""

    def __init__(self, base_every: int | Literal["auto"] | None, mtbf: float, start: int) -> None:
        """`mtbf` is in seconds, for `"auto"`; `start` is the step at which recording started."""
        self.base_every = None if base_every == "auto" else base_every
        self._tuner = Tuner() if base_every == "auto" else None
        self._mtbf = mtbf
        self._start = start

    def is_tuning_step(self, step: int) -> bool:
        """Whether to choose the interval again after `step`."""
        return self._tuner is not None and (step - self._start) % TUNE_EVERY == 0

    def is_base_due(self, step: int, last: int) -> bool:
        """Whether to save a base after `step`; the newest one is of step `last`."""
        return self.base_every is not None and step - last >= self.base_every

    def choose(
        self,
        timings: RecorderTimings,
        stats: WriterStats,
        *,
        steps: int,
        record_seconds: float,
        base_duration: float,
        numel: int,
    ) -> TuningChoice:
        """Choose the intervals from the measurements of the slowest rank over `steps` steps. Collective.

        `record_seconds` were spent in hooks, `base_duration` is the time from the start of a base to its end, and
        `numel` is the number of elements that this rank logs.
        """
        assert self._tuner is not None
        record = record_seconds / steps
        measured = (
            (time.perf_counter() - timings.started - timings.base_seconds) / steps - record,
            timings.base_seconds / timings.bases if timings.bases else timings.first_base_seconds,
            stats.stall_seconds / stats.syncs if stats.syncs else 0.0,
            record,
            numel * REPLAY_SECONDS,
            base_duration,
        )
        step, base_stall, sync_stall, record, replay, base_time = map(max, zip(*all_gather(measured), strict=True))
        costs = RecordingCosts(
            max(step, 1e-9), self._mtbf, base_stall, sync_stall, record, replay, base_time, base_time
        )
        choice = self._tuner.update(costs)
        self.base_every = choice.base_every
        return choice


@dataclass(slots=True)
class BaseSaver:
    """Saves the bases of one epoch."""

    run: Path
    epoch: int
    last_step: int  # of the newest base; at first, the step at which the epoch starts
    next_number: int
    keep: int | None
    save: Callable[[Path, bool], SaveHandle]  # saves the job in a folder, asynchronously or not; called on every rank
    rank: int
    extra_files: Callable[[Path], None] | None = None  # writes further files of this rank into the folder of a base
    taken: int = 0
    seconds: float = 0.0  # from start to end of the last complete base
    _start: int = field(init=False)
    _work: Future[None] | None = None
    _finished: list[int] = field(default_factory=list)  # steps of the complete bases of this run, oldest first

    def __post_init__(self) -> None:
        self._start = self.last_step

    def save_first(self, step: int) -> str:
        """Save the first base now; returns its folder relative to the run's."""
        base = self._new(step)
        try:
            self.save(base.path, False).wait()
            self._publish(base)
        except (OSError, StorageError) as error:
            raise _base_error(base, error) from error
        return str(base.folder.relative_to(self.run))

    def take(self, step: int) -> None:
        """Save a base of the current state in the background. Collective."""
        self.wait()
        base = self._new(step)
        begin = time.perf_counter()
        try:
            handle = self.save(base.path, True)
        except (OSError, StorageError) as error:
            raise _base_error(base, error) from error

        def finish() -> None:
            try:
                handle.wait()
                self._publish(base)
            except (OSError, StorageError) as error:
                raise _base_error(base, error) from error
            self.seconds = time.perf_counter() - begin

        self._work = run_in_background(finish, "ucp-base")

    def drop_old_segments(self, writer: StreamWriter) -> None:
        """Drop the log segments before the oldest base that is kept. Cheap if there is nothing to drop."""
        keep = self.keep
        while keep is not None and len(self._finished) > keep:
            self._finished.pop(0)
            writer.drop_segments_upto(self._finished[0])

    def wait(self) -> None:
        """Wait for the base in progress; raise its error if it failed."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BaseException | None:
        """Wait for the base in progress; return its error, once."""
        work, self._work = self._work, None
        return None if work is None else work.exception()

    def raise_finished_error(self) -> None:
        """Raise the error of the last base if it has already failed. Cheap."""
        if self._work is not None and self._work.done():
            self.wait()

    def _new(self, step: int) -> BaseCheckpoint:
        base = BaseCheckpoint(base_folder(self.run, self.next_number), self.next_number, step, self.epoch, ATOMS)
        try:
            base.folder.mkdir(parents=True, exist_ok=True)
            if self.extra_files is not None:
                self.extra_files(base.folder)  # before the save, which completes only after all ranks have started it
        except OSError as error:
            raise _base_error(base, error) from error
        self.next_number += 1
        self.taken += 1
        self.last_step = step
        return base

    def _publish(self, base: BaseCheckpoint) -> None:
        if self.rank == 0:
            write_base(base)
            self._drop_old()
        self._finished.append(base.step)

    def _drop_old(self) -> None:
        """Remove old bases, and epochs that end before the oldest one that is kept. On rank 0."""
        if self.keep is None:
            return
        bases = list_bases(self.run)
        for base in bases[: -self.keep]:
            shutil.rmtree(base.folder)
        kept = bases[-self.keep :]
        if len(bases) > self.keep and kept[0].step >= self._start and kept[0].epoch == self.epoch:
            for folder in (self.run / "log").iterdir():
                named = EPOCH.fullmatch(folder.name)
                if named is not None and int(named[1]) < self.epoch:
                    shutil.rmtree(folder)


def _base_error(base: BaseCheckpoint, error: OSError | StorageError) -> StorageError:
    """An error that names the base which could not be saved."""
    reason = error.what if isinstance(error, StorageError) else error.strerror or str(error)
    reason = reason.removeprefix(f"{base.folder}: ")
    return StorageError(
        f"{base.folder}: the base of step {base.step} cannot be saved: {reason}",
        hint="older bases and the log are safe; free disk space or check the disk, and start recording again",
    )
