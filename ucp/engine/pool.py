"""The worker pool: items of work done by this thread, by threads, or by forked processes.

Converting, verifying and comparing describe what to do as a `Work` and hand their items to `run_pool`, which

1. asks the work whether its workers may be processes (`prepare_fork`), if the caller wants that;
2. starts `jobs` workers, each of which calls `Work.start` once;
3. lets each worker take items from its own queue first, and help with the other queues when that is empty;
4. calls `done` with every result, one call at a time, in this process;
5. stops all workers at the first failure and raises it.

Threads of one interpreter take turns at everything but the system calls. A process is a fork of this one, so it already
has the index, the plan and everything else in memory. It asks for items over a pipe and sends back results as JSON.
Worker processes die with their parent, however it ends; the error of a worker is raised in the parent.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from select import POLLIN, poll
from typing import Any, Final, Generic, NoReturn, TypeVar

from ucp import errors, settings
from ucp.errors import StorageError, UcpError
from ucp.storage.local import die_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
_MAX_ITEMS: Final = 64  # handed to a process at once
_NO_QUEUE: Final = -1  # in place of a queue number: no items are left


class Progress:
    """Receives the progress of a run, in bytes. This base class ignores it. `advance` may be called from any thread."""

    def start(self, total: int) -> None:
        """The run will process `total` bytes."""

    def resume(self, nbytes: int) -> None:
        """`nbytes` were already done by an earlier run."""
        self.advance(nbytes)

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""

    def finish(self) -> None:
        """The run has ended, successfully or not."""


class StoppedError(Exception):
    """Another worker failed, or the user interrupted the run: abandon the current item."""


class Meter:
    """Counts the bytes that all workers process, and is the place where a worker notices that it should stop."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        """`advance` is called with every number of bytes, from any thread."""
        self.nbytes = 0
        self._advance = advance
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more; raises StoppedError if the run was stopped."""
        with self._lock:
            self.nbytes += nbytes
        self._advance(nbytes)
        self.check()

    def check(self) -> None:
        """Raise StoppedError if the run was stopped."""
        if self._stopped.is_set():
            raise StoppedError

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()


@dataclass(frozen=True, slots=True)
class Worker(Generic[Item, Result]):
    """One thread or process at work: `run` does an item, and `close` is called when no more items will come.

    What `run` keeps from item to item (buffers, readers, open files) is bound to it. A process ends without `close`.
    """

    run: Callable[[Item], Result]
    close: Callable[[], None] = lambda: None


class Work(Generic[Item, Result]):
    """What to do with the items of a pool; shared by all its workers.

    A subclass defines `start`. If its workers may be processes it also defines `prepare_fork`, and the methods after it
    as needed: a process has its own copy of everything, so results and collected state travel as JSON.
    """

    def start(self, meter: Meter) -> Worker[Item, Result]:
        """Make a worker; called in the thread or process that it will run in. It reports bytes to `meter`."""
        raise NotImplementedError

    def load(self, item: Item) -> float:
        """How much of one hand-out to a process an item is: items are handed out together up to a sum of 1."""
        del item
        return 1.0

    def prepare_fork(self) -> bool:
        """Load or close what processes cannot share; False if the workers have to be threads."""
        return False

    def enter_fork(self, workers: int) -> None:
        """Called in each of `workers` processes before `start`."""

    def encode(self, result: Result) -> Any:
        """A result as a JSON value."""
        return result

    def decode(self, value: Any) -> Result:
        """The result that `encode` made `value` from."""
        result: Result = value
        return result

    def collect(self) -> Any:
        """In a process that has no more items: a JSON value for `merge`, or None."""

    def merge(self, collected: Any) -> None:
        """In the parent: add what a process collected."""


def can_fork() -> bool:
    """Whether workers can be processes: only Linux ties their life to ours, and a fork inherits no other threads."""
    return sys.platform == "linux" and threading.active_count() == 1


def run_pool(
    work: Work[Item, Result],
    queues: Sequence[Iterable[Item]],
    done: Callable[[Result], None],
    meter: Meter,
    *,
    jobs: int,
    processes: bool = False,
) -> None:
    """Do every item of all `queues` with `jobs` workers, and call `done` with each result, one call at a time.

    Worker `i` starts with its own queue, so that workers begin far from each other. With `processes`, workers are
    forked if the work allows it; then every process iterates over its own copy of a queue, which must yield the same
    items in all of them. The first failure stops all workers and is raised.
    """
    if not (processes and jobs > 1 and can_fork() and work.prepare_fork() and can_fork()):
        _ThreadRun(work, [iter(queue) for queue in queues], done, meter, max(1, jobs)).run()
        return
    dispatcher = _Dispatcher(work, done, len(queues), jobs)
    with WorkerProcesses(meter.advance) as started:
        for _ in range(jobs):
            started.start(lambda channel: _serve_items(work, queues, jobs, channel))
        started.serve(dispatcher.on_message)


def _queue_order(worker: int, workers: int, queues: int) -> Iterator[int]:
    """Numbers of the queues in the order in which a worker should take them."""
    first = worker * queues // workers
    return chain(range(first, queues), range(first))


