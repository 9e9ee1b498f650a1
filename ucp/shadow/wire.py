"""What a shadow and its peers say to each other: a handshake, JSON messages, frames. Never a pickle.

Every length is compared with a limit before anything of that length is read. What carries the bytes is a `Channel`: a
socket, or something that behaves like one.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

_MAGIC: Final = b"UCPSHDW1"
_NONCE: Final = 32
_MAC: Final = 32
_LENGTH: Final = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class Channel(Protocol):
    """Bytes in order, both ways. The methods are those of a stream socket, and mean what they mean there."""

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class RefusedError(Exception):
    """The peer is not who it should be, or does not keep to the protocol. It is told nothing."""


# ----------------------------------------------------------------------------------------------------------------------
# Handshake: each end proves that it knows the token, and shows it to nobody


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(nonces), "sha256")


def welcome(sock: Channel, key: bytes) -> None:
    """The shadow's end; `RefusedError` where the peer does not know the token."""
    mine = secrets.token_bytes(_NONCE)
    send(sock, [_MAGIC + mine])
    answer = bytes(receive(sock, len(_MAGIC) + _NONCE + _MAC))
    magic, theirs, proof = answer[:8], answer[8 : 8 + _NONCE], answer[8 + _NONCE :]
    known = hmac.compare_digest(proof, _proof(key, b"client", mine, theirs))
    if magic != _MAGIC or not known:
        raise RefusedError("a peer without the token")
    send(sock, [_proof(key, b"shadow", theirs, mine)])


def greet(sock: Channel, key: bytes) -> None:
    """The other end."""
    challenge = bytes(receive(sock, len(_MAGIC) + _NONCE))
    if challenge[:8] != _MAGIC:
        raise RefusedError("this is no shadow")
    theirs, mine = challenge[8:], secrets.token_bytes(_NONCE)
    send(sock, [_MAGIC + mine + _proof(key, b"client", theirs, mine)])
    if not hmac.compare_digest(bytes(receive(sock, _MAC)), _proof(key, b"shadow", mine, theirs)):
        raise RefusedError("the shadow does not know the token")


# ----------------------------------------------------------------------------------------------------------------------
# Messages


def receive(sock: Channel, size: int) -> memoryview:
    """Exactly so many bytes, which the caller has found to be few enough. `RefusedError` where the peer leaves."""
    # Not a bytearray, which is filled with zeros: memory that a peer only claims to need must not be touched.
    data = np.empty(size, np.uint8).data
    receive_into(sock, data)
    return data


def receive_into(sock: Channel, target: memoryview) -> None:
    """Fill `target` with what comes next."""
    done = 0
    while done < len(target):
        got = sock.recv_into(target[done:])
        if got == 0:
            raise RefusedError("the connection was closed")
        done += got


def joined(parts: Sequence[Buffer]) -> memoryview:
    """A copy of buffers end to end. Made by numpy, which lets the trainer's thread run meanwhile."""
    made = np.empty(sum(map(len, parts)), np.uint8)
    at = 0
    for part in parts:
        if len(part):
            np.copyto(made[at : at + len(part)], np.frombuffer(part, np.uint8))
        at += len(part)
    return made.data


def send(sock: Channel, parts: Sequence[Buffer]) -> None:
    """Send buffers end to end."""
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    while pending:
        done = sock.sendmsg(pending[:512])
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


def send_json(sock: Channel, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    send(sock, [_LENGTH.pack(len(data)), data])


def receive_json(sock: Channel, limit: int) -> Any:
    """A JSON value of at most `limit` bytes."""
    size = _LENGTH.unpack(receive(sock, _LENGTH.size))[0]
    if size > limit:
        raise RefusedError(f"a message of {size} bytes, where {limit} are allowed")
    try:
        return json.loads(bytes(receive(sock, size)))
    except (ValueError, RecursionError) as error:
        raise RefusedError("a message that is no JSON") from error
