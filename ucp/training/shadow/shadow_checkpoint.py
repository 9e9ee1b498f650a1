"""Checkpoints and the state of a shadow: the state that it starts with, and the checkpoint that its state is.

The initial state comes from a checkpoint, a log, or the state of the previous epoch. As a checkpoint, a state is the
index of its base with all states and buffers in the shadow's memory. It is described by JSON values, so that the
checkpoint can also be assembled in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ucp import settings
from ucp.core.checkpoint import COMPUTED, MASTER, STEP, WEIGHT, Atom, Checkpoint, ComputedFiles, Note, Parameter
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, NotUnderstoodError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.base_folders import ATOMS, BASE
from ucp.log.epoch_manifest import MANIFEST, EpochManifest
from ucp.log.payloads import StepRecord
from ucp.log.reader import EPOCH, Epoch, EpochSpan, Log, LogStream
from ucp.log.stream_recovery import LoggedStep, StreamScan
from ucp.log.stream_schema import BUFFER, StreamSchema, parse_shaped_kind
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import raw_dtype
from ucp.replay.at_step import ReplayedState, find_base, replay_to_step, with_labels
from ucp.replay.exactness import (
    ALL_PARAMETERS,
    BUFFERS_NOT_LOGGED,
    ApproximationLabel,
    approximation_reasons,
    find_kernel,
    why_not_replayed,
)
from ucp.replay.gradients import OptimizerUpdate
from ucp.replay.logged_states import set_buffer, shaped_atom
from ucp.replay.non_tensor_state import advance_extras
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ReplayedTensor
from ucp.storage.local import SourceFiles
from ucp.training.shadow.shadow_state import (
    SHAPED_PREFIX,
    Buffers,
    ShadowState,
    ShadowValue,
    SingleStepStream,
    StateKey,
    StateSnapshot,
    TensorState,
)
from ucp.training.shadow.step_assembler import WHOLE, stream_shards

FORMAT = 3  # of the description of a state


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


# The initial state ----------------------------------------------------------------------------------------------------


def is_log_of_states(manifest: EpochManifest) -> bool:
    """Whether a log contains states instead of gradients."""
    return manifest.kernel.id.endswith(" (state)")


def load_values(
    checkpoint: Checkpoint, manifest: EpochManifest, tensors: Sequence[TensorState], files: SourceFiles
) -> Buffers:
    """Load the states with other shapes than their tensors, of a log of states; returns the buffers."""
    if is_log_of_states(manifest):
        for tensor in tensors:
            parameter = checkpoint.parameters.get(tensor.names[0]) if tensor.names else None
            for kind, atom in {} if parameter is None else parameter.atoms.items():
                is_shaped = kind == STEP or (parameter is not None and atom.shape != parameter.shape)
                if is_shaped and kind not in (WEIGHT, MASTER):
                    tensor.shaped[kind] = _read_value(atom, files)
    found: Buffers = {}
    for schema in manifest.streams:
        for block in schema.buffers:
            buffer = checkpoint.parameters.get(manifest.buffers[block.parameter].name)
            if buffer is not None and WEIGHT in buffer.atoms:
                found[schema.stream, block.id] = _read_value(buffer.atoms[WEIGHT], files)
    return found


def _read_value(atom: Atom, files: SourceFiles) -> ShadowValue:
    out = np.empty(atom.numel, raw_dtype(atom.dtype))
    AtomReader(files, atom, flat=False).read_region(Region.all_of(atom.shape), out)
    return ShadowValue(atom.shape, atom.dtype, out.tobytes())


@dataclass(slots=True)
class InitialState:
    """A state, and the frames at which its streams continue."""

    state: ShadowState
    base: Path  # path of the checkpoint
    positions: dict[int, int] = field(default_factory=dict)  # by stream; without an entry, its first frame


def from_log(base: Path | None, log: Path, options: ReadOptions, shard: WorkShard = WHOLE) -> InitialState:
    """The newest state of a log, starting from `base` or from the newest base of the run."""
    with Log.open(log, "inspect", check="tail") as opened:
        newest = opened.epochs[-1]
        last = newest.recoverable_step
        start = find_base(opened.run_folder if base is None else base, opened, last)
        derived = replay_to_step(open_checkpoint(start, replace(options, spread=True)), opened, last)
        try:
            spans = opened.spans(last)
        except UsageError:  # the state is that of a base, and older steps were dropped
            spans = []
        check_size(newest.manifest)
        checkpoint = derived.checkpoint
        # Nothing is replayed in the newest epoch if it has no steps yet, or if the base is of its last step.
        inside = bool(derived.tensors) and bool(spans) and spans[-1].epoch is newest
        tensors = derived.tensors if inside else _tensors(checkpoint, newest, last)
        with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
            loaded = _load_tensors(tensors, newest.manifest, newest.folder, files, shard, fresh=not newest.steps)
            buffers = load_values(checkpoint, newest.manifest, loaded, files)
        recent, aux = _recent(spans[-1]) if spans else ([], None)
        labels = list(derived.labels) or _labels(newest.manifest, last + 1)
        state = ShadowState(newest.manifest, last, loaded, labels, recent, aux, shard, buffers)
        positions = {number: _position(stream, last) for number, stream in newest.streams.items()}
        return InitialState(state, start, positions)


def from_checkpoint(
    base: Checkpoint,
    manifest: EpochManifest,
    labels: Sequence[ApproximationLabel] = (),
    *,
    named: bool = False,
    shard: WorkShard = WHOLE,
) -> InitialState:
    """The initial state of an epoch from a checkpoint of the same step.

    A checkpoint that does not count steps is taken as step 0, unless the job itself has `named` it.
    """
    step = base.step if base.step is not None else manifest.start if named else 0
    if step != manifest.start:
        raise UsageError(
            f"{base.root}: is of step {step}, but the job continues from step {manifest.start}",
            hint="pass the log of the run with --log, or a base of that step",
        )
    check_size(manifest)
    folder = Path(f"epoch-{manifest.epoch:06d}")
    epoch = Epoch(folder, manifest, {s.stream: SingleStepStream(folder, s) for s in manifest.streams})
    tensors = _tensors(base, epoch, manifest.start)
    with SourceFiles(base.root, computed=base.computed) as files:
        loaded = _load_tensors(tensors, manifest, folder, files, shard, fresh=True)
        buffers = load_values(base, manifest, loaded, files)
    all_labels = [*labels, *_labels(manifest, manifest.start + 1)]
    state = ShadowState(manifest, manifest.start, loaded, all_labels, shard=shard, buffers=buffers)
    return InitialState(state, base.root)


def _tensors(base: Checkpoint, epoch: Epoch, step: int) -> list[ReplayedTensor]:
    """The optimizer tensors of an epoch, from a checkpoint of `step`."""
    kernel, _ = find_kernel(epoch.manifest.kernel)
    return SpanBuilder(base, EpochSpan(epoch, step + 1, step), kernel, step, {}).tensors()


def _load_tensors(
    tensors: Sequence[ReplayedTensor],
    manifest: EpochManifest,
    folder: Path,
    files: SourceFiles,
    shard: WorkShard,
    *,
    fresh: bool,
) -> list[TensorState]:
    """Load the tensors, or parts of tensors, that belong to the shard."""
    streams = {schema.stream: SingleStepStream(folder, schema) for schema in manifest.streams}
    for tensor in tensors:
        if tensor.kernel is None and not is_log_of_states(manifest):
            raise UsageError(
                f"the optimizer {manifest.optimizer} ({manifest.kernel.id}) cannot be replayed"
                f" ({why_not_replayed(manifest.kernel)}), and the job records gradients",
                hint='record states instead: ucp.record(…, what="state")',
            )
    stream_parts = stream_shards(manifest, shard)
    loaded = []
    for tensor in tensors:
        start, stop = stream_parts[tensor.stream.number].of_tensor(tensor.index, tensor.numel)
        if start < stop or shard.is_whole:
            loaded.append(TensorState(tensor, streams[tensor.stream.number], files, (start, stop), fresh=fresh))
    return loaded


def _labels(manifest: EpochManifest, step: int) -> list[ApproximationLabel]:
    kernel, doubt = find_kernel(manifest.kernel)
    if kernel is None:  # a log of states is not replayed, so nothing can be approximate
        return []
    reasons = [*approximation_reasons(manifest), *([doubt] if doubt else [])]
    return [ApproximationLabel(step, ALL_PARAMETERS, reason) for reason in reasons]


def _position(stream: LogStream, last: int) -> int:
    """The number of the frame after step `last`."""
    logged = stream.scan.steps.get(last)
    if logged is not None:
        return logged.commit.header.lsn + 1
    return stream.scan.segments[0].first_lsn if stream.scan.segments else 0


def _recent(span: EpochSpan) -> tuple[list[tuple[int, StepRecord]], Any]:
    """The newest steps with their records, starting with the last one that was not skipped, and its notes."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    found: list[tuple[int, StepRecord]] = []
    for step in range(span.last, span.first - 1, -1):
        record = stream.record(step)
        found.insert(0, (step, record))
        if not record.skipped:
            break
    return found, stream.aux(span.last)


