"""The state of a shadow as a checkpoint: the index of its base, with all states and buffers in the shadow's memory.

A state is described by JSON values, so that the checkpoint can also be assembled in another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ucp.core.checkpoint import COMPUTED, Checkpoint, ComputedFiles, Note, Parameter
from ucp.core.dtypes import BY_NAME
from ucp.errors import NotUnderstoodError
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.payloads import StepRecord
from ucp.log.reader import Epoch, EpochSpan, LogStream
from ucp.log.stream_recovery import LoggedStep, StreamScan
from ucp.log.stream_schema import BUFFER, StreamSchema
from ucp.replay.at_step import ReplayedState, with_labels
from ucp.replay.exactness import BUFFERS_NOT_LOGGED, ApproximationLabel, find_kernel
from ucp.replay.gradients import OptimizerUpdate
from ucp.replay.logged_states import set_buffer, shaped_atom
from ucp.replay.non_tensor_state import advance_extras
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ReplayedTensor
from ucp.training.shadow.shadow_state import SHAPED_PREFIX, ShadowState, StateKey, StateSnapshot

FORMAT = 3


def describe_state(state: ShadowState, base: Path, log: Path | None) -> dict[str, Any]:
    """Everything about a state except its bytes, as JSON values."""
    labels = [*([state.refuted] if state.refuted else []), *state.labels]
    if state.refuted is None and state.proven_step == state.step:
        labels = []
    return {
        "format": FORMAT,
        "manifest": state.manifest.to_json(),
        "step": state.step,
        "base": str(base.resolve()),
        "log": None if log is None else str(log.resolve()),
        "share": [state.shard.number, state.shard.count],
        "tensors": [[t.stream.number, t.index, t.counter, t.kinds, *t.elements] for t in state.tensors],
        "own": [
            [t.stream.number, t.index, kind, list(v.shape), str(v.dtype), None if v.shape else v.data.hex()]
            for t in state.tensors
            for kind, v in t.shaped.items()
        ],
        "buffers": [[stream, number, str(value.dtype)] for (stream, number), value in state.buffers.items()],
        "recent": [[step, record.pack().hex()] for step, record in state.recent],
        "aux": state.aux,
        "labels": [label.to_json() for label in labels],
        "proven_step": state.proven_step,
    }


class SnapshotFiles:
    """The bytes of a snapshot in this process, as computed files."""

    def __init__(self, snapshot: StateSnapshot) -> None:
        self.identity = identity_of(snapshot.description)
        self._snapshot = snapshot

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        self._snapshot.read_into(state_key(file), offset, target)


def identity_of(description: Mapping[str, Any]) -> str:
    """A text that is equal for equal states."""
    manifest = description["manifest"]
    return f"shadow {manifest['run']} {manifest['epoch']} {description['step']}"


def file_name(stream: int, tensor: int) -> str:
    """The name of an optimizer tensor's computed files, without the state."""
    return f"{COMPUTED}shadow/{stream}/{tensor}"


def state_key(file: str) -> StateKey:
    """The state that a computed file contains."""
    stream, tensor, kind = file.removeprefix(f"{COMPUTED}shadow/").split("/", 2)
    return int(stream), int(tensor), kind


def assemble(base: Checkpoint, description: Mapping[str, Any], files: ComputedFiles) -> Checkpoint:
    """The checkpoint of a shadow, from its base, the description of its state, and its bytes."""
    if description.get("format") != FORMAT:
        raise NotUnderstoodError(
            f"the shadow uses format {description.get('format')}, but this version of ucp uses {FORMAT}"
        )
    manifest = EpochManifest.from_json(description["manifest"])
    step = int(description["step"])
    records = {int(at): StepRecord.unpack(bytes.fromhex(packed)) for at, packed in description["recent"]}
    folder = Path(f"epoch-{manifest.epoch:06d}")
    streams: dict[int, LogStream] = {
        s.stream: _DescribedStream(folder, s, records, description["aux"]) for s in manifest.streams
    }
    epoch = Epoch(folder, manifest, streams)
    kernel, _ = find_kernel(manifest.kernel)
    builder = SpanBuilder(base, EpochSpan(epoch, step + 1, step), kernel, step, {})
    known = {(int(s), int(t)): (int(counter), kinds) for s, t, counter, kinds, *_ in description["tensors"]}
    tensors = [
        _with_description(tensor, step, *known[tensor.stream.number, tensor.index]) for tensor in builder.tensors()
    ]
    parameters = builder.parameters(tensors)
    _add_shaped_states(parameters, tensors, description["own"])
    for stream, number, dtype in description["buffers"]:
        name = manifest.buffers[manifest.stream(stream).buffers[number].parameter].name
        set_buffer(parameters, name, f"{file_name(stream, number)}/{BUFFER}", BY_NAME[dtype])
    notes = [*base.notes, *(Note("buffers", n) for n in manifest.notes if n.startswith(BUFFERS_NOT_LOGGED))]
    after = replace(base, parameters=parameters, step=step, steps={}, notes=notes, computed=files)
    if records:
        after = advance_extras(after, EpochSpan(epoch, min(records), step))
    labels = [
        ApproximationLabel(int(one["step"]), str(one["parameter"]), str(one["reason"])) for one in description["labels"]
    ]
    after.details = {**after.details, "replay": {"base_step": base.step, "step": step, "log": description["log"]}}
    return with_labels(ReplayedState(after, labels, proven=description["proven_step"]))


def _add_shaped_states(
    parameters: dict[str, Parameter], tensors: Sequence[ReplayedTensor], described: Sequence[Any]
) -> None:
    """Add states with other shapes than the parameter's, from the first optimizer tensor with elements of it."""
    first: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        for block in tensor.blocks:
            first.setdefault(tensor.base_parameters[block.parameter].name, (tensor.stream.number, tensor.index))
    shaped: dict[tuple[int, int], list[Any]] = {}
    for stream, index, *rest in described:
        shaped.setdefault((int(stream), int(index)), []).append(rest)
    for name, key in first.items():
        parameter = parameters[name]
        atoms = dict(parameter.atoms)
        for kind, shape, dtype, inline in shaped.get(key, ()):
            data = None if inline is None else bytes.fromhex(inline)
            file, whole = f"{file_name(*key)}/{SHAPED_PREFIX}{kind}", tuple(map(int, shape))
            atoms[kind] = shaped_atom(name, kind, whole, BY_NAME[dtype], file=file, inline=data)
        parameters[name] = replace(parameter, atoms=atoms)


def _with_description(tensor: ReplayedTensor, step: int, counter: int, kinds: Mapping[str, str]) -> ReplayedTensor:
    """A tensor with the states and the update count of the shadow."""
    origins = {number: replace(origin, step=step, counter=counter) for number, origin in tensor.base_parameters.items()}
    return replace(
        tensor,
        file=file_name(tensor.stream.number, tensor.index),
        kinds={kind: BY_NAME[dtype] for kind, dtype in kinds.items()},
        base_parameters=origins,
        updates=[OptimizerUpdate(step, {}, None, counter)] if counter else [],
    )


class _DescribedStream(LogStream):
    """A stream with the scalars and notes of the newest steps only."""

    def __init__(self, folder: Path, schema: StreamSchema, records: Mapping[int, StepRecord], aux: Any) -> None:
        scan = StreamScan(folder, schema.stream)
        for step, record in records.items():
            scan.steps[step] = LoggedStep(step, record, [], None, [], None)  # type: ignore[arg-type]
        super().__init__(folder, schema, scan)
        self._aux = aux

    def aux(self, step: int) -> Any:
        del step
        return self._aux
