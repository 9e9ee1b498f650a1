"""How a channel to a shadow comes to be, at both ends: over TCP, or by a name on this machine."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from ucp import tunables
from ucp.errors import StorageError, UcpError, UsageError
from ucp.shadow.addresses import TOKEN_VARIABLE, Address, require_token
from ucp.shadow.wire import RefusedError, greet

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A socket that listens, and where it does (port 0 takes a free one)."""
    try:
        if address.transport == "shm":
            return _listen_here(address), address
        require_token(address)
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((address.host, address.port), family=family, backlog=128)
        return made, Address(address.host, made.getsockname()[1], address.token_file)
    except OSError as error:
        raise StorageError(f"{address}: cannot listen here: {error.strerror or error}") from error


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


def let_in(sock: socket.socket) -> None:
    """Prepare a connection that has come in; `RefusedError` where it is of another user of this machine."""
    if sock.family == socket.AF_UNIX:
        _check_user(sock)
        return
    _prepare(sock)


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _check_user(sock: socket.socket) -> None:
    """Names of sockets belong to nobody, so both ends look whose process the other is."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(told)[1] != os.getuid():
        raise RefusedError("a process of another user")


def connect(address: Address, opened: Callable[[socket.socket], None] = lambda _: None) -> socket.socket:
    """A connection to a shadow, greeted. `StorageError` where there is none, or none that knows the token.

    `opened` is given the socket before anything is waited for, so that another thread can end the waiting.
    """
    seconds = tunables.SHADOW_HANDSHAKE_SECONDS
    try:
        if address.transport == "shm":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(seconds)
            try:
                sock.connect(_name_of(address))
            except BaseException:
                sock.close()
                raise
        else:
            sock = socket.create_connection((address.host, address.port), timeout=seconds)
    except OSError as error:
        raise StorageError(
            f"{address}: cannot be reached: {error.strerror or error}", hint="is `ucp shadow` running there?"
        ) from error
    try:
        opened(sock)
        if address.transport == "shm":
            _check_user(sock)
        else:
            _prepare(sock)
        greet(sock, address.key())
        return sock
    except (OSError, RefusedError) as error:
        sock.close()
        raise StorageError(
            f"{address}: does not let us in ({error})",
            hint=f"name the shadow's token file: {address}?token=FILE, or in {TOKEN_VARIABLE}",
        ) from error
    except UcpError:
        sock.close()
        raise
