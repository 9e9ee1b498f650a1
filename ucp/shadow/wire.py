"""What a shadow and its peers say to each other over a socket: a handshake, JSON messages, frames. Never a pickle.

Every length is compared with a limit before anything of that length is read.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote

from ucp import tunables
from ucp.errors import StorageError, UcpError, UsageError

SCHEME: Final = "shadow:/"  # how an address begins, with one more slash that a path may have lost
TOKEN_VARIABLE: Final = "UCP_SHADOW_TOKEN_FILE"

_MAGIC: Final = b"UCPSHDW1"
_NONCE: Final = 32
_MAC: Final = 32
_LENGTH: Final = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class RefusedError(Exception):
    """The peer is not who it should be, or does not keep to the protocol. It is told nothing."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shadow listens, and the file with the secret that both ends know."""

    host: str
    port: int
    token_file: Path | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def key(self) -> bytes:
        """The secret; empty where there is none."""
        return b"" if self.token_file is None else read_token(self.token_file)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Does a source name a shadow, and no file?"""
    return os.fspath(path).startswith(SCHEME)


def parse_address(text: str | os.PathLike[str], token: Path | None = None) -> Address:
    """`shadow://host:port`, `host:port` or `:port`, with `?token=FILE` where that is not given otherwise."""
    given = os.fspath(text)
    plain, _, query = given.removeprefix(SCHEME).lstrip("/").partition("?")
    host, colon, port = plain.rpartition(":")
    named = parse_qs(query).get("token")
    variable = os.environ.get(TOKEN_VARIABLE)
    file = token or (Path(unquote(named[0])) if named else None) or (Path(variable) if variable else None)
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{given!r} is no address of a shadow", hint="say shadow://host:port")
    return Address(host.strip("[]") or "127.0.0.1", int(port), file)


def read_token(path: Path) -> bytes:
    """The secret in a file: what stands in it, without the white space around it."""
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except OSError as error:
        raise StorageError(f"{path}: the token cannot be read: {error.strerror}") from error
    if len(token) < tunables.SHADOW_TOKEN_BYTES:
        raise UsageError(
            f"{path}: a token of {len(token)} bytes is too short",
            hint="head -c 32 /dev/urandom | base64 makes a good one",
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{path}: others may read the token", hint=f"chmod 600 {path}")
    return token


def require_token(address: Address) -> None:
    """Only this machine itself is listened to without a token."""
    if address.token_file is not None:
        read_token(address.token_file)
        return
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{address.host}: is no address of this machine: {error}") from error
    if not all(ipaddress.ip_address(info[4][0]).is_loopback for info in found):
        raise UsageError(
            f"{address}: others can reach this address, so the shadow needs a token",
            hint="give --token FILE here and to the job, or listen on 127.0.0.1",
        )


# ----------------------------------------------------------------------------------------------------------------------
# Handshake: each end proves that it knows the token, and shows it to nobody


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(nonces), "sha256")


def welcome(sock: socket.socket, key: bytes) -> None:
    """The shadow's end; `RefusedError` where the peer does not know the token."""
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(_MAGIC + mine)
    answer = bytes(receive(sock, len(_MAGIC) + _NONCE + _MAC))
    magic, theirs, proof = answer[:8], answer[8 : 8 + _NONCE], answer[8 + _NONCE :]
    known = hmac.compare_digest(proof, _proof(key, b"client", mine, theirs))
    if magic != _MAGIC or not known:
        raise RefusedError("a peer without the token")
    sock.sendall(_proof(key, b"shadow", theirs, mine))


def greet(sock: socket.socket, key: bytes) -> None:
    """The other end."""
    challenge = bytes(receive(sock, len(_MAGIC) + _NONCE))
    if challenge[:8] != _MAGIC:
        raise RefusedError("this is no shadow")
    theirs, mine = challenge[8:], secrets.token_bytes(_NONCE)
    sock.sendall(_MAGIC + mine + _proof(key, b"client", theirs, mine))
    if not hmac.compare_digest(bytes(receive(sock, _MAC)), _proof(key, b"shadow", mine, theirs)):
        raise RefusedError("the shadow does not know the token")


def connect(address: Address) -> socket.socket:
    """A connection to a shadow, greeted. `StorageError` where there is none, or none that knows the token."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=tunables.SHADOW_HANDSHAKE_SECONDS)
    except OSError as error:
        raise StorageError(
            f"shadow://{address}: cannot be reached: {error.strerror or error}", hint="is `ucp shadow` running there?"
        ) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        greet(sock, address.key())
        return sock
    except (OSError, RefusedError) as error:
        sock.close()
        raise StorageError(
            f"shadow://{address}: does not let us in ({error})",
            hint=f"name the shadow's token file: shadow://host:port?token=FILE, or in {TOKEN_VARIABLE}",
        ) from error
    except UcpError:
        sock.close()
        raise


# ----------------------------------------------------------------------------------------------------------------------
# Messages


def receive(sock: socket.socket, size: int) -> memoryview:
    """Exactly so many bytes, which the caller has found to be few enough. `RefusedError` where the peer leaves."""
    data = memoryview(bytearray(size))
    receive_into(sock, data)
    return data


def receive_into(sock: socket.socket, target: memoryview) -> None:
    """Fill `target` with what comes next."""
    done = 0
    while done < len(target):
        got = sock.recv_into(target[done:])
        if got == 0:
            raise RefusedError("the connection was closed")
        done += got


def send(sock: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send buffers end to end."""
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    while pending:
        done = sock.sendmsg(pending[:512])
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


def send_json(sock: socket.socket, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    send(sock, [_LENGTH.pack(len(data)), data])


def receive_json(sock: socket.socket, limit: int) -> Any:
    """A JSON value of at most `limit` bytes."""
    size = _LENGTH.unpack(receive(sock, _LENGTH.size))[0]
    if size > limit:
        raise RefusedError(f"a message of {size} bytes, where {limit} are allowed")
    try:
        return json.loads(bytes(receive(sock, size)))
    except (ValueError, RecursionError) as error:
        raise RefusedError("a message that is no JSON") from error
