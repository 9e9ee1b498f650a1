"""The thread that writes a stream: takes filled slots, writes them, waits for the disk once for several steps."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.errors import UcpError
from ucp.log.append import Appender, Buffer, Unwritten, storage_error
from ucp.log.frames import FrameHeader, FrameType
from ucp.log.payloads import pack_json
from ucp.log.ring import Slot, make_slots
from ucp.log.schema import StreamSchema
from ucp.log.steps import StateFrames, append_step, encode_block
from ucp.log.values import Value, ValueEncoder
from ucp.records import as_dict, dataclass


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
        return as_dict(self)


@dataclass(slots=True)
class _Job:
    """Something to append: a step in a slot, or one small frame. `lsn` is where it went first."""

    slot: Slot | None = None
    kind: FrameType = FrameType.AUX
    step: int = 0
    payload: bytes = b""
    lsn: int = -1
    states: StateFrames | None = None  # made once: a difference is to what was written before


class Writer:
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
        self.compress = compress
        self.sparse = sparse
        self.batch_steps = batch_steps
        self.stats = WriterStats(durable_step=durable_step)
        if folder is None:
            self._appender: Appender = Unwritten(epoch, schema.stream, schema.hash())
        else:
            self._appender = Appender(folder, epoch, schema.stream, schema.hash(), next_lsn)
        self._appender.tap = tap
        self._slots = make_slots(schema, slots, gradients=gradients)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._work: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._error: UcpError | None = None
        self._bug: BaseException | None = None
        self._closed = False
        # The thread's own:
        self._pending: list[_Job] = []  # written, not yet durable
        self._pending_bytes = 0
        self._oldest = 0.0  # when the first of them was written
        self._last_step = durable_step
        self._values = ValueEncoder()
        self._done: list[tuple[Path, int]] = []  # closed segments of this writer and their last steps
        self._thread = threading.Thread(target=self._run, name="ucp-log", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # a program that ends without `close` should lose nothing either

    # ------------------------------------------------------------------------------------------------------------------
    # The trainer's side

    @property
    def slots(self) -> list[Slot]:
        return self._slots

    @property
    def durable_step(self) -> int:
        """The last step that survives a crash; what the writer began with before the first."""
        return self.stats.durable_step

    def raise_error(self) -> None:
        """Raise what went wrong in the thread."""
        if self._bug is not None:
            raise self._bug
        if self._error is not None:
            raise self._error

    def acquire(self) -> Slot:
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
        if self._error is not None or self._bug is not None:
            self._free.put(slot)
            self.raise_error()
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back that holds nothing."""
        slot.clear()
        self._free.put(slot)

    def submit(self, slot: Slot) -> None:
        """Hand a filled slot over."""
        self.raise_error()
        self._work.put(_Job(slot, step=slot.step))

    def append(self, kind: FrameType, step: int, payload: bytes) -> None:
        """Append a small frame that is part of no step, after everything that was submitted before."""
        self.raise_error()
        self._work.put(_Job(None, kind, step, payload))

    def begin_with(self, step: int, values: Sequence[Value]) -> None:
        """These are the states that the log starts from: the differences of the first step are to them."""
        self._work.put(lambda: self._values.begin_with(step, values))

    def rotate(self) -> None:
        """Begin a new segment with the next step."""
        self._work.put(self._rotate)

    def drop_upto(self, step: int) -> None:
        """Delete this writer's closed segments whose steps are all at most `step`."""
        self._work.put(lambda: self._drop(step))

    def flush(self) -> int:
        """Wait until everything submitted so far is durable; gives `durable_step`."""
        if self._closed:
            return self.durable_step
        done = threading.Event()

        def sync_now() -> None:
            try:
                self._sync()
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
        if self._error is None and self._bug is None:
            self._work.put(_Job(None, FrameType.EPOCH_END, -1, pack_json({"reason": reason})))
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
                    work = self._work.get(timeout=self._patience())
                except queue.Empty:
                    self._sync()
                    continue
                if work is None:
                    self._finish()
                    return
                if isinstance(work, _Job):
                    self._add(work)
                else:
                    work()
                self.stats.cpu_seconds = time.thread_time()
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread
            self._bug = error
            self._let_go()

    def _failed(self) -> bool:
        return self._error is not None

    def _patience(self) -> float | None:
        """How long to wait for more work before what is pending must be made durable."""
        if not self._pending or self._failed():
            return None
        return max(0.0, self._oldest + tunables.LOG_BATCH_SECONDS - time.monotonic())

    def _add(self, job: _Job) -> None:
        if self._error is not None:
            self._give_back(job)
            return
        if job.kind == FrameType.EPOCH_END:
            job.step = max(self._last_step, 0)
        if job.slot is not None and self._appender.end > tunables.LOG_SEGMENT_BYTES:
            self._rotate()
            if self._failed():
                self._give_back(job)
                return
        if not self._pending:
            self._oldest = time.monotonic()
        steps = 1 + sum(other.slot is not None for other in self._pending)
        size = 0 if job.slot is None else job.slot.nbytes
        full = self._pending_bytes + size >= tunables.LOG_BATCH_BYTES and steps >= self.batch_steps
        sync = job.slot is not None and (full or steps >= len(self._slots))
        self._pending.append(job)
        self._pending_bytes += size
        try:
            self._write(job, batch_end=sync)
        except OSError as error:
            self._recover(error)
        if sync:
            self._sync()

    def _write(self, job: _Job, *, batch_end: bool) -> None:
        appender, slot = self._appender, job.slot
        job.lsn = appender.next_lsn
        opened = appender.path
        if slot is None:
            appender.append(job.kind, job.step, [job.payload])
        else:
            blocks = [
                encode_block(block, slot.arrays[block], slot.dtypes[block], compress=self.compress, sparse=self.sparse)
                for block in slot.present
            ]
            if slot.values and job.states is None:
                job.states = self._values.encode(slot.step, slot.values, compress=self.compress)
            written = append_step(
                appender, slot.step, slot.record, blocks, states=job.states, aux=slot.aux, batch_end=batch_end
            )
            self.stats.bytes += written
            self._last_step = slot.step
        if appender.path != opened:
            self.stats.segments += 1

    def _sync(self) -> None:
        """Make everything pending durable, publish it, and give its slots back."""
        if not self._pending or self._error is not None:
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
            self._give_back(job)

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
            self._error = storage_error(failed, error)
            self._let_go()

    def _rotate(self) -> None:
        self._sync()
        path = self._appender.path  # after the sync: it may have moved on to another
        if path is None or self._failed():
            return
        try:
            self._appender.close_segment()
        except OSError as error:
            self._error = storage_error(path, error)
            self._let_go()
            return
        if not self._done or self._done[-1][0] != path:
            self._done.append((path, self._last_step))

    def _drop(self, step: int) -> None:
        while self._done and self._done[0][1] <= step:
            path, _ = self._done.pop(0)
            path.unlink(missing_ok=True)
            self.stats.dropped_segments += 1

    def _finish(self) -> None:
        self._rotate()
        self._let_go()

    def _let_go(self) -> None:
        """Give every slot back, so that the trainer never waits for a writer that has stopped."""
        for job in self._pending:
            self._give_back(job)
        self._pending = []
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if isinstance(work, _Job):
                self._give_back(work)
            elif work is not None:
                work()  # flush: somebody waits for its end
            else:
                self._work.put(None)
                return

    def _give_back(self, job: _Job) -> None:
        if job.slot is not None:
            job.slot.clear()
            self._free.put(job.slot)
            job.slot = None
