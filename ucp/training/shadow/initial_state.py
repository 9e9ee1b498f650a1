"""What a log holds as it is, buffers and states of optimizers that cannot be replayed: what a shadow begins with.

Where a shadow begins: a checkpoint, and what a log says has happened since.

Which state an epoch begins with, and where a log keeps its epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from ucp.replay.at_step import replay_to_step
from ucp.replay.exactness import (
    ALL_PARAMETERS,
    ApproximationLabel,
    approximation_reasons,
    find_kernel,
    why_not_replayed,
)
from ucp.replay.open_at import find_base
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ReplayedTensor
from ucp.storage.local import SourceFiles
from ucp.training.shadow.shadow_state import Buffers, ShadowState, ShadowValue, SingleStepStream, TensorState
from ucp.training.shadow.step_assembler import WHOLE, stream_shards
from ucp.training.shadow.to_checkpoint import SnapshotFiles, assemble, describe_state


def holds_states(manifest: EpochManifest) -> bool:
    """Is this a log of states, and not of gradients?"""
    return manifest.kernel.id.endswith(" (state)")


def load_values(
    checkpoint: Checkpoint, manifest: EpochManifest, tensors: Sequence[TensorState], files: SourceFiles
) -> Buffers:
    """Give the tensors of a log of states their states with shapes of their own, and give the buffers."""
    if holds_states(manifest):
        for tensor in tensors:
            parameter = checkpoint.parameters.get(tensor.names[0]) if tensor.names else None
            for kind, atom in {} if parameter is None else parameter.atoms.items():
                is_own = kind == STEP or (parameter is not None and atom.shape != parameter.shape)
                if is_own and kind not in (WEIGHT, MASTER):
                    tensor.own[kind] = _read_value(atom, files)
    found: Buffers = {}
    for schema in manifest.streams:
        for block in schema.buffers:
            held = checkpoint.parameters.get(manifest.buffers[block.parameter].name)
            if held is not None and WEIGHT in held.atoms:
                found[schema.stream, block.id] = _read_value(held.atoms[WEIGHT], files)
    return found


def _read_value(atom: Atom, files: SourceFiles) -> ShadowValue:
    out = np.empty(atom.numel, raw_dtype(atom.dtype))
    AtomReader(files, atom, flat=False).read_region(Region.all_of(atom.shape), out)
    return ShadowValue(atom.shape, atom.dtype, out.tobytes())


def check_shapes(manifest: EpochManifest) -> None:
    """States with shapes of their own, and buffers, must not ask for more memory than a model has any use for."""
    room = settings.SHADOW_PADDING_ELEMENTS
    most = max((math.prod(parameter.shape) for parameter in manifest.parameters), default=0) + room
    for name in manifest.state_kinds:
        told = parse_shaped_kind(name)
        if told is not None and math.prod(told[1]) > most:
            raise InconsistentError(f"state {name} has more elements than any parameter of the job")
    for schema in manifest.streams:
        for block in schema.buffers:
            where = f"stream {schema.stream}, buffer {block.id}"
            if not 0 <= block.parameter < len(manifest.buffers):
                raise InconsistentError(f"{where}: is none of the job's buffers")
            if block.count != math.prod(manifest.buffers[block.parameter].shape):
                raise InconsistentError(f"{where}: is not the whole of it")


@dataclass(slots=True)
class InitialState:
    """A state, and which frame each stream goes on with (None: with its first)."""

    state: ShadowState
    base: Path  # folder of the checkpoint
    positions: dict[int, int | None]


def from_log(base: Path | None, log: Path, options: ReadOptions, share: WorkShard = WHOLE) -> InitialState:
    """The newest state that a log has. Without a base, from the newest of the run's own."""
    with Log.open(log, "inspect", check="tail") as opened:
        newest = opened.epochs[-1]
        last = newest.recoverable_step
        start = find_base(opened.run_folder if base is None else base, opened, last)
        derived = replay_to_step(open_checkpoint(start, replace(options, spread=True)), opened, last)
        spans = _spans(opened, last)
        check_size(newest.manifest)
        checkpoint = derived.checkpoint
        # Where the newest epoch has nothing after its beginning, or the base is of the very last step, nothing is
        # replayed in it.
        inside = bool(derived.tensors) and bool(spans) and spans[-1].epoch is newest
        tensors = derived.tensors if inside else _tensors(checkpoint, newest, last)
        with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
            held = _load_tensors(tensors, newest.manifest, newest.folder, files, share, fresh=not newest.steps)
            buffers = load_values(checkpoint, newest.manifest, held, files)
        recent, aux = _recent(spans[-1]) if spans else ([], None)
        labels = derived.labels or _labels(newest.manifest, last + 1)
        state = ShadowState(newest.manifest, last, held, labels, recent, aux, share, buffers)
        positions = {number: _position(stream, last) for number, stream in newest.streams.items()}
        return InitialState(state, start, positions)