# Threads ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ThreadRun(Generic[Item, Result]):
    work: Work[Item, Result]
    queues: Sequence[Iterator[Item]]
    done: Callable[[Result], None]
    meter: Meter
    jobs: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def run(self) -> None:
        if self.jobs == 1:
            self._worker(0)
        else:
            threads: list[threading.Thread] = []
            try:
                for number in range(self.jobs):
                    thread = threading.Thread(target=self._worker, args=(number,), name=f"ucp-worker-{number}")
                    thread.start()
                    threads.append(thread)
                for thread in threads:
                    thread.join()
            except BaseException:  # an interrupt, or a thread that cannot be started
                self.meter.stop()
                raise
            finally:
                for thread in threads:
                    thread.join()
        if self.failure is not None:
            raise self.failure

    def _worker(self, number: int) -> None:
        worker: Worker[Item, Result] | None = None
        try:
            worker = self.work.start(self.meter)
            for queue in _queue_order(number, self.jobs, len(self.queues)):
                while not self.meter.is_stopped:
                    with self.lock:
                        items = list(islice(self.queues[queue], 1))
                    if not items:
                        break
                    result = worker.run(items[0])
                    with self.lock:
                        self.done(result)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            with self.lock:
                self.failure = self.failure or error
            self.meter.stop()
        finally:
            if worker is not None:
                worker.close()


# Processes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Dispatcher(Generic[Item, Result]):
    """The parent's side: hands out ranges of the queues and takes in results.

    A process prefers queues that no other process has started: to help with one, it must iterate over what was already
    handed out of it.
    """

    work: Work[Item, Result]
    done: Callable[[Result], None]
    queues: int
    workers: int
    taken: dict[int, int] = field(default_factory=dict)  # queue → number of items that were handed out
    current: dict[int, int] = field(default_factory=dict)  # worker → its queue
    exhausted: set[int] = field(default_factory=set)

    def on_message(self, process: WorkerProcess, message: dict[str, Any]) -> None:
        for value in message.get("results", ()):
            self.done(self.work.decode(value))
        if "collected" in message:
            self.work.merge(message["collected"])
        if "next" in message:
            self._assign(process, message["next"], message["exhausted"])

    def _assign(self, process: WorkerProcess, count: int, exhausted: int | None) -> None:
        if exhausted is not None:
            self.exhausted.add(exhausted)
        queue = self.current.get(process.number, _NO_QUEUE)
        if queue == _NO_QUEUE or queue in self.exhausted:
            order = [n for n in _queue_order(process.number, self.workers, self.queues) if n not in self.exhausted]
            queue = next((n for n in order if n not in self.taken), order[0] if order else _NO_QUEUE)
            self.current[process.number] = queue
        first = self.taken.get(queue, 0)
        self.taken[queue] = first + count
        process.answer([queue, first, count])


def _serve_items(work: Work[Item, Result], queues: Sequence[Iterable[Item]], jobs: int, channel: PipeChannel) -> None:
    """The process's side: ask for items and do them, until none are left."""
    gc.freeze()  # a collection would touch, and so copy, every object that was forked
    work.enter_fork(jobs)
    progress = _BatchedProgress(channel)
    worker = work.start(Meter(progress.advance))
    cursors = [_QueueCursor(iter(queue)) for queue in queues]
    message: dict[str, Any] = {"next": 1, "exhausted": None}
    while True:
        channel.send({**message, "bytes": progress.flush()})
        ((queue, first, count),) = channel.receive()  # if the parent is gone, this process is killed while it waits
        if queue == _NO_QUEUE:
            break
        items = cursors[queue].take(first, count)
        results = [work.encode(worker.run(item)) for item in items]
        exhausted = queue if len(items) < count else None
        load = sum(map(work.load, items))
        # If the next items are like these, that many of them are about one load.
        wanted = max(1, min(_MAX_ITEMS, int(len(items) / load) if load else _MAX_ITEMS))
        message = {"next": wanted, "exhausted": exhausted, "results": results}
    collected = work.collect()
    if collected is not None:
        channel.send({"collected": collected})


@dataclass(slots=True)
class _QueueCursor(Generic[Item]):
    """The items of a queue by number, taken in rising order."""

    items: Iterator[Item]
    position: int = 0

    def take(self, first: int, count: int) -> list[Item]:
        """Items `[first, first + count)`; fewer only if the queue ends."""
        skip = first - self.position
        self.position = first + count
        return list(islice(self.items, skip, skip + count))


