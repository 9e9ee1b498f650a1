"""A checkpoint at any step of a log: the base's index, with every state that was trained since in computed files.

    state = at_step(base, Log.open("run"), 1200)

is a `Checkpoint` like any other; nothing is computed before its bytes are read. Digests in the log can prove or refute
that a replay produces the job's own bits. `open_at` implements SRC, --log and --step of every command.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from ucp.core.checkpoint import STEP, Checkpoint, Note
from ucp.errors import ImpossibleError, UsageError, require_torch
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.base_folders import BaseCheckpoint, list_bases, usable_bases
from ucp.log.payloads import StateDigest
from ucp.log.reader import EpochSpan, Log
from ucp.log.stream_schema import PARAM
from ucp.replay.exactness import (
    ALL_PARAMETERS,
    BUFFERS_NOT_LOGGED,
    ApproximationLabel,
    approximation_reasons,
    find_kernel,
)
from ucp.replay.logged_states import PARAM_NAMES, LoggedFiles, set_logged_buffers
from ucp.replay.non_tensor_state import advance_extras, with_following_hyper
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ChunkReplay, ReplayedFiles, ReplayedTensor
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path


@dataclass(slots=True)
class ReplayedState:
    """The state after a step, and why it may not be exact."""

    checkpoint: Checkpoint
    labels: list[ApproximationLabel] = field(default_factory=list)
    tensors: list[ReplayedTensor] = field(default_factory=list)  # of the newest span
    proven: int | None = None  # the newest step at which the job's digests matched, if they were compared


def at_step(base: Checkpoint, log: Log, step: int | None = None, *, exact: bool = False) -> Checkpoint:
    """The state of the job after `step` (by default the last one in the log), from an earlier state and the log.

    If the result may differ from the job's state, notes contain the reason and the first step; with `exact` that is an
    error. Comparing the digests in the log costs another replay, so it is done with `exact` only.
    """
    replayed = replay_to_step(base, log, step)
    if exact:
        proof = prove_by_digests(replayed)
        replayed.labels, replayed.proven = proof.remaining(replayed.labels), proof.proven_step
        if replayed.labels:
            raise ImpossibleError(
                f"{log.root}: step {replayed.checkpoint.step} cannot be replayed exactly: {replayed.labels[0]}",
                hint="without --exact the result is labelled approximate",
            )
    return with_labels(replayed)


def with_labels(replayed: ReplayedState) -> Checkpoint:
    """The checkpoint with its labels as notes, and in the details that are written to manifests."""
    checkpoint = replayed.checkpoint
    return replace(
        checkpoint,
        notes=[*checkpoint.notes, *(Note("approximate", str(label)) for label in replayed.labels)],
        details={
            **checkpoint.details,
            "replay": {
                **checkpoint.details.get("replay", {}),
                "exact": not replayed.labels,
                "proven_step": replayed.proven,
                "labels": [label.to_json() for label in replayed.labels],
            },
        },
    )


def replay_to_step(base: Checkpoint, log: Log, step: int | None = None) -> ReplayedState:
    """Replay span by span: the result of one is the base of the next, in the next one's layout."""
    last = log.recoverable_step if step is None else step
    known = _base_of(base, log)
    steps, first, step_before = known.steps, known.first_step, known.step
    if last < first:
        raise ImpossibleError(
            f"{base.root}: is of step {first}, after step {last}", hint="use a base of an earlier step"
        )
    spans = [] if last == first else _spans_between(log.spans(last), first, last, log)
    earliest = spans[0].last if spans else last
    for name, newest in ({**steps, "the rest": known.step} if steps else {}).items():
        if newest > earliest:
            raise ImpossibleError(
                f"{base.root}: parameter {name} is of step {newest}, after step {earliest}",
                hint="a base whose tensors are of different steps can be used from the step of its newest tensor on",
            )
    replayed = ReplayedState(base)
    for span in spans:
        replayed = _after_span(replayed, span, step_before, steps)
        step_before, steps = span.last, {}
    checkpoint = replayed.checkpoint
    if checkpoint is not base:
        details = {"base_step": first, "step": last, "log": str(log.root.resolve())}
        checkpoint.details = {**checkpoint.details, "replay": details}
        replayed.labels[:0] = _undone_base(known, spans, log)
    elif not steps:
        replayed.checkpoint = _unreplayed(base, known, log)
    return replayed


def _unreplayed(base: Checkpoint, known: BaseCheckpoint, log: Log) -> Checkpoint:
    """The base itself, if that is the step; schedulers may have run after it, and the next step has their results."""
    following = known.step + 1
    for epoch in reversed(log.epochs):
        continues = known.epoch in (-1, epoch.number) or epoch.manifest.start == known.step
        if continues and following in epoch.steps:
            return with_following_hyper(base, EpochSpan(epoch, following, epoch.steps.stop - 1))
    return base