def from_checkpoint(
    base: Checkpoint,
    manifest: EpochManifest,
    labels: Sequence[ApproximationLabel] = (),
    *,
    named: bool = False,
    share: WorkShard = WHOLE,
) -> InitialState:
    """The state that an epoch begins with, where the checkpoint is just that.

    One that does not count its steps is of step 0, unless the job itself has `named` it.
    """
    step = base.step if base.step is not None else manifest.start if named else 0
    if step != manifest.start:
        raise UsageError(
            f"{base.root}: is of step {step}, and the job goes on from step {manifest.start}",
            hint="give the log of the run with --log, or a base of that step",
        )
    check_size(manifest)
    folder = Path(f"epoch-{manifest.epoch:06d}")
    epoch = Epoch(folder, manifest, {s.stream: SingleStepStream(folder, s) for s in manifest.streams})
    tensors = _tensors(base, epoch, manifest.start)
    with SourceFiles(base.root, computed=base.computed) as files:
        held = _load_tensors(tensors, manifest, folder, files, share, fresh=True)
        buffers = load_values(base, manifest, held, files)
    all_labels = [*labels, *_labels(manifest, manifest.start + 1)]
    state = ShadowState(manifest, manifest.start, held, all_labels, share=share, buffers=buffers)
    return InitialState(state, base.root, {schema.stream: None for schema in manifest.streams})


def _spans(log: Log, last: int) -> list[EpochSpan]:
    """The steps that the log has up to the last; none where the state is that of a base and older steps are gone."""
    try:
        return log.spans(last)
    except UsageError:
        return []


def _tensors(base: Checkpoint, epoch: Epoch, step: int) -> list[ReplayedTensor]:
    """The optimizer tensors of an epoch as they are in a checkpoint of `step`."""
    kernel, _ = find_kernel(epoch.manifest.kernel)
    return SpanBuilder(base, EpochSpan(epoch, step + 1, step), kernel, step, {}).tensors()


def _load_tensors(
    tensors: Sequence[ReplayedTensor],
    manifest: EpochManifest,
    folder: Path,
    files: SourceFiles,
    share: WorkShard,
    *,
    fresh: bool,
) -> list[TensorState]:
    """The tensors that a share has something of, with that loaded."""
    streams = {schema.stream: SingleStepStream(folder, schema) for schema in manifest.streams}
    for tensor in tensors:
        if tensor.kernel is None and not holds_states(manifest):
            raise UsageError(
                f"the optimizer {manifest.optimizer} ({manifest.kernel.id}) cannot be replayed"
                f" ({why_not_replayed(manifest.kernel)}), and the job records gradients",
                hint='ucp.record(…, what="state") records what a shadow of it needs',
            )
    mine = stream_shards(manifest, share)
    held = []
    for tensor in tensors:
        start, stop = mine[tensor.stream.number].of_tensor(tensor.index, tensor.numel)
        if start < stop or share.is_whole:
            held.append(TensorState(tensor, streams[tensor.stream.number], files, (start, stop), fresh=fresh))
    return held


def _labels(manifest: EpochManifest, step: int) -> list[ApproximationLabel]:
    kernel, doubt = find_kernel(manifest.kernel)
    if kernel is None:  # nothing is computed that could differ
        return []
    return [
        ApproximationLabel(step, ALL_PARAMETERS, reason)
        for reason in (*approximation_reasons(manifest), *([doubt] if doubt else []))
    ]


def _position(stream: LogStream, last: int) -> int | None:
    """The frame after the last step that is in the state."""
    logged = stream.scan.steps.get(last)
    if logged is not None:
        return logged.commit.header.lsn + 1
    return stream.scan.segments[0].first_lsn if stream.scan.segments else 0