def check_size(manifest: EpochManifest) -> None:
    """Refuse a manifest that would need more memory than its parameters and some padding."""
    room = settings.SHADOW_PADDING_ELEMENTS
    most = max((math.prod(parameter.shape) for parameter in manifest.parameters), default=0) + room
    for name in manifest.state_kinds:
        parsed = parse_shaped_kind(name)
        if parsed is not None and math.prod(parsed[1]) > most:
            raise InconsistentError(f"state {name} has more elements than any parameter of the job")
    for schema in manifest.streams:
        for block in schema.buffers:
            where = f"stream {schema.stream}, buffer {block.id}"
            if not 0 <= block.parameter < len(manifest.buffers):
                raise InconsistentError(f"{where}: is not one of the job's buffers")
            if block.count != math.prod(manifest.buffers[block.parameter].shape):
                raise InconsistentError(f"{where}: is not the whole buffer")
        covered = [0] * len(schema.tensors)
        elements = [0] * len(manifest.parameters)
        for block in schema.blocks:
            where = f"stream {schema.stream}, block {block.id}"
            if not 0 <= block.parameter < len(elements) or not 0 <= block.tensor < len(covered):
                raise InconsistentError(f"{where}: refers to an unknown parameter or tensor")
            if not 0 <= block.offset <= schema.tensors[block.tensor].numel - block.count:
                raise InconsistentError(f"{where}: is outside its tensor")
            covered[block.tensor] += block.count
            elements[block.parameter] += block.count
        for index, (tensor, count) in enumerate(zip(schema.tensors, covered, strict=True)):
            if not count <= tensor.numel <= 2 * count + room:
                raise InconsistentError(
                    f"stream {schema.stream}, optimizer tensor {index}: the log has {count} of its {tensor.numel}"
                    " elements"
                )
        for parameter, count in zip(manifest.parameters, elements, strict=True):
            if count > math.prod(parameter.shape) + room:
                raise InconsistentError(
                    f"stream {schema.stream}: has {count} elements of parameter {parameter.name}, which has only"
                    f" {math.prod(parameter.shape)}"
                )


