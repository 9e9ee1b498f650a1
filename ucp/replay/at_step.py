"""A checkpoint at any step of a log: the base's index, with every state that was trained since in computed files.

    state = at_step(base, Log.open("run"), 1200)

is a `Checkpoint` like any other; nothing is computed before its bytes are read.

Digests in a log prove or refute that a replay gives the job's own bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from ucp.core.checkpoint import STEP, Checkpoint, Note
from ucp.errors import UsageError
from ucp.log.base_folders import BaseCheckpoint, list_bases
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
from ucp.replay.logged_states import PARAM_NAMES, LoggedFiles, with_buffers
from ucp.replay.non_tensor_state import advance_extras, with_following_hyper
from ucp.replay.replay_index import SpanBuilder
from ucp.replay.replayer import ChunkReplay, ReplayedFiles, ReplayedTensor, tensor_bytes
from ucp.storage.local import SourceFiles


@dataclass(slots=True)
class ReplayedState:
    """A state at a step, and how sure it is."""

    checkpoint: Checkpoint
    labels: list[ApproximationLabel] = field(default_factory=list)
    tensors: list[ReplayedTensor] = field(default_factory=list)  # of the newest span
    proven: int | None = None  # the newest step at which digests of the job were met, where someone has looked


def at_step(base: Checkpoint, log: Log, step: int | None = None, *, exact: bool = False) -> Checkpoint:
    """The state of the job after `step` (the last that the log has), from an older state and the log.

    Where the result may differ from what the job held, notes say so, with reason and first step; with `exact` that is
    an error. Digests in the log can prove or refute it; to look at them costs another replay, so only `exact` does.
    """
    derived = replay_to_step(base, log, step)
    if exact:
        proof = prove_by_digests(derived)
        derived.labels, derived.proven = proof.remaining(derived.labels), proof.proven_step
        if derived.labels:
            raise UsageError(
                f"{log.root}: step {derived.checkpoint.step} cannot be had exactly: {derived.labels[0]}",
                hint="leave --exact out to get it, labelled approximate",
            )
    return with_labels(derived)


def with_labels(derived: ReplayedState) -> Checkpoint:
    """The checkpoint with its labels as notes, and among the facts that go into a manifest."""
    checkpoint = derived.checkpoint
    told = checkpoint.details.get("replay", {})
    return replace(
        checkpoint,
        notes=[*checkpoint.notes, *(Note("approximate", str(label)) for label in derived.labels)],
        details={
            **checkpoint.details,
            "replay": {
                **told,
                "exact": not derived.labels,
                "proven_step": derived.proven,
                "labels": [label.to_json() for label in derived.labels],
            },
        },
    )


def replay_to_step(base: Checkpoint, log: Log, step: int | None = None) -> ReplayedState:
    """Span by span: what one gives is the base of the next, in the layout that it has."""
    last = log.recoverable_step if step is None else step
    known = _base_of(base, log)
    steps, first, step_before = known.steps, known.first_step, known.step
    if last < first:
        raise UsageError(
            f"{base.root}: is of step {first}, after step {last}", hint="give a base that is older than the step"
        )
    spans = [] if last == first else _needed(log.spans(last), first, last, log)
    _check_fuzzy(base, {**steps, "the rest": known.step} if steps else {}, spans[0].last if spans else last)
    derived = ReplayedState(base)
    told = {"base_step": first, "step": last, "log": str(log.root.resolve())}
    for span in spans:
        derived = _over(derived, span, step_before, steps)
        step_before, steps = span.last, {}
    checkpoint = derived.checkpoint
    if checkpoint is not base:
        checkpoint.details = {**checkpoint.details, "replay": told}
        derived.labels[:0] = _left_behind(known, spans, log)
    elif not steps:
        derived.checkpoint = _settled(base, known, log)
    return derived


def _settled(base: Checkpoint, known: BaseCheckpoint, log: Log) -> Checkpoint:
    """The base itself, where the step is its own; what was set after it the next step knows, if there is one."""
    following = known.step + 1
    for epoch in reversed(log.epochs):
        goes_on = known.epoch in (-1, epoch.number) or epoch.manifest.start == known.step
        if goes_on and following in epoch.steps:
            return with_following_hyper(base, EpochSpan(epoch, following, epoch.steps.stop - 1))
    return base


def _check_fuzzy(base: Checkpoint, steps: Mapping[str, int], last: int) -> None:
    for name, step in steps.items():
        if step > last:
            raise UsageError(
                f"{base.root}: parameter {name} is of step {step}, after step {last}",
                hint="a base whose tensors have different steps is good for steps from its newest tensor on",
            )


def _base_of(base: Checkpoint, log: Log) -> BaseCheckpoint:
    """What is known of the base's step: as its run noted it, or as the checkpoint says."""
    root = base.root.resolve()
    for known in list_bases(log.run_folder):
        if known.path.resolve() == root:
            return known
    for epoch in log.epochs:
        named = epoch.manifest.base
        if named is not None and (log.run_folder / named).resolve() in (root, root.parent):
            return BaseCheckpoint(root, -1, epoch.manifest.start, epoch.number)
    if base.step is None:
        raise UsageError(
            f"{base.root}: does not say which step it is of, so the log cannot be put upon it",
            hint="give a base of the run, or a checkpoint that counts its steps",
        )
    return BaseCheckpoint(root, -1, base.step, -1, steps=base.steps)


