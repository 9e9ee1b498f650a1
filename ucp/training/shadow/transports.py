"""Frames over torch.distributed: a group of two for every rank and its shadow, apart from the job's own groups.

For clusters where a job's processes reach each other through gloo, with its choice of network, and not otherwise. The
shadow keeps the store in which the two find each other.

Frames through shared memory: a ring that both processes have mapped, beside a socket on which they say how far.

The memory has no name: it is gone when neither process has it any more, however they ended. All that is said about it
(how far it was written, how far it was read) goes over the socket, so that no process believes a number in memory that
the other may be changing, and the end of one is noticed by the other as with any socket.

How a channel to a shadow comes to be, at both ends: over TCP, over gloo, or by a name on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import numpy as np

from ucp import settings
from ucp.errors import StorageError, UcpError, UsageError
from ucp.training.shadow.protocol import (
    TOKEN_VARIABLE,
    ByteChannel,
    RefusedError,
    ShadowAddress,
    is_loopback,
    require_token,
    start_handshake,
)

if TYPE_CHECKING:
    import torch


_SHADOW, _JOB = 0, 1  # ranks in the group
_MESSAGE_BYTES: Final = 4 * settings.MIB  # at most; what is longer goes as several
_HEARTBEAT: Final = 0  # a message that says nothing: the reader can look whether it should end
_VISITS_KEY: Final = "ucp/visits"


class GlooListener:
    """The shadow's end: gives a channel for everyone who calls. A part of what a listening socket can do."""

    def __init__(self, address: ShadowAddress) -> None:
        dist = _distributed()
        waiting = socket.create_server((address.host, address.port))
        self.port = int(waiting.getsockname()[1])
        self._address = address
        self._closed = threading.Event()
        self._visitor = 1
        self._store = dist.TCPStore(
            address.host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=settings.SHADOW_HANDSHAKE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=waiting.detach(),  # where we say, and not on all addresses of the machine
        )

    def accept(self) -> tuple[GlooChannel, None]:
        """Wait for the next visitor; `OSError` when this is closed."""
        while not self._store.check([_group_name(self._visitor)]):
            if self._closed.wait(settings.SHADOW_POLL_SECONDS):
                raise ConnectionAbortedError("closed")
        channel = GlooChannel(self._address, self._store, self._visitor, _SHADOW)
        self._visitor += 1
        return channel, None

    def shutdown(self, how: int, /) -> None:
        del how
        self._closed.set()

    def close(self) -> None:
        self._closed.set()


