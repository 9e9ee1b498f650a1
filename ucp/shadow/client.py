"""Asking a shadow: its status, and the checkpoint that it holds."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.engine.shares import Share
from ucp.errors import NotUnderstoodError, StorageError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.bases import list_bases
from ucp.log.frames import BadBytesError
from ucp.model.checkpoint import Checkpoint, ComputedFiles
from ucp.shadow.addresses import Address, parse_address, parse_addresses
from ucp.shadow.assembling import assemble, identity_of, place_of
from ucp.shadow.connecting import connect
from ucp.shadow.gathering import GatheredFiles, check_shares, merge, take_one_step
from ucp.shadow.wire import RefusedError, receive_into, receive_json, send_json


def status(address: str | os.PathLike[str], token: Path | None = None) -> dict[str, Any]:
    """What a shadow says of itself."""
    with Questions(parse_address(address, token)) as shadow:
        told: dict[str, Any] = shadow.ask({"ask": "status"})
        return told


def open_shadow(address: str | os.PathLike[str], options: ReadOptions) -> Checkpoint:
    """The checkpoint of the newest complete step that a shadow holds, or several that hold a share each.

    The shadows go on; this stays as it is. What no step changes (frozen parameters, extras) is read from a
    shadow's base, which must be readable here.
    """
    shadows: list[Questions] = []
    try:
        for one in parse_addresses(address):
            shadows.append(Questions(one))
        with _understood(address):
            told = _told(shadows)
            path = _base(told[0])
        base = open_checkpoint(path, replace(options, spread=True))
        with _understood(address):
            files: list[ComputedFiles] = []
            for shadow, one_told in zip(shadows, told, strict=True):
                made = RemoteFiles(shadow, identity_of(one_told))
                weakref.finalize(made, shadow.close)
                files.append(made)
            if len(shadows) == 1:
                return assemble(base, told[0], files[0])
            return assemble(base, merge(told), GatheredFiles(told, files))
    except BaseException:
        for shadow in shadows:
            shadow.close()
        raise


@contextmanager
def _understood(address: str | os.PathLike[str]) -> Iterator[None]:
    """What a peer says may be of any form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, BadBytesError) as error:
        raise NotUnderstoodError(
            f"{os.fspath(address)}: what the shadow says of its state cannot be understood: {error!r}",
            hint="is it of the same version of ucp? The log has what it held",
        ) from error


def _told(shadows: list[Questions]) -> list[dict[str, Any]]:
    """What every shadow tells of one step, with its bytes ready to be read."""
    if len(shadows) > 1:
        return take_one_step(shadows)
    told = shadows[0].ask({"ask": "snapshot"})
    check_shares([(shadows[0].address, Share(*told.get("share", (0, 1))))])
    return [told]


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
        f"{named}: the shadow's base is not here, and what no step changes (frozen parameters, extras) stands only"
        " there",
        hint="convert on a machine that sees the shadow's files",
    )


class Questions:
    """A connection to a shadow that answers questions, one at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._socket = connect(address)
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
                    raise UcpError(f"{self.address}: {told['error']}", hint=told.get("hint"))
                if target is not None:
                    if told.get("size") != len(target):
                        raise RefusedError("an answer of another size than was asked for")
                    receive_into(self._socket, target)
                return told
        except (OSError, RefusedError, AttributeError) as error:
            raise StorageError(
                f"{self.address}: the shadow is gone ({error})",
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
