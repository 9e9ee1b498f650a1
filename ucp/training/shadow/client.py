"""The checkpoint that several shadows hold together, each a share of it, all at one step.

Asking a shadow: its status, and the checkpoint that it holds.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ucp import settings
from ucp.core.checkpoint import Checkpoint, ComputedFiles
from ucp.core.dtypes import BY_NAME
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, NotUnderstoodError, StorageError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.base_folders import list_bases
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.frames import BadBytesError
from ucp.log.stream_schema import BUFFER
from ucp.training.shadow.protocol import (
    RefusedError,
    ShadowAddress,
    parse_address,
    parse_addresses,
    receive_into,
    receive_json,
    send_json,
)
from ucp.training.shadow.shadow_state import OWN, StateKey
from ucp.training.shadow.to_checkpoint import assemble, identity_of, state_key
from ucp.training.shadow.transports import connect


class ShadowQuery(Protocol):
    """A shadow that answers questions."""

    address: ShadowAddress

    def ask(self, question: dict[str, Any], /) -> Any: ...


def check_shards(shares: Sequence[tuple[ShadowAddress, WorkShard]]) -> None:
    """Are these shadows everything of one state, each share once? Or do all of them hold everything?"""
    counts = {share.count for _, share in shares}
    held = ", ".join(f"{address} holds {share.number + 1}/{share.count}" for address, share in shares)
    if len(counts) > 1:
        raise UsageError(f"these shadows do not belong together: {held}", hint="start all with --share of one number")
    count = counts.pop()
    if count == 1:
        return
    missing = sorted(set(range(count)) - {share.number for _, share in shares})
    if missing:
        lacking = ", ".join(f"{number + 1}/{count}" for number in missing)
        raise UsageError(
            f"share {lacking} is missing: {held}", hint="name the shadows of all shares: shadow://a,shadow://b"
        )
    if len(shares) > count:
        raise UsageError(f"a share is there twice: {held}", hint="name one shadow for each share")


def take_one_step(shadows: Sequence[ShadowQuery]) -> list[dict[str, Any]]:
    """What every shadow tells of its share, all after the same step: the newest that they can all give.

    Every share keeps its newest steps back, so that there normally is one at once. Where a share has come less far
    than another has applied, it is waited for.
    """
    end = time.monotonic() + settings.SHADOW_ALIGN_SECONDS
    while True:
        told = [shadow.ask({"ask": "pin"}) for shadow in shadows]
        places = list(
            zip((shadow.address for shadow in shadows), (WorkShard(*one["share"]) for one in told), strict=True)
        )
        check_shards(places)
        runs = {str(one["run"]) for one in told}
        if len(runs) > 1:
            raise UsageError(f"these are shadows of several runs: {', '.join(sorted(runs))}")
        step = min(int(one["complete"]) for one in told)
        if len({int(one["epoch"]) for one in told}) == 1 and step >= max(int(one["applied"]) for one in told):
            try:
                return [shadow.ask({"ask": "snapshot", "step": step}) for shadow in shadows]
            except UcpError:
                if time.monotonic() > end:
                    raise
        elif time.monotonic() > end:
            raise _apart(shadows, told)
        time.sleep(0.02)


def _apart(shadows: Sequence[ShadowQuery], told: Sequence[Mapping[str, Any]]) -> InconsistentError:
    where = "; ".join(
        f"{shadow.address} can give steps {one['applied']} to {one['complete']} of epoch {one['epoch']}"
        + (f" (stale: {one['reason']})" if one["reason"] else "")
        for shadow, one in zip(shadows, told, strict=True)
    )
    return InconsistentError(
        f"the shadows have no step in common: {where}",
        hint="the log of the run has all steps; a shadow that is behind catches up when it is started with --log",
    )


def merge(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all shares tell, as if one shadow held everything. `InconsistentError` where they leave something out."""
    first = told[0]
    tensors: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in told:
        for stream, tensor, counter, kinds, start, stop in one["tensors"]:
            known = tensors.get((stream, tensor), (0, {}))
            tensors[stream, tensor] = max(known[0], counter), {**known[1], **kinds}
            held.setdefault((stream, tensor), []).append((start, stop))
    manifest = EpochManifest.from_json(first["manifest"])
    for schema in manifest.streams:
        for index, tensor in enumerate(schema.tensors):
            at = 0
            for start, stop in sorted(held.get((schema.stream, index), [])):
                at = stop if start == at else at
            if at != tensor.numel:
                raise InconsistentError(
                    f"stream {schema.stream}, optimizer tensor {index}: the shadows hold {at} of its {tensor.numel}"
                    " elements",
                    hint="their shares were cut by different versions: start them again",
                )
            tensors.setdefault((schema.stream, index), (0, {}))
    labels = [label for one in told for label in one["labels"]]
    proven = {one["proven_step"] for one in told}
    return {
        **first,
        "tensors": [[*place, *found] for place, found in sorted(tensors.items())],
        "own": list({tuple(each[:3]): each for one in told for each in one["own"]}.values()),
        "buffers": list({tuple(each[:2]): each for one in told for each in one["buffers"]}.values()),
        "labels": [label for number, label in enumerate(labels) if label not in labels[:number]],
        "proven_step": proven.pop() if len(proven) == 1 else None,
    }


