"""Load the state that a shadow starts with: from a checkpoint, a log, or the state it held in the previous epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ucp import settings
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint
from ucp.core.region import Region
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.base_folders import ATOMS, BASE
from ucp.log.epoch_manifest import MANIFEST, EpochManifest
from ucp.log.payloads import StepRecord
from ucp.log.reader import EPOCH, Epoch, EpochSpan, Log, LogStream
from ucp.log.stream_schema import parse_shaped_kind
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import raw_dtype
from ucp.replay.at_step import find_base, replay_to_step
from ucp.replay.exactness import (
    ALL_PARAMETERS,
    ApproximationLabel,
    approximation_reasons,
    find_kernel,
    why_not_replayed,
)
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ReplayedTensor
from ucp.storage.local import SourceFiles
from ucp.training.shadow.shadow_state import Buffers, ShadowState, ShadowValue, SingleStepStream, TensorState
from ucp.training.shadow.step_assembler import WHOLE, stream_shards
from ucp.training.shadow.to_checkpoint import SnapshotFiles, assemble, describe_state


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