class GlooChannel:
    """Bytes in order between a job's rank and its shadow. Of one thread; any may call `shutdown`."""

    family = -1  # no socket's

    def __init__(self, address: ShadowAddress, store: Any, visitor: int, rank: int) -> None:
        self._address = address
        self._store = store
        self._visitor = visitor
        self._peer = _JOB if rank == _SHADOW else _SHADOW
        self._group: Any = None
        self._seconds: float | None = None
        self._left = memoryview(b"")  # of the message that came last
        self._ending = False

    def open(self) -> None:
        """Meet the other end."""
        dist = _distributed()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=settings.SHADOW_HANDSHAKE_SECONDS)
        own = is_loopback(self._address.host)
        gloo = dist.ProcessGroupGloo
        options._devices = [gloo.create_device(hostname=self._address.host) if own else gloo.create_default_device()]
        try:
            store = dist.PrefixStore(f"ucp/{self._visitor}", self._store)
            self._group = gloo(store, 1 - self._peer, 2, options)
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error

    def recv_into(self, buffer: memoryview, /) -> int:
        """As of a socket. A peer that says nothing for too long is gone."""
        while not self._left:
            size = int(self._receive(8).view("int64")[0])
            if self._ending:
                raise ConnectionAbortedError("closed")
            if not 0 <= size <= _MESSAGE_BYTES:
                raise RefusedError(f"a message of {size} bytes, where {_MESSAGE_BYTES} are allowed")
            if size != _HEARTBEAT:
                self._left = memoryview(self._receive(size))
        some = min(len(buffer), len(self._left))
        buffer[:some] = self._left[:some]
        self._left = self._left[some:]
        return some

    def _receive(self, size: int) -> Any:
        import torch

        data = torch.empty(size, dtype=torch.uint8)
        self._wait("recv", data, settings.SHADOW_TIMEOUT_SECONDS)
        return data.numpy()

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """As of a socket: takes at least one byte."""
        import torch

        message = bytearray()
        for part in buffers:
            message += part[: _MESSAGE_BYTES - len(message)]
            if len(message) == _MESSAGE_BYTES:
                break
        self._send_size(len(message))
        self._wait("send", torch.frombuffer(message, dtype=torch.uint8), self._seconds)
        return len(message)

    def beat(self) -> None:
        """Say that one is still there. Who has nothing to send does so now and then."""
        self._send_size(_HEARTBEAT)

    def _send_size(self, size: int) -> None:
        import torch

        self._wait("send", torch.tensor([size]).view(torch.uint8), self._seconds)

    def _wait(self, what: str, data: torch.Tensor, seconds: float | None) -> None:
        if self._ending or self._group is None:
            raise ConnectionAbortedError("closed")
        try:
            work = getattr(self._group, what)([data], self._peer, 0)
            work.wait(timedelta(seconds=settings.SHADOW_TIMEOUT_SECONDS if seconds is None else seconds))
        except RuntimeError as error:
            raise ConnectionResetError(_first_line(error)) from error

    def settimeout(self, value: float | None, /) -> None:
        self._seconds = value

    def shutdown(self, how: int, /) -> None:
        """Let the thread that waits here end with the next message, which comes within a second or so."""
        del how
        self._ending = True

    def close(self) -> None:
        self._ending = True
        self._group = None  # ends its connection


def connect_gloo(address: ShadowAddress) -> GlooChannel:
    """A channel to the shadow at an address; `OSError` where there is none."""
    dist = _distributed()
    seconds = settings.SHADOW_HANDSHAKE_SECONDS
    socket.create_connection((address.host, address.port), timeout=seconds).close()  # a store would ask for long
    try:
        store = dist.TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        visitor = store.add(_VISITS_KEY, 1)
        store.set(_group_name(visitor), b"")
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(_first_line(error)) from error
    channel = GlooChannel(address, store, visitor, _JOB)
    channel.open()
    return channel


def _group_name(visitor: int) -> str:
    return f"ucp/called/{visitor}"


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise UsageError("gloo:// needs torch", hint="pip install torch, or say shadow://host:port") from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise StorageError("this torch was built without gloo", hint="say shadow://host:port")
    return dist


def _first_line(error: BaseException) -> str:
    """What gloo says, without the place in its source."""
    return str(error).partition("\n")[0].rpartition("] ")[2]


_POSITION: Final = struct.Struct("<Q")  # bytes that were written, or read, since the beginning
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
                self._socket.sendall(_POSITION.pack(self._read))
        return some

    def _wait(self) -> bool:
        """Wait until more was written; False where the writer has left."""
        told = b""
        while len(told) < _POSITION.size:
            try:
                more = self._socket.recv(_POSITION.size - len(told))
            except ConnectionResetError:  # it left without having heard how far we are: what it said came before this
                more = b""
            if not more:
                return False
            told += more
        written = _POSITION.unpack(told)[0]
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
        self._socket.sendall(_POSITION.pack(self._written))
        return self._written - begin

    def _hear(self, *, wait: bool) -> None:
        """Take what the reader says of how far it is."""
        if not wait:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return
        more = self._socket.recv(512 * _POSITION.size)
        if not more:
            raise ConnectionResetError("the shadow is gone")
        told = self._partial + more
        whole = len(told) // _POSITION.size * _POSITION.size
        self._partial = told[whole:]
        for (read,) in _POSITION.iter_unpack(told[:whole]):
            if not self._read <= read <= self._written:
                raise RefusedError(f"{read} bytes were read of {self._written}")
            self._read = read

    def recv_into(self, buffer: memoryview, /) -> int:
        return self._socket.recv_into(buffer)


