"""The writer of a stream: takes filled slots from the training loop and writes them in a thread of its own.

Steps are appended, made durable several at a time, and their slots then returned. What a failed write or sync has lost
is written again, to a new segment; if that fails as well, the stream ends.
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
    FilelessWriter,
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
    """Totals of a writer so far. Seconds are wall-clock time, unless the name contains `cpu`."""

    steps: int = 0
    bytes: int = 0
    syncs: int = 0
    segments: int = 0
    dropped_segments: int = 0
    rewrites: int = 0  # failed writes or syncs that were repeated in a new segment
    stalls: int = 0  # the training loop found no free slot
    stall_seconds: float = 0.0
    sync_seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the writer's thread
    durable_step: int = -1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# Slots: memory between the training loop and the writer's thread ----------------------------------------------------


@dataclass(slots=True)
class StepSlot:
    """Memory for one step. The owner fills `arrays` of some blocks, lists these in `present`, and sets the rest.

    `arrays` stay at the same addresses, so they may be wrapped as tensors once.
    """

    number: int
    arrays: list[Bits]  # one per block of the schema: bit patterns in the gradient's own dtype
    dtypes: list[DType]
    step: int = 0
    record: StepRecord = field(default_factory=StepRecord)
    present: list[int] = field(default_factory=list)  # ids of the blocks that the step has
    values: list[StateValue] = field(default_factory=list)  # states and buffers; their memory belongs to the caller
    aux: Any = None  # JSON values

    @property
    def nbytes(self) -> int:
        """Bytes of gradients, states and buffers."""
        grads = sum(self.arrays[block].nbytes for block in self.present)
        return grads + sum(value.bits.nbytes for value in self.values)

    def clear(self) -> None:
        self.present = []
        self.values = []
        self.aux = None
        self.record = StepRecord()


def make_slots(schema: StreamSchema, count: int | None = None, *, gradients: bool = True) -> list[StepSlot]:
    """Slots for a stream: `count`, or as many as fit in `LOG_RING_BYTES`, but 4 to 64.

    Without `gradients` they have no memory of their own, and there are two: a step's states take more than gradients.
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
        memory.fill(0)  # touch every page now, so that the first steps need not
        arrays: list[Bits] = []
        at = 0
        for size, dtype in zip(sizes, dtypes, strict=True):
            arrays.append(memory[at : at + size].view(bits_type(dtype)))
            at += padded(size)
        slots.append(StepSlot(number, arrays, dtypes))
    return slots


# The thread's side: batches of steps that become durable together ---------------------------------------------------


@dataclass(slots=True)
class WriteJob:
    """Something to append: a step in a slot, or one small frame. `lsn` is the number of its first frame."""

    slot: StepSlot | None = None
    kind: FrameType = FrameType.AUX
    step: int = 0
    payload: bytes = b""
    lsn: int = -1
    states: StateFrames | None = None  # encoded once: differences are from what was written before