def _base_of(base: Checkpoint, log: Log) -> BaseCheckpoint:
    """The base's step: as recorded in its run, or as in the checkpoint itself."""
    root = base.root.resolve()
    for known in list_bases(log.run_folder):
        if known.path.resolve() == root:
            return known
    for epoch in log.epochs:
        named = epoch.manifest.base
        if named is not None and (log.run_folder / named).resolve() in (root, root.parent):
            return BaseCheckpoint(root, -1, epoch.manifest.start, epoch.number)
    if base.step is None:
        raise ImpossibleError(
            f"{base.root}: does not contain its step, so the log cannot be applied to it",
            hint="use a base of the run, or a checkpoint that contains its step",
        )
    return BaseCheckpoint(root, -1, base.step, -1, steps=base.steps)


def _spans_between(spans: Sequence[EpochSpan], first: int, last: int, log: Log) -> list[EpochSpan]:
    """The spans from the base to the step, without gaps."""
    kept = [replace(span, first=max(span.first, first + 1)) for span in spans if span.last > first]
    if not kept or kept[0].first != first + 1:
        have = f"steps {spans[0].first} to {spans[-1].last}" if spans else "no steps"
        raise ImpossibleError(
            f"{log.root}: does not contain all steps from the base (step {first}) to step {last}: it has {have}",
            hint="use a newer base, or the log with its older segments",
        )
    return kept


def _undone_base(base: BaseCheckpoint, spans: Sequence[EpochSpan], log: Log) -> list[ApproximationLabel]:
    """A label if the base may be of a step that the run undid when it restarted from an earlier one."""
    forks = {e.manifest.parent.epoch: e.manifest.parent.step for e in log.epochs if e.manifest.parent is not None}
    for epoch in log.epochs:
        after = base.step > forks.get(epoch.number, base.step)
        if not after or base.epoch not in (epoch.number, -1) or (base.epoch < 0 and base.step not in epoch.steps):
            continue
        known = base.epoch >= 0 or spans[0].epoch is epoch
        whose = f"is of step {base.step} of epoch {epoch.number}" if known else f"may be of epoch {epoch.number}"
        reason = f"the base {whose}, which was left after step {forks[epoch.number]}"
        return [ApproximationLabel(base.step, ALL_PARAMETERS, reason)]
    return []


# One span -----------------------------------------------------------------------------------------------------------


def _after_span(before: ReplayedState, span: EpochSpan, step: int, steps: Mapping[str, int]) -> ReplayedState:
    """The state after a span, from the state before it."""
    base, manifest = before.checkpoint, span.epoch.manifest
    kernel, doubt = find_kernel(manifest.kernel)
    labels = list(before.labels)
    if kernel is not None:
        reasons = [*approximation_reasons(manifest), *([doubt] if doubt else [])]
        labels += [ApproximationLabel(span.first, ALL_PARAMETERS, reason) for reason in reasons]
    builder = SpanBuilder(base, span, kernel, step, steps)
    tensors = builder.tensors()
    if kernel is not None and kernel.id == "deepspeed.cpu_adam":
        unknown = _unknown_beta_products(span, tensors)
        labels += [ApproximationLabel(span.first, ALL_PARAMETERS, unknown)] if unknown else []
    identity = f"{manifest.run} {span.epoch.number} {base.step} {span.first} {span.last}"
    inner = base.computed
    identity = identity if inner is None else f"{inner.identity}; {identity}"
    files = ReplayedFiles(SourceFiles(base.root, computed=inner), tensors, identity, inner)
    parameters = builder.parameters(tensors)
    logged = {**set_logged_buffers(parameters, span, builder.stored), **builder.logged}
    computed = LoggedFiles(logged, files) if logged else files
    notes = [*base.notes, *(Note("buffers", n) for n in manifest.notes if n.startswith(BUFFERS_NOT_LOGGED))]
    after = replace(base, parameters=parameters, step=span.last, steps={}, notes=notes, computed=computed)
    return ReplayedState(advance_extras(after, span), labels, tensors)


def _unknown_beta_products(span: EpochSpan, tensors: Sequence[ReplayedTensor]) -> str | None:
    """DeepSpeed's CPU Adam multiplies betas since its process started; why the log does not determine the product."""
    manifest = span.epoch.manifest
    resumed = any(tensor.resumed_at > 0 for tensor in tensors)
    betas = {tuple(update.hyper["betas"]) for tensor in tensors for update in tensor.updates[:1]}
    if len(betas) > 1:
        return "the groups of DeepSpeed's CPU Adam have different betas: their running products depend on the order"
    if span.epoch.steps.start == manifest.start + 1 and not (
        resumed and manifest.parent is None and manifest.base is None
    ):
        return None
    return "the step at which DeepSpeed's CPU Adam started is unknown, and with it its running product of betas"


