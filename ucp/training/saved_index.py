"""Build the index of a running job on rank 0, from the summaries of all ranks.

The training state (counters, scheduler, loss scaler, client state, random generators) becomes extras under the file
names and keys of DeepSpeed and the Hugging Face Trainer, where other loaders look for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ucp.containers.pickle_writer import bare_object
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Note, Parameter, ParamGroup, Rank
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.region import Region
from ucp.errors import InconsistentError, UsageError
from ucp.formats.deepspeed.step_files import model_file_name, optimizer_file_name
from ucp.training.collect import StateCollector
from ucp.training.live_job import LiveJob, dtype_of, updates_counted
from ucp.training.training_state import (
    COUNTERS,
    RNG_TREE,
    SCALER_FIELDS,
    STATE_TREE,
    current_rng,
    live_scaler,
    to_inert,
)

TensorKeeper = Callable[[str, Any], Atom]


def collect_training_state(job: LiveJob, client_state: dict[str, Any]) -> dict[str, Any]:
    """This rank's random generators; on the first data-parallel rank also counters, scheduler and client state."""
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
    fields = [name for name in (*SCALER_FIELDS, "min_loss_scale", "dynamic", "dtype") if hasattr(scaler, name)]
    return {
        "counters": {name: int(getattr(engine, name)) for name in COUNTERS},
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "config": getattr(engine._config, "_param_dict", None),
        "scaler": {name: getattr(scaler, name) for name in fields},
        "scaler_class": "" if scaler is None else type(scaler).__qualname__,
        "scaler_module": "" if scaler is None else type(scaler).__module__,
        "optimizer": type(engine.optimizer).__name__,
    }


def build_trees(
    job: LiveJob, states: list[dict[str, Any]], keep: TensorKeeper, notes: list[Note]
) -> tuple[dict[str, Any], int | None]:
    """The trees of the extras from the training states of all ranks, and the step if the job counts steps."""
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