class _BatchedProgress:
    """The progress of a process, sent to the parent a few times per second."""

    def __init__(self, channel: PipeChannel) -> None:
        self._channel = channel
        self._nbytes = 0
        self._sent_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._sent_at >= settings.PROGRESS_SECONDS:
            self._sent_at = now
            self._channel.send({"bytes": self.flush()})

    def flush(self) -> int:
        """The bytes that were not sent yet, for a message that is sent anyway."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


class PipeChannel:
    """Two pipes that carry one JSON value per line. (`socket` would take 3 ms to import.)"""

    def __init__(self, reads: int, writes: int) -> None:
        """Takes the file descriptors of this end."""
        self.reads = reads
        self._writes = writes
        self._pending: list[bytes] = []  # the beginning of an incomplete line

    @staticmethod
    def pair() -> tuple[PipeChannel, PipeChannel]:
        """Both ends of a new channel."""
        to_far = os.pipe()
        try:
            to_near = os.pipe()
        except OSError:
            os.close(to_far[0])
            os.close(to_far[1])
            raise
        return PipeChannel(to_near[0], to_far[1]), PipeChannel(to_far[0], to_near[1])

    def close(self) -> None:
        os.close(self.reads)
        os.close(self._writes)

    def send(self, message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._writes, data) :]

    def receive(self) -> list[Any]:
        """Wait for messages and return all that have arrived; an empty list if the other end is closed."""
        while True:
            data = os.read(self.reads, 1 << 16)
            if not data:
                return []
            self._pending.append(data)
            if b"\n" in data:
                *lines, rest = b"".join(self._pending).split(b"\n")
                self._pending = [rest]
                return [json.loads(line) for line in lines]


@dataclass(slots=True)
class WorkerProcess:
    """A worker process as its parent sees it."""

    pid: int
    number: int  # from 0
    channel: PipeChannel
    has_ended: bool = False

    def answer(self, message: Any) -> None:
        """Send the process what it waits for."""
        try:
            self.channel.send(message)
        except ConnectionError:  # it was killed after it had asked
            raise self.lost() from None

    def lost(self) -> UcpError:
        return StorageError(f"a worker process ({self.pid}) is gone: it was killed, or the machine is out of memory")


class WorkerProcesses:
    """The worker processes of one run. Use as a context manager: none of them outlives it."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """`progress` is called in the parent with the bytes that the processes report."""
        self._progress = progress
        self._processes: dict[int, WorkerProcess] = {}  # by file descriptor

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGKILL)
        for fd in list(self._processes):
            self._reap(fd)

    def start(self, main: Callable[[PipeChannel], None]) -> None:
        """Fork a process that calls `main` with its end of the channel, and exits."""
        number = len(self._processes)
        # A terminal sends Ctrl-C, and Slurm SIGTERM, to all processes. Only the parent handles them, once it has
        # recorded its new process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            near, far = PipeChannel.pair()
            try:
                with warnings.catch_warnings():
                    # Python 3.12 and later warn if the process has threads of any kind. Those of numpy's BLAS stop
                    # before a fork by themselves, and no other threads exist here.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
            except OSError:
                near.close()
                far.close()
                raise
            if pid == 0:
                near.close()
                _run_process(number, far, main)
            far.close()
            self._processes[near.reads] = WorkerProcess(pid, number, near)
        except OSError as error:
            raise StorageError(
                f"worker process {number + 1} cannot be started: {error.strerror}",
                hint="the machine allows no more processes or is out of memory; --jobs 1 needs none",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def serve(self, on_message: Callable[[WorkerProcess, dict[str, Any]], None]) -> None:
        """Pass on every message until all processes have ended. The first failure of any is raised."""
        ready = poll()
        for fd in self._processes:
            ready.register(fd, POLLIN)
        while self._processes:
            for fd, _ in ready.poll():
                process = self._processes[fd]
                messages = process.channel.receive()
                if not messages:
                    raise process.lost()
                for message in messages:
                    if "failed" in message:
                        raise _decode_error(message["failed"])
                    if "bytes" in message:
                        self._progress(message["bytes"])
                    on_message(process, message)
                    process.has_ended = "ended" in message
                if process.has_ended:
                    ready.unregister(fd)
                    self._reap(fd)

    def _reap(self, fd: int) -> None:
        process = self._processes.pop(fd)
        process.channel.close()
        os.waitpid(process.pid, 0)


def _run_process(number: int, channel: PipeChannel, main: Callable[[PipeChannel], None]) -> NoReturn:
    """The whole life of a worker process. Nothing of the parent's is flushed, closed or cleaned up here."""
    try:
        die_with_parent()
        main(channel)
        channel.send({"ended": number})
    except BaseException as error:  # noqa: BLE001 - raised by the parent
        channel.send({"failed": _encode_error(error)})
    finally:
        os._exit(0)


def _encode_error(error: BaseException) -> dict[str, Any]:
    if isinstance(error, UcpError):
        # The nearest class of `ucp.errors`: others may not be imported in the parent.
        kind = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return {"kind": kind, "what": error.what, "hint": error.hint}
    import traceback  # only for bugs

    return {"kind": "", "what": traceback.format_exc(), "hint": None}


def _decode_error(value: dict[str, Any]) -> BaseException:
    kind = getattr(errors, value["kind"], None)
    if isinstance(kind, type) and issubclass(kind, UcpError):
        return kind(value["what"], hint=value["hint"])
    return RuntimeError(f"in a worker process:\n{value['what']}")
