"""The writer of a stream: takes filled slots from a trainer, and has a thread that writes them (see batches)."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ucp.errors import UcpError
from ucp.log.append import Appender, Buffer, Unwritten
from ucp.log.batches import Batches, Job
from ucp.log.frames import FrameHeader, FrameType
from ucp.log.payloads import pack_json
from ucp.log.ring import Slot, make_slots
from ucp.log.schema import StreamSchema
from ucp.log.values import Value
from ucp.log.writer_stats import WriterStats


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
        self.stats = WriterStats(durable_step=durable_step)
        if folder is None:
            appender: Appender = Unwritten(epoch, schema.stream, schema.hash())
        else:
            appender = Appender(folder, epoch, schema.stream, schema.hash(), next_lsn)
        appender.tap = tap
        self._slots = make_slots(schema, slots, gradients=gradients)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._work: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._bug: BaseException | None = None
        self._closed = False
        self._batches = Batches(  # the thread's own, but for `error` and `steps`
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
    def slots(self) -> list[Slot]:
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
        if self._batches.error is not None or self._bug is not None:
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
        self._work.put(Job(slot, step=slot.step))

    def append(self, kind: FrameType, step: int, payload: bytes) -> None:
        """Append a small frame that is part of no step, after everything that was submitted before."""
        self.raise_error()
        self._work.put(Job(None, kind, step, payload))

    def begin_with(self, step: int, values: Sequence[Value]) -> None:
        """These are the states that the log starts from: the differences of the first step are to them."""
        self._work.put(lambda: self._batches.begin_with(step, values))

    def rotate(self) -> None:
        """Begin a new segment with the next step."""
        self._work.put(self._batches.rotate)

    def drop_upto(self, step: int) -> None:
        """Delete this writer's closed segments whose steps are all at most `step`."""
        self._work.put(lambda: self._batches.drop_upto(step))

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
            self._work.put(Job(None, FrameType.EPOCH_END, -1, pack_json({"reason": reason})))
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
                if isinstance(work, Job):
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
            if isinstance(work, Job):
                self._batches.give_back(work)
            elif work is not None:
                work()  # flush: somebody waits for its end
            else:
                self._work.put(None)
                return
