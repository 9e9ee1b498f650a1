"""What a writer of a log counts.

The memory between a trainer and its log: a few slots, each with room for the gradients of one step.

What a stream has and may lose: jobs are appended, made durable several at a time, and then done.

What a failed write or sync has lost is written again, into a new segment. When that fails as well, `error` says why,
and nothing more is written.

The writer of a stream: takes filled slots from a trainer, and has a thread that writes them (see batches).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ucp import settings
from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import UcpError
from ucp.log.codecs import Bits, bits_type
from ucp.log.frames import FrameHeader, FrameType, padded
from ucp.log.payloads import StepRecord, pack_json
from ucp.log.segment_writer import (
    Buffer,
    FileLessWriter,
    SegmentWriter,
    StateEncoder,
    StateFrames,
    StateValue,
    append_step,
    encode_block,
    log_write_error,
)
from ucp.log.stream_schema import StreamSchema


@dataclass(slots=True)
class WriterStats:
    """What a writer has done so far. Seconds are of the wall clock, unless they say CPU."""

    steps: int = 0
    bytes: int = 0
    syncs: int = 0
    segments: int = 0
    dropped_segments: int = 0
    rewrites: int = 0  # a failed write or sync was made good in a new segment
    stalls: int = 0  # the trainer found no free slot
    stall_seconds: float = 0.0
    sync_seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the writer's thread
    durable_step: int = -1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class StepSlot:
    """Room for one step. Whoever has acquired it fills `arrays` of some blocks, names them in `present`, sets the rest.

    `arrays` never change place: they may be wrapped once and used for every step.
    """

    number: int
    arrays: list[Bits]  # one a block of the schema, in its gradient's own type, as bit patterns
    dtypes: list[DType]
    step: int = 0
    record: StepRecord = field(default_factory=StepRecord)
    present: list[int] = field(default_factory=list)  # ids of the blocks that the step has
    values: list[StateValue] = field(
        default_factory=list
    )  # states and buffers; theirs is the memory of who filled the slot
    aux: Any = None  # JSON values

    @property
    def nbytes(self) -> int:
        """Of everything that the step has."""
        grads = sum(self.arrays[block].nbytes for block in self.present)
        return grads + sum(value.bits.nbytes for value in self.values)

    def clear(self) -> None:
        self.present = []
        self.values = []
        self.aux = None
        self.record = StepRecord()


def make_slots(schema: StreamSchema, count: int | None = None, *, gradients: bool = True) -> list[StepSlot]:
    """Slots for a stream; as many as `LOG_RING_BYTES` allow, but at least four, unless `count` is given.

    Without `gradients` they have no memory of their own, and there are two: states are more to hold than gradients.
    """
    if not gradients:
        return [StepSlot(number, [], []) for number in range(count or 2)]
    dtypes = [BY_NAME[schema.tensors[block.tensor].grad_dtype] for block in schema.blocks]
    sizes = [block.count * dtype.itemsize for block, dtype in zip(schema.blocks, dtypes, strict=True)]
    total = sum(map(padded, sizes))
    if count is None:
        count = min(max(settings.LOG_RING_BYTES // max(total, 1), 4), 64)
    slots = []
    for number in range(count):
        memory = np.empty(max(total, 1), np.uint8)
        memory.fill(0)  # touches every page: the first steps should not pay for that
        arrays: list[Bits] = []
        at = 0
        for size, dtype in zip(sizes, dtypes, strict=True):
            arrays.append(memory[at : at + size].view(bits_type(dtype)))
            at += padded(size)
        slots.append(StepSlot(number, arrays, dtypes))
    return slots


@dataclass(slots=True)
class WriteJob:
    """Something to append: a step in a slot, or one small frame. `lsn` is where it went first."""

    slot: StepSlot | None = None
    kind: FrameType = FrameType.AUX
    step: int = 0
    payload: bytes = b""
    lsn: int = -1
    states: StateFrames | None = None  # made once: a difference is to what was written before


class DurableBatches:
    """Appends jobs to a stream, in one thread. `release` gets every slot back when it is durable, or given up."""

    def __init__(
        self,
        appender: SegmentWriter,
        stats: WriterStats,
        release: Callable[[StepSlot], None],
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
        self._pending: list[WriteJob] = []  # written, not yet durable
        self._pending_bytes = 0
        self._oldest = 0.0  # when the first of them was written
        self._last_step = stats.durable_step
        self._values = StateEncoder()
        self._done: list[tuple[Path, int]] = []  # closed segments of this writer and their last steps

    @property
    def is_empty(self) -> bool:
        """Is nothing waiting to become durable?"""
        return not self._pending

    def patience(self) -> float | None:
        """Seconds that what is pending may wait for more; None where there is nothing that waits."""
        if not self._pending or self._failed():
            return None
        return max(0.0, self._oldest + settings.LOG_BATCH_SECONDS - time.monotonic())

    def begin_with(self, step: int, values: Sequence[StateValue]) -> None:
        """These are the states that the log starts from: the differences of the first step are to them."""
        self._values.begin_with(step, values)

    def add(self, job: WriteJob) -> None:
        """Append, and sync where that fills a batch."""
        if self.error is not None:
            self.give_back(job)
            return
        if job.kind == FrameType.EPOCH_END:
            job.step = max(self._last_step, 0)
        if job.slot is not None and self._appender.end > settings.LOG_SEGMENT_BYTES:
            self.rotate()
            if self._failed():
                self.give_back(job)
                return
        if not self._pending:
            self._oldest = time.monotonic()
        steps = 1 + sum(other.slot is not None for other in self._pending)
        size = 0 if job.slot is None else job.slot.nbytes
        full = self._pending_bytes + size >= settings.LOG_BATCH_BYTES and steps >= self.steps
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
            self.error = log_write_error(path, error)
            self.give_up()
            return
        if not self._done or self._done[-1][0] != path:
            self._done.append((path, self._last_step))

    def drop_segments_upto(self, step: int) -> None:
        """Delete closed segments of this writer whose steps are all at most `step`."""
        while self._done and self._done[0][1] <= step:
            path, _ = self._done.pop(0)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.error = self.error or log_write_error(path, error)
                self.give_up()
                return
            self.stats.dropped_segments += 1

    def give_up(self) -> None:
        """Give the slots of all that is pending back."""
        for job in self._pending:
            self.give_back(job)
        self._pending = []

    def give_back(self, job: WriteJob) -> None:
        """Give a job's slot back, whatever became of the job."""
        if job.slot is not None:
            self._release(job.slot)
            job.slot = None

    def _failed(self) -> bool:
        return self.error is not None

    def _write(self, job: WriteJob, *, batch_end: bool) -> None:
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
            self.error = log_write_error(failed, error)
            self.give_up()


