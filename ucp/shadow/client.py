"""Asking a shadow: its status, and the checkpoint that it holds."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.errors import StorageError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.bases import list_bases
from ucp.model.checkpoint import Checkpoint
from ucp.shadow.assembling import assemble, identity_of, place_of
from ucp.shadow.wire import Address, RefusedError, connect, parse_address, receive_into, receive_json, send_json


def status(address: str | os.PathLike[str], token: Path | None = None) -> dict[str, Any]:
    """What a shadow says of itself."""
    with Questions(parse_address(address, token)) as shadow:
        told: dict[str, Any] = shadow.ask({"ask": "status"})
        return told


def open_shadow(
    address: str | os.PathLike[str], options: ReadOptions | None = None, token: Path | None = None
) -> Checkpoint:
    """The checkpoint of the newest complete step that a shadow holds. The shadow goes on; this stays as it is.

    What is not trained (buffers, extras) is read from the shadow's base, which must be readable here.
    """
    shadow = Questions(parse_address(address, token))
    try:
        told = shadow.ask({"ask": "snapshot"})
        base = open_checkpoint(_base(told), options or ReadOptions())
        files = RemoteFiles(shadow, identity_of(told))
        weakref.finalize(files, shadow.close)
        return assemble(base, told, files)
    except BaseException:
        shadow.close()
        raise


def _base(told: dict[str, Any]) -> Path:
    """A checkpoint of the same model: what the shadow began with, or where that is gone the run's newest base."""
    named = Path(told["base"])
    if named.exists():
        return named
    log = None if told["log"] is None else Path(told["log"])
    for run in () if log is None else (log, log.parent):
        bases = list_bases(run)
        if bases:
            return bases[-1].path
    raise UsageError(
        f"{named}: the shadow's base is not here, and what is not trained (buffers, extras) stands only there",
        hint="convert on a machine that sees the shadow's files",
    )


class Questions:
    """A connection to a shadow that answers questions, one at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._socket: socket.socket = connect(address)
        self._socket.settimeout(None)
        self._lock = threading.Lock()

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, question: dict[str, Any], target: memoryview | None = None) -> Any:
        """The answer to a question; with a `target`, that is filled with the bytes that follow it."""
        try:
            with self._lock:
                send_json(self._socket, question)
                told = receive_json(self._socket, tunables.SHADOW_MANIFEST_BYTES)
                if isinstance(told, dict) and "error" in told:
                    raise UcpError(f"shadow://{self.address}: {told['error']}", hint=told.get("hint"))
                if target is not None:
                    if told.get("size") != len(target):
                        raise RefusedError("an answer of another size than was asked for")
                    receive_into(self._socket, target)
                return told
        except (OSError, RefusedError, AttributeError) as error:
            raise StorageError(
                f"shadow://{self.address}: the shadow is gone ({error})",
                hint="the log has what it held: start it again with --log",
            ) from error


class RemoteFiles:
    """The bytes of a shadow's snapshot as computed files."""

    def __init__(self, shadow: Questions, identity: str) -> None:
        self.identity = identity
        self._shadow = shadow

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        stream, tensor, kind = place_of(file)
        done = 0
        while done < len(target):
            size = min(len(target) - done, tunables.SHADOW_READ_BYTES)
            question = {
                "ask": "read",
                "stream": stream,
                "tensor": tensor,
                "kind": kind,
                "offset": offset + done,
                "size": size,
            }
            self._shadow.ask(question, target[done : done + size])
            done += size
