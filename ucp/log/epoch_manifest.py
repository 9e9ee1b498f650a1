"""`manifest.json` of an epoch: what its streams contain, and how to repeat what the job did."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from ucp.core.checkpoint import Mesh
from ucp.errors import IntegrityError, NotUnderstoodError, storage_errors
from ucp.log.stream_schema import LoggedParameter, StreamSchema
from ucp.storage.local import sync

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class KernelFingerprint:
    """What updated the optimizer tensors. Replay is exact only if all of this is the same.

    `id` is `<library>.<optimizer>.<variant>`, for example `torch.adamw.single`, `torch.sgd.foreach`,
    `deepspeed.cpu_adam`; of any other class, its import path.
    """

    id: str
    torch: str = ""  # version
    cpu_capability: str = ""  # torch.backends.cpu.get_cpu_capability()
    device: str = "cpu"  # or the accelerator's name
    vector_bytes: int = 0
    library: str = ""  # version of the library that contains the kernel, if that is not torch

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> KernelFingerprint:
        name, torch, capability, device = (str(data[key]) for key in ("id", "torch", "cpu_capability", "device"))
        return KernelFingerprint(name, torch, capability, device, int(data["vector_bytes"]), str(data["library"]))


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A param group: hyper-parameters at the start of the epoch (JSON values), and its parameters."""

    hyper: dict[str, Any]
    names: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"hyper": self.hyper, "names": list(self.names)}

    @staticmethod
    def from_json(data: Any) -> OptimizerGroup:
        return OptimizerGroup(dict(data["hyper"]), tuple(map(str, data["names"])))


@dataclass(frozen=True, slots=True)
class ParentEpoch:
    """What an epoch continues: the state after `step` of `epoch`. Later steps of that epoch no longer count."""

    epoch: int
    step: int


@dataclass(slots=True)
class EpochManifest:
    """The description of an epoch. Its first step is `start + 1`."""

    run: str  # random, the same for all epochs of a log
    epoch: int
    start: int  # step of the state that the epoch starts from
    mesh: Mesh
    kernel: KernelFingerprint
    optimizer: str  # class name, for messages
    parameters: list[LoggedParameter]
    groups: list[OptimizerGroup]
    streams: list[StreamSchema]
    parent: ParentEpoch | None = None
    base: str | None = None  # folder of the base at `start`, relative to the run's folder or absolute
    state_kinds: list[str] = field(default_factory=lambda: ["grad"])  # FULL and DIFF entries have an index into this
    notes: list[str] = field(default_factory=list)  # known reasons why a replay cannot be exact
    buffers: list[LoggedParameter] = field(default_factory=list)  # of the model, logged when they change

    def stream(self, number: int) -> StreamSchema:
        """A stream's schema by its number."""
        return {schema.stream: schema for schema in self.streams}[number]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "format": FORMAT,
            "run": self.run,
            "epoch": self.epoch,
            "start": self.start,
            "parent": None if self.parent is None else asdict(self.parent),
            "base": self.base,
            "mesh": self.mesh.to_json(),
            "kernel": self.kernel.to_json(),
            "optimizer": self.optimizer,
            "state_kinds": self.state_kinds,
            "notes": self.notes,
            "groups": [group.to_json() for group in self.groups],
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "streams": [stream.to_json() for stream in self.streams],
        }
        if self.buffers:
            out["buffers"] = [buffer.to_json() for buffer in self.buffers]
        return out

    @staticmethod
    def from_json(data: Any) -> EpochManifest:
        parent = data["parent"]
        return EpochManifest(
            str(data["run"]),
            int(data["epoch"]),
            int(data["start"]),
            Mesh(**data["mesh"]),
            KernelFingerprint.from_json(data["kernel"]),
            str(data["optimizer"]),
            [LoggedParameter.from_json(parameter) for parameter in data["parameters"]],
            [OptimizerGroup.from_json(group) for group in data["groups"]],
            [StreamSchema.from_json(stream) for stream in data["streams"]],
            None if parent is None else ParentEpoch(int(parent["epoch"]), int(parent["step"])),
            data["base"],
            list(map(str, data["state_kinds"])),
            list(map(str, data["notes"])),
            [LoggedParameter.from_json(buffer) for buffer in data.get("buffers", ())],
        )


def write_manifest(folder: Path, manifest: EpochManifest) -> None:
    """Write `manifest.json`; after a crash the file is whole or missing."""
    content = manifest.to_json()
    write_json(folder / MANIFEST, {"checksum": _checksum(content), **content})


def _checksum(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_json(content).encode())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file durably: to a temporary name, sync, rename, sync the folder (created if needed)."""
    partial = path.with_name(path.name + ".partial")
    with storage_errors(path, "cannot be written", hint="make room, or check the disk; then try again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(_json(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)


def read_manifest(folder: Path) -> EpochManifest:
    """Read the manifest in an epoch's folder."""
    path = folder / MANIFEST
    with storage_errors(path):
        raw = path.read_bytes()
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise IntegrityError(f"{path}: not the manifest of a log")
    if data["format"] != FORMAT:
        raise NotUnderstoodError(
            f"{path}: format {data['format']} (this version of ucp reads {FORMAT})", hint="use a newer ucp"
        )
    expected = data.pop("checksum", None)
    # Compare the raw bytes too: not even a byte that does not matter to JSON may have changed.
    if expected != _checksum(data) or raw != _json({"checksum": expected, **data}).encode():
        raise IntegrityError(f"{path}: damaged (the checksum is wrong)", hint="restore it from a copy")
    try:
        return EpochManifest.from_json(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"{path}: damaged ({type(error).__name__}: {error})") from error
