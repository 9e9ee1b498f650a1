"""Extras of a live job: what `ucp.save` keeps besides parameters, in the places where loaders look for it.

The index of what a live job holds, from what its ranks told rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.containers.pickle_writer import bare_object
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Note, Parameter, ParamGroup
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.errors import InconsistentError, UsageError
from ucp.formats.deepspeed.experts import expert_number
from ucp.formats.deepspeed.step_files import model_file_name, optimizer_file_name
from ucp.training.collect import ParameterInfo
from ucp.training.live_job import LiveJob, dtype_of
from ucp.training.optimizer_states import updates_counted
from ucp.training.training_state import (
    COUNTERS,
    RNG_TREE,
    SCALER_FIELDS,
    STATE_TREE,
    current_rng,
    live_scaler,
    to_inert,
)

KeepTensor = Callable[[str, Any], Atom]


def collect_training_state(job: LiveJob, client_state: dict[str, Any]) -> dict[str, Any]:
    """Live values of this rank, to be sent to rank 0: random generators, and once a model-parallel rank the rest."""
    state: dict[str, Any] = {"rng": current_rng()}
    if job.rank.dp == 0:
        state["mp"] = job.rank.pp * job.mesh.tp + job.rank.tp
        state["client_state"] = client_state
        if job.engine is not None:
            state |= _engine_state(job)
    return state


def _engine_state(job: LiveJob) -> dict[str, Any]:
    engine = job.engine
    scaler = live_scaler(engine.optimizer)
    fields = {} if scaler is None else {name: getattr(scaler, name) for name in _scaler_fields(scaler)}
    return {
        "counters": {name: int(getattr(engine, name)) for name in COUNTERS},
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "config": getattr(engine._config, "_param_dict", None),
        "scaler": fields,
        "scaler_class": "" if scaler is None else type(scaler).__qualname__,
        "scaler_module": "" if scaler is None else type(scaler).__module__,
        "optimizer": type(engine.optimizer).__name__,
    }


def _scaler_fields(scaler: Any) -> list[str]:
    return [name for name in (*SCALER_FIELDS, "min_loss_scale", "dynamic", "dtype") if hasattr(scaler, name)]


def build_trees(
    job: LiveJob, states: list[dict[str, Any]], keep: KeepTensor, notes: list[Note]
) -> tuple[dict[str, Any], int | None]:
    """The trees of the extras from the states of all ranks, and the step where the job counts steps. On rank 0."""
    trees: dict[str, Any] = {}
    step: int | None = None
    for state in states:
        if "mp" in state and job.engine is not None:
            trees |= _engine_trees(job, state, keep, notes)
            step = state["counters"]["global_steps"]
        elif "mp" in state and state["mp"] == 0:
            trees[STATE_TREE] = {"client_state": to_inert(state["client_state"], "client_state", keep)}
    for rank, state in enumerate(states):
        name = RNG_TREE.format(rank)
        trees[name] = to_inert(state["rng"], name, keep)
    return trees, step


def _engine_trees(job: LiveJob, state: dict[str, Any], keep: KeepTensor, notes: list[Note]) -> dict[str, Any]:
    """Trees under the names and keys of DeepSpeed's own files, which other loaders and writers understand."""
    import deepspeed

    model = model_file_name(state["mp"])
    tree: dict[str, Any] = {
        "lr_scheduler": _scheduler(state["scheduler"], model, keep, notes),
        **state["counters"],
        "dp_world_size": job.mesh.dp,
        "mp_world_size": job.mesh.tp * job.mesh.pp,
        "ds_config": to_inert(_plain(state["config"] or {}), "ds_config", keep),
        "ds_version": str(deepspeed.__version__),
    }
    for key, value in state["client_state"].items():
        tree[key] = to_inert(value, f"{model}/{key}", keep)
    trees = {model: tree}
    fields = to_inert(state["scaler"], "loss_scaler", keep)
    if state["optimizer"] in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
        tree["optimizer"] = fields
    elif state["scaler_class"]:
        name = optimizer_file_name(0, state["mp"], "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        scaler = bare_object(state["scaler_module"], state["scaler_class"], fields)
        trees[name] = {"optimizer_state_dict": {"loss_scaler": scaler}}
    return trees


def _scheduler(state: Any, where: str, keep: KeepTensor, notes: list[Note]) -> Any:
    try:
        return to_inert(state, f"{where}/lr_scheduler", keep)
    except UsageError as error:
        notes.append(Note("scheduler-lost", f"the LR scheduler's state was not saved: {error.what}"))
        return None


def _plain(value: Any) -> Any:
    """A configuration without what is not plain data (a user may put objects into it)."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@dataclass(slots=True)
class RankSummary:
    """What one rank tells rank 0: its pieces (name, kind, dtype, shape, region), parameters, groups, place, state."""

    pieces: list[tuple[str, str, str, Shape, Region]]
    notes: list[ParameterInfo]
    groups: list[tuple[dict[str, Any], list[str]]]  # hyper-parameters, names
    rank: Rank
    state: dict[str, Any]
    numbers: dict[tuple[str, str], Any] = field(default_factory=dict)  # (name, kind) → a number other than the step


def build_index(
    job: LiveJob, gathered: Sequence[RankSummary], path: Path, parameters: dict[str, Parameter] | None = None
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
        notes.extend(_drop_rank_local_numbers(ranks, parameters))
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


def _parameters(ranks: Sequence[RankSummary]) -> dict[str, Parameter]:
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


def _atoms(ranks: Sequence[RankSummary], parameters: dict[str, Parameter]) -> None:
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


def _drop_rank_local_numbers(ranks: Sequence[RankSummary], parameters: dict[str, Parameter]) -> Iterator[Note]:
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


def _groups(ranks: Sequence[RankSummary]) -> list[ParamGroup]:
    """Groups over all stages: those of different stages belong together by position."""
    groups: list[ParamGroup] = []
    for told in ranks:
        for number, (hyper, names) in enumerate(told.groups):
            if number == len(groups):
                groups.append(ParamGroup(to_inert(hyper, f"group {number}", _no_tensor), []))
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