@dataclass(slots=True, kw_only=True)
class DurableBatches:
    """Appends jobs to a stream, in one thread. Every slot is passed to `release` when it is durable or given up."""

    writer: SegmentWriter
    stats: WriterStats
    release: Callable[[StepSlot], None]
    steps: int  # at least this many share a sync, if they are small
    most_steps: int  # never more than this
    compress: bool
    sparse: bool
    last_step: int
    error: UcpError | None = None  # nothing more can be written
    values: StateEncoder = field(default_factory=StateEncoder)
    _pending: list[WriteJob] = field(default_factory=list)  # written, not yet durable
    _pending_bytes: int = 0
    _oldest: float = 0.0  # when the first pending job was written
    _closed: list[tuple[Path, int]] = field(default_factory=list)  # closed segments of this writer, and last steps

    def seconds_until_sync(self) -> float | None:
        """How long pending jobs may still wait for others; None if there are none."""
        if not self._pending or self.error is not None:
            return None
        return max(0.0, self._oldest + settings.LOG_BATCH_SECONDS - time.monotonic())

    def add(self, job: WriteJob) -> None:
        """Append a job, and sync if that fills a batch."""
        if self.error is not None:
            self.give_back(job)
            return
        if job.kind == FrameType.EPOCH_END:
            job.step = max(self.last_step, 0)
        if job.slot is not None and self.writer.end > settings.LOG_SEGMENT_BYTES:
            self.rotate()
            if self._has_failed():
                self.give_back(job)
                return
        if not self._pending:
            self._oldest = time.monotonic()
        steps = 1 + sum(other.slot is not None for other in self._pending)
        size = 0 if job.slot is None else job.slot.nbytes
        full = self._pending_bytes + size >= settings.LOG_BATCH_BYTES and steps >= self.steps
        sync = job.slot is not None and (full or steps >= self.most_steps)
        self._pending.append(job)
        self._pending_bytes += size
        try:
            self._write(job, batch_end=sync)
        except OSError as error:
            self._rewrite(error)
        if sync:
            self.sync()

    def sync(self) -> None:
        """Make all pending jobs durable, publish `durable_step`, and give their slots back."""
        if not self._pending or self.error is not None:
            return
        begin = time.perf_counter()
        try:
            self.writer.sync()
        except OSError as error:
            self._rewrite(error)
            if self._has_failed():
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
        """Close the segment; the next step starts another."""
        self.sync()
        path = self.writer.path  # after the sync, which may have moved to another file
        if path is None or self._has_failed():
            return
        try:
            self.writer.close_segment()
        except OSError as error:
            self.error = log_write_error(path, error)
            self.give_up()
            return
        if not self._closed or self._closed[-1][0] != path:
            self._closed.append((path, self.last_step))

    def drop_segments_upto(self, step: int) -> None:
        """Delete closed segments of this writer whose steps are all at most `step`."""
        while self._closed and self._closed[0][1] <= step:
            path, _ = self._closed.pop(0)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.error = self.error or log_write_error(path, error)
                self.give_up()
                return
            self.stats.dropped_segments += 1

    def give_up(self) -> None:
        """Give back the slots of all pending jobs."""
        for job in self._pending:
            self.give_back(job)
        self._pending = []

    def give_back(self, job: WriteJob) -> None:
        """Give back a job's slot, whether it was written or not."""
        if job.slot is not None:
            self.release(job.slot)
            job.slot = None

    def _has_failed(self) -> bool:
        return self.error is not None  # a call, because mypy does not expect the attribute to change

    def _write(self, job: WriteJob, *, batch_end: bool) -> None:
        writer, slot = self.writer, job.slot
        job.lsn = writer.next_lsn
        path = writer.path
        if slot is None:
            writer.append(job.kind, job.step, [job.payload])
        else:
            how = {"compress": self.compress, "sparse": self.sparse}
            blocks = [encode_block(n, slot.arrays[n], slot.dtypes[n], **how) for n in slot.present]
            if slot.values and job.states is None:
                job.states = self.values.encode(slot.step, slot.values, compress=self.compress)
            self.stats.bytes += append_step(
                writer, slot.step, slot.record, blocks, states=job.states, aux=slot.aux, batch_end=batch_end
            )
            self.last_step = slot.step
        if writer.path != path:
            self.stats.segments += 1

    def _rewrite(self, error: OSError) -> None:
        """After a failed write or sync, write all pending jobs again, to a new segment.

        A failed sync is never repeated on the same file: the system may have discarded what it could not write, and
        report success the next time.
        """
        first = next((job.lsn for job in self._pending if job.lsn >= 0), self.writer.next_lsn)
        failed = self.writer.path or self.writer.folder
        try:
            self.writer.abandon(first)
            for job in self._pending:
                self._write(job, batch_end=False)
            self.writer.sync()
            self.stats.rewrites += 1
        except OSError:
            self.error = log_write_error(failed, error)
            self.give_up()


