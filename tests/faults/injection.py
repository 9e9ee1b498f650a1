"""Faults of the operating system, at the call that a test selects.

`install` replaces the functions of `os` that access files, permanently: it is meant for a child process. Calls are
counted from 0 over all threads. What a fault does depends on the call: a write without space, a short read.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

READS: Final = ("pread", "preadv")
WRITES: Final = ("write", "pwrite", "pwritev")
SYNCS: Final = ("fsync", "fdatasync")
OTHERS: Final = (
    "open", "ftruncate", "truncate", "rename", "replace", "mkdir", "rmdir", "unlink", "posix_fallocate",
)  # fmt: skip
CALLS: Final = (*READS, *WRITES, *SYNCS, *OTHERS)

KINDS: Final = {
    "short": (*READS, *WRITES),  # half of what was requested
    "EIO": (*READS, *WRITES, *SYNCS, *OTHERS),
    "ENOSPC": (*WRITES, "fsync", "open", "ftruncate", "mkdir", "rename", "replace", "posix_fallocate"),
    "kill": (*WRITES, *OTHERS),  # before the call
    "torn": WRITES,  # SIGKILL after half of it
    "power": (*WRITES, *OTHERS),  # SIGKILL, and what was not synced is lost
    "late": SYNCS,  # the disk is slow
    "lost": SYNCS,  # the disk reports success without having the bytes, and power fails at the next call
}

REAL: Final = {name: getattr(os, name) for name in CALLS}
_HERE: Final = (__file__, threading.__file__)


@dataclass
class Injector:
    """Counts calls, and does `kind` at call `at`."""

    kind: str | None = None
    at: int = -1
    calls: list[tuple[str, str]] = field(default_factory=list)  # (function, where it was called from)
    lost: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # path → ranges that are not on the disk
    paths: dict[int, str] = field(default_factory=dict)
    doomed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = REAL[name]

        def wrapped(*args: Any, **options: Any) -> Any:
            with self.lock:
                number = len(self.calls)
                self.calls.append((name, _site()))
                if number == self.at and self.kind is not None:
                    return self._fault(name, args, options)
                if self.doomed and name in (*WRITES, *OTHERS):
                    self._lose()
                    os.kill(os.getpid(), signal.SIGKILL)
                # Syncs are not executed, only recorded below.
                result = None if name in SYNCS else real(*args, **options)
                self._remember(name, args, result)
                return result

        return wrapped

    def _fault(self, name: str, args: Any, options: Any) -> Any:
        if self.kind == "short":
            return REAL[name](*_half(name, args), **options)
        if self.kind == "late":
            time.sleep(0.05)
            return self._remember(name, args, None)
        if self.kind == "lost":
            self.doomed = True
            if args[0] not in self.paths:  # written through Python's file objects, which are not counted
                self.lost[self._path(args[0])] = [(0, os.fstat(args[0]).st_size)]
            return None
        if self.kind == "torn":
            REAL[name](*_half(name, args), **options)
        if self.kind == "power":
            self._lose()
        if self.kind in ("kill", "torn", "power"):
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, str(self.kind))
        raise OSError(
            number, os.strerror(number), *(str(arg) for arg in args[:1] if isinstance(arg, (str, os.PathLike)))
        )

    def _remember(self, name: str, args: Any, result: Any) -> None:
        """Which bytes would be lost in a power failure now."""
        if name == "open":
            self.paths[result] = os.fspath(args[0])
        elif name == "pwrite" or name == "pwritev":
            self.lost.setdefault(self.paths[args[0]], []).append((args[2], result))
        elif name == "write" and args[0] in self.paths:  # ours are to the ends of files
            size = os.fstat(args[0]).st_size
            self.lost.setdefault(self.paths[args[0]], []).append((size - result, result))
        elif name in SYNCS:
            self.lost.pop(self._path(args[0]), None)
        elif name in ("rename", "replace"):
            old, new = map(os.fspath, args[:2])
            self.lost = {_moved(path, old, new): ranges for path, ranges in self.lost.items()}

    def _path(self, fd: int) -> str:
        return self.paths.get(fd) or os.readlink(f"/proc/self/fd/{fd}")

    def _lose(self) -> None:
        chance = random.Random(self.at)
        for path, ranges in self.lost.items():
            try:
                fd = REAL["open"](path, os.O_WRONLY)
            except OSError:
                continue
            for offset, size in ranges:
                if chance.random() < 0.5:
                    REAL["pwrite"](fd, bytes(size), offset)


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path


def _half(name: str, args: Any) -> tuple[Any, ...]:
    fd, data, *rest = args
    if name == "pread":
        return fd, max(1, data // 2), *rest
    if name in ("preadv", "pwritev"):
        first = memoryview(data[0])
        return fd, [first[: max(1, len(first) // 2)]], *rest
    return fd, memoryview(data)[: max(1, len(data) // 2)], *rest


def _site() -> str:
    """The two nearest lines of the project that lead to a call: they identify the kind of call."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 2:  # type: ignore[redundant-expr]
        file = frame.f_code.co_filename
        if f"{os.sep}ucp{os.sep}" in file and file not in _HERE:
            found.append(f"{os.path.basename(file)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def points(calls: list[tuple[str, str]], kind: str) -> list[int]:
    """Calls to inject a fault into: the first and the last one of every call site."""
    places: dict[tuple[str, str], list[int]] = {}
    for number, call in enumerate(calls):
        if call[0] in KINDS[kind]:
            places.setdefault(call, []).append(number)
    return sorted({number for numbers in places.values() for number in (numbers[0], numbers[-1])})


def always_short(most: int) -> None:
    """Limit every read and write to `most` bytes."""
    for name in ("pwrite", "write"):
        real = REAL[name]
        setattr(os, name, lambda fd, data, *rest, real=real: real(fd, memoryview(data)[:most], *rest))
    os.pread = lambda fd, size, offset: REAL["pread"](fd, min(size, most), offset)
    for name in ("preadv", "pwritev"):
        real = REAL[name]
        setattr(os, name, lambda fd, data, *rest, real=real: real(fd, [memoryview(data[0])[:most]], *rest))


def signal_storm() -> None:
    """Interrupt system calls all the time, with a signal that has no effect."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
