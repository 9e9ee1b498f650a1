"""Where a shadow listens, and the secret that both ends know."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qs, unquote

from ucp import tunables
from ucp.errors import StorageError, UsageError

Transport = Literal["shadow", "shm", "gloo"]
TOKEN_VARIABLE: Final = "UCP_SHADOW_TOKEN_FILE"

_SCHEME: Final = re.compile(r"(shadow|shm|gloo):/+")  # a path may have lost one of the slashes
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shadow listens, and the file with the secret that both ends know.

    Over TCP and gloo that is a host and a port; over shared memory, the host is a name on this machine and there is no
    port.
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
        """The secret; empty where there is none."""
        return b"" if self.token_file is None else read_token(self.token_file)


def parse_address(text: str | os.PathLike[str], token: Path | None = None) -> Address:
    """`shadow://host:port`, `host:port`, `:port`, `gloo://host:port` or `shm://name`; `?token=FILE` may follow."""
    given = os.fspath(text)
    scheme = _SCHEME.match(given)
    plain, _, query = given[scheme.end() if scheme else 0 :].partition("?")
    named = parse_qs(query).get("token")
    variable = os.environ.get(TOKEN_VARIABLE)
    file = token or (Path(unquote(named[0])) if named else None) or (Path(variable) if variable else None)
    if scheme is not None and scheme[1] == "shm":
        if not _NAME.fullmatch(plain):
            raise UsageError(
                f"{given!r} is not an address of a shadow", hint="say shm://name, a word of letters and digits"
            )
        return Address(plain, 0, file, "shm")
    host, colon, port = plain.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{given!r} is not an address of a shadow", hint="say shadow://host:port")
    return Address(
        host.strip("[]") or "127.0.0.1", int(port), file, "gloo" if scheme and scheme[1] == "gloo" else "shadow"
    )


def parse_addresses(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Address]:
    """One address or several: a list of them, or a text with commas between them (`%2C` is a comma in a file name)."""
    texts = [given] if isinstance(given, str | os.PathLike) else given
    found = [parse_address(each) for text in texts for each in os.fspath(text).split(",")]
    if len(set(found)) < len(found) or not found:
        raise UsageError(f"{given!r} names a shadow twice, or none")
    return found


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
    if not is_loopback(address.host):
        raise UsageError(
            f"{address}: others can reach this address, so the shadow needs a token",
            hint="give --token FILE here and to the job, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Is this an address that only this machine itself can reach?"""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{host}: is no address of this machine: {error}") from error
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)
