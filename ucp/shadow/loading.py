"""Where a shadow begins: a checkpoint, and what a log says has happened since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.engine.shares import Share
from ucp.errors import InconsistentError, UsageError
from ucp.files.local import SourceFiles
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.manifest import Manifest
from ucp.log.payloads import StepRecord
from ucp.log.reader import Epoch, Log, Span, Stream
from ucp.model.checkpoint import Checkpoint
from ucp.replay.building import Builder
from ucp.replay.chunks import ReplayedTensor
from ucp.replay.derive import derive
from ucp.replay.exactness import EVERY, Approximate, doubts, find_kernel
from ucp.replay.opening import find_base
from ucp.shadow.held import ArrivedStream, HeldTensor
from ucp.shadow.portions import WHOLE, portions
from ucp.shadow.state import HeldState
from ucp.shadow.values import check_shapes, holds_states, load_values


@dataclass(slots=True)
class Beginning:
    """A state, and which frame each stream goes on with (None: with its first)."""

    state: HeldState
    base: Path  # folder of the checkpoint
    positions: dict[int, int | None]


def from_log(base: Path | None, log: Path, options: ReadOptions, share: Share = WHOLE) -> Beginning:
    """The newest state that a log has. Without a base, from the newest of the run's own."""
    with Log.open(log, "inspect", check="tail") as opened:
        newest = opened.epochs[-1]
        last = newest.recoverable_step
        start = find_base(opened.run_folder if base is None else base, opened, last)
        derived = derive(open_checkpoint(start, replace(options, spread=True)), opened, last)
        spans = _spans(opened, last)
        check_size(newest.manifest)
        checkpoint = derived.checkpoint
        # Where the newest epoch has nothing after its beginning, or the base is of the very last step, nothing is
        # replayed in it.
        inside = bool(derived.tensors) and bool(spans) and spans[-1].epoch is newest
        tensors = derived.tensors if inside else _tensors(checkpoint, newest, last)
        with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
            held = _held(tensors, newest.manifest, newest.folder, files, share, fresh=not newest.steps)
            buffers = load_values(checkpoint, newest.manifest, held, files)
        recent, aux = _recent(spans[-1]) if spans else ([], None)
        labels = derived.labels or _labels(newest.manifest, last + 1)
        state = HeldState(newest.manifest, last, held, labels, recent, aux, share, buffers)
        positions = {number: _position(stream, last) for number, stream in newest.streams.items()}
        return Beginning(state, start, positions)


def from_checkpoint(
    base: Checkpoint,
    manifest: Manifest,
    labels: Sequence[Approximate] = (),
    *,
    named: bool = False,
    share: Share = WHOLE,
) -> Beginning:
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
    epoch = Epoch(folder, manifest, {s.stream: ArrivedStream(folder, s) for s in manifest.streams})
    tensors = _tensors(base, epoch, manifest.start)
    with SourceFiles(base.root, computed=base.computed) as files:
        held = _held(tensors, manifest, folder, files, share, fresh=True)
        buffers = load_values(base, manifest, held, files)
    all_labels = [*labels, *_labels(manifest, manifest.start + 1)]
    state = HeldState(manifest, manifest.start, held, all_labels, share=share, buffers=buffers)
    return Beginning(state, base.root, {schema.stream: None for schema in manifest.streams})


def _spans(log: Log, last: int) -> list[Span]:
    """The steps that the log has up to the last; none where the state is that of a base and older steps are gone."""
    try:
        return log.spans(last)
    except UsageError:
        return []


def _tensors(base: Checkpoint, epoch: Epoch, step: int) -> list[ReplayedTensor]:
    """The optimizer tensors of an epoch as they are in a checkpoint of `step`."""
    kernel, _ = find_kernel(epoch.manifest.kernel)
    return Builder(base, Span(epoch, step + 1, step), kernel, step, {}).tensors()


def _held(
    tensors: Sequence[ReplayedTensor],
    manifest: Manifest,
    folder: Path,
    files: SourceFiles,
    share: Share,
    *,
    fresh: bool,
) -> list[HeldTensor]:
    """The tensors that a share has something of, with that loaded."""
    streams = {schema.stream: ArrivedStream(folder, schema) for schema in manifest.streams}
    for tensor in tensors:
        if tensor.kernel is None and not holds_states(manifest):
            raise UsageError(
                f"the optimizer {manifest.optimizer} ({manifest.kernel.id}) cannot be replayed, and the job records"
                " gradients",
                hint='ucp.record(…, what="state") records what a shadow of it needs',
            )
    mine = portions(manifest, share)
    held = []
    for tensor in tensors:
        start, stop = mine[tensor.stream.number].of_tensor(tensor.index, tensor.numel)
        if start < stop or share.is_whole:
            held.append(HeldTensor(tensor, streams[tensor.stream.number], files, (start, stop), fresh=fresh))
    return held


def _labels(manifest: Manifest, step: int) -> list[Approximate]:
    kernel, doubt = find_kernel(manifest.kernel)
    if kernel is None:  # nothing is computed that could differ
        return []
    return [Approximate(step, EVERY, reason) for reason in (*doubts(manifest), *([doubt] if doubt else []))]


def _position(stream: Stream, last: int) -> int | None:
    """The frame after the last step that is in the state."""
    logged = stream.scan.steps.get(last)
    if logged is not None:
        return logged.commit.header.lsn + 1
    return stream.scan.segments[0].first_lsn if stream.scan.segments else 0


def _recent(span: Span) -> tuple[list[tuple[int, StepRecord]], Any]:
    """The newest steps and their records, from the last that changed something on, and the notes of the last."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    found: list[tuple[int, StepRecord]] = []
    for step in range(span.last, span.first - 1, -1):
        record = stream.record(step)
        found.insert(0, (step, record))
        if not record.skipped:
            break
    return found, stream.aux(span.last)


def check_size(manifest: Manifest) -> None:
    """A manifest must not ask for more memory than its parameters have elements, and some padding."""
    room = tunables.SHADOW_PADDING_ELEMENTS
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
