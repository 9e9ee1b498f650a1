"""Frames over torch.distributed: a group of two for every rank and its shadow, apart from the job's own groups.

For clusters where a job's processes reach each other through gloo, with its choice of network, and not otherwise. The
shadow keeps the store in which the two find each other.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ucp import tunables
from ucp.errors import StorageError, UsageError
from ucp.shadow.addresses import Address, is_loopback
from ucp.shadow.wire import RefusedError

if TYPE_CHECKING:
    import torch

_SHADOW, _JOB = 0, 1  # ranks in the group
_MESSAGE_BYTES: Final = 4 * tunables.MIB  # at most; what is longer goes as several
_BEAT: Final = 0  # a message that says nothing: the reader can look whether it should end
_VISITS: Final = "ucp/visits"


class GlooListener:
    """The shadow's end: gives a channel for everyone who calls. A part of what a listening socket can do."""

    def __init__(self, address: Address) -> None:
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
            timeout=timedelta(seconds=tunables.SHADOW_HANDSHAKE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=waiting.detach(),  # where we say, and not on all addresses of the machine
        )

    def accept(self) -> tuple[GlooChannel, None]:
        """Wait for the next visitor; `OSError` when this is closed."""
        while not self._store.check([_called(self._visitor)]):
            if self._closed.wait(tunables.SHADOW_POLL_SECONDS):
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

    def __init__(self, address: Address, store: Any, visitor: int, rank: int) -> None:
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
        options._timeout = timedelta(seconds=tunables.SHADOW_HANDSHAKE_SECONDS)
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
            if size != _BEAT:
                self._left = memoryview(self._receive(size))
        some = min(len(buffer), len(self._left))
        buffer[:some] = self._left[:some]
        self._left = self._left[some:]
        return some

    def _receive(self, size: int) -> Any:
        import torch

        data = torch.empty(size, dtype=torch.uint8)
        self._wait("recv", data, tunables.SHADOW_SILENCE_SECONDS)
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
        self._send_size(_BEAT)

    def _send_size(self, size: int) -> None:
        import torch

        self._wait("send", torch.tensor([size]).view(torch.uint8), self._seconds)

    def _wait(self, what: str, data: torch.Tensor, seconds: float | None) -> None:
        if self._ending or self._group is None:
            raise ConnectionAbortedError("closed")
        try:
            work = getattr(self._group, what)([data], self._peer, 0)
            work.wait(timedelta(seconds=tunables.SHADOW_SILENCE_SECONDS if seconds is None else seconds))
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


def call(address: Address) -> GlooChannel:
    """A channel to the shadow at an address; `OSError` where there is none."""
    dist = _distributed()
    seconds = tunables.SHADOW_HANDSHAKE_SECONDS
    socket.create_connection((address.host, address.port), timeout=seconds).close()  # a store would ask for long
    try:
        store = dist.TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        visitor = store.add(_VISITS, 1)
        store.set(_called(visitor), b"")
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(_first_line(error)) from error
    channel = GlooChannel(address, store, visitor, _JOB)
    channel.open()
    return channel


def _called(visitor: int) -> str:
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


__all__ = ["GlooChannel", "GlooListener", "call"]
