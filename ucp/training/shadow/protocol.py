"""The protocol between a shadow and its peers: addresses, a handshake with a shared token, JSON messages, frames.

Nothing is pickled. Every length is compared with a limit before data of that length is read. Bytes are carried by a
`ByteChannel`: a socket, or an object that behaves like one.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import parse_qs, unquote

import numpy as np

from ucp import settings
from ucp.errors import StorageError, UsageError

Transport = Literal["shadow", "shm", "gloo"]
TOKEN_VARIABLE: Final = "UCP_SHADOW_TOKEN_FILE"

_SCHEME: Final = re.compile(r"(shadow|shm|gloo):/+")  # converting to a path may have removed one of the slashes
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ShadowAddress:
    """The address of a shadow, and the file with the token that both ends know.

    TCP and gloo use host and port. For shared memory, `host` is a name on this machine and `port` is unused.
    """

    host: str
    port: int
    token_file: Path | None = None
    transport: Transport = "shadow"

    def __str__(self) -> str:
        if self.transport == "shm":
            return f"shm://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}"

    def key(self) -> bytes:
        """The token; empty if there is none."""
        return b"" if self.token_file is None else read_token(self.token_file)


def parse_address(text: str | os.PathLike[str], token: Path | None = None) -> ShadowAddress:
    """Parse `shadow://host:port`, `host:port`, `:port`, `gloo://host:port` or `shm://name`, and `?token=FILE`."""
    given = os.fspath(text)
    scheme = _SCHEME.match(given)
    plain, _, query = given[scheme.end() if scheme else 0 :].partition("?")
    named = parse_qs(query).get("token")
    variable = os.environ.get(TOKEN_VARIABLE)
    file = token or (Path(unquote(named[0])) if named else None) or (Path(variable) if variable else None)
    if scheme is not None and scheme[1] == "shm":
        if not _NAME.fullmatch(plain):
            raise UsageError(
                f"{given!r} is not an address of a shadow", hint="use shm://name, with letters and digits only"
            )
        return ShadowAddress(plain, 0, file, "shm")
    host, colon, port = plain.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{given!r} is not an address of a shadow", hint="use shadow://host:port")
    return ShadowAddress(
        host.strip("[]") or "127.0.0.1", int(port), file, "gloo" if scheme and scheme[1] == "gloo" else "shadow"
    )


def parse_addresses(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[ShadowAddress]:
    """Parse one or several addresses: a list, or text separated by commas (`%2C` is a comma in a file name)."""
    texts = [given] if isinstance(given, str | os.PathLike) else given
    found = [parse_address(each) for text in texts for each in os.fspath(text).split(",")]
    if len(set(found)) < len(found) or not found:
        raise UsageError(f"{given!r} names a shadow twice, or no shadow")
    return found


def read_token(path: Path) -> bytes:
    """Read the token from a file, without surrounding white space."""
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except OSError as error:
        raise StorageError(f"{path}: the token cannot be read: {error.strerror}") from error
    if len(token) < settings.SHADOW_TOKEN_BYTES:
        raise UsageError(
            f"{path}: a token of {len(token)} bytes is too short",
            hint="head -c 32 /dev/urandom | base64 makes a good one",
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{path}: other users can read the token", hint=f"chmod 600 {path}")
    return token


def require_token(address: ShadowAddress) -> None:
    """Require a token unless the address can only be reached from this machine."""
    if address.token_file is not None:
        read_token(address.token_file)
        return
    if not is_loopback(address.host):
        raise UsageError(
            f"{address}: other machines can reach this address, so the shadow needs a token",
            hint="pass --token FILE here and to the job, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{host}: is not an address of this machine: {error}") from error
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)


_MAGIC: Final = b"UCPSHDW1"
_NONCE: Final = 32
_MAC: Final = 32
_LENGTH: Final = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class ByteChannel(Protocol):
    """A byte stream in both directions, with the methods of a stream socket."""

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class RefusedError(Exception):
    """The peer failed to authenticate or violated the protocol. It gets no answer."""


# Handshake: each end proves that it knows the token without sending it ------------------------------------------------


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(nonces), "sha256")


def accept_handshake(sock: ByteChannel, key: bytes) -> None:
    """The shadow's side; `RefusedError` if the peer does not know the token."""
    mine = secrets.token_bytes(_NONCE)
    send(sock, [_MAGIC + mine])
    answer = bytes(receive(sock, len(_MAGIC) + _NONCE + _MAC))
    magic, theirs, proof = answer[:8], answer[8 : 8 + _NONCE], answer[8 + _NONCE :]
    known = hmac.compare_digest(proof, _proof(key, b"client", mine, theirs))
    if magic != _MAGIC or not known:
        raise RefusedError("the peer does not know the token")
    send(sock, [_proof(key, b"shadow", theirs, mine)])


def start_handshake(sock: ByteChannel, key: bytes) -> None:
    """The client's side; `RefusedError` if the peer is not a shadow or does not know the token."""
    challenge = bytes(receive(sock, len(_MAGIC) + _NONCE))
    if challenge[:8] != _MAGIC:
        raise RefusedError("the peer is not a shadow")
    theirs, mine = challenge[8:], secrets.token_bytes(_NONCE)
    send(sock, [_MAGIC + mine + _proof(key, b"client", theirs, mine)])
    if not hmac.compare_digest(bytes(receive(sock, _MAC)), _proof(key, b"shadow", mine, theirs)):
        raise RefusedError("the shadow does not know the token")


# Messages -------------------------------------------------------------------------------------------------------------


def receive(sock: ByteChannel, size: int) -> memoryview:
    """Receive exactly `size` bytes, a size that the caller has checked. `RefusedError` if the peer disconnects."""
    # Not a bytearray, which is zero-filled: memory that a peer only claims to need must not be touched.
    data = np.empty(size, np.uint8).data
    receive_into(sock, data)
    return data


def receive_into(sock: ByteChannel, target: memoryview) -> None:
    """Fill `target` with the next bytes."""
    done = 0
    while done < len(target):
        got = sock.recv_into(target[done:])
        if got == 0:
            raise RefusedError("the connection was closed")
        done += got


def concatenated(parts: Sequence[Buffer]) -> memoryview:
    """Concatenate buffers. Uses numpy, which releases the GIL for the trainer's thread."""
    made = np.empty(sum(map(len, parts)), np.uint8)
    at = 0
    for part in parts:
        if len(part):
            np.copyto(made[at : at + len(part)], np.frombuffer(part, np.uint8))
        at += len(part)
    return made.data


def send(sock: ByteChannel, parts: Sequence[Buffer]) -> None:
    """Send all buffers."""
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    while pending:
        done = sock.sendmsg(pending[:512])
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


def send_json(sock: ByteChannel, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    send(sock, [_LENGTH.pack(len(data)), data])


def receive_json(sock: ByteChannel, limit: int) -> Any:
    """Receive a JSON value of at most `limit` bytes."""
    size = _LENGTH.unpack(receive(sock, _LENGTH.size))[0]
    if size > limit:
        raise RefusedError(f"a message of {size} bytes (maximum {limit})")
    try:
        return json.loads(bytes(receive(sock, size)))
    except (ValueError, RecursionError) as error:
        raise RefusedError("a message that is not valid JSON") from error
