"""Frames through shared memory: a ring that both processes have mapped, beside a socket on which they say how far.

The memory has no name: it is gone when neither process has it any more, however they ended. All that is said about it
(how far it was written, how far it was read) goes over the socket, so that no process believes a number in memory that
the other may be changing, and the end of one is noticed by the other as with any socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from ucp.shadow.wire import RefusedError

_PLACE: Final = struct.Struct("<Q")  # bytes that were written, or read, since the beginning
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing: a mapping stays good
_ACKNOWLEDGED: Final = 4  # the reader tells of every quarter of the ring


def offer_ring(sock: socket.socket, size: int) -> RingReader:
    """Make a ring of `size` bytes and hand it to the other end, who will write."""
    fd = os.memfd_create("ucp-shadow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        reader = RingReader(sock, mmap.mmap(fd, size))
        socket.send_fds(sock, [b"\0"], [fd])
        return reader
    finally:
        os.close(fd)


def take_ring(sock: socket.socket, size: int) -> RingWriter:
    """Take the ring of `size` bytes that the other end has made."""
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        if len(fds) != 1 or os.fstat(fds[0]).st_size != size or fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) != _SEALS:
            raise RefusedError("no ring where one was told of")
        return RingWriter(sock, mmap.mmap(fds[0], size))
    finally:
        for fd in fds:
            os.close(fd)


class _Ring:
    """What both ends have. A ring is of one thread; any may call `shutdown`."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        self._socket = sock
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)  # numpy lets other threads run while it copies
        self._size = len(memory)
        self._written = 0
        self._read = 0

    def settimeout(self, value: float | None, /) -> None:
        self._socket.settimeout(value)

    def shutdown(self, how: int, /) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        del self._bytes  # a map with views on it cannot be closed
        self._memory.close()
        self._socket.close()


class RingReader(_Ring):
    """The shadow's end."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        super().__init__(sock, memory)
        self._told = 0  # how far the writer knows that was read

    def recv_into(self, buffer: memoryview, /) -> int:
        """As of a socket: at least one byte, or 0 when the writer has left and everything of it was read."""
        if self._read == self._written and not self._wait():
            return 0
        at = self._read % self._size
        some = min(len(buffer), self._written - self._read, self._size - at)
        np.copyto(np.frombuffer(buffer, np.uint8, some), self._bytes[at : at + some])
        self._read += some
        if (self._read - self._told) * _ACKNOWLEDGED >= self._size:
            self._told = self._read
            with contextlib.suppress(OSError):  # the writer is gone: what it has written is read all the same
                self._socket.sendall(_PLACE.pack(self._read))
        return some

    def _wait(self) -> bool:
        """Wait until more was written; False where the writer has left."""
        told = b""
        while len(told) < _PLACE.size:
            try:
                more = self._socket.recv(_PLACE.size - len(told))
            except ConnectionResetError:  # it left without having heard how far we are: what it said came before this
                more = b""
            if not more:
                return False
            told += more
        written = _PLACE.unpack(told)[0]
        if not self._read < written <= self._read + self._size:
            raise RefusedError(f"{written - self._read} bytes in a ring of {self._size}")
        self._written = written
        return True

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        return self._socket.sendmsg(buffers)


class RingWriter(_Ring):
    """The job's end."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        super().__init__(sock, memory)
        self._partial = b""  # of a number that is coming

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """As of a socket: takes what there is room for, and waits for room for one byte as long as told."""
        self._hear(wait=False)
        while self._written - self._read == self._size:
            self._hear(wait=True)
        begin = self._written
        for part in buffers:
            done = 0
            while done < len(part) and self._written - self._read < self._size:
                at = self._written % self._size
                some = min(len(part) - done, self._size - at, self._size - (self._written - self._read))
                np.copyto(self._bytes[at : at + some], np.frombuffer(part, np.uint8, some, done))
                self._written += some
                done += some
            if done < len(part):
                break
        self._socket.sendall(_PLACE.pack(self._written))
        return self._written - begin

    def _hear(self, *, wait: bool) -> None:
        """Take what the reader says of how far it is."""
        if not wait:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return
        more = self._socket.recv(512 * _PLACE.size)
        if not more:
            raise ConnectionResetError("the shadow is gone")
        told = self._partial + more
        whole = len(told) // _PLACE.size * _PLACE.size
        self._partial = told[whole:]
        for (read,) in _PLACE.iter_unpack(told[:whole]):
            if not self._read <= read <= self._written:
                raise RefusedError(f"{read} bytes were read of {self._written}")
            self._read = read

    def recv_into(self, buffer: memoryview, /) -> int:
        return self._socket.recv_into(buffer)