# Digests ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DigestProof:
    """The result of comparing a replay with the job's digests."""

    step: int  # the requested one
    compared: int = 0  # digests
    proven: dict[str, int] = field(default_factory=dict)  # parameter → newest step at which all its states match
    refuted: list[ApproximationLabel] = field(default_factory=list)

    @property
    def proven_step(self) -> int | None:
        """The newest step at which every parameter is proven; None if there is none."""
        step = min(self.proven.values(), default=-1)
        return None if step < 0 or self.refuted else step

    def remaining(self, labels: Sequence[ApproximationLabel]) -> list[ApproximationLabel]:
        """The labels that still apply: matching digests of the step itself remove them, others are added."""
        if self.refuted:
            return [*self.refuted, *labels]
        everything = bool(self.proven) and all(step >= self.step for step in self.proven.values())
        return [] if everything else list(labels)


def prove_by_digests(replayed: ReplayedState) -> DigestProof:
    """Replay every tensor of the newest span up to each of its digests, chunk by chunk, and compare."""
    checkpoint = replayed.checkpoint
    proof = DigestProof(checkpoint.step or 0)
    inner = getattr(checkpoint.computed, "inner", None)
    with SourceFiles(checkpoint.root, computed=inner) as base:
        for tensor in replayed.tensors:
            _prove_tensor(proof, tensor, base)
    return proof


def _prove_tensor(proof: DigestProof, tensor: ReplayedTensor, base: SourceFiles) -> None:
    import torch

    names = sorted({parameter.name for parameter in tensor.base_parameters.values()})
    if any(tensor.base_parameters[block.parameter].is_padded(block.region) for block in tensor.blocks):
        proof.proven.update(dict.fromkeys(names, -1))
        return  # the job's digest includes rows that pad the vocabulary, and the base does not have them
    begin = max((parameter.step for parameter in tensor.base_parameters.values()), default=tensor.last)
    known: dict[int, list[StateDigest]] = {}
    for step, digests in sorted(tensor.stream.digests().items()):
        if (begin if tensor.kernel is not None else tensor.last) <= step <= tensor.last:
            # Old logs have digests of step counters for parameters that are a single number.
            own = [d for d in digests if d.tensor == tensor.index and not (d.kind == STEP and tensor.numel == 1)]
            known.update({step: own} if own else {})
    running = {(step, d.kind): xxhash.xxh3_128() for step, digests in known.items() for d in digests}
    for number in range(-(-tensor.numel // tensor.chunk_numel)):
        replay = ChunkReplay(tensor, number, base)
        for step, digests in known.items():
            with torch.no_grad():
                replay.run(step)
            for digest in digests:
                replay.add_to_digest(running[step, digest.kind], _kind(digest))
    for name in names:
        proof.proven.setdefault(name, -1)
    for step, digests in known.items():
        wrong = [d for d in digests if running[step, d.kind].hexdigest() != d.value]
        proof.compared += len(digests)
        if wrong:
            kinds = ", ".join(_kind(d) for d in wrong)
            reason = f"the replay differs from the job's own digest ({kinds})"
            proof.refuted += [ApproximationLabel(step, name, reason) for name in names]
            return
        if {_kind(d) for d in digests} >= set(tensor.kinds):
            for name in names:
                proof.proven[name] = max(proof.proven[name], step)


def _kind(digest: StateDigest) -> str:
    return PARAM if digest.kind in PARAM_NAMES else digest.kind


LATEST = "latest"


def open_at(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    *,
    exact: bool = False,
) -> Checkpoint:
    """The checkpoint at `path`; with a `log`, the state after `step` (a number, or `latest`) computed from both.

    With a log, `path` may also be the folder of the run: then its newest base before the step is used.
    """
    if log is None:
        if step is not None or exact:
            raise UsageError("--step and --exact need a log", hint="give the log with --log, or leave them out")
        return open_checkpoint(parse_path(path), options)
    require_torch("the state after a step of a log")
    wanted = parse_step(step)
    opened = Log.open(parse_path(log), check="tail")  # blocks are checked when they are read
    base = open_checkpoint(find_base(parse_path(path), opened, wanted), replace(options, spread=True))
    state = at_step(base, opened, wanted, exact=exact)
    if state.computed is None:
        opened.close()
    else:
        weakref.finalize(state.computed, opened.close)
    return state


def parse_step(step: int | str | None) -> int | None:
    """Parse a step; None is the last one in the log."""
    if isinstance(step, str) and step != LATEST and not step.isdecimal():
        raise UsageError(f"{step!r} is not a step", hint="give a number, or latest")
    return None if step is None or step == LATEST else int(step)


def find_base(path: Path, log: Log, step: int | None) -> Path:
    """The base to start from: the checkpoint itself, or in a run's folder the newest base up to the step."""
    if path.resolve() not in (log.run_folder.resolve(), log.root.resolve()) or not list_bases(log.run_folder):
        return path
    usable = usable_bases(log, step)
    last = log.recoverable_step if step is None else step
    fitting = [base for base in usable if max([base.step, *base.steps.values()]) <= last]
    if not fitting:
        raise ImpossibleError(
            f"{path}: contains no base from which step {last} can be reached",
            hint="`ucp log ls` lists bases and steps; give a checkpoint of an earlier step instead of the run",
        )
    return fitting[-1].path
