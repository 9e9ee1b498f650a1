"""A checkpoint at any step of a log: the base's index, with every state that was trained since in computed files.

    state = at_step(base, Log.open("run"), 1200)

is a `Checkpoint` like any other; nothing is computed before its bytes are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ucp.errors import InconsistentError, UsageError
from ucp.files.local import SourceFiles
from ucp.log.bases import Base, list_bases
from ucp.log.reader import Log, Span
from ucp.log.schema import Block, LoggedParameter
from ucp.model.box import intersect, whole
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Note, Parameter
from ucp.model.dtypes import BY_NAME, FLOAT32, DType
from ucp.model.region import Region
from ucp.replay.aftermath import advance
from ucp.replay.chunks import Origin, ReplayedFiles, ReplayedTensor, file_of
from ucp.replay.exactness import ABOUT_BUFFERS, EVERY, Approximate, doubts, find_kernel
from ucp.replay.kernels import PARAM, Kernel
from ucp.replay.stored import PARAM_NAMES, StoredStates
from ucp.replay.timeline import Timelines, Update

_NUMBERS: Final = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@dataclass(slots=True)
class Derived:
    """A state at a step, and how sure it is."""

    checkpoint: Checkpoint
    labels: list[Approximate] = field(default_factory=list)
    tensors: list[ReplayedTensor] = field(default_factory=list)  # of the newest span


def at_step(base: Checkpoint, log: Log, step: int | None = None, *, exact: bool = False) -> Checkpoint:
    """The state of the job after `step` (the last that the log has), from an older state and the log.

    Where the result may differ from what the job held, notes say so, with reason and first step; with `exact` that is
    an error, unless digests in the log prove that it does not.
    """
    derived = derive(base, log, step)
    if exact and derived.labels:
        from ucp.replay.proof import prove

        proof = prove(derived)
        derived.labels = proof.remaining(derived.labels)
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
            "replay": {**told, "exact": not derived.labels, "labels": [label.to_json() for label in derived.labels]},
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
    return derived


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
    return Base(root, -1, base.step, -1)


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
    """May the base be of steps that the run took and then took otherwise? That is no state of this history."""
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
    builder = _Builder(base, span, kernel, step, steps)
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
    parameters = builder.parameters(tensors)
    notes = [*base.notes, *(Note("buffers", n) for n in manifest.notes if n.startswith(ABOUT_BUFFERS))]
    after = replace(base, parameters=parameters, step=span.last, notes=notes, computed=files)
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


class _Builder:
    """Tensors and parameters of one span upon one base."""

    def __init__(
        self, base: Checkpoint, span: Span, kernel: Kernel | None, step: int, steps: Mapping[str, int]
    ) -> None:
        """`base` is of `step`, but for the parameters in `steps`."""
        self.base = base
        self._step = step
        self.span = span
        self.kernel = kernel
        self.manifest = span.epoch.manifest
        self._aliases = base.aliases()
        self._files = SourceFiles(base.root, computed=base.computed)
        self._own_steps = steps
        self._origins: dict[int, Origin] = {}

    def tensors(self) -> list[ReplayedTensor]:
        """Every optimizer tensor of the span."""
        with self._files:
            return list(self._tensors())

    def _tensors(self) -> Iterator[ReplayedTensor]:
        span = self.span
        for number, stream in sorted(span.epoch.streams.items()):
            timelines = Timelines(span, stream)
            stored = StoredStates(stream, self.manifest.state_kinds)
            for index, schema in enumerate(stream.schema.tensors):
                blocks = stream.schema.blocks_of(index)
                updates = timelines.of_tensor(index)
                origins = {block.parameter: self._origin(block.parameter, updates) for block in blocks}
                if self.kernel is None and not stored:
                    raise self._no_kernel()
                dtype = BY_NAME[schema.dtype]
                self._check(origins.values(), dtype, updates, stream.number)
                yield ReplayedTensor(
                    file_of(span.epoch.number, number, index, span.last),
                    stream,
                    index,
                    schema.numel,
                    dtype,
                    self.kernel,
                    self._kinds(origins.values(), dtype, updates, schema.group),
                    blocks,
                    origins,
                    updates,
                    stored,
                    span.last,
                    self._resumed_at(timelines, schema.group),
                )

    def _no_kernel(self) -> UsageError:
        return UsageError(
            f"{self.span.epoch.folder}: the optimizer {self.manifest.optimizer} ({self.manifest.kernel.id}) cannot be"
            " replayed, and the log has none of its states",
            hint="only the steps of full checkpoints can be had of this run",
        )

    def _resumed_at(self, timelines: Timelines, group: int) -> int:
        """Updates that the optimizer had counted when the epoch began, where its first steps are still there."""
        steps = self.span.epoch.steps
        if not steps:
            return 0
        stream = timelines.stream
        for step in steps:
            record = stream.record(step)
            scalars = next((one for one in record.groups if one.group == group), None)
            if not record.skipped and scalars is not None and scalars.opt_step >= 0:
                return scalars.opt_step
        return 0

    def _parameter(self, logged: LoggedParameter) -> Parameter:
        found = self.base.parameters.get(self._aliases.get(logged.name, logged.name))
        if found is None:
            raise InconsistentError(
                f"{self.base.root}: has no parameter {logged.name}, which the log trains",
                hint="give a base of the same run",
            )
        if found.shape != logged.shape:
            raise InconsistentError(
                f"parameter {logged.name}: shape {list(found.shape)} in {self.base.root}, {list(logged.shape)} in the"
                " log",
                hint="give a base of the same run",
            )
        return found

    def _origin(self, number: int, updates: Sequence[Update]) -> Origin:
        if number not in self._origins:
            parameter = self._parameter(self.manifest.parameters[number])
            atoms = {kind: atom for kind, atom in parameter.atoms.items() if kind not in (WEIGHT, MASTER, STEP)}
            held = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
            if held is None:
                raise InconsistentError(
                    f"parameter {parameter.name}: {self.base.root} has neither weight nor master of it",
                    hint="take a base with all states: --only and --exclude leave some out",
                )
            step = self._own_steps.get(parameter.name, self._step)
            counter = self._counter(parameter)
            if counter is None:
                after = next((update.before for update in updates if update.step > step), -1)
                counter = max(after, 0)
                if counter and len(atoms) == 0:
                    raise InconsistentError(
                        f"parameter {parameter.name}: {self.base.root} has no optimizer states of it, after"
                        f" {counter} updates",
                        hint="take a base with all states: --only and --exclude leave some out",
                    )
            self._origins[number] = Origin(parameter.name, step, counter, {PARAM: held, **atoms})
        return self._origins[number]

    def _counter(self, parameter: Parameter) -> int | None:
        atom = parameter.atoms.get(STEP)
        if atom is None or atom.numel != 1 or atom.dtype.name not in _NUMBERS:
            return None
        fragment = atom.fragments[0]
        size = fragment.dtype.itemsize
        data = fragment.inline or self._files.read(fragment.file, fragment.offset, size)
        return int(struct.unpack(_NUMBERS[fragment.dtype.name], data)[0])

    def _check(self, origins: Iterable[Origin], dtype: DType, updates: Sequence[Update], stream: int) -> None:
        """The base must be the state that the log goes on from."""
        for origin in origins:
            held = origin.atoms[PARAM]
            if held.dtype != dtype:
                raise InconsistentError(
                    f"parameter {origin.name}: the optimizer stepped it in {dtype}, the base has it in {held.dtype}",
                    hint="take a base with masters in full precision",
                )
            after = next((update for update in updates if update.step > origin.step), None)
            if after is not None and after.before >= 0 and origin.counter > after.before:
                raise InconsistentError(
                    f"parameter {origin.name}: its optimizer had counted {origin.counter} updates in {self.base.root},"
                    f" and {after.before} before step {after.step} of the log (stream {stream})",
                    hint="the base is not of this run, or not of the step that it says",
                )

    def _kinds(
        self, origins: Iterable[Origin], dtype: DType, updates: Sequence[Update], group: int
    ) -> dict[str, DType]:
        """The states that there are after the span, with their element types."""
        held = {kind: atom.dtype for origin in origins for kind, atom in origin.atoms.items() if kind != PARAM}
        if self.kernel is None:
            logged = {kind for kind in self.manifest.state_kinds[1:] if kind not in PARAM_NAMES}
            return {PARAM: dtype, **{kind: held.get(kind, dtype) for kind in sorted(logged & set(held))}}
        hyper = updates[0].hyper if updates else self.manifest.groups[group].hyper
        kinds = self.kernel.kinds(hyper) if updates else tuple(held)
        return {PARAM: dtype, **{kind: held.get(kind, dtype) for kind in kinds}}

    # ------------------------------------------------------------------------------------------------------------------

    def parameters(self, tensors: Sequence[ReplayedTensor]) -> dict[str, Parameter]:
        """The base's parameters, the logged ones with atoms in computed files."""
        held: dict[str, list[tuple[ReplayedTensor, Block]]] = {}
        for tensor in tensors:
            for block in tensor.blocks:
                held.setdefault(tensor.origins[block.parameter].name, []).append((tensor, block))
        self._check_complete(held)
        return {
            name: self._computed(parameter, held[name]) if name in held else parameter
            for name, parameter in self.base.parameters.items()
        }

    def _check_complete(self, held: dict[str, list[tuple[ReplayedTensor, Block]]]) -> None:
        for parameter in self.base.parameters.values():
            found = held.get(parameter.name)
            if found is None:
                if parameter.role == "trained" and parameter.group is not None:
                    raise InconsistentError(
                        f"parameter {parameter.name}: is trained, but the log knows nothing of it",
                        hint="a log of all ranks is needed; convert the base as it is without --log",
                    )
                continue
            inside = whole(parameter.shape)
            count = sum(
                common.numel
                for _, block in found
                for piece in block.region.pieces()
                if (common := intersect(piece.box, inside)) is not None
            )
            if count != parameter.numel:
                raise InconsistentError(
                    f"parameter {parameter.name}: the log has {count} of its {parameter.numel} elements",
                    hint="a log of all ranks is needed: copy the streams of every rank into one folder",
                )

    def _computed(self, parameter: Parameter, held: Sequence[tuple[ReplayedTensor, Block]]) -> Parameter:
        first = held[0][0]
        atoms: dict[str, Atom] = {}
        for kind, atom in parameter.atoms.items():
            if kind in (WEIGHT, MASTER):
                # The module's copy is the master, cast.
                fragments = _fragments(held, PARAM)
                atoms[kind] = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            elif kind == STEP:
                atoms[kind] = self._stepped(atom, first, parameter)
            elif kind in first.kinds:
                fragments = _fragments(held, kind)
                atoms[kind] = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            else:
                atoms[kind] = atom
        for kind, dtype in first.kinds.items():
            if kind != PARAM and kind not in atoms:
                atoms[kind] = Atom(parameter.name, kind, parameter.shape, dtype, _fragments(held, kind), computed=True)
        if STEP not in atoms and first.updates and self.kernel is not None and self.kernel.counts:
            blank = Atom(parameter.name, STEP, (), FLOAT32, ())
            atoms[STEP] = self._stepped(blank, first, parameter)
        return replace(parameter, atoms=atoms)

    def _stepped(self, atom: Atom, tensor: ReplayedTensor, parameter: Parameter) -> Atom:
        """The optimizer's counter after the span."""
        origin = next(origin for origin in tensor.origins.values() if origin.name == parameter.name)
        count = origin.counter + sum(update.step > origin.step for update in tensor.updates)
        data = struct.pack(_NUMBERS[atom.dtype.name], count)
        region = Region.all_of(atom.shape)
        return replace(atom, fragments=(Fragment(region, "", 0, atom.dtype, inline=data),), replicas=(), combine="copy")


def _fragments(held: Sequence[tuple[ReplayedTensor, Block]], kind: str) -> tuple[Fragment, ...]:
    """Where a state of a parameter lies in computed files; neighbours joined."""
    found: list[Fragment] = []
    for tensor, block in held:
        dtype = tensor.kinds[kind]
        file, offset = f"{tensor.file}/{kind}", block.offset * dtype.itemsize
        before = found[-1] if found else None
        if (
            before is not None
            and before.file == file
            and before.offset + before.nbytes == offset
            and before.region.boxes == block.region.boxes
            and before.region.stop == block.region.start
        ):
            region = Region(before.region.boxes, before.region.start, block.region.stop)
            found[-1] = replace(before, region=region)
        else:
            found.append(Fragment(block.region, file, offset, dtype, tensor.stream.schema.rank))
    return tuple(found)


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a replayed checkpoint says about how it came to be; nothing for one that was read."""
    told = checkpoint.details.get("replay")
    return told if isinstance(told, dict) else {}