class ShardedFiles:
    """The computed files of all shares: every byte comes from the shadow that holds it."""

    def __init__(self, told: Sequence[Mapping[str, Any]], files: Sequence[ComputedFiles]) -> None:
        self.identity = identity_of(told[0])
        self._held: dict[tuple[int, int], list[tuple[int, int, ComputedFiles]]] = {}
        self._sizes: dict[tuple[int, int, str], int] = {}
        self._whole: dict[StateKey, ComputedFiles] = {}  # small things, which every share holds
        for one, its in zip(told, files, strict=True):
            self._whole.update({(stream, tensor, OWN + kind): its for stream, tensor, kind, *_ in one["own"]})
            self._whole.update({(stream, number, BUFFER): its for stream, number, *_ in one["buffers"]})
            for stream, tensor, _, kinds, start, stop in one["tensors"]:
                self._held.setdefault((stream, tensor), []).append((start, stop, its))
                self._sizes.update({(stream, tensor, kind): BY_NAME[dtype].itemsize for kind, dtype in kinds.items()})

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        place = state_key(file)
        if place in self._whole:
            self._whole[place].read_into(file, offset, target)
            return
        size = self._sizes[place]
        for start, stop, its in self._held[place[:2]]:
            low, high = max(start * size, offset), min(stop * size, offset + len(target))
            if low < high:
                its.read_into(file, low, target[low - offset : high - offset])


def status(address: str | os.PathLike[str], token: Path | None = None) -> dict[str, Any]:
    """What a shadow says of itself."""
    with ShadowConnection(parse_address(address, token)) as shadow:
        told: dict[str, Any] = shadow.ask({"ask": "status"})
        return told


def open_shadow(address: str | os.PathLike[str], options: ReadOptions) -> Checkpoint:
    """The checkpoint of the newest complete step that a shadow holds, or several that hold a share each.

    The shadows go on; this stays as it is. What no step changes (frozen parameters, extras) is read from a
    shadow's base, which must be readable here.
    """
    shadows: list[ShadowConnection] = []
    try:
        for one in parse_addresses(address):
            shadows.append(ShadowConnection(one))
        with _parsed_answer(address):
            told = _query_all(shadows)
            path = _open_base(told[0])
        base = open_checkpoint(path, replace(options, spread=True))
        with _parsed_answer(address):
            files: list[ComputedFiles] = []
            for shadow, one_told in zip(shadows, told, strict=True):
                made = ShadowFiles(shadow, identity_of(one_told))
                weakref.finalize(made, shadow.close)
                files.append(made)
            if len(shadows) == 1:
                return assemble(base, told[0], files[0])
            return assemble(base, merge(told), ShardedFiles(told, files))
    except BaseException:
        for shadow in shadows:
            shadow.close()
        raise


@contextmanager
def _parsed_answer(address: str | os.PathLike[str]) -> Iterator[None]:
    """What a peer says may be of any form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, BadBytesError) as error:
        raise NotUnderstoodError(
            f"{os.fspath(address)}: what the shadow says of its state cannot be understood: {error!r}",
            hint="is it of the same version of ucp? The log has what it held",
        ) from error


def _query_all(shadows: list[ShadowConnection]) -> list[dict[str, Any]]:
    """What every shadow tells of one step, with its bytes ready to be read."""
    if len(shadows) > 1:
        return take_one_step(shadows)
    told = shadows[0].ask({"ask": "snapshot"})
    check_shards([(shadows[0].address, WorkShard(*told.get("share", (0, 1))))])
    return [told]


def _open_base(told: dict[str, Any]) -> Path:
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


class ShadowConnection:
    """A connection to a shadow that answers questions, one at a time."""

    def __init__(self, address: ShadowAddress) -> None:
        self.address = address
        self._socket = connect(address)
        self._socket.settimeout(None)
        self._lock = threading.Lock()

    def __enter__(self) -> ShadowConnection:
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
                told = receive_json(self._socket, settings.SHADOW_MANIFEST_BYTES)
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


class ShadowFiles:
    """The bytes of a shadow's snapshot as computed files."""

    def __init__(self, shadow: ShadowConnection, identity: str) -> None:
        self.identity = identity
        self._shadow = shadow

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        stream, tensor, kind = state_key(file)
        done = 0
        while done < len(target):
            size = min(len(target) - done, settings.SHADOW_READ_BYTES)
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
