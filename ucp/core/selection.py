"""Selections: reduce a checkpoint index to some parameters or kinds, or change dtypes. Reads no tensor data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Parameter, ParamGroup
from ucp.core.dtypes import DType, parse_dtype
from ucp.errors import UsageError

Only = Literal["weights", "optimizer"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which parameters and states to take. Patterns are shell patterns (`*`, `?`, `[…]`) over parameter names."""

    only: Only | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dtype: DType | None = None  # of `weight`; masters and optimizer states keep theirs


def select(checkpoint: Checkpoint, wanted: Selection) -> Checkpoint:
    """The index of the `wanted` part of `checkpoint`. A pattern that matches nothing is an error."""
    for pattern in (*wanted.include, *wanted.exclude):
        if not any(fnmatchcase(name, pattern) for name in checkpoint.parameters):
            raise UsageError(
                f"pattern {pattern!r} matches none of the {len(checkpoint.parameters)} parameters",
                hint="`ucp inspect SRC` lists the names; quote the pattern so that the shell leaves it alone",
            )
    kept: dict[str, Parameter] = {}
    named = checkpoint.details.get("dtype")  # of the module's weights: ZeRO-3 stores masters only
    model_dtype = parse_dtype(named) if isinstance(named, str) else None
    for name, parameter in checkpoint.parameters.items():
        if (not wanted.include or _matches(name, wanted.include)) and not _matches(name, wanted.exclude):
            atoms = _atoms(parameter, wanted, model_dtype)
            if atoms:
                kept[name] = replace(parameter, atoms=atoms)
    groups = [ParamGroup(group.hyper, [name for name in group.names if name in kept]) for group in checkpoint.groups]
    return replace(checkpoint, parameters=kept, groups=groups)


def _atoms(parameter: Parameter, wanted: Selection, model_dtype: DType | None) -> dict[str, Atom]:
    atoms = dict(parameter.atoms)
    if wanted.only == "optimizer":
        atoms.pop(WEIGHT, None)
        return atoms if parameter.role == "trained" else {}
    if wanted.dtype is not None or (wanted.only == "weights" and WEIGHT not in atoms):
        weight = _cast_weight(parameter, wanted.dtype or model_dtype)
        if weight is not None:
            atoms = {WEIGHT: weight, **{kind: atom for kind, atom in atoms.items() if kind != WEIGHT}}
    if wanted.only == "weights":
        return {WEIGHT: atoms[WEIGHT]} if WEIGHT in atoms else {}
    return atoms


def _cast_weight(parameter: Parameter, dtype: DType | None) -> Atom | None:
    """The weight in another dtype, cast from the most precise copy available; None if there is none."""
    if parameter.role == "buffer":
        return parameter.atoms.get(WEIGHT)
    best = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
    if best is None or best.dtype.family != "float":
        return best
    return replace(best, kind=WEIGHT, dtype=dtype or best.dtype)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