def root_of(log: Path) -> Path:
    """The folder with the epochs of a log; `log` may be the path of the run."""
    return log / "log" if (log / "log").is_dir() else log


def epochs_of(log: Path) -> list[int]:
    """The numbers of a log's epochs."""
    root = root_of(log)
    if not root.is_dir():
        return []
    found = [EPOCH.fullmatch(path.name) for path in root.iterdir() if (path / MANIFEST).is_file()]
    return [int(named[1]) for named in found if named is not None]


def newest_of(log: Path, base: Path | None, options: ReadOptions, shard: WorkShard = WHOLE) -> InitialState:
    """The newest state of a log, starting from the bases of its run if there are any, otherwise from `base`."""
    has_bases = (root_of(log).parent / "base").is_dir()
    return from_log(None if has_bases else base, log, options, shard)


def continues_from(state: ShadowState, manifest: EpochManifest) -> bool:
    """Whether an epoch continues exactly from this state."""
    parent = manifest.parent
    same = state.manifest.run == manifest.run and state.step == manifest.start
    return same and parent is not None and (parent.epoch, parent.step) == (state.manifest.epoch, state.step)


def from_current_state(
    state: ShadowState, base: Path, manifest: EpochManifest, options: ReadOptions
) -> InitialState | None:
    """The initial state of a new epoch that continues from the current state, in the new epoch's layout.

    None if only a shard is held and the layout has changed: the missing elements are in other shadows.
    """
    if not state.shard.is_whole:
        layouts = [[schema.hash() for schema in of.streams] for of in (state.manifest, manifest)]
        if layouts[0] != layouts[1] or state.manifest.kernel != manifest.kernel:
            return None
        for tensor in state.tensors:
            for replay in tensor.replays:
                replay.chunk.resumed_at = replay.chunk.step
        return InitialState(replace(state, manifest=manifest), base)
    snapshot = state.snapshot(lambda: describe_state(state, base, None))
    try:
        opened = open_checkpoint(base, replace(options, spread=True))
        current = assemble(opened, snapshot.description, SnapshotFiles(snapshot))
        initial = from_checkpoint(current, manifest, state.labels)
    finally:
        snapshot.close()
    initial.base = base
    return initial


def from_manifest(
    manifest: EpochManifest,
    run: Path | None,
    log: Path | None,
    base: Path | None,
    options: ReadOptions,
    shard: WorkShard = WHOLE,
) -> InitialState:
    """The initial state of a job's epoch: from the log, from the base that its manifest names, or from `base`."""
    if log is not None and epochs_of(log):
        initial = newest_of(log, base, options, shard)
        found = initial.state.manifest
        if (found.run, found.epoch) == (manifest.run, manifest.epoch):
            return initial
    named = None if manifest.base is None else Path(manifest.base)
    if named is not None and not named.is_absolute():
        named = None if run is None else run / named
    if named is not None and (named / BASE).is_file():  # a base of the run, not a user's checkpoint
        named = named / ATOMS
    reasons = []
    for path in (named, base):
        if path is not None and path.exists():
            try:
                return from_checkpoint(open_checkpoint(path, options), manifest, named=path is not base, shard=shard)
            except UsageError as error:
                reasons.append(error.what)
    raise UsageError(
        f"found no checkpoint of step {manifest.start}, from which the job continues"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        hint="start the shadow with --base of that step, or with --log of the run",
    )
