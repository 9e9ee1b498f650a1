"""Query shadows: their status, and the checkpoint that one shadow, or several with a shard each, hold."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from ucp.training.shadow.shadow_checkpoint import assemble, identity_of, state_key
from ucp.training.shadow.shadow_state import SHAPED_PREFIX, StateKey
from ucp.training.shadow.transports import connect


def check_shards(shards: Sequence[tuple[ShadowAddress, WorkShard]]) -> None:
    """Check that these shadows hold every shard of one state once, or that each holds the whole state."""
    counts = {shard.count for _, shard in shards}
    shown = ", ".join(f"{address} holds {shard.number + 1}/{shard.count}" for address, shard in shards)
    if len(counts) > 1:
        raise UsageError(
            f"these shadows do not belong together: {shown}", hint="start all with the same N in --shard I/N"
        )
    count = counts.pop()
    if count == 1:
        return
    missing = sorted(set(range(count)) - {shard.number for _, shard in shards})
    if missing:
        numbers = ", ".join(f"{number + 1}/{count}" for number in missing)
        raise UsageError(
            f"shard {numbers} is missing: {shown}", hint="name the shadows of all shards: shadow://a,shadow://b"
        )
    if len(shards) > count:
        raise UsageError(f"a shard is named twice: {shown}", hint="name one shadow for each shard")


def snapshot_at_common_step(shadows: Sequence[ShadowConnection]) -> list[dict[str, Any]]:
    """Snapshots of all shards after the same step, the newest that all shadows can provide; returns descriptions.

    Every shadow delays applying its newest steps, so that normally there is a common step at once. If a shadow is
    behind what another one has applied, wait for it.
    """
    end = time.monotonic() + settings.SHADOW_ALIGN_SECONDS
    while True:
        pins = [shadow.ask({"ask": "pin"}) for shadow in shadows]
        addresses = [shadow.address for shadow in shadows]
        check_shards([(at, WorkShard(*pin["share"])) for at, pin in zip(addresses, pins, strict=True)])
        runs = {str(pin["run"]) for pin in pins}
        if len(runs) > 1:
            raise UsageError(f"these are shadows of several runs: {', '.join(sorted(runs))}")
        step = min(int(pin["complete"]) for pin in pins)
        if len({int(pin["epoch"]) for pin in pins}) == 1 and step >= max(int(pin["applied"]) for pin in pins):
            try:
                return [shadow.ask({"ask": "snapshot", "step": step}) for shadow in shadows]
            except UcpError:
                if time.monotonic() > end:
                    raise
        elif time.monotonic() > end:
            where = "; ".join(
                f"{shadow.address} has steps {pin['applied']} to {pin['complete']} of epoch {pin['epoch']}"
                + (f" (stale: {pin['reason']})" if pin["reason"] else "")
                for shadow, pin in zip(shadows, pins, strict=True)
            )
            raise InconsistentError(
                f"the shadows have no step in common: {where}",
                hint="the log of the run has all steps; a shadow that is behind catches up when started with --log",
            )
        time.sleep(0.02)


def merge(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the descriptions of all shards into one; `InconsistentError` if elements are missing."""
    first = descriptions[0]
    tensors: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in descriptions:
        for stream, tensor, counter, kinds, start, stop in one["tensors"]:
            known = tensors.get((stream, tensor), (0, {}))
            tensors[stream, tensor] = max(known[0], counter), {**known[1], **kinds}
            ranges.setdefault((stream, tensor), []).append((start, stop))
    manifest = EpochManifest.from_json(first["manifest"])
    for schema in manifest.streams:
        for index, tensor in enumerate(schema.tensors):
            at = 0
            for start, stop in sorted(ranges.get((schema.stream, index), [])):
                at = stop if start == at else at
            if at != tensor.numel:
                raise InconsistentError(
                    f"stream {schema.stream}, optimizer tensor {index}: the shadows hold {at} of its {tensor.numel}"
                    " elements",
                    hint="the shadows run different versions of ucp: start them again",
                )
            tensors.setdefault((schema.stream, index), (0, {}))
    labels = [label for one in descriptions for label in one["labels"]]
    proven = {one["proven_step"] for one in descriptions}
    return {
        **first,
        "tensors": [[*key, *found] for key, found in sorted(tensors.items())],
        "own": list({tuple(each[:3]): each for one in descriptions for each in one["own"]}.values()),
        "buffers": list({tuple(each[:2]): each for one in descriptions for each in one["buffers"]}.values()),
        "labels": [label for number, label in enumerate(labels) if label not in labels[:number]],
        "proven_step": proven.pop() if len(proven) == 1 else None,
    }