_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class ShadowListener(Protocol):
    """What a shadow's door waits at; the methods are those of a socket."""

    def accept(self) -> tuple[ByteChannel, Any]: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


def listen(address: ShadowAddress) -> tuple[ShadowListener, ShadowAddress]:
    """What gives a channel for everyone who comes, and where it does (port 0 takes a free one)."""
    try:
        if address.transport == "shm":
            return _listen_local(address), address
        require_token(address)
        if address.transport == "gloo":
            listener = GlooListener(address)
            return listener, replace(address, port=listener.port)
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((address.host, address.port), family=family, backlog=128)
        return made, replace(address, port=made.getsockname()[1])
    except OSError as error:
        used = "another process listens there: take another address" if error.errno == errno.EADDRINUSE else None
        what = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
        raise StorageError(f"{address}: cannot listen here: {what}", hint=used) from error


def _listen_local(address: ShadowAddress) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(_name_of(address))
        made.listen(128)
        return made
    except BaseException:
        made.close()
        raise


def _name_of(address: ShadowAddress) -> bytes:
    """The socket's name. It is in no folder: it is gone with the process that listens, however that ends."""
    if not hasattr(os, "memfd_create"):
        raise UsageError("shadows over shared memory need Linux", hint="say shadow://127.0.0.1:port")
    return f"\0ucp-shadow/{os.getuid()}/{address.host}".encode()


def prepare_incoming(channel: ByteChannel) -> None:
    """Prepare a connection that has come in; `RefusedError` where it is of another user of this machine."""
    if isinstance(channel, GlooChannel):
        channel.open()
        return
    assert isinstance(channel, socket.socket)
    if is_local(channel):
        _check_user(channel)
    else:
        _prepare(channel)


def is_local(channel: ByteChannel) -> TypeGuard[socket.socket]:
    """Is this a socket over which memory can be shared?"""
    return isinstance(channel, socket.socket) and channel.family == socket.AF_UNIX


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _check_user(sock: socket.socket) -> None:
    """Names of sockets belong to nobody, so both ends look whose process the other is."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(told)[1] != os.getuid():
        raise RefusedError("a process of another user")


def connect(address: ShadowAddress, opened: Callable[[ByteChannel], None] = lambda _: None) -> ByteChannel:
    """A connection to a shadow, greeted. `StorageError` where there is none, or none that knows the token.

    `opened` is given the channel before anything is waited for, so that another thread can end the waiting.
    """
    seconds = settings.SHADOW_HANDSHAKE_SECONDS
    try:
        channel: ByteChannel
        if address.transport == "gloo":
            channel = connect_gloo(address)
            channel.settimeout(seconds)
        elif address.transport == "shm":
            channel = _connect_local(address, seconds)
        else:
            channel = socket.create_connection((address.host, address.port), timeout=seconds)
    except OSError as error:
        raise StorageError(
            f"{address}: cannot be reached: {error.strerror or error}", hint="is `ucp shadow` running there?"
        ) from error
    try:
        opened(channel)
        if isinstance(channel, socket.socket):
            (_check_user if is_local(channel) else _prepare)(channel)
        start_handshake(channel, address.key())
        return channel
    except (OSError, RefusedError) as error:
        channel.close()
        raise StorageError(
            f"{address}: does not let us in ({error})",
            hint=f"name the shadow's token file: {address}?token=FILE, or in {TOKEN_VARIABLE}",
        ) from error
    except UcpError:
        channel.close()
        raise


def _connect_local(address: ShadowAddress, seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(_name_of(address))
        return sock
    except BaseException:
        sock.close()
        raise