class StreamWriter:
    """Writes one stream of one epoch. The trainer's thread calls; a thread of its own writes.

    Slots come back to the ring when they are durable, so that what a failed write has lost can be written again. When
    that fails as well the stream is closed, and the next call of the trainer raises `StorageError`.
    """

    def __init__(
        self,
        folder: Path | None,
        epoch: int,
        schema: StreamSchema,
        *,
        slots: int | None = None,
        gradients: bool = True,
        compress: bool = False,
        sparse: bool = False,
        batch_steps: int = 1,
        next_lsn: int = 0,
        durable_step: int = -1,
        tap: Callable[[FrameHeader, Sequence[Buffer]], None] | None = None,
    ) -> None:
        """`folder` is the stream's; without one, nothing is written and `tap` has all there is. `batch_steps` is how
        many steps, at least, wait for the disk together. `tap` is shown every frame that was written, in the writer's
        thread; what it wants to keep it copies.
        """
        self.folder = folder
        self.stats = WriterStats(durable_step=durable_step)
        if folder is None:
            appender: SegmentWriter = FileLessWriter(epoch, schema.stream, schema.hash())
        else:
            appender = SegmentWriter(folder, epoch, schema.stream, schema.hash(), next_lsn)
        appender.tap = tap
        self._slots = make_slots(schema, slots, gradients=gradients)
        self._free: queue.SimpleQueue[StepSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._work: queue.SimpleQueue[WriteJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._bug: BaseException | None = None
        self._closed = False
        self._batches = DurableBatches(  # the thread's own, but for `error` and `steps`
            appender,
            self.stats,
            self.release,
            steps=batch_steps,
            most_steps=len(self._slots),
            compress=compress,
            sparse=sparse,
        )
        self._thread = threading.Thread(target=self._run, name="ucp-log", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # a program that ends without `close` should lose nothing either

    # ------------------------------------------------------------------------------------------------------------------
    # The trainer's side

    @property
    def slots(self) -> list[StepSlot]:
        return self._slots

    @property
    def batch_steps(self) -> int:
        """How many steps, at least, wait for the disk together."""
        return self._batches.steps

    @batch_steps.setter
    def batch_steps(self, steps: int) -> None:
        self._batches.steps = steps

    @property
    def durable_step(self) -> int:
        """The last step that survives a crash; what the writer began with before the first."""
        return self.stats.durable_step

    def raise_error(self) -> None:
        """Raise what went wrong in the thread."""
        if self._bug is not None:
            raise self._bug
        if self._batches.error is not None:
            raise self._batches.error

    def acquire(self) -> StepSlot:
        """A free slot; waits while all are in use."""
        self.raise_error()
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        self.stats.stalls += 1
        begin = time.perf_counter()
        slot = self._free.get()
        self.stats.stall_seconds += time.perf_counter() - begin
        if self._batches.error is not None or self._bug is not None:
            self._free.put(slot)
            self.raise_error()
        return slot

    def release(self, slot: StepSlot) -> None:
        """Give a slot back that holds nothing."""
        slot.clear()
        self._free.put(slot)

    def submit(self, slot: StepSlot) -> None:
        """Hand a filled slot over."""
        self.raise_error()
        self._work.put(WriteJob(slot, step=slot.step))

    def append(self, kind: FrameType, step: int, payload: bytes) -> None:
        """Append a small frame that is part of no step, after everything that was submitted before."""
        self.raise_error()
        self._work.put(WriteJob(None, kind, step, payload))

    def begin_with(self, step: int, values: Sequence[StateValue]) -> None:
        """These are the states that the log starts from: the differences of the first step are to them."""
        self._work.put(lambda: self._batches.begin_with(step, values))

    def rotate(self) -> None:
        """Begin a new segment with the next step."""
        self._work.put(self._batches.rotate)

    def drop_segments_upto(self, step: int) -> None:
        """Delete this writer's closed segments whose steps are all at most `step`."""
        self._work.put(lambda: self._batches.drop_segments_upto(step))

    def flush(self) -> int:
        """Wait until everything submitted so far is durable; gives `durable_step`."""
        if self._closed:
            return self.durable_step
        done = threading.Event()

        def sync_now() -> None:
            try:
                self._batches.sync()
            finally:
                done.set()

        self._work.put(sync_now)
        while not done.wait(0.5):
            if not self._thread.is_alive():
                break
        self.raise_error()
        return self.durable_step

    def close(self, reason: str = "closed") -> None:
        """Write what is left, end the stream and the thread."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._batches.error is None and self._bug is None:
            self._work.put(WriteJob(None, FrameType.EPOCH_END, -1, pack_json({"reason": reason})))
        self._work.put(None)
        self._thread.join()
        self.raise_error()

    def _at_exit(self) -> None:
        with contextlib.suppress(UcpError):
            self.close("the program ended")

    # ------------------------------------------------------------------------------------------------------------------
    # The thread's side

    def _run(self) -> None:
        try:
            while True:
                try:
                    work = self._work.get(timeout=self._batches.patience())
                except queue.Empty:
                    self._batches.sync()
                    continue
                if work is None:
                    self._batches.rotate()
                    self._let_go()
                    return
                if isinstance(work, WriteJob):
                    self._batches.add(work)
                else:
                    work()
                self.stats.cpu_seconds = time.thread_time()
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread
            self._bug = error
            self._let_go()

    def _let_go(self) -> None:
        """Give every slot back, so that the trainer never waits for a writer that has stopped."""
        self._batches.give_up()
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if isinstance(work, WriteJob):
                self._batches.give_back(work)
            elif work is not None:
                work()  # flush: somebody waits for its end
            else:
                self._work.put(None)
                return