def _engine_trees(job: LiveJob, state: dict[str, Any], keep: TensorKeeper, notes: list[Note]) -> dict[str, Any]:
    """Trees under the names and keys of DeepSpeed's own files."""
    import deepspeed

    model = model_file_name(state["mp"])
    try:
        scheduler = to_inert(state["scheduler"], f"{model}/lr_scheduler", keep)
    except UsageError as error:
        scheduler = None
        notes.append(Note("scheduler-lost", f"the state of the LR scheduler was not saved: {error.what}"))
    tree: dict[str, Any] = {
        "lr_scheduler": scheduler,
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
        name = optimizer_file_name(0, state["mp"])
        scaler = bare_object(state["scaler_module"], state["scaler_class"], fields)
        trees[name] = {"optimizer_state_dict": {"loss_scaler": scaler}}
    return trees


def _plain(value: Any) -> Any:
    """A configuration as plain data; objects in it become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@dataclass(slots=True)
class RankSummary:
    """What one rank sends to rank 0."""

    fragments: list[tuple[str, str, str, Shape, Region]]  # name, kind, dtype, shape, region
    parameters: list[Parameter]
    groups: list[tuple[dict[str, Any], list[str]]]  # hyper-parameters, names
    rank: Rank
    state: dict[str, Any]  # see `collect_training_state`
    numbers: dict[tuple[str, str], Any] = field(default_factory=dict)  # (name, kind) → a number other than the step


def summarize_rank(
    job: LiveJob,
    held: StateCollector,
    training_state: dict[str, Any],
    numbers: dict[tuple[str, str], Any] | None = None,
) -> RankSummary:
    """The summary of this rank's state."""
    fragments = [(f.name, f.kind, f.dtype.name, f.shape, f.region) for f in held.fragments]
    names = [[job.logical_name(name) for name in group] for group in job.names_by_group()]
    groups = list(zip(group_hyper_parameters(job.groups), names, strict=True))
    return RankSummary(fragments, list(held.parameters.values()), groups, job.rank, training_state, numbers or {})


def group_hyper_parameters(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hyper-parameters of param groups, without `params`; one-element tensors as numbers."""
    return [{str(key): _as_number(value) for key, value in group.items() if key != "params"} for group in groups]


def _as_number(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(hasattr(item, "item") for item in value):  # betas that are tensors
        return type(value)(map(_as_number, value))
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1 else value


def build_index(
    job: LiveJob, summaries: Sequence[RankSummary], path: Path, parameters: dict[str, Parameter] | None = None
) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint to write (its atoms have no fragments yet), and the tensors inside its extras.

    `parameters` are those of an earlier index, if nothing about them has changed.
    """
    order = sorted(range(len(summaries)), key=lambda rank: (summaries[rank].rank, rank))
    ranks = [summaries[rank] for rank in order]
    notes: list[Note] = []
    if parameters is None:
        parameters = _parameters(ranks)
        _atoms(ranks, parameters)
        notes.extend(_drop_rank_local_numbers(ranks, parameters))
    tensors: dict[str, Any] = {}

    def keep(name: str, tensor: Any) -> Atom:
        tensors[name] = tensor
        return Atom(name, "extra", tuple(tensor.shape), dtype_of(tensor), ())

    trees, step = build_trees(job, [summary.state for summary in summaries], keep, notes)
    checkpoint = Checkpoint(
        "deepspeed" if job.engine is not None else "torch",
        path,
        job.mesh,
        parameters,
        framework=_framework(job),
        step=steps_counted(job) if step is None else step,
        groups=_groups(ranks),
        extras=Extras(trees),
        notes=notes,
        details={"dtype": _model_dtype(parameters).name, "live": job.description},
    )
    return checkpoint, tensors


def _parameters(ranks: Sequence[RankSummary]) -> dict[str, Parameter]:
    """Every parameter, in the order of the pipeline stages."""
    parameters: dict[str, Parameter] = {}
    for rank in ranks:
        for parameter in rank.parameters:
            known = parameters.setdefault(parameter.name, replace(parameter, atoms={}))
            if known.shape != parameter.shape:
                raise InconsistentError(
                    f"parameter {known.name} has shape {list(known.shape)} on one rank and {list(parameter.shape)} on"
                    " another"
                )
            known.stages = tuple(dict.fromkeys((*known.stages, *parameter.stages)))
    return parameters


def _atoms(ranks: Sequence[RankSummary], parameters: dict[str, Parameter]) -> None:
    for rank in ranks:
        for name, kind, dtype, shape, _ in rank.fragments:
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
    """Remove numbers that differ between ranks: they describe a rank's partition of a flat buffer, not a parameter."""
    values: dict[tuple[str, str], Any] = {}
    different: dict[str, str] = {}
    for rank in ranks:
        for (name, kind), number in rank.numbers.items():
            if values.setdefault((name, kind), number) != number:
                different.setdefault(kind, name)
                parameters[name].atoms.pop(kind, None)
    for kind, name in different.items():
        yield Note(
            "state-unplaced",
            f"optimizer state '{kind}' is a number that differs between ranks (for example of {name}), so it does not"
            " belong to a parameter; not saved",
        )


def _groups(ranks: Sequence[RankSummary]) -> list[ParamGroup]:
    """Param groups over all pipeline stages; groups of different stages are matched by position."""
    groups: list[ParamGroup] = []
    for rank in ranks:
        for number, (hyper, names) in enumerate(rank.groups):
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
    """The number of steps that the optimizer has counted, or None if it does not count."""
    states = job.optimizer.state.values() if job.optimizer is not None else ()
    counted = map(updates_counted, states)
    return max((count for count in counted if count is not None), default=None)


def steps_taken(job: LiveJob) -> int:
    """The number of steps that the job has taken, as counted by the engine or the optimizer; 0 if neither counts."""
    return int(job.engine.global_steps) if job.engine is not None else steps_counted(job) or 0


def _framework(job: LiveJob) -> str:
    import torch

    if job.engine is None:
        return f"torch {torch.__version__}"
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"
