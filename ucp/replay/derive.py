"""A checkpoint at any step of a log: the base's index, with every state that was trained since in computed files.

    state = at_step(base, Log.open("run"), 1200)

is a `Checkpoint` like any other; nothing is computed before its bytes are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.errors import UsageError
from ucp.files.local import SourceFiles
from ucp.log.bases import Base, list_bases
from ucp.log.reader import Log, Span
from ucp.model.checkpoint import Checkpoint, Note
from ucp.replay.aftermath import advance, settle
from ucp.replay.building import Builder
from ucp.replay.chunks import ReplayedTensor
from ucp.replay.computed import ReplayedFiles
from ucp.replay.exactness import ABOUT_BUFFERS, EVERY, Approximate, doubts, find_kernel
from ucp.replay.values import LoggedFiles, with_buffers


@dataclass(slots=True)
class Derived:
    """A state at a step, and how sure it is."""

    checkpoint: Checkpoint
    labels: list[Approximate] = field(default_factory=list)
    tensors: list[ReplayedTensor] = field(default_factory=list)  # of the newest span
    proven: int | None = None  # the newest step at which digests of the job were met, where someone has looked


def at_step(base: Checkpoint, log: Log, step: int | None = None, *, exact: bool = False) -> Checkpoint:
    """The state of the job after `step` (the last that the log has), from an older state and the log.

    Where the result may differ from what the job held, notes say so, with reason and first step; with `exact` that is
    an error. Digests in the log can prove or refute it; to look at them costs another replay, so only `exact` does.
    """
    derived = derive(base, log, step)
    if exact:
        from ucp.replay.proof import prove

        proof = prove(derived)
        derived.labels, derived.proven = proof.remaining(derived.labels), proof.proven_step
        if derived.labels:
            raise UsageError(
                f"{log.root}: step {derived.checkpoint.step} cannot be had exactly: {derived.labels[0]}",
                hint="leave --exact out to get it, labelled approximate",
            )
    return labelled(derived)


def labelled(derived: Derived) -> Checkpoint:
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


def derive(base: Checkpoint, log: Log, step: int | None = None) -> Derived:
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
    derived = Derived(base)
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


def _settled(base: Checkpoint, known: Base, log: Log) -> Checkpoint:
    """The base itself, where the step is its own; what was set after it the next step knows, if there is one."""
    following = known.step + 1
    for epoch in reversed(log.epochs):
        goes_on = known.epoch in (-1, epoch.number) or epoch.manifest.start == known.step
        if goes_on and following in epoch.steps:
            return settle(base, Span(epoch, following, epoch.steps.stop - 1))
    return base


def _check_fuzzy(base: Checkpoint, steps: Mapping[str, int], last: int) -> None:
    for name, step in steps.items():
        if step > last:
            raise UsageError(
                f"{base.root}: parameter {name} is of step {step}, after step {last}",
                hint="a base whose tensors have different steps is good for steps from its newest tensor on",
            )


def _base_of(base: Checkpoint, log: Log) -> Base:
    """What is known of the base's step: as its run noted it, or as the checkpoint says."""
    root = base.root.resolve()
    for known in list_bases(log.run_folder):
        if known.path.resolve() == root:
            return known
    for epoch in log.epochs:
        named = epoch.manifest.base
        if named is not None and (log.run_folder / named).resolve() in (root, root.parent):
            return Base(root, -1, epoch.manifest.start, epoch.number)
    if base.step is None:
        raise UsageError(
            f"{base.root}: does not say which step it is of, so the log cannot be put upon it",
            hint="give a base of the run, or a checkpoint that counts its steps",
        )
    return Base(root, -1, base.step, -1, steps=base.steps)


def _needed(spans: Sequence[Span], first: int, last: int, log: Log) -> list[Span]:
    """The spans that lead from the base to the step, without gap."""
    kept = [replace(span, first=max(span.first, first + 1)) for span in spans if span.last > first]
    if not kept or kept[0].first != first + 1:
        have = f"steps {spans[0].first} to {spans[-1].last}" if spans else "no steps"
        raise UsageError(
            f"{log.root}: leads from step {first + 1} of the base to step {last} nowhere: it has {have}",
            hint="give a newer base, or the log with its older segments",
        )
    return kept


def _left_behind(base: Base, spans: Sequence[Span], log: Log) -> list[Approximate]:
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
        return [Approximate(base.step, EVERY, reason)]
    return []


# ----------------------------------------------------------------------------------------------------------------------
# One span


def _over(before: Derived, span: Span, step: int, steps: Mapping[str, int]) -> Derived:
    """The state after a span, from the state before it."""
    base, manifest = before.checkpoint, span.epoch.manifest
    kernel, doubt = find_kernel(manifest.kernel)
    labels = list(before.labels)
    if kernel is not None:
        reasons = [*doubts(manifest), *([doubt] if doubt else [])]
        labels += [Approximate(span.first, EVERY, reason) for reason in reasons]
    builder = Builder(base, span, kernel, step, steps)
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
    notes = [*base.notes, *(Note("buffers", n) for n in manifest.notes if n.startswith(ABOUT_BUFFERS))]
    after = replace(base, parameters=parameters, step=span.last, steps={}, notes=notes, computed=computed)
    return Derived(advance(after, span), labels, tensors)


def _unknown_product(span: Span, tensors: Sequence[ReplayedTensor]) -> list[Approximate]:
    """DeepSpeed's CPU Adam multiplies betas from the start of its process; when that was is known for fresh runs."""
    manifest = span.epoch.manifest
    resumed = max((tensor.resumed_at for tensor in tensors), default=0)
    betas = {tuple(update.hyper["betas"]) for tensor in tensors for update in tensor.updates[:1]}
    if len(betas) > 1:
        reason = "the groups of DeepSpeed's CPU Adam have different betas: their running products depend on the order"
        return [Approximate(span.first, EVERY, reason)]
    first_kept = span.epoch.steps.start
    if first_kept != manifest.start + 1 or (resumed and manifest.parent is None and manifest.base is None):
        reason = "when the process of DeepSpeed's CPU Adam began is not known, so its running product of betas is not"
        return [Approximate(span.first, EVERY, reason)]
    return []
