"""Channels between a job and its shadow: TCP, gloo, or a ring in shared memory. `listen` and `connect` open them.

Gloo is for clusters in which processes can reach each other only through gloo's choice of network. Every rank and its
shadow form a process group of two, separate from the job's own groups; the shadow hosts the store for the rendezvous.

The shared-memory ring is anonymous: it vanishes with the last process that has mapped it, however that ends. Read and
write positions are sent over a Unix socket, so that neither process trusts a number in memory that the other may be
changing, and each notices the end of the other as with any socket.
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
from ucp.errors import StorageError, UcpError, UsageError, missing_package
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


_SHADOW, _JOB = 0, 1  # ranks in the group of two
_MESSAGE_BYTES: Final = 4 * settings.MIB  # maximum; longer data is sent as several messages
_HEARTBEAT: Final = 0  # size of an empty message, after which a reader checks whether it should stop
_VISITS_KEY: Final = "ucp/visits"


class GlooListener:
    """The shadow's end of gloo: accepts channels, with the methods of a listening socket."""

    def __init__(self, address: ShadowAddress) -> None:
        dist = _distributed()
        waiting = socket.create_server((address.host, address.port))
        self.port = int(waiting.getsockname()[1])
        self._address = address
        self._closed = threading.Event()
        self._client = 1
        self._store = dist.TCPStore(
            address.host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=settings.SHADOW_HANDSHAKE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=waiting.detach(),  # listen on this address only; TCPStore would listen on all
        )

    def accept(self) -> tuple[GlooChannel, None]:
        """Wait for the next client; `OSError` when the listener is closed."""
        while not self._store.check([_group_name(self._client)]):
            if self._closed.wait(settings.SHADOW_POLL_SECONDS):
                raise ConnectionAbortedError("closed")
        channel = GlooChannel(self._address, self._store, self._client, _SHADOW)
        self._client += 1
        return channel, None

    def shutdown(self, how: int, /) -> None:
        del how
        self._closed.set()

    def close(self) -> None:
        self._closed.set()


class GlooChannel:
    """A byte stream between a rank and its shadow. Used by one thread; any thread may call `shutdown`."""

    family = -1  # not a socket

    def __init__(self, address: ShadowAddress, store: Any, client: int, rank: int) -> None:
        self._address = address
        self._store = store
        self._client = client
        self._peer = _JOB if rank == _SHADOW else _SHADOW
        self._group: Any = None
        self._seconds: float | None = None
        self._left = memoryview(b"")  # unread rest of the last message
        self._closing = False

    def open(self) -> None:
        """Form the process group with the other end."""
        dist = _distributed()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=settings.SHADOW_HANDSHAKE_SECONDS)
        own = is_loopback(self._address.host)
        gloo = dist.ProcessGroupGloo
        options._devices = [gloo.create_device(hostname=self._address.host) if own else gloo.create_default_device()]
        try:
            store = dist.PrefixStore(f"ucp/{self._client}", self._store)
            self._group = gloo(store, 1 - self._peer, 2, options)
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error

    def recv_into(self, buffer: memoryview, /) -> int:
        """Like `socket.recv_into`. A peer that sends nothing, not even heartbeats, for too long is taken as gone."""
        while not self._left:
            size = int(self._receive(8).view("int64")[0])
            if self._closing:
                raise ConnectionAbortedError("closed")
            if not 0 <= size <= _MESSAGE_BYTES:
                raise RefusedError(f"a message of {size} bytes (maximum {_MESSAGE_BYTES})")
            if size != _HEARTBEAT:
                self._left = memoryview(self._receive(size))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _receive(self, size: int) -> Any:
        import torch

        data = torch.empty(size, dtype=torch.uint8)
        self._wait("recv", data, settings.SHADOW_TIMEOUT_SECONDS)
        return data.numpy()

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """Like `socket.sendmsg`: sends at least one byte."""
        import torch

        message = bytearray()
        for part in buffers:
            message += part[: _MESSAGE_BYTES - len(message)]
            if len(message) == _MESSAGE_BYTES:
                break
        self._send_size(len(message))
        self._wait("send", torch.frombuffer(message, dtype=torch.uint8), self._seconds)
        return len(message)

    def send_heartbeat(self) -> None:
        """Show that this end is alive; sent regularly if there is nothing else to send."""
        self._send_size(_HEARTBEAT)

    def _send_size(self, size: int) -> None:
        import torch

        self._wait("send", torch.tensor([size]).view(torch.uint8), self._seconds)

    def _wait(self, what: str, data: torch.Tensor, seconds: float | None) -> None:
        if self._closing or self._group is None:
            raise ConnectionAbortedError("closed")
        try:
            work = getattr(self._group, what)([data], self._peer, 0)
            work.wait(timedelta(seconds=settings.SHADOW_TIMEOUT_SECONDS if seconds is None else seconds))
        except RuntimeError as error:
            raise ConnectionResetError(_first_line(error)) from error

    def settimeout(self, value: float | None, /) -> None:
        self._seconds = value

    def shutdown(self, how: int, /) -> None:
        """Let a waiting thread stop at the next message or heartbeat, which arrives within about a second."""
        del how
        self._closing = True

    def close(self) -> None:
        self._closing = True
        self._group = None  # ends its connection