class StreamWriter:
    """Writes one stream of one epoch. The training loop calls it; a thread of its own writes.

    Slots return to the ring when they are durable, so that what a failed write has lost can be written again. If that
    fails as well, the stream is closed, and the next call from the training loop raises `StorageError`.
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
        on_frame: Callable[[FrameHeader, Sequence[Buffer]], None] | None = None,
    ) -> None:
        """`folder` is the stream's; without one, frames go to `on_frame` only.

        At least `batch_steps` steps share a sync. `on_frame` is called in the writer's thread with every frame that was
        written; it must copy what it keeps.
        """
        self.folder = folder
        self.stats = WriterStats(durable_step=durable_step)
        if folder is None:
            writer: SegmentWriter = FilelessWriter(epoch, schema.stream, schema.hash())
        else:
            writer = SegmentWriter(folder, epoch, schema.stream, schema.hash(), next_lsn)
        writer.on_frame = on_frame
        self.slots = make_slots(schema, slots, gradients=gradients)
        self._free: queue.SimpleQueue[StepSlot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        self._work: queue.SimpleQueue[WriteJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._bug: BaseException | None = None
        self._closed = False
        self._batches = DurableBatches(  # belongs to the thread, except for `error` and `steps`
            writer=writer,
            stats=self.stats,
            release=self.release,
            last_step=durable_step,
            steps=batch_steps,
            most_steps=len(self.slots),
            compress=compress,
            sparse=sparse,
        )
        self._thread = threading.Thread(target=self._run, name="ucp-log", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # a program that ends without `close` should not lose steps either

    @property
    def batch_steps(self) -> int:
        """How many steps, at least, share a sync."""
        return self._batches.steps

    @batch_steps.setter
    def batch_steps(self, steps: int) -> None:
        self._batches.steps = steps

    @property
    def durable_step(self) -> int:
        """The last step that survives a crash; initially the one given to the constructor."""
        return self.stats.durable_step

    def raise_error(self) -> None:
        """Raise the error of the thread, if it has failed."""
        if self._bug is not None:
            raise self._bug
        if self._batches.error is not None:
            raise self._batches.error

    def acquire(self) -> StepSlot:
        """A free slot; waits while all are in use."""
        self.raise_error()
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        self.stats.stalls += 1
        begin = time.perf_counter()
        slot = self._free.get()
        self.stats.stall_seconds += time.perf_counter() - begin
        if self._batches.error is not None or self._bug is not None:
            self._free.put(slot)
            self.raise_error()
        return slot

    def release(self, slot: StepSlot) -> None:
        """Clear a slot and return it to the ring."""
        slot.clear()
        self._free.put(slot)

    def submit(self, slot: StepSlot) -> None:
        """Hand over a filled slot."""
        self.raise_error()
        self._work.put(WriteJob(slot, step=slot.step))

    def append(self, kind: FrameType, step: int, payload: bytes) -> None:
        """Append a small frame between steps, after everything that was submitted before."""
        self.raise_error()
        self._work.put(WriteJob(None, kind, step, payload))

    def set_base_values(self, step: int, values: Sequence[StateValue]) -> None:
        """Set the states that the log starts from: the differences of the first step are from these."""
        self._work.put(lambda: self._batches.values.set_base_values(step, values))

    def rotate(self) -> None:
        """Start a new segment with the next step."""
        self._work.put(self._batches.rotate)

    def drop_segments_upto(self, step: int) -> None:
        """Delete this writer's closed segments whose steps are all at most `step`."""
        self._work.put(lambda: self._batches.drop_segments_upto(step))

    def flush(self) -> int:
        """Wait until everything submitted so far is durable; returns `durable_step`."""
        if self._closed:
            return self.durable_step
        done = threading.Event()

        def sync_now() -> None:
            try:
                self._batches.sync()
            finally:
                done.set()

        self._work.put(sync_now)
        while not done.wait(0.5) and self._thread.is_alive():
            pass
        self.raise_error()
        return self.durable_step

    def close(self, reason: str = "closed") -> None:
        """Write what is left, and end the stream and the thread."""
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

    def _run(self) -> None:
        """The thread."""
        try:
            while True:
                try:
                    work = self._work.get(timeout=self._batches.seconds_until_sync())
                except queue.Empty:
                    self._batches.sync()
                    continue
                if work is None:
                    self._batches.rotate()
                    self._release_all()
                    return
                if isinstance(work, WriteJob):
                    self._batches.add(work)
                else:
                    work()
                self.stats.cpu_seconds = time.thread_time()
        except BaseException as error:  # noqa: BLE001 - raised in the training loop's thread
            self._bug = error
            self._release_all()

    def _release_all(self) -> None:
        """Give back every slot, so that the training loop never waits for a writer that has stopped."""
        self._batches.give_up()
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if isinstance(work, WriteJob):
                self._batches.give_back(work)
            elif work is not None:
                work()  # `flush` waits for its end
            else:
                self._work.put(None)
                return
