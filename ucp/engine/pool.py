"""Workers that are processes: how they start and end, and how they speak with their parent.

Threads of one interpreter take turns at everything but the bytes themselves. A worker is a fork: it has the plan, the
index and the open files already. Over two pipes it asks for work and tells what became of it. Workers end with their
parent, whatever ends it; a failure of one is raised in the parent as its own.

A conversion by workers that are processes (see forks).

Workers ask for a few parts at a time, and tell what they have written; so the journal has one writer, and a worker that
is done helps with what is left. All states of some elements go to one worker where they are computed together.
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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from select import POLLIN, poll
from types import TracebackType
from typing import Any, Final, NoReturn

from ucp import errors, settings
from ucp.core.checkpoint import ForkableFiles
from ucp.engine.plan import CopyTask, first_queue, task_groups
from ucp.engine.worker import CopyContext, CopyWorker, WorkerBudget, WrittenRange
from ucp.errors import StorageError, UcpError
from ucp.storage.local import SourceFiles, die_with_parent


def can_fork() -> bool:
    """Only Linux can tie a worker's life to ours, and a fork has none of our threads."""
    return sys.platform == "linux" and threading.active_count() == 1


class PipeChannel:
    """Messages, one JSON value a line, over two pipes: `socket` would take 3 ms to import."""

    def __init__(self, reads: int, writes: int) -> None:
        """The descriptors of its own ends."""
        self.reads = reads
        self._writes = writes
        self._pending: list[bytes] = []  # the beginning of a line

    @staticmethod
    def pair() -> tuple[PipeChannel, PipeChannel]:
        """Two that are connected."""
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
        """Wait for messages; all that have come. None at all where the other side is gone."""
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
    """A worker as its parent knows it."""

    pid: int
    number: int  # from 0
    channel: PipeChannel
    left: bool = False

    def answer(self, message: Any) -> None:
        """Send a worker what it waits for."""
        try:
            self.channel.send(message)
        except ConnectionError:  # it was killed after it had asked
            raise self.lost() from None

    def lost(self) -> UcpError:
        return StorageError(f"a worker process ({self.pid}) is gone: it was killed, or the machine is out of memory")


