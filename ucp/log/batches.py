"""What a stream has and may lose: jobs are appended, made durable several at a time, and then done.

What a failed write or sync has lost is written again, into a new segment. When that fails as well, `error` says why,
and nothing more is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucp import tunables
from ucp.errors import UcpError
from ucp.log.append import Appender, storage_error
from ucp.log.frames import FrameType
from ucp.log.ring import Slot
from ucp.log.steps import StateFrames, append_step, encode_block
from ucp.log.values import Value, ValueEncoder
from ucp.log.writer_stats import WriterStats


@dataclass(slots=True)
class Job:
    """Something to append: a step in a slot, or one small frame. `lsn` is where it went first."""

    slot: Slot | None = None
    kind: FrameType = FrameType.AUX
    step: int = 0
    payload: bytes = b""
    lsn: int = -1
    states: StateFrames | None = None  # made once: a difference is to what was written before


class Batches:
    """Appends jobs to a stream, in one thread. `release` gets every slot back when it is durable, or given up."""

    def __init__(
        self,
        appender: Appender,
        stats: WriterStats,
        release: Callable[[Slot], None],
        *,
        steps: int,
        most_steps: int,
        compress: bool,
        sparse: bool,
    ) -> None:
        """At least `steps` steps wait for the disk together where they are small, and never more than `most_steps`."""
        self.error: UcpError | None = None
        self.steps = steps
        self.stats = stats
        self._appender = appender
        self._release = release
        self._most_steps = most_steps
        self._compress = compress
        self._sparse = sparse
        self._pending: list[Job] = []  # written, not yet durable
        self._pending_bytes = 0
        self._oldest = 0.0  # when the first of them was written
        self._last_step = stats.durable_step
        self._values = ValueEncoder()
        self._done: list[tuple[Path, int]] = []  # closed segments of this writer and their last steps

    @property
    def is_empty(self) -> bool:
        """Is nothing waiting to become durable?"""
        return not self._pending

    def patience(self) -> float | None:
        """Seconds that what is pending may wait for more; None where there is nothing that waits."""
        if not self._pending or self._failed():
            return None
        return max(0.0, self._oldest + tunables.LOG_BATCH_SECONDS - time.monotonic())

    def begin_with(self, step: int, values: Sequence[Value]) -> None:
        """These are the states that the log starts from: the differences of the first step are to them."""
        self._values.begin_with(step, values)

    def add(self, job: Job) -> None:
        """Append, and sync where that fills a batch."""
        if self.error is not None:
            self.give_back(job)
            return
        if job.kind == FrameType.EPOCH_END:
            job.step = max(self._last_step, 0)
        if job.slot is not None and self._appender.end > tunables.LOG_SEGMENT_BYTES:
            self.rotate()
            if self._failed():
                self.give_back(job)
                return
        if not self._pending:
            self._oldest = time.monotonic()
        steps = 1 + sum(other.slot is not None for other in self._pending)
        size = 0 if job.slot is None else job.slot.nbytes
        full = self._pending_bytes + size >= tunables.LOG_BATCH_BYTES and steps >= self.steps
        sync = job.slot is not None and (full or steps >= self._most_steps)
        self._pending.append(job)
        self._pending_bytes += size
        try:
            self._write(job, batch_end=sync)
        except OSError as error:
            self._recover(error)
        if sync:
            self.sync()

    def sync(self) -> None:
        """Make everything pending durable, publish it, and give its slots back."""
        if not self._pending or self.error is not None:
            return
        begin = time.perf_counter()
        try:
            self._appender.sync()
        except OSError as error:
            self._recover(error)
            if self._failed():
                return
        self.stats.syncs += 1
        self.stats.sync_seconds += time.perf_counter() - begin
        done, self._pending, self._pending_bytes = self._pending, [], 0
        steps = [job.slot.step for job in done if job.slot is not None]
        self.stats.steps += len(steps)
        if steps:
            self.stats.durable_step = steps[-1]
        for job in done:
            self.give_back(job)

    def rotate(self) -> None:
        """Close the segment; the next step begins another."""
        self.sync()
        path = self._appender.path  # after the sync: it may have moved on to another
        if path is None or self._failed():
            return
        try:
            self._appender.close_segment()
        except OSError as error:
            self.error = storage_error(path, error)
            self.give_up()
            return
        if not self._done or self._done[-1][0] != path:
            self._done.append((path, self._last_step))

    def drop_upto(self, step: int) -> None:
        """Delete closed segments of this writer whose steps are all at most `step`."""
        while self._done and self._done[0][1] <= step:
            path, _ = self._done.pop(0)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.error = self.error or storage_error(path, error)
                self.give_up()
                return
            self.stats.dropped_segments += 1

    def give_up(self) -> None:
        """Give the slots of all that is pending back."""
        for job in self._pending:
            self.give_back(job)
        self._pending = []

    def give_back(self, job: Job) -> None:
        """Give a job's slot back, whatever became of the job."""
        if job.slot is not None:
            self._release(job.slot)
            job.slot = None

    def _failed(self) -> bool:
        return self.error is not None

    def _write(self, job: Job, *, batch_end: bool) -> None:
        appender, slot = self._appender, job.slot
        job.lsn = appender.next_lsn
        opened = appender.path
        if slot is None:
            appender.append(job.kind, job.step, [job.payload])
        else:
            blocks = [
                encode_block(
                    block, slot.arrays[block], slot.dtypes[block], compress=self._compress, sparse=self._sparse
                )
                for block in slot.present
            ]
            if slot.values and job.states is None:
                job.states = self._values.encode(slot.step, slot.values, compress=self._compress)
            written = append_step(
                appender, slot.step, slot.record, blocks, states=job.states, aux=slot.aux, batch_end=batch_end
            )
            self.stats.bytes += written
            self._last_step = slot.step
        if appender.path != opened:
            self.stats.segments += 1

    def _recover(self, error: OSError) -> None:
        """After a failed write or sync: everything pending once more, into a new segment. A sync is never repeated:

        after it has failed, the system may have thrown away what it could not write and say yes the next time.
        """
        first = next((job.lsn for job in self._pending if job.lsn >= 0), self._appender.next_lsn)
        failed = self._appender.path or self._appender.folder
        try:
            self._appender.abandon(first)
            for job in self._pending:
                self._write(job, batch_end=False)
            self._appender.sync()
            self.stats.rewrites += 1
        except OSError:
            self.error = storage_error(failed, error)
            self.give_up()