def connect_gloo(address: ShadowAddress) -> GlooChannel:
    """Connect to the shadow at an address; `OSError` if there is none."""
    dist = _distributed()
    seconds = settings.SHADOW_HANDSHAKE_SECONDS
    socket.create_connection((address.host, address.port), timeout=seconds).close()  # TCPStore would retry for long
    try:
        store = dist.TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        client = store.add(_VISITS_KEY, 1)
        store.set(_group_name(client), b"")
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(_first_line(error)) from error
    channel = GlooChannel(address, store, client, _JOB)
    channel.open()
    return channel


def _group_name(client: int) -> str:
    return f"ucp/called/{client}"


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise missing_package(error, "gloo://", ", or use shadow://host:port") or error from None
    if not dist.is_available() or not dist.is_gloo_available():
        raise StorageError("this torch was built without gloo", hint="use shadow://host:port")
    return dist


def _first_line(error: BaseException) -> str:
    """The first line of gloo's error, without the location in its source."""
    return str(error).partition("\n")[0].rpartition("] ")[2]


_POSITION: Final = struct.Struct("<Q")  # total bytes written, or read, so far
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, _SHRINK, _GROW: the mapping stays valid
_ACKNOWLEDGED: Final = 4  # the reader sends its position after every quarter of the ring


def offer_ring(sock: socket.socket, size: int) -> RingReader:
    """Create a ring of `size` bytes and pass it to the other end, which will write into it."""
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
    """Receive the ring of `size` bytes that the other end has created."""
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        if len(fds) != 1 or os.fstat(fds[0]).st_size != size or fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) != _SEALS:
            raise RefusedError("the announced ring was not sent")
        return RingWriter(sock, mmap.mmap(fds[0], size))
    finally:
        for fd in fds:
            os.close(fd)


class _Ring:
    """Common to both ends. Used by one thread; any thread may call `shutdown`."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        self._socket = sock
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)  # numpy releases the GIL while it copies
        self._size = len(memory)
        self._written = 0
        self._read = 0

    def settimeout(self, value: float | None, /) -> None:
        self._socket.settimeout(value)

    def shutdown(self, how: int, /) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        del self._bytes  # a mapping with views cannot be closed
        self._memory.close()
        self._socket.close()


class RingReader(_Ring):
    """The shadow's end of a ring."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        super().__init__(sock, memory)
        self._reported = 0  # read position that was last sent to the writer

    def recv_into(self, buffer: memoryview, /) -> int:
        """Like `socket.recv_into`: at least one byte, or 0 when the writer is gone and everything was read."""
        if self._read == self._written and not self._wait():
            return 0
        at = self._read % self._size
        some = min(len(buffer), self._written - self._read, self._size - at)
        np.copyto(np.frombuffer(buffer, np.uint8, some), self._bytes[at : at + some])
        self._read += some
        if (self._read - self._reported) * _ACKNOWLEDGED >= self._size:
            self._reported = self._read
            with contextlib.suppress(OSError):  # the writer is gone, but its data is still read
                self._socket.sendall(_POSITION.pack(self._read))
        return some

    def _wait(self) -> bool:
        """Wait until more was written; False if the writer is gone."""
        data = b""
        while len(data) < _POSITION.size:
            try:
                more = self._socket.recv(_POSITION.size - len(data))
            except ConnectionResetError:  # it closed with unread positions; everything it sent has arrived before
                more = b""
            if not more:
                return False
            data += more
        written = _POSITION.unpack(data)[0]
        if not self._read < written <= self._read + self._size:
            raise RefusedError(f"{written - self._read} bytes in a ring of {self._size}")
        self._written = written
        return True

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        return self._socket.sendmsg(buffers)