def _recent(span: EpochSpan) -> tuple[list[tuple[int, StepRecord]], Any]:
    """The newest steps and their records, from the last that changed something on, and the notes of the last."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    found: list[tuple[int, StepRecord]] = []
    for step in range(span.last, span.first - 1, -1):
        record = stream.record(step)
        found.insert(0, (step, record))
        if not record.skipped:
            break
    return found, stream.aux(span.last)


def check_size(manifest: EpochManifest) -> None:
    """A manifest must not ask for more memory than its parameters have elements, and some padding."""
    room = settings.SHADOW_PADDING_ELEMENTS
    check_shapes(manifest)
    for schema in manifest.streams:
        covered = [0] * len(schema.tensors)
        elements = [0] * len(manifest.parameters)
        for block in schema.blocks:
            where = f"stream {schema.stream}, block {block.id}"
            if not 0 <= block.parameter < len(elements) or not 0 <= block.tensor < len(covered):
                raise InconsistentError(f"{where}: is of no parameter or tensor")
            if not 0 <= block.offset <= schema.tensors[block.tensor].numel - block.count:
                raise InconsistentError(f"{where}: does not lie in its tensor")
            covered[block.tensor] += block.count
            elements[block.parameter] += block.count
        for index, (tensor, count) in enumerate(zip(schema.tensors, covered, strict=True)):
            if not count <= tensor.numel <= 2 * count + room:
                raise InconsistentError(
                    f"stream {schema.stream}, optimizer tensor {index}: of its {tensor.numel} elements the log has"
                    f" {count}"
                )
        for parameter, count in zip(manifest.parameters, elements, strict=True):
            if count > math.prod(parameter.shape) + room:
                raise InconsistentError(
                    f"stream {schema.stream}: has {count} elements of {parameter.name}, which has"
                    f" {math.prod(parameter.shape)}"
                )


def root_of(log: Path) -> Path:
    """The folder that holds the epochs of a log, which may be named by its run."""
    return log / "log" if (log / "log").is_dir() else log


def epochs_of(log: Path) -> list[int]:
    """Numbers of the epochs that a log has."""
    root = root_of(log)
    if not root.is_dir():
        return []
    found = [EPOCH.fullmatch(path.name) for path in root.iterdir() if (path / MANIFEST).is_file()]
    return [int(named[1]) for named in found if named is not None]


def newest_of(log: Path, base: Path | None, options: ReadOptions, share: WorkShard = WHOLE) -> InitialState:
    """The newest state of a log: from its run's own bases where it has some, else from `base`."""
    own = (root_of(log).parent / "base").is_dir()
    return from_log(None if own else base, log, options, share)


def continues_from(state: ShadowState, manifest: EpochManifest) -> bool:
    """Is what is held just what the epoch goes on from?"""
    parent = manifest.parent
    same = state.manifest.run == manifest.run and state.step == manifest.start
    return same and parent is not None and (parent.epoch, parent.step) == (state.manifest.epoch, state.step)


def from_current_state(
    state: ShadowState, base: Path, manifest: EpochManifest, options: ReadOptions
) -> InitialState | None:
    """A new epoch that goes on from the state that is held, in its own layout.

    None where a share of another layout is needed: what it lacks is in other shadows.
    """
    if not state.share.is_whole:
        return _in_the_same_layout(state, base, manifest)
    snapshot = state.snapshot(lambda: describe_state(state, base, None))
    try:
        held = assemble(open_checkpoint(base, replace(options, spread=True)), snapshot.told, SnapshotFiles(snapshot))
        beginning = from_checkpoint(held, manifest, state.labels)
    finally:
        snapshot.close()
    beginning.base = base
    return beginning


def _in_the_same_layout(state: ShadowState, base: Path, manifest: EpochManifest) -> InitialState | None:
    """The state as it is, where the epoch's streams are those of the one before."""
    if [schema.hash() for schema in state.manifest.streams] != [schema.hash() for schema in manifest.streams]:
        return None
    if state.manifest.kernel != manifest.kernel:
        return None
    for tensor in state.tensors:
        for replay in tensor.replays:
            replay.chunk.resumed_at = replay.chunk.step
    again = ShadowState(
        *(manifest, state.step, state.tensors, state.labels, state.recent, state.aux, state.share, state.buffers)
    )
    return InitialState(again, base, {schema.stream: None for schema in manifest.streams})


def from_manifest(
    manifest: EpochManifest,
    run: Path | None,
    log: Path | None,
    base: Path | None,
    options: ReadOptions,
    share: WorkShard = WHOLE,
) -> InitialState:
    """An epoch that a job tells of: from the log, from the base that the job names in its `run`, or from `base`."""
    if log is not None and epochs_of(log):
        beginning = newest_of(log, base, options, share)
        found = beginning.state.manifest
        if (found.run, found.epoch) == (manifest.run, manifest.epoch):
            return beginning
    told = None if manifest.base is None else Path(manifest.base)
    if told is not None and not told.is_absolute():
        told = None if run is None else run / told
    if told is not None and (told / BASE).is_file():  # a base of the run, and no checkpoint of somebody's
        told = told / ATOMS
    reasons = []
    for path in (told, base):
        if path is not None and path.exists():
            try:
                return from_checkpoint(open_checkpoint(path, options), manifest, named=path is not base, share=share)
            except UsageError as error:
                reasons.append(error.what)
    raise UsageError(
        f"there is no checkpoint of step {manifest.start}, which the job goes on from"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        hint="start the shadow with --base of that step, or with --log of the run",
    )
