"""How a channel to a shadow comes to be, at both ends: over TCP, over gloo, or by a name on this machine."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol, TypeGuard

from ucp import tunables
from ucp.errors import StorageError, UcpError, UsageError
from ucp.shadow.addresses import TOKEN_VARIABLE, Address, require_token
from ucp.shadow.gloo import GlooChannel, GlooListener, call
from ucp.shadow.wire import Channel, RefusedError, greet

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class Listener(Protocol):
    """What a shadow's door waits at; the methods are those of a socket."""

    def accept(self) -> tuple[Channel, Any]: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


def listen(address: Address) -> tuple[Listener, Address]:
    """What gives a channel for everyone who comes, and where it does (port 0 takes a free one)."""
    try:
        if address.transport == "shm":
            return _listen_here(address), address
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


def _listen_here(address: Address) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(_name_of(address))
        made.listen(128)
        return made
    except BaseException:
        made.close()
        raise


def _name_of(address: Address) -> bytes:
    """The socket's name. It is in no folder: it is gone with the process that listens, however that ends."""
    if not hasattr(os, "memfd_create"):
        raise UsageError("shadows over shared memory need Linux", hint="say shadow://127.0.0.1:port")
    return f"\0ucp-shadow/{os.getuid()}/{address.host}".encode()


def let_in(channel: Channel) -> None:
    """Prepare a connection that has come in; `RefusedError` where it is of another user of this machine."""
    if isinstance(channel, GlooChannel):
        channel.open()
        return
    assert isinstance(channel, socket.socket)
    if is_local(channel):
        _check_user(channel)
    else:
        _prepare(channel)


def is_local(channel: Channel) -> TypeGuard[socket.socket]:
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


def connect(address: Address, opened: Callable[[Channel], None] = lambda _: None) -> Channel:
    """A connection to a shadow, greeted. `StorageError` where there is none, or none that knows the token.

    `opened` is given the channel before anything is waited for, so that another thread can end the waiting.
    """
    seconds = tunables.SHADOW_HANDSHAKE_SECONDS
    try:
        channel: Channel
        if address.transport == "gloo":
            channel = call(address)
            channel.settimeout(seconds)
        elif address.transport == "shm":
            channel = _connect_here(address, seconds)
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
        greet(channel, address.key())
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


def _connect_here(address: Address, seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(_name_of(address))
        return sock
    except BaseException:
        sock.close()
        raise
