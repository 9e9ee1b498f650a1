"""Pair the atoms of two checkpoints: which are compared with each other, and which have no counterpart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Note, Parameter
from ucp.core.selection import Only, Selection, select
from ucp.errors import UsageError
from ucp.read.casting import can_cast
from ucp.read.verbatim import can_flatten


@dataclass(frozen=True, slots=True)
class AtomPair:
    """Two atoms to compare. `name` and `kind` are those in the first checkpoint."""

    name: str
    kind: str
    a: Atom
    b: Atom

    @property
    def comparable(self) -> bool:
        """Whether they have the same shape; a scalar may have any number of dimensions."""
        if self.a.shape == self.b.shape:
            return True
        return self.a.numel == self.b.numel == 1 and can_flatten(self.a) and can_flatten(self.b)


@dataclass(frozen=True, slots=True)
class TyingDifference:
    """Aliases that a parameter has in one of the two checkpoints only."""

    name: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def __str__(self) -> str:
        sides = [(self.only_a, "A"), (self.only_b, "B")]
        return "; ".join(f"{self.name} is also {', '.join(more)} in {side} only" for more, side in sides if more)


@dataclass(slots=True)
class Pairing:
    """All pairs in the order of the first checkpoint, and the (name, kind) of atoms on one side only."""

    parameters: list[tuple[Parameter, Parameter]] = field(default_factory=list)
    atoms: list[AtomPair] = field(default_factory=list)
    only_a: list[tuple[str, str]] = field(default_factory=list)
    only_b: list[tuple[str, str]] = field(default_factory=list)
    tying: list[TyingDifference] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def select_both(
    a: Checkpoint, b: Checkpoint, only: Only | None, include: Sequence[str], exclude: Sequence[str]
) -> tuple[Checkpoint, Checkpoint]:
    """Select the same parameters of both. Every pattern must match a name or alias in at least one of them.

    Masters are selected together with weights, in case the other side has its weights in the precision of the master.
    """
    for pattern in (*include, *exclude):
        if not any(_matches(p, [pattern]) for side in (a, b) for p in side.parameters.values()):
            raise UsageError(
                f"pattern {pattern!r} matches no parameter of either checkpoint",
                hint="`ucp inspect` lists the names; quote the pattern so that the shell leaves it alone",
            )
    return _selected(a, only, include, exclude), _selected(b, only, include, exclude)


def _selected(side: Checkpoint, only: Only | None, include: Sequence[str], exclude: Sequence[str]) -> Checkpoint:
    chosen = select(side, Selection(only))
    parameters: dict[str, Parameter] = {}
    for name, parameter in chosen.parameters.items():
        if (not include or _matches(parameter, include)) and not _matches(parameter, exclude):
            master = side.parameters[name].atoms.get(MASTER)
            atoms = parameter.atoms if master is None or only != "weights" else {**parameter.atoms, MASTER: master}
            parameters[name] = replace(parameter, atoms=atoms)
    return replace(chosen, parameters=parameters)


def _matches(parameter: Parameter, patterns: Sequence[str]) -> bool:
    names = (parameter.name, *parameter.aliases)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def pair_atoms(a: Checkpoint, b: Checkpoint, *, strict: bool = False, only: Only | None = None) -> Pairing:
    """Find the counterpart of every parameter and state.

    Tied parameters are found under any of their names: if one side has one tensor and the other two, both are compared
    with it. If one side stores only a weight or only a master, it also stands in for the other state, and a note says
    so; with `strict` that state is missing. With `only="weights"` a master is compared only if it stands in for a
    weight.
    """
    pairing = Pairing()
    owners_a, owners_b = _owners(a), _owners(b)
    names = dict.fromkeys([*owners_a, *owners_b])
    pairs = dict.fromkeys((owners_a[name], owners_b[name]) for name in names if name in owners_a and name in owners_b)
    pairing.parameters = [(a.parameters[one], b.parameters[other]) for one, other in pairs]
    paired_a, paired_b = {one for one, _ in pairs}, {other for _, other in pairs}
    pairing.only_a = [(name, kind) for name, p in a.parameters.items() if name not in paired_a for kind in p.atoms]
    pairing.only_b = [(name, kind) for name, p in b.parameters.items() if name not in paired_b for kind in p.atoms]
    remarks: Counter[str] = Counter()
    for one, other in pairing.parameters:
        _pair_states(pairing, one, other, remarks, strict=strict, only=only)
    if only == "weights":
        pairing.only_a = [(name, kind) for name, kind in pairing.only_a if kind != MASTER]
        pairing.only_b = [(name, kind) for name, kind in pairing.only_b if kind != MASTER]
    pairing.notes = [Note("stand-in", f"{count} parameters: {remark}") for remark, count in remarks.items()]
    for one, other in pairing.parameters:
        names_a, names_b = {one.name, *one.aliases}, {other.name, *other.aliases}
        if names_a != names_b:
            more_a, more_b = tuple(sorted(names_a - names_b)), tuple(sorted(names_b - names_a))
            pairing.tying.append(TyingDifference(one.name, more_a, more_b))
    return pairing


def _owners(checkpoint: Checkpoint) -> dict[str, str]:
    """Every name and alias → the parameter with the tensor, in the order of the model."""
    own = {name: name for name in checkpoint.parameters}
    return {**own, **{alias: name for alias, name in checkpoint.aliases().items() if alias not in own}}


def _pair_states(
    pairing: Pairing, one: Parameter, other: Parameter, remarks: Counter[str], *, strict: bool, only: Only | None
) -> None:
    ours = one.atoms if strict else _with_stand_ins(other, one, "A", remarks)
    theirs = other.atoms if strict else _with_stand_ins(one, other, "B", remarks)
    for kind in dict.fromkeys([*ours, *theirs]):
        if only == "weights" and kind == MASTER and kind in one.atoms and kind in other.atoms:
            continue
        if kind in ours and kind in theirs:
            pairing.atoms.append(AtomPair(one.name, kind, ours[kind], theirs[kind]))
        elif kind == STEP and not strict:
            remarks[f"only {'A' if kind in ours else 'B'} has their step counts"] += 1
        elif kind in ours:
            pairing.only_a.append((one.name, kind))
        else:
            pairing.only_b.append((other.name, kind))


def _with_stand_ins(partner: Parameter, parameter: Parameter, side: str, remarks: Counter[str]) -> Mapping[str, Atom]:
    """The states of `parameter`, with weight or master derived from the other if the partner has both.

    ZeRO-3 stores masters only: rounded, they are the weights. A job in full precision stores weights only: they are
    their own masters, and rounded they are the weights of a partner in lower precision.
    """
    weight, master = parameter.atoms.get(WEIGHT), parameter.atoms.get(MASTER)
    wanted_weight, wanted_master = partner.atoms.get(WEIGHT), partner.atoms.get(MASTER)
    atoms = dict(parameter.atoms)
    if weight is None and master is not None and wanted_weight is not None:
        if can_cast(master.dtype, wanted_weight.dtype):
            atoms[WEIGHT] = replace(master, kind=WEIGHT, dtype=wanted_weight.dtype)
            remarks[f"{side} has the master only, which was used as the weight{_rounded(master, wanted_weight)}"] += 1
    elif master is None and weight is not None and wanted_master is not None and weight.dtype == wanted_master.dtype:
        atoms[MASTER] = replace(weight, kind=MASTER)
        remarks[f"{side} has the {weight.dtype} weight only, which was used as the master"] += 1
        if wanted_weight is not None and wanted_weight.dtype != weight.dtype:
            atoms[WEIGHT] = replace(weight, dtype=wanted_weight.dtype)
            remarks[f"{side} has the weight in {weight.dtype}; it was{_rounded(weight, wanted_weight)}"] += 1
    return atoms


def _rounded(ours: Atom, theirs: Atom) -> str:
    return "" if ours.dtype == theirs.dtype else f" rounded to {theirs.dtype}"