def _needed(spans: Sequence[EpochSpan], first: int, last: int, log: Log) -> list[EpochSpan]:
    """The spans that lead from the base to the step, without gap."""
    kept = [replace(span, first=max(span.first, first + 1)) for span in spans if span.last > first]
    if not kept or kept[0].first != first + 1:
        have = f"steps {spans[0].first} to {spans[-1].last}" if spans else "no steps"
        raise UsageError(
            f"{log.root}: leads from step {first + 1} of the base to step {last} nowhere: it has {have}",
            hint="give a newer base, or the log with its older segments",
        )
    return kept


def _left_behind(base: BaseCheckpoint, spans: Sequence[EpochSpan], log: Log) -> list[ApproximationLabel]:
    """A label, where the base may be of steps that the run went back behind and took again: not of this history."""
    forks = {e.manifest.parent.epoch: e.manifest.parent.step for e in log.epochs if e.manifest.parent is not None}
    for epoch in log.epochs:
        after = base.step > forks.get(epoch.number, base.step)
        if not after or base.epoch not in (epoch.number, -1) or (base.epoch < 0 and base.step not in epoch.steps):
            continue
        reason = (
            f"the base is of step {base.step} of epoch {epoch.number}, which was left after step {forks[epoch.number]}"
        )
        if base.epoch < 0 and spans[0].epoch is not epoch:
            reason = f"the base may be of epoch {epoch.number}, which was left after step {forks[epoch.number]}"
        return [ApproximationLabel(base.step, ALL_PARAMETERS, reason)]
    return []


# ----------------------------------------------------------------------------------------------------------------------
# One span


def _over(before: ReplayedState, span: EpochSpan, step: int, steps: Mapping[str, int]) -> ReplayedState:
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
        labels += _unknown_product(span, tensors)
    identity = f"{manifest.run} {span.epoch.number} {base.step} {span.first} {span.last}"
    inner = base.computed
    files = ReplayedFiles(
        SourceFiles(base.root, computed=inner),
        tensors,
        identity if inner is None else f"{inner.identity}; {identity}",
        inner,
    )
    parameters, logged = with_buffers(builder.parameters(tensors), span, builder.stored)
    logged.update(builder.logged)
    computed = LoggedFiles(logged, files) if logged else files
    notes = [*base.notes, *(Note("buffers", n) for n in manifest.notes if n.startswith(BUFFERS_NOT_LOGGED))]
    after = replace(base, parameters=parameters, step=span.last, steps={}, notes=notes, computed=computed)
    return ReplayedState(advance_extras(after, span), labels, tensors)


