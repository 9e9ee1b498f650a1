"""Workers that are processes: how they start and end, and how they speak with their parent.

Threads of one interpreter take turns at everything but the bytes themselves. A worker is a fork: it has the plan, the
index and the open files already. Over two pipes it asks for work and tells what became of it. Workers end with their
parent, whatever ends it; a failure of one is raised in the parent as its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from select import POLLIN, poll
from types import TracebackType
from typing import Any, NoReturn

from ucp import errors, tunables
from ucp.errors import StorageError, UcpError
from ucp.files.local import die_with_parent


def are_possible() -> bool:
    """Only Linux can tie a worker's life to ours, and a fork has none of our threads."""
    return sys.platform == "linux" and threading.active_count() == 1


class Channel:
    """Messages, one JSON value a line, over two pipes: `socket` would take 3 ms to import."""

    def __init__(self, reads: int, writes: int) -> None:
        """The descriptors of its own ends."""
        self.reads = reads
        self._writes = writes
        self._pending: list[bytes] = []  # the beginning of a line

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two that are connected."""
        to_far = os.pipe()
        try:
            to_near = os.pipe()
        except OSError:
            os.close(to_far[0])
            os.close(to_far[1])
            raise
        return Channel(to_near[0], to_far[1]), Channel(to_far[0], to_near[1])

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
class Fork:
    """A worker as its parent knows it."""

    pid: int
    number: int  # from 0
    channel: Channel
    left: bool = False

    def answer(self, message: Any) -> None:
        """Send a worker what it waits for."""
        try:
            self.channel.send(message)
        except ConnectionError:  # it was killed after it had asked
            raise self.lost() from None

    def lost(self) -> UcpError:
        return StorageError(f"a worker process ({self.pid}) is gone: it was killed, or the machine is out of memory")


class Forks:
    """The workers of one piece of work, seen from their parent. As a context: none of them outlives it."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """`progress` is called, here in the parent, with the bytes that workers have moved."""
        self._progress = progress
        self._forks: dict[int, Fork] = {}  # by file descriptor

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)
        for fd in list(self._forks):
            self._forget(fd)

    def start(self, work: Callable[[int, Channel], None]) -> None:
        """One more worker, which does nothing but `work` with its number and its end of the channel."""
        number = len(self._forks)
        # Ctrl-C goes to all processes of a terminal. Only the parent hears it, and not before it knows its worker.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            near, far = Channel.pair()
            try:
                pid = _fork()
            except OSError:
                near.close()
                far.close()
                raise
            if pid == 0:
                near.close()
                _live(number, far, work)
            far.close()
            self._forks[near.reads] = Fork(pid, number, near)
        except OSError as error:
            raise StorageError(
                f"worker process {number + 1} cannot be started: {error.strerror}",
                hint="the machine allows no more processes or is out of memory; --jobs 1 needs none",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)

    def serve(self, hear: Callable[[Fork, dict[str, Any]], None]) -> None:
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
                        raise _failure(message["failed"])
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


class Told:
    """A worker's progress, which goes to the parent in few messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._nbytes = 0
        self._told_at = time.monotonic()

    def progress(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._told_at >= tunables.TOLD_SECONDS:
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


def _live(number: int, channel: Channel, work: Callable[[int, Channel], None]) -> NoReturn:
    """The whole life of a worker. Nothing of the parent's is flushed, closed or cleaned up here."""
    try:
        die_with_parent()
        work(number, channel)
        channel.send({"left": number})
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        channel.send({"failed": _described(error)})
    finally:
        os._exit(0)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, UcpError):
        return {"kind": type(error).__name__, "what": error.what, "hint": error.hint}
    import traceback  # seldom of use

    return {"kind": "", "what": traceback.format_exc(), "hint": None}


def _failure(told: dict[str, Any]) -> BaseException:
    kind = getattr(errors, told["kind"], None)
    if isinstance(kind, type) and issubclass(kind, UcpError):
        return kind(told["what"], hint=told["hint"])
    return RuntimeError(f"in a worker process:\n{told['what']}")
