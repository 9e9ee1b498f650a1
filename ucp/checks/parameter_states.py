"""States, shapes and dtypes: what the index alone says about parameters that belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ucp.checks.findings import Finding, Severity, place
from ucp.checks.tasks import CheckContext
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Parameter
from ucp.core.optimizers import missing_moment


def look(context: CheckContext) -> Iterator[Finding]:
    """Compare the parameters of each group with each other, and each parameter with itself."""
    checkpoint = context.checkpoint
    severity: Severity = "error" if checkpoint.mesh.zero else "warning"
    for parameter in checkpoint.parameters.values():
        yield from _own_shapes(parameter)
        yield from _copies(parameter, severity)
    yield from _needed(checkpoint, severity)
    for siblings in _groups(checkpoint):
        yield from _states(siblings, severity)
        yield from _state_shapes(siblings)
        yield from _state_dtypes(siblings)


def _groups(checkpoint: Checkpoint) -> list[list[Parameter]]:
    """Trained parameters by optimizer group; those that say no group are one of their own."""
    groups: dict[int | None, list[Parameter]] = {}
    for parameter in checkpoint.parameters.values():
        if parameter.role == "trained":
            groups.setdefault(parameter.group, []).append(parameter)
    return list(groups.values())


def _optimizer_kinds(parameter: Parameter) -> list[str]:
    return [kind for kind in parameter.atoms if kind != WEIGHT]


def _states(siblings: Sequence[Parameter], severity: Severity) -> Iterator[Finding]:
    """Without ZeRO an optimizer keeps no state of a parameter that never got a gradient: then it is only a warning.

    Optimizers that treat vectors and matrices differently (Adafactor) have states for each that the other has not.
    """
    common = Counter(kind for parameter in siblings for kind in parameter.atoms)
    held = Counter(frozenset(parameter.atoms) for parameter in siblings)
    for parameter in siblings:
        fuller = max((kinds for kinds in held if kinds > parameter.atoms.keys()), key=held.__getitem__, default=None)
        if fuller is None:
            continue
        missing = [kind for kind in common if kind in fuller and kind not in parameter.atoms]
        owner = next(p for p in siblings if missing[0] in p.atoms)
        yield Finding(
            "states",
            severity,
            f"parameter {parameter.name} has no {', '.join(missing)}, which {common[missing[0]]} of {len(siblings)}"
            f" parameters of its group have ({owner.name}, …)",
            parameter=parameter.name,
            kind=missing[0],
            hint="its optimizer starts without them when training goes on; was a file of another save mixed in?",
        )


def _needed(checkpoint: Checkpoint, severity: Severity) -> Iterator[Finding]:
    """States that all parameters of a group lack: another group has them, or the optimizer cannot do without."""
    kinds: dict[int, set[str]] = {}
    for parameter in checkpoint.parameters.values():
        if parameter.role == "trained" and parameter.group is not None:
            kinds.setdefault(parameter.group, set()).update(set(parameter.atoms) - {WEIGHT, MASTER, STEP})
    for group, held in sorted(kinds.items()):
        # Optimizers that treat groups differently have states of their own for each: none has less than another.
        fuller = next((other for other, more in sorted(kinds.items()) if held < more), None)
        hyper = checkpoint.groups[group].hyper if group < len(checkpoint.groups) else {}
        moment = missing_moment(held, hyper)
        missing = sorted(kinds[fuller] - held) if fuller is not None else [moment] if moment is not None else []
        if missing:
            which = f", which those of group {fuller} have" if fuller is not None else ", which its optimizer keeps"
            yield Finding(
                "states",
                severity,
                f"no parameter of group {group} has {', '.join(missing)}{which}",
                kind=missing[0],
                hint="its optimizer starts without them when training goes on; was a file of another save mixed in?",
                subject=f"group {group}",
            )


def _copies(parameter: Parameter, severity: Severity) -> Iterator[Finding]:
    """Ranks that have a copy of one state have one of every state."""
    counts = {kind: len(parameter.atoms[kind].replicas) for kind in _optimizer_kinds(parameter) if kind != STEP}
    most = max(counts, key=counts.__getitem__, default="")
    for kind, count in counts.items():
        if count < counts[most] and parameter.role == "trained":
            fuller, held = parameter.atoms[most], parameter.atoms[kind]
            lacking = _lacking(fuller, held)
            if not lacking:  # ranks that have a part of one state, and all of another (Muon's momentum)
                continue
            where = f", but not on {place(lacking[0])}"
            yield Finding(
                "states",
                severity,
                f"parameter {parameter.name}: {1 + counts[most]} copies of its {most}, {1 + count} of its {kind}"
                + where,
                lacking[0].file if lacking else None,
                lacking[0].rank if lacking else None,
                parameter.name,
                kind,
                hint="the copy that is there is taken; is that rank's file from another save?",
            )


def _lacking(fuller: Atom, held: Atom) -> list[Fragment]:
    """Fragments of one state on ranks that have fewer of the other.

    Several ranks may count as one (expert-parallel ones, of parameters that are no experts'): files tell them apart.
    """
    wanted, having = list(_fragments(fuller)), list(_fragments(held))
    more = Counter(fragment.rank for fragment in wanted) - Counter(fragment.rank for fragment in having)
    on_those = [fragment for fragment in wanted if fragment.rank in more]
    places = {(fragment.rank, fragment.file) for fragment in having}
    return [fragment for fragment in on_those if (fragment.rank, fragment.file) not in places] or on_those


def _fragments(atom: Atom) -> Iterator[Fragment]:
    return (fragment for cover in (atom.fragments, *atom.replicas) for fragment in cover)


def _own_shapes(parameter: Parameter) -> Iterator[Finding]:
    for kind in (WEIGHT, MASTER):
        atom = parameter.atoms.get(kind)
        if atom is not None and atom.shape != parameter.shape:
            yield Finding(
                "shapes",
                "error",
                f"parameter {parameter.name} has shape {list(parameter.shape)}, but its {kind} {list(atom.shape)}",
                parameter=parameter.name,
                kind=kind,
                hint="the file that holds it is from another model or another layout",
            )


def _state_shapes(siblings: Sequence[Parameter]) -> Iterator[Finding]:
    """A kind that most siblings keep in the parameter's shape is kept so by all (factored states are in no one's)."""
    for kind in dict.fromkeys(kind for parameter in siblings for kind in _optimizer_kinds(parameter)):
        holders = [parameter for parameter in siblings if kind in parameter.atoms and parameter.shape]
        odd = [parameter for parameter in holders if parameter.atoms[kind].shape != parameter.shape]
        if not odd or kind == MASTER or 2 * len(odd) >= len(holders):
            continue
        for parameter in odd:
            yield Finding(
                "shapes",
                "warning",
                f"parameter {parameter.name} has shape {list(parameter.shape)}, but its {kind}"
                f" {list(parameter.atoms[kind].shape)}; {len(holders) - len(odd)} siblings keep it in their own shape",
                parameter=parameter.name,
                kind=kind,
            )


def _state_dtypes(siblings: Sequence[Parameter]) -> Iterator[Finding]:
    """Masters and optimizer states of one kind have one dtype over a group; weights may differ (norms in fp32)."""
    for kind in dict.fromkeys(kind for parameter in siblings for kind in _optimizer_kinds(parameter)):
        counted = Counter(parameter.atoms[kind].dtype for parameter in siblings if kind in parameter.atoms)
        if len(counted) < 2:
            continue
        usual = counted.most_common(1)[0][0]
        for parameter in siblings:
            atom = parameter.atoms.get(kind)
            if atom is not None and atom.dtype != usual:
                yield Finding(
                    "dtypes",
                    "warning",
                    f"parameter {parameter.name}: {kind} is {atom.dtype}, but {usual} for {counted[usual]} parameters"
                    " of its group",
                    parameter=parameter.name,
                    kind=kind,
                )
