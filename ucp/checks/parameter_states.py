"""States of parameters that belong together: which exist, in which shapes and dtypes, after how many steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from ucp.checks.tasks import CheckContext, CheckTask
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import scalar_value
from ucp.core.findings import Finding, Level, Severity, describe_fragment, location_of
from ucp.core.optimizers import missing_moment
from ucp.engine.pool import Meter
from ucp.storage.local import SourceFiles

_MISSING_HINT: Final = "training would resume without them; was a file of another save mixed in?"
_MIXED_HINT: Final = "files of different saves are mixed: keep those of one step, and restore the others"


def run_check(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """Compare the states of each parameter, and of the parameters of each optimizer group."""
    checkpoint = context.checkpoint
    # Without ZeRO an optimizer has no state for parameters that never got a gradient, and counts steps per parameter.
    severity: Severity = "error" if checkpoint.mesh.zero else "warning"
    for parameter in checkpoint.parameters.values():
        yield from _check_own_shapes(parameter)
        yield from _check_replica_counts(parameter, severity)
    yield from _check_group_states(checkpoint, severity)
    groups: dict[int | None, list[Parameter]] = {}  # those without a group form one of their own
    for parameter in checkpoint.parameters.values():
        if parameter.role == "trained":
            groups.setdefault(parameter.group, []).append(parameter)
    for siblings in groups.values():
        yield from _check_sibling_states(siblings, severity)
        yield from _check_sibling_shapes(siblings)
        yield from _check_sibling_dtypes(siblings)
    # The steps of a snapshot that is spread over several iterations differ as its manifest says.
    if context.level is not Level.QUICK and not checkpoint.steps:
        atoms = [atom for atom in context.atoms() if atom.kind == STEP and atom.numel == 1]
        if atoms:
            yield CheckTask("steps", 0, partial(_check_steps, context.files, checkpoint, atoms, severity))


def _optimizer_kinds(parameter: Parameter) -> list[str]:
    return [kind for kind in parameter.atoms if kind != WEIGHT]


def _check_sibling_states(siblings: Sequence[Parameter], severity: Severity) -> Iterator[Finding]:
    """Report parameters that lack states of their siblings.

    A parameter is compared only with siblings that have all its states and more: optimizers that treat vectors and
    matrices differently (Adafactor) keep states for each that the other does not have.
    """
    common = Counter(kind for parameter in siblings for kind in parameter.atoms)
    state_sets = Counter(frozenset(parameter.atoms) for parameter in siblings)
    for parameter in siblings:
        supersets = (kinds for kinds in state_sets if kinds > parameter.atoms.keys())
        expected = max(supersets, key=state_sets.__getitem__, default=None)
        if expected is None:
            continue
        missing = [kind for kind in common if kind in expected and kind not in parameter.atoms]
        example = next(p for p in siblings if missing[0] in p.atoms)
        yield Finding(
            "states",
            severity,
            f"parameter {parameter.name} has no {', '.join(missing)}, which {common[missing[0]]} of {len(siblings)}"
            f" parameters of its group have ({example.name}, …)",
            parameter=parameter.name,
            kind=missing[0],
            hint=_MISSING_HINT,
        )


def _check_group_states(checkpoint: Checkpoint, severity: Severity) -> Iterator[Finding]:
    """Report states that a whole group lacks: another group has them, or the optimizer always keeps them."""
    kinds: dict[int, set[str]] = {}
    for parameter in checkpoint.parameters.values():
        if parameter.role == "trained" and parameter.group is not None:
            kinds.setdefault(parameter.group, set()).update(set(parameter.atoms) - {WEIGHT, MASTER, STEP})
    for group, present in sorted(kinds.items()):
        # Only a group with strictly more states counts: some optimizers keep different states for different groups.
        fuller = next((other for other, more in sorted(kinds.items()) if present < more), None)
        if fuller is not None:
            missing, reason = sorted(kinds[fuller] - present), f"which those of group {fuller} have"
        else:
            hyper = checkpoint.groups[group].hyper if group < len(checkpoint.groups) else {}
            moment = missing_moment(present, hyper)
            missing, reason = [] if moment is None else [moment], "which its optimizer keeps"
        if missing:
            yield Finding(
                "states",
                severity,
                f"no parameter of group {group} has {', '.join(missing)}, {reason}",
                kind=missing[0],
                hint=_MISSING_HINT,
                subject=f"group {group}",
            )


def _check_replica_counts(parameter: Parameter, severity: Severity) -> Iterator[Finding]:
    """A rank that has a copy of one state must have a copy of every state."""
    if parameter.role != "trained":
        return
    counts = {kind: len(parameter.atoms[kind].replicas) for kind in _optimizer_kinds(parameter) if kind != STEP}
    most = max(counts, key=counts.__getitem__, default="")
    for kind, count in counts.items():
        if count < counts[most]:
            lacking = _missing_fragments(parameter.atoms[most], parameter.atoms[kind])
            if not lacking:  # these ranks have one part of the first state and all of the other (momentum of Muon)
                continue
            yield Finding(
                "states",
                severity,
                f"parameter {parameter.name}: {1 + counts[most]} copies of its {most}, {1 + count} of its {kind}"
                f", but not on {describe_fragment(lacking[0])}",
                *location_of(lacking[0], parameter.atoms[kind]),
                hint="the existing copy is used; is that rank's file from another save?",
            )


def _missing_fragments(fuller: Atom, atom: Atom) -> list[Fragment]:
    """Fragments of one state on ranks that have fewer fragments of the other.

    Expert-parallel ranks count as one rank for parameters that are not experts: their files distinguish them.
    """
    expected, present = list(_all_fragments(fuller)), list(_all_fragments(atom))
    ranks = Counter(fragment.rank for fragment in expected) - Counter(fragment.rank for fragment in present)
    candidates = [fragment for fragment in expected if fragment.rank in ranks]
    known = {(fragment.rank, fragment.file) for fragment in present}
    return [fragment for fragment in candidates if (fragment.rank, fragment.file) not in known] or candidates


def _all_fragments(atom: Atom) -> Iterator[Fragment]:
    return (fragment for cover in (atom.fragments, *atom.replicas) for fragment in cover)


def _check_own_shapes(parameter: Parameter) -> Iterator[Finding]:
    for kind in (WEIGHT, MASTER):
        atom = parameter.atoms.get(kind)
        if atom is not None and atom.shape != parameter.shape:
            yield Finding(
                "shapes",
                "error",
                f"parameter {parameter.name} has shape {list(parameter.shape)}, but its {kind} {list(atom.shape)}",
                parameter=parameter.name,
                kind=kind,
                hint="the file that contains it is from another model or another layout",
            )


def _check_sibling_shapes(siblings: Sequence[Parameter]) -> Iterator[Finding]:
    """If most siblings keep a state in the shape of the parameter, all must. (Factored states never have it.)"""
    for kind in dict.fromkeys(kind for parameter in siblings for kind in _optimizer_kinds(parameter)):
        having = [parameter for parameter in siblings if kind in parameter.atoms and parameter.shape]
        odd = [parameter for parameter in having if parameter.atoms[kind].shape != parameter.shape]
        if not odd or kind == MASTER or 2 * len(odd) >= len(having):
            continue
        for parameter in odd:
            yield Finding(
                "shapes",
                "warning",
                f"parameter {parameter.name} has shape {list(parameter.shape)}, but its {kind}"
                f" {list(parameter.atoms[kind].shape)}; {len(having) - len(odd)} siblings keep it in their own shape",
                parameter=parameter.name,
                kind=kind,
            )


def _check_sibling_dtypes(siblings: Sequence[Parameter]) -> Iterator[Finding]:
    """A state has one dtype in a group. Weights may differ (norms in float32)."""
    for kind in dict.fromkeys(kind for parameter in siblings for kind in _optimizer_kinds(parameter)):
        counted = Counter(parameter.atoms[kind].dtype for parameter in siblings if kind in parameter.atoms)
        usual, count = counted.most_common(1)[0]
        for parameter in siblings if len(counted) > 1 else ():
            atom = parameter.atoms.get(kind)
            if atom is not None and atom.dtype != usual:
                yield Finding(
                    "dtypes",
                    "warning",
                    f"parameter {parameter.name}: {kind} is {atom.dtype}, but {usual} for {count} parameters"
                    " of its group",
                    parameter=parameter.name,
                    kind=kind,
                )


def _check_steps(
    files: SourceFiles, checkpoint: Checkpoint, atoms: list[Atom], severity: Severity, meter: Meter
) -> Iterator[Finding]:
    """All ranks, and all parameters of a group, must have taken the same number of steps."""
    groups: dict[int | None, dict[str, float]] = {}
    for atom in atoms:
        known: list[tuple[Fragment, float]] = []
        for fragment in _all_fragments(atom):
            data = fragment.inline
            if data is None:
                data = files.read(fragment.file, fragment.offset, fragment.dtype.itemsize)
                meter.advance(len(data))
            value = scalar_value(data, fragment.dtype)
            if value is None:
                continue  # its dtype cannot be that of a counter
            known.append((fragment, value))
            first, step = known[0]
            if value != step:
                yield Finding(
                    "steps",
                    "error",
                    f"parameter {atom.name}: {value:g} steps on {describe_fragment(fragment)},"
                    f" but {step:g} on {describe_fragment(first)}",
                    *location_of(fragment, atom),
                    hint=_MIXED_HINT,
                )
        if known:
            groups.setdefault(checkpoint.parameters[atom.name].group, {})[atom.name] = known[0][1]
    for number, steps in groups.items():
        usual, count = Counter(steps.values()).most_common(1)[0]
        for name in (name for name, step in steps.items() if step != usual):
            yield Finding(
                "steps",
                severity,
                f"parameter {name} has taken {steps[name]:g} steps, but {count} of {len(steps)} parameters of group"
                f" {0 if number is None else number} {usual:g}",
                parameter=name,
                kind=STEP,
                hint=_MIXED_HINT if severity == "error" else "expected if it got no gradient in some steps",
            )
    taken = Counter(step for steps in groups.values() for step in steps.values())
    if taken and checkpoint.step is not None and checkpoint.step not in taken:
        usual = taken.most_common(1)[0][0]
        # A note, because it can be right: without ZeRO DeepSpeed counts one step more in bf16, and optimizers are
        # created anew in the middle of runs.
        yield Finding(
            "steps",
            "note",
            f"the optimizer has taken {usual:g} steps, but the checkpoint is at step {checkpoint.step}",
            hint="expected if the optimizer was created anew during the run; otherwise files of different saves are"
            " mixed",
        )