def _unknown_product(span: EpochSpan, tensors: Sequence[ReplayedTensor]) -> list[ApproximationLabel]:
    """DeepSpeed's CPU Adam multiplies betas from the start of its process; when that was is known for fresh runs."""
    manifest = span.epoch.manifest
    resumed = max((tensor.resumed_at for tensor in tensors), default=0)
    betas = {tuple(update.hyper["betas"]) for tensor in tensors for update in tensor.updates[:1]}
    if len(betas) > 1:
        reason = "the groups of DeepSpeed's CPU Adam have different betas: their running products depend on the order"
        return [ApproximationLabel(span.first, ALL_PARAMETERS, reason)]
    first_kept = span.epoch.steps.start
    if first_kept != manifest.start + 1 or (resumed and manifest.parent is None and manifest.base is None):
        reason = "when the process of DeepSpeed's CPU Adam began is not known, so its running product of betas is not"
        return [ApproximationLabel(span.first, ALL_PARAMETERS, reason)]
    return []


@dataclass(slots=True)
class DigestProof:
    """What digests say about a replay."""

    step: int  # that was wanted
    compared: int = 0  # digests
    proven: dict[str, int] = field(
        default_factory=dict
    )  # parameter → newest step at which all its states are the job's
    refuted: list[ApproximationLabel] = field(default_factory=list)

    @property
    def proven_step(self) -> int | None:
        """The newest step at which every parameter is proven; None where there is none."""
        step = min(self.proven.values(), default=-1)
        return None if step < 0 or self.refuted else step

    def remaining(self, labels: Sequence[ApproximationLabel]) -> list[ApproximationLabel]:
        """The labels that are left: a digest of the very step proves what it covers, a wrong one refutes it."""
        if self.refuted:
            return [*self.refuted, *labels]
        everything = bool(self.proven) and all(step >= self.step for step in self.proven.values())
        return [] if everything else list(labels)


def prove_by_digests(derived: ReplayedState) -> DigestProof:
    """Replay every tensor of the newest span past its digests, stretch by stretch, and compare."""
    checkpoint = derived.checkpoint
    proof = DigestProof(checkpoint.step or 0)
    inner = getattr(checkpoint.computed, "inner", None)
    with SourceFiles(checkpoint.root, computed=inner) as base:
        for tensor in derived.tensors:
            _prove_tensor(proof, tensor, base)
    return proof


def _prove_tensor(proof: DigestProof, tensor: ReplayedTensor, base: SourceFiles) -> None:
    import torch

    if any(tensor.origins[block.parameter].is_padded(block.region) for block in tensor.blocks):
        proof.proven.update(dict.fromkeys({origin.name for origin in tensor.origins.values()}, -1))
        return  # rows beyond the vocabulary are in the job's digest, and not in the base
    names = sorted({origin.name for origin in tensor.origins.values()})
    begin = max(origin.step for origin in tensor.origins.values()) if tensor.origins else tensor.last
    known = {
        step: [digest for digest in digests if digest.tensor == tensor.index and not _is_counter(digest, tensor)]
        for step, digests in sorted(tensor.stream.digests().items())
        if (begin <= step if tensor.kernel is not None else step == tensor.last) and step <= tensor.last
    }
    known = {step: digests for step, digests in known.items() if digests}
    running = {(step, d.kind): xxhash.xxh3_128() for step, digests in known.items() for d in digests}
    for number in range(-(-tensor.numel // tensor.chunk)):
        replay = ChunkReplay(tensor, number, base)
        for step, digests in known.items():
            with torch.no_grad():
                replay.run(step)
            for digest in digests:
                _add(running[step, digest.kind], replay, _kind(digest))
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


def _is_counter(digest: StateDigest, tensor: ReplayedTensor) -> bool:
    """Is it of the number of updates? Logs of parameters that are numbers once had digests of it."""
    return digest.kind == STEP and tensor.numel == 1


def _kind(digest: StateDigest) -> str:
    return PARAM if digest.kind in PARAM_NAMES else digest.kind


def _add(running: xxhash.xxh3_128, replay: ChunkReplay, kind: str) -> None:
    """The stretch's elements without padding: its blocks end to end."""
    values = replay.tensor_of(kind)
    for low, high in _covered(replay):
        running.update(tensor_bytes(values[low:high]))


def _covered(replay: ChunkReplay) -> Iterable[tuple[int, int]]:
    for block in replay.blocks:
        low, high = max(block.offset, replay.start), min(block.offset + block.count, replay.stop)
        yield low - replay.start, high - replay.start
