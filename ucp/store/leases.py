"""Leases: locks by which readers keep a slot as it is, and a writer keeps others out. They end with their process.

Locks belong to an open file (`F_OFD_SETLK`), so threads and libraries of one process do not get in each other's way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Final

from ucp.errors import IntegrityError, StorageError, UcpError, UsageError
from ucp.store.blocks import SlotHeader
from ucp.store.survey import Shape, Survey, read_shape, reader_of, survey

_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: `struct flock` of 64-bit Linux
_CANNOT: Final = {errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_WRITER_AT: Final = 0  # the byte that stands for being the writer
_ATTEMPTS: Final = 100


class BusyError(UcpError):
    """Readers hold every slot that could be overwritten, or another process writes."""


def lock(fd: int, at: int, kind: int) -> bool:
    """Try to lock the byte `at` (`F_RDLCK`, `F_WRLCK`, `F_UNLCK`). True also where the file system has no locks."""
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        return True
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _CANNOT:
            return True
        raise
    return True


def become_writer(fd: int, path: Path) -> None:
    """One writer a store."""
    if not lock(fd, _WRITER_AT, fcntl.F_WRLCK):
        raise BusyError(f"{path}: another process writes into this store", hint="one job a store: end the other first")


def stop_writing(fd: int) -> None:
    """Let another process write. (Closing `fd` is not enough: a map of the file keeps it open.)"""
    lock(fd, _WRITER_AT, fcntl.F_UNLCK)


class Lease:
    """A generation that stays as it is for as long as this object lives (or until `close`)."""

    def __init__(self, fd: int, shape: Shape, found: Survey, header: SlotHeader) -> None:
        self.fd = fd
        self.shape = shape
        self.survey = found
        self.header = header

    def close(self) -> None:
        """Let the slot go."""
        if self.fd >= 0:
            lock(self.fd, self.shape.layout.slot_at(self.header.slot), fcntl.F_UNLCK)
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def take_lease(path: Path, step: int | None = None) -> Lease:
    """Hold the newest whole generation of a store, or that of a certain step."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        read = reader_of(fd, path)
        shape = read_shape(read, os.fstat(fd).st_size, path)
        for _ in range(_ATTEMPTS):
            found = survey(read, shape)
            header = choose(found, path, step)
            at = shape.layout.slot_at(header.slot)
            if lock(fd, at, fcntl.F_RDLCK):
                # Between looking and locking the writer may have gone on: look again.
                again = survey(read, shape)
                if any(same.sequence == header.sequence and same.slot == header.slot for same in again.generations):
                    return Lease(fd, shape, again, header)
                lock(fd, at, fcntl.F_UNLCK)
            time.sleep(0.001)
        raise BusyError(f"{path}: generations come faster than they can be held", hint="try again")
    except BaseException:
        os.close(fd)
        raise


def choose(found: Survey, path: Path, step: int | None) -> SlotHeader:
    """The generation that is wanted among those that are there."""
    if step is not None:
        for header in found.generations:
            if header.step == step:
                return header
        there = ", ".join(str(header.step) for header in found.generations) or "none"
        raise UsageError(f"{path}: holds no generation of step {step}", hint=f"steps that it holds: {there}")
    if found.root is not None:
        return found.root
    if found.root_superblock is not None and not found.broken:
        raise IntegrityError(f"{path}: holds no generation yet", hint="the job has committed none: wait for the first")
    raise IntegrityError(
        f"{path}: no generation of it is whole: "
        + (f"the header of slot {found.broken[0].slot} is damaged" if found.broken else "both superblocks are damaged"),
        hint="restore the store from a copy",
    )
