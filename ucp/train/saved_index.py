"""The index of what a live job holds, from what its ranks told rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.errors import InconsistentError
from ucp.formats.deepspeed.experts import expert_number
from ucp.model.box import Shape
from ucp.model.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Note, Parameter, ParamGroup
from ucp.model.dtypes import BY_NAME, DType
from ucp.model.layout import Rank
from ucp.model.region import Region
from ucp.train.live import LiveJob, dtype_of
from ucp.train.optimizers import updates_counted
from ucp.train.pieces import ParameterNote
from ucp.train.saved_state import build_trees
from ucp.train.values import still


@dataclass(slots=True)
class Gathered:
    """What one rank tells rank 0: its pieces (name, kind, dtype, shape, region), parameters, groups, place, state."""

    pieces: list[tuple[str, str, str, Shape, Region]]
    notes: list[ParameterNote]
    groups: list[tuple[dict[str, Any], list[str]]]  # hyper-parameters, names
    rank: Rank
    state: dict[str, Any]
    numbers: dict[tuple[str, str], Any] = field(default_factory=dict)  # (name, kind) → a number other than the step


def build_index(
    job: LiveJob, gathered: Sequence[Gathered], path: Path, parameters: dict[str, Parameter] | None = None
) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint that is to be written (its atoms have no fragments yet), and the tensors inside its extras.

    `parameters` are those of an earlier index, where the ranks say of them what they said then.
    """
    order = sorted(range(len(gathered)), key=lambda rank: (gathered[rank].rank, rank))
    ranks = [gathered[rank] for rank in order]
    notes: list[Note] = []
    if parameters is None:
        parameters = _parameters(ranks)
        _atoms(ranks, parameters)
        notes.extend(_leave_out_shares_own(ranks, parameters))
    groups = _groups(ranks)
    tensors: dict[str, Any] = {}

    def keep(name: str, tensor: Any) -> Atom:
        tensors[name] = tensor
        return Atom(name, "extra", tuple(tensor.shape), dtype_of(tensor), ())

    trees, step = build_trees(job, [each.state for each in gathered], keep, notes)
    return (
        Checkpoint(
            "deepspeed" if job.is_deepspeed else "torch",
            path,
            job.mesh,
            parameters,
            framework=_framework(job),
            step=steps_counted(job) if step is None else step,
            groups=groups,
            extras=Extras(trees),
            notes=notes,
            details={"dtype": _model_dtype(parameters).name, "live": job.description},
        ),
        tensors,
    )


def _parameters(ranks: Sequence[Gathered]) -> dict[str, Parameter]:
    """Every parameter in the order of the stages, with all that the ranks say about it."""
    parameters: dict[str, Parameter] = {}
    for told in ranks:
        for note in told.notes:
            known = parameters.get(note.name)
            if known is None:
                parameters[note.name] = Parameter(
                    note.name,
                    note.shape,
                    note.role,
                    rule=note.rule,
                    rule_origin=note.rule_origin,
                    padded_shape=note.padded_shape,
                    group=note.group,
                    aliases=note.aliases,
                    stages=(note.stage,),
                    expert=expert_number(note.name) if note.expert else None,
                )
            elif known.shape != note.shape:
                raise InconsistentError(
                    f"parameter {note.name} has shape {list(known.shape)} on one rank and {list(note.shape)} on another"
                )
            elif note.stage not in known.stages:
                known.stages = (*known.stages, note.stage)
    return parameters


def _atoms(ranks: Sequence[Gathered], parameters: dict[str, Parameter]) -> None:
    for told in ranks:
        for name, kind, dtype, shape, _ in told.pieces:
            parameter = parameters[name]
            known = parameter.atoms.get(kind)
            if known is None:
                parameter.atoms[kind] = Atom(name, kind, shape, BY_NAME[dtype], ())
            elif (known.dtype.name, known.shape) != (dtype, shape):
                raise InconsistentError(
                    f"parameter {name}: '{kind}' is {known.dtype} {list(known.shape)} on one rank and"
                    f" {dtype} {list(shape)} on another"
                )
    for parameter in parameters.values():
        first = [kind for kind in (WEIGHT, "master") if kind in parameter.atoms]
        parameter.atoms = {kind: parameter.atoms[kind] for kind in (*first, *parameter.atoms)}


def _leave_out_shares_own(ranks: Sequence[Gathered], parameters: dict[str, Parameter]) -> Iterator[Note]:
    """Leave numbers out that ranks do not agree on: they are of a rank's share of a flat buffer, not of a parameter."""
    found: dict[tuple[str, str], Any] = {}
    apart: dict[str, str] = {}
    for told in ranks:
        for (name, kind), number in told.numbers.items():
            if found.setdefault((name, kind), number) != number:
                apart.setdefault(kind, name)
                parameters[name].atoms.pop(kind, None)
    for kind, name in apart.items():
        yield Note(
            "state-unplaced",
            f"optimizer state '{kind}' belongs to no element of a parameter (ranks have numbers of their own, as for"
            f" {name}); not saved",
        )


def _groups(ranks: Sequence[Gathered]) -> list[ParamGroup]:
    """Groups over all stages: those of different stages belong together by position."""
    groups: list[ParamGroup] = []
    for told in ranks:
        for number, (hyper, names) in enumerate(told.groups):
            if number == len(groups):
                groups.append(ParamGroup(still(hyper, f"group {number}", _no_tensor), []))
            known = set(groups[number].names)
            groups[number].names.extend(name for name in names if name not in known)
    return groups


def _no_tensor(path: str, tensor: Any) -> Any:
    raise InconsistentError(f"{path}: a hyper-parameter is a tensor of shape {list(tensor.shape)}")


def _model_dtype(parameters: dict[str, Parameter]) -> DType:
    """The dtype that most of the module's elements have."""
    counts: dict[DType, int] = {}
    for parameter in parameters.values():
        atom = parameter.atoms.get(WEIGHT)
        if atom is not None and atom.dtype.family == "float" and parameter.role != "buffer":
            counts[atom.dtype] = counts.get(atom.dtype, 0) + atom.numel
    return max(counts, key=lambda dtype: counts[dtype], default=BY_NAME["float32"])


def steps_counted(job: LiveJob) -> int | None:
    """Steps that the optimizer counts itself, where it does."""
    states = job.optimizer.state.values() if job.optimizer is not None else ()
    counted = map(updates_counted, states)
    return max((count for count in counted if count is not None), default=None)


def _framework(job: LiveJob) -> str:
    import torch

    if not job.is_deepspeed:
        return f"torch {torch.__version__}"
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"