class ShardedFiles:
    """The computed files of all shards; every byte is read from the shadow that holds it."""

    def __init__(self, descriptions: Sequence[Mapping[str, Any]], files: Sequence[ComputedFiles]) -> None:
        self.identity = identity_of(descriptions[0])
        self._ranges: dict[tuple[int, int], list[tuple[int, int, ComputedFiles]]] = {}
        self._sizes: dict[tuple[int, int, str], int] = {}
        self._whole: dict[StateKey, ComputedFiles] = {}  # small values, which every shard has
        for one, shard in zip(descriptions, files, strict=True):
            for stream, tensor, kind, *_ in one["own"]:
                self._whole[stream, tensor, SHAPED_PREFIX + kind] = shard
            self._whole.update({(stream, number, BUFFER): shard for stream, number, *_ in one["buffers"]})
            for stream, tensor, _, kinds, start, stop in one["tensors"]:
                self._ranges.setdefault((stream, tensor), []).append((start, stop, shard))
                self._sizes.update({(stream, tensor, kind): BY_NAME[dtype].itemsize for kind, dtype in kinds.items()})

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        key = state_key(file)
        if key in self._whole:
            self._whole[key].read_into(file, offset, target)
            return
        size = self._sizes[key]
        for start, stop, shard in self._ranges[key[:2]]:
            low, high = max(start * size, offset), min(stop * size, offset + len(target))
            if low < high:
                shard.read_into(file, low, target[low - offset : high - offset])


def status(address: str | os.PathLike[str], token: Path | None = None) -> dict[str, Any]:
    """The status of a shadow as JSON values."""
    with ShadowConnection(parse_address(address, token)) as shadow:
        answer: dict[str, Any] = shadow.ask({"ask": "status"})
        return answer


def open_shadow(address: str | os.PathLike[str], options: ReadOptions) -> Checkpoint:
    """The checkpoint of the newest complete step of a shadow, or of several with a shard each.

    It does not change while the shadows apply further steps. Frozen parameters and extras are read from the shadow's
    base, which must be readable here.
    """
    shadows: list[ShadowConnection] = []
    try:
        for one in parse_addresses(address):
            shadows.append(ShadowConnection(one))
        with _parsed_answer(address):
            if len(shadows) > 1:
                descriptions = snapshot_at_common_step(shadows)
            else:
                descriptions = [shadows[0].ask({"ask": "snapshot"})]
                check_shards([(shadows[0].address, WorkShard(*descriptions[0].get("share", (0, 1))))])
            path = _find_base(descriptions[0])
        base = open_checkpoint(path, replace(options, spread=True))
        with _parsed_answer(address):
            files: list[ComputedFiles] = []
            for shadow, description in zip(shadows, descriptions, strict=True):
                made = ShadowFiles(shadow, identity_of(description))
                weakref.finalize(made, shadow.close)
                files.append(made)
            if len(shadows) == 1:
                return assemble(base, descriptions[0], files[0])
            return assemble(base, merge(descriptions), ShardedFiles(descriptions, files))
    except BaseException:
        for shadow in shadows:
            shadow.close()
        raise


@contextmanager
def _parsed_answer(address: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors of a malformed answer into `NotUnderstoodError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, BadBytesError) as error:
        raise NotUnderstoodError(
            f"{os.fspath(address)}: the shadow's description of its state cannot be parsed: {error!r}",
            hint="does it run the same version of ucp? The log has the same state",
        ) from error


def _find_base(description: dict[str, Any]) -> Path:
    """A checkpoint of the same model: the base of the shadow, or if that was dropped, the run's newest base."""
    named = Path(description["base"])
    if named.exists():
        return named
    log = None if description["log"] is None else Path(description["log"])
    for run in () if log is None else (log, log.parent):
        bases = list_bases(run)
        if bases:
            return bases[-1].path
    raise UsageError(
        f"{named}: the shadow's base does not exist here, but frozen parameters and extras must be read from it",
        hint="convert on a machine that can read the shadow's files",
    )


class ShadowConnection:
    """A connection to a shadow for queries, one at a time."""

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
        """The answer to a question; a `target` is filled with the bytes that follow the answer."""
        try:
            with self._lock:
                send_json(self._socket, question)
                answer = receive_json(self._socket, settings.SHADOW_MANIFEST_BYTES)
                if isinstance(answer, dict) and "error" in answer:
                    raise UcpError(f"{self.address}: {answer['error']}", hint=answer.get("hint"))
                if target is not None:
                    if answer.get("size") != len(target):
                        raise RefusedError("the answer has another size than requested")
                    receive_into(self._socket, target)
                return answer
        except (OSError, RefusedError, AttributeError) as error:
            raise StorageError(
                f"{self.address}: the shadow is gone ({error})",
                hint="the log has the same state: start the shadow again with --log",
            ) from error


class ShadowFiles:
    """The bytes of a remote shadow's snapshot, as computed files."""

    def __init__(self, shadow: ShadowConnection, identity: str) -> None:
        self.identity = identity
        self._shadow = shadow

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        stream, tensor, kind = state_key(file)
        question = {"ask": "read", "stream": stream, "tensor": tensor, "kind": kind}
        done = 0
        while done < len(target):
            size = min(len(target) - done, settings.SHADOW_READ_BYTES)
            self._shadow.ask({**question, "offset": offset + done, "size": size}, target[done : done + size])
            done += size