class RingWriter(_Ring):
    """The job's end of a ring."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        super().__init__(sock, memory)
        self._partial = b""  # incomplete position

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """Like `socket.sendmsg`: writes as much as fits, after waiting for space for one byte up to the timeout."""
        self._receive_positions(wait=False)
        while self._written - self._read == self._size:
            self._receive_positions(wait=True)
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

    def _receive_positions(self, *, wait: bool) -> None:
        """Receive the reader's positions."""
        if not wait:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return
        more = self._socket.recv(512 * _POSITION.size)
        if not more:
            raise ConnectionResetError("the shadow is gone")
        data = self._partial + more
        complete = len(data) // _POSITION.size * _POSITION.size
        self._partial = data[complete:]
        for (read,) in _POSITION.iter_unpack(data[:complete]):
            if not self._read <= read <= self._written:
                raise RefusedError(f"{read} bytes were read of {self._written}")
            self._read = read

    def recv_into(self, buffer: memoryview, /) -> int:
        return self._socket.recv_into(buffer)


_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class ShadowListener(Protocol):
    """Accepts the connections of a shadow; the methods are those of a socket."""

    def accept(self) -> tuple[ByteChannel, Any]: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


def listen(address: ShadowAddress) -> tuple[ShadowListener, ShadowAddress]:
    """Listen at an address; returns the listener and the actual address (port 0 takes a free port)."""
    try:
        if address.transport == "shm":
            return _local_socket(address), address
        require_token(address)
        if address.transport == "gloo":
            listener = GlooListener(address)
            return listener, replace(address, port=listener.port)
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((address.host, address.port), family=family, backlog=128)
        return made, replace(address, port=made.getsockname()[1])
    except OSError as error:
        used = "another process is listening there: use another address" if error.errno == errno.EADDRINUSE else None
        what = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
        raise StorageError(f"{address}: cannot listen here: {what}", hint=used) from error


def _local_socket(address: ShadowAddress, seconds: float | None = None) -> socket.socket:
    """A Unix socket that listens at an address, or is connected to it within `seconds`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if seconds is None:
            sock.bind(_socket_name(address))
            sock.listen(128)
        else:
            sock.settimeout(seconds)
            sock.connect(_socket_name(address))
        return sock
    except BaseException:
        sock.close()
        raise


def _socket_name(address: ShadowAddress) -> bytes:
    """The name of a Linux abstract socket, which has no file and vanishes with the listening process."""
    if not hasattr(os, "memfd_create"):
        raise UsageError("shadows over shared memory need Linux", hint="use shadow://127.0.0.1:port")
    return f"\0ucp-shadow/{os.getuid()}/{address.host}".encode()


def prepare_incoming(channel: ByteChannel) -> None:
    """Prepare an accepted connection; `RefusedError` if it belongs to another user of this machine."""
    if isinstance(channel, GlooChannel):
        channel.open()
        return
    assert isinstance(channel, socket.socket)
    _prepare_socket(channel)


def is_local(channel: ByteChannel) -> TypeGuard[socket.socket]:
    """Whether this is a Unix socket, over which memory can be shared."""
    return isinstance(channel, socket.socket) and channel.family == socket.AF_UNIX


def _prepare_socket(sock: socket.socket) -> None:
    if not is_local(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return
    # Abstract sockets have no permissions, so both ends check the user of the other.
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise RefusedError("a process of another user")


def connect(address: ShadowAddress, opened: Callable[[ByteChannel], None] = lambda _: None) -> ByteChannel:
    """Connect to a shadow, including the handshake. `StorageError` if there is none, or if it refuses the token.

    `opened` is called with the channel before the first wait, so that another thread can shut it down.
    """
    seconds = settings.SHADOW_HANDSHAKE_SECONDS
    try:
        channel: ByteChannel
        if address.transport == "gloo":
            channel = connect_gloo(address)
            channel.settimeout(seconds)
        elif address.transport == "shm":
            channel = _local_socket(address, seconds)
        else:
            channel = socket.create_connection((address.host, address.port), timeout=seconds)
    except OSError as error:
        raise StorageError(
            f"{address}: cannot be reached: {error.strerror or error}", hint="is `ucp shadow` running there?"
        ) from error
    try:
        opened(channel)
        if isinstance(channel, socket.socket):
            _prepare_socket(channel)
        start_handshake(channel, address.key())
        return channel
    except (OSError, RefusedError) as error:
        channel.close()
        raise StorageError(
            f"{address}: the connection was refused ({error})",
            hint=f"name the shadow's token file: {address}?token=FILE, or in {TOKEN_VARIABLE}",
        ) from error
    except UcpError:
        channel.close()
        raise