class WorkerProcesses:
    """The workers of one piece of work, seen from their parent. As a context: none of them outlives it."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """`progress` is called, here in the parent, with the bytes that workers have moved."""
        self._progress = progress
        self._forks: dict[int, WorkerProcess] = {}  # by file descriptor

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)
        for fd in list(self._forks):
            self._forget(fd)

    def start(self, work: Callable[[int, PipeChannel], None]) -> None:
        """One more worker, which does nothing but `work` with its number and its end of the channel."""
        number = len(self._forks)
        # Ctrl-C goes to all processes of a terminal. Only the parent hears it, and not before it knows its worker.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            near, far = PipeChannel.pair()
            try:
                pid = _fork()
            except OSError:
                near.close()
                far.close()
                raise
            if pid == 0:
                near.close()
                _run_worker(number, far, work)
            far.close()
            self._forks[near.reads] = WorkerProcess(pid, number, near)
        except OSError as error:
            raise StorageError(
                f"worker process {number + 1} cannot be started: {error.strerror}",
                hint="the machine allows no more processes or is out of memory; --jobs 1 needs none",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)

    def serve(self, hear: Callable[[WorkerProcess, dict[str, Any]], None]) -> None:
        """Hear every message until all workers have left. The first failure of any is raised."""
        ready = poll()
        for fd in self._forks:
            ready.register(fd, POLLIN)
        while self._forks:
            for fd, _ in ready.poll():
                fork = self._forks[fd]
                messages = fork.channel.receive()
                if not messages:
                    raise fork.lost()
                for message in messages:
                    if "failed" in message:
                        raise _rebuild_error(message["failed"])
                    if "bytes" in message:
                        self._progress(message["bytes"])
                    hear(fork, message)
                    fork.left = "left" in message
                if fork.left:
                    ready.unregister(fd)
                    self._forget(fd)

    def _forget(self, fd: int) -> None:
        fork = self._forks.pop(fd)
        fork.channel.close()
        os.waitpid(fork.pid, 0)


class BatchedProgress:
    """A worker's progress, which goes to the parent in few messages."""

    def __init__(self, channel: PipeChannel) -> None:
        self._channel = channel
        self._nbytes = 0
        self._told_at = time.monotonic()

    def progress(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._told_at >= settings.PROGRESS_SECONDS:
            self._told_at = now
            self._channel.send({"bytes": self.flush()})

    def flush(self) -> int:
        """The bytes that were not told yet, for a message that goes out anyway."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


def _fork() -> int:
    with warnings.catch_warnings():
        # Later versions of Python warn where the process has threads of any kind. Those of numpy's algebra stop by
        # themselves before a fork, and there are no others.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_worker(number: int, channel: PipeChannel, work: Callable[[int, PipeChannel], None]) -> NoReturn:
    """The whole life of a worker. Nothing of the parent's is flushed, closed or cleaned up here."""
    try:
        die_with_parent()
        work(number, channel)
        channel.send({"left": number})
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        channel.send({"failed": _describe_error(error)})
    finally:
        os._exit(0)


def _describe_error(error: BaseException) -> dict[str, Any]:
    if isinstance(error, UcpError):
        return {"kind": type(error).__name__, "what": error.what, "hint": error.hint}
    import traceback  # seldom of use

    return {"kind": "", "what": traceback.format_exc(), "hint": None}


def _rebuild_error(told: dict[str, Any]) -> BaseException:
    kind = getattr(errors, told["kind"], None)
    if isinstance(kind, type) and issubclass(kind, UcpError):
        return kind(told["what"], hint=told["hint"])
    return RuntimeError(f"in a worker process:\n{told['what']}")


_MAX_GROUPS: Final = 64  # at a time
_NO_QUEUE: Final = -1  # in the place of a stretch: there is no more to do


def can_copy_in_processes(source: SourceFiles) -> bool:
    """Where workers can be processes and read for themselves: connections cannot be shared."""
    if source.is_remote or not can_fork():
        return False
    computed = source.computed
    # What is loaded for all workers may have begun threads of its own.
    return computed is None or (isinstance(computed, ForkableFiles) and computed.before_fork() and can_fork())


def copy_in_processes(
    stretches: Sequence[Iterable[CopyTask]], work: CopyContext, done: Callable[[list[WrittenRange]], None]
) -> None:
    """Write every part. `done` and the work's `progress` are called here, in the parent.

    A worker walks along its own copy of a stretch, which must give all of them the same parts. It takes stretches that
    nobody has begun first: to help with another's, it goes through what that one has done.
    """
    parent = _CopyScheduler(len(stretches), work.budget.jobs, done)
    with WorkerProcesses(work.progress) as started:
        for _ in range(work.budget.jobs):
            started.start(partial(_copy_worker, stretches, work))
        started.serve(parent.hear)


@dataclass(slots=True)
class _CopyScheduler:
    """Hands out bundles of parts, and hears what became of them."""

    stretches: int
    workers: int
    done: Callable[[list[WrittenRange]], None]
    taken: dict[int, int] = field(default_factory=dict)  # stretch → bundles that were handed out
    walked: dict[int, int] = field(default_factory=dict)  # worker → the stretch that it is on
    ended: set[int] = field(default_factory=set)  # stretches with no more of them

    def hear(self, fork: WorkerProcess, message: dict[str, Any]) -> None:
        for part in message.get("wrote", ()):
            self.done([WrittenRange(*extent) for extent in part])
        if "next" in message:
            self._assign(fork, message["next"], message["ended"])

    def _assign(self, fork: WorkerProcess, count: int, ended: int | None) -> None:
        """Give a worker so many bundles of the stretch that it is on, or when that is walked of another one."""
        if ended is not None:
            self.ended.add(ended)
        stretch = self.walked.get(fork.number, _NO_QUEUE)
        if stretch == _NO_QUEUE or stretch in self.ended:
            begin = first_queue(fork.number, self.workers, self.stretches)
            order = [n for n in (*range(begin, self.stretches), *range(begin)) if n not in self.ended]
            stretch = next((n for n in order if n not in self.taken), order[0] if order else _NO_QUEUE)
            self.walked[fork.number] = stretch
        first = self.taken.get(stretch, 0)
        self.taken[stretch] = first + count
        fork.answer([stretch, first, count])


def _copy_worker(stretches: Sequence[Iterable[CopyTask]], work: CopyContext, number: int, channel: PipeChannel) -> None:
    """What a worker does, until there are no more parts."""
    del number
    gc.freeze()  # to look for cycles among what was forked would copy all of it
    if isinstance(work.source.computed, ForkableFiles):
        work.source.computed.in_fork(work.budget.jobs)
    told = BatchedProgress(channel)
    share = WorkerBudget(1, work.budget.memory // work.budget.jobs)
    worker = CopyWorker(replace(work, budget=share, progress=told.progress, stopped=_never))
    walks = [_QueueCursor(task_groups(stretch)) for stretch in stretches]
    message: dict[str, Any] = {"next": 1, "ended": None}
    while True:
        channel.send({**message, "bytes": told.flush()})
        ((stretch, first, count),) = channel.receive()  # a parent that is gone takes us along
        if stretch == _NO_QUEUE:
            return
        taken = walks[stretch].get(first, count)
        parts = [part for bundle in taken for part in bundle]
        wrote = [[(w.file, w.offset, w.nbytes, w.digest, w.crc) for w in worker.write(part)] for part in parts]
        message = {"next": _next_batch_size(taken), "ended": stretch if len(taken) < count else None, "wrote": wrote}


def _next_batch_size(last: Sequence[Sequence[CopyTask]]) -> int:
    """How many bundles to ask for after these: small ones come by the dozen, about as many as make a large part."""
    parts = [part for bundle in last for part in bundle]
    is_computed = any(part.atom is not None and part.atom.computed for part in parts)
    wanted = settings.COMPUTED_BATCH_BYTES if is_computed else settings.COPY_TASK_BYTES
    nbytes = sum(part.nbytes for part in parts)
    return max(1, min(_MAX_GROUPS, wanted * len(last) // max(1, nbytes)))


def _never() -> bool:
    """A worker that is to stop is killed."""
    return False


class _QueueCursor:
    """The bundles of a stretch by number, asked for in rising order."""

    def __init__(self, bundled: Iterator[Sequence[CopyTask]]) -> None:
        self._bundles = bundled
        self._at = 0

    def get(self, first: int, count: int) -> list[Sequence[CopyTask]]:
        """Fewer than `count` only where the stretch ends."""
        skip = first - self._at
        self._at = first + count
        return list(islice(self._bundles, skip, skip + count))
