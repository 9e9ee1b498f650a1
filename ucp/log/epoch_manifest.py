"""`manifest.json` of an epoch: what its streams are about, and how to repeat what the trainer did."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from ucp.core.mesh import Mesh
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError
from ucp.log.stream_schema import LoggedParameter, StreamSchema
from ucp.storage.local import sync

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class KernelFingerprint:
    """What stepped the optimizer tensors. Replay is exact only where all of this is the same again.

    `id` is `<library>.<optimizer>.<variant>`, for example `torch.adamw.single`, `torch.sgd.foreach`,
    `deepspeed.cpu_adam`; an optimizer of another class has its import path.
    """

    id: str
    torch: str = ""  # version
    cpu_capability: str = ""  # torch.backends.cpu.get_cpu_capability()
    device: str = "cpu"  # or the accelerator's name
    vector_bytes: int = 0
    library: str = ""  # version of the library that the kernel is from, where that is not torch

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "torch": self.torch,
            "cpu_capability": self.cpu_capability,
            "device": self.device,
            "vector_bytes": self.vector_bytes,
            "library": self.library,
        }

    @staticmethod
    def from_json(data: Any) -> KernelFingerprint:
        return KernelFingerprint(
            str(data["id"]),
            str(data["torch"]),
            str(data["cpu_capability"]),
            str(data["device"]),
            int(data["vector_bytes"]),
            str(data["library"]),
        )


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A parameter group: hyper-parameters as they were when the epoch began (JSON values), and its parameters."""

    hyper: dict[str, Any]
    names: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"hyper": self.hyper, "names": list(self.names)}

    @staticmethod
    def from_json(data: Any) -> OptimizerGroup:
        return OptimizerGroup(dict(data["hyper"]), tuple(map(str, data["names"])))


@dataclass(frozen=True, slots=True)
class ParentEpoch:
    """Where an epoch goes on from: the state after `step` of `epoch`. Later steps of that epoch are abandoned."""

    epoch: int
    step: int


@dataclass(slots=True)
class EpochManifest:
    """All that an epoch says about itself. Its first step is `start + 1`."""

    run: str  # random, the same for all epochs of a log
    epoch: int
    start: int  # step of the state that the epoch began with
    mesh: Mesh
    kernel: KernelFingerprint
    optimizer: str  # class, for people
    parameters: list[LoggedParameter]
    groups: list[OptimizerGroup]
    streams: list[StreamSchema]
    parent: ParentEpoch | None = None
    base: str | None = None  # folder of the base that the epoch began with, relative to the run's folder or absolute
    state_kinds: list[str] = field(default_factory=lambda: ["grad"])  # what FULL and DIFF entries name by number
    notes: list[str] = field(default_factory=list)  # why a replay cannot be exact, where the recorder knows
    buffers: list[LoggedParameter] = field(default_factory=list)  # of the model, logged when they change

    def stream(self, number: int) -> StreamSchema:
        """A stream's schema by its number."""
        for schema in self.streams:
            if schema.stream == number:
                return schema
        raise KeyError(number)

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "format": FORMAT,
            "run": self.run,
            "epoch": self.epoch,
            "start": self.start,
            "parent": None if self.parent is None else {"epoch": self.parent.epoch, "step": self.parent.step},
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
    """Write `manifest.json` so that after a crash it is there whole or not at all."""
    told = manifest.to_json()
    write_json(folder / MANIFEST, {"checksum": _checksum(told), **told})


def _checksum(told: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_json(told).encode())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file under another name, wait for the disk, rename it, wait for the folder, which is made."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(_json(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}", hint="make room, or see to the disk; then try again"
        ) from error


def read_manifest(folder: Path) -> EpochManifest:
    """The manifest of an epoch's folder."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
        data = json.loads(raw)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: is no JSON: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise IntegrityError(f"{path}: is no manifest of a log")
    if data["format"] != FORMAT:
        raise NotUnderstoodError(
            f"{path}: format {data['format']}, but this ucp reads {FORMAT}", hint="use a newer ucp"
        )
    expected = data.pop("checksum", None)
    # Written and read again the same: so no byte has changed, not even one that JSON does not care about.
    if expected != _checksum(data) or raw != _json({"checksum": expected, **data}).encode():
        raise IntegrityError(f"{path}: is damaged (the checksum is wrong)", hint="restore it from a copy")
    try:
        return EpochManifest.from_json(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
