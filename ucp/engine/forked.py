"""Workers that are processes. Threads of one interpreter take turns at everything but the bytes themselves.

A worker is a fork: it has the plan, the index and the open files already. Over a socket it asks for a few parts at a
time, and tells what it has written; so the journal has one writer, and a worker that is done helps with what is left.
Workers end with their parent, whatever ends it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from select import POLLIN, poll
from typing import Any, Final, NoReturn

from ucp import errors, tunables
from ucp.engine.plan import Part
from ucp.engine.worker import Budget, Work, Worker, Written
from ucp.errors import StorageError, UcpError
from ucp.files.local import SourceFiles, die_with_parent
from ucp.records import dataclass, field, replace

_MOST_PARTS: Final = 64  # at a time
_NOTHING: Final = -1  # in the place of a stretch: there is no more to do


def is_possible(source: SourceFiles) -> bool:
    """Only Linux can tie a worker's life to ours; a fork has none of our threads; what is computed is computed once."""
    alone = threading.active_count() == 1
    return sys.platform == "linux" and alone and source.computed is None and not source.is_remote


def stream(stretches: Sequence[Iterable[Part]], work: Work, done: Callable[[list[Written]], None]) -> None:
    """Write every part. `done` and the work's `progress` are called here, in the parent.

    Workers walk along all stretches, each in its own copy: it must give every one of them the same parts.
    """
    parent = _Parent(len(stretches), done, work.progress)
    share = Budget(1, work.budget.memory // work.budget.jobs)
    try:
        for number in range(work.budget.jobs):
            near, far = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                near.close()
                told = _Told(Channel(far))
                own = replace(work, budget=share, progress=told.progress, stopped=told.never)
                _work(number, stretches, told, own)
            far.close()
            parent.workers[near.fileno()] = _Known(pid, number, Channel(near))
        parent.serve()
    finally:
        parent.end()


class Channel:
    """Messages, one JSON value a line, over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = b""  # the beginning of a line

    def send(self, message: Any) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any]:
        """Wait for messages; all that have come. None at all where the other side is gone."""
        while True:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            *lines, self._pending = (self._pending + data).split(b"\n")
            if lines or not data:
                return [json.loads(line) for line in lines]


# ----------------------------------------------------------------------------------------------------------------------
# The parent


@dataclass(slots=True)
class _Known:
    pid: int
    number: int
    channel: Channel
    left: bool = False


@dataclass(slots=True)
class _Parent:
    """Hands out parts, and hears what became of them."""

    stretches: int
    done: Callable[[list[Written]], None]
    progress: Callable[[int], None]
    workers: dict[int, _Known] = field(default_factory=dict)  # by file descriptor
    taken: dict[int, int] = field(default_factory=dict)  # stretch → parts that were handed out
    ended: set[int] = field(default_factory=set)  # stretches with no more parts

    def serve(self) -> None:
        """Until all workers have left."""
        ready = poll()
        for fd in self.workers:
            ready.register(fd, POLLIN)
        while self.workers:
            for fd, _ in ready.poll():
                worker = self.workers[fd]
                messages = worker.channel.receive()
                if not messages:
                    raise _lost(worker)
                for message in messages:
                    self._hear(worker, message)
                if worker.left:
                    ready.unregister(fd)
                    self._forget(fd)

    def _hear(self, worker: _Known, message: dict[str, Any]) -> None:
        if "failed" in message:
            raise _failure(message["failed"])
        if "bytes" in message:
            self.progress(message["bytes"])
        for part in message.get("wrote", ()):
            self.done([Written(*extent) for extent in part])
        if "next" in message:
            self._assign(worker, message["next"], message["ended"])
        worker.left = "left" in message

    def _assign(self, worker: _Known, count: int, ended: int | None) -> None:
        """Give a worker so many parts of its own stretch, or of another's when that is walked."""
        if ended is not None:
            self.ended.add(ended)
        order = (*range(worker.number, self.stretches), *range(min(worker.number, self.stretches)))
        stretch = next((n for n in order if n not in self.ended), _NOTHING)
        first = self.taken.get(stretch, 0)
        self.taken[stretch] = first + count
        worker.channel.send([stretch, first, count])

    def _forget(self, fd: int) -> None:
        worker = self.workers.pop(fd)
        worker.channel.sock.close()
        os.waitpid(worker.pid, 0)

    def end(self) -> None:
        """No worker outlives this, whatever happened."""
        for worker in self.workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        for fd in list(self.workers):
            self._forget(fd)


def _lost(worker: _Known) -> UcpError:
    return StorageError(f"a worker process ({worker.pid}) is gone: it was killed, or the machine is out of memory")


def _failure(told: dict[str, Any]) -> BaseException:
    kind = getattr(errors, told["kind"], None)
    if isinstance(kind, type) and issubclass(kind, UcpError):
        return kind(told["what"], hint=told["hint"])
    return RuntimeError(f"in a worker process:\n{told['what']}")


# ----------------------------------------------------------------------------------------------------------------------
# The worker


def _work(number: int, stretches: Sequence[Iterable[Part]], told: _Told, work: Work) -> NoReturn:
    """The whole life of a worker. Nothing of the parent's is flushed, closed or cleaned up here."""
    channel = told.channel
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
        die_with_parent()
        worker = Worker(work)
        walks = [_Walk(iter(stretch)) for stretch in stretches]
        message: dict[str, Any] = {"next": 1, "ended": None}
        while True:
            channel.send({**message, "bytes": told.flush()})
            ((stretch, first, count),) = channel.receive()  # a parent that is gone takes us along
            if stretch == _NOTHING:
                break
            parts = walks[stretch].get(first, count)
            wrote = [[(w.file, w.offset, w.nbytes, w.digest, w.crc) for w in worker.write(part)] for part in parts]
            # Small parts come by the dozen: about as many as make a large one.
            nbytes = sum(part.nbytes for part in parts)
            more = max(1, min(_MOST_PARTS, tunables.PART_BYTES * len(parts) // max(1, nbytes)))
            message = {"next": more, "ended": stretch if len(parts) < count else None, "wrote": wrote}
        channel.send({"left": number})
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        channel.send({"failed": _described(error)})
    finally:
        os._exit(0)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, UcpError):
        return {"kind": type(error).__name__, "what": error.what, "hint": error.hint}
    return {"kind": "", "what": traceback.format_exc(), "hint": None}


class _Told:
    """Progress that goes to the parent, in few messages."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._nbytes = 0

    def progress(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes >= tunables.TOLD_BYTES:
            self.channel.send({"bytes": self.flush()})

    def flush(self) -> int:
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes

    def never(self) -> bool:
        """A worker that is to stop is killed."""
        return False


class _Walk:
    """The parts of a stretch by number, asked for in rising order."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self._parts = parts
        self._at = 0

    def get(self, first: int, count: int) -> list[Part]:
        """Fewer than `count` only where the stretch ends."""
        skip = first - self._at
        self._at = first + count
        return list(islice(self._parts, skip, skip + count))
