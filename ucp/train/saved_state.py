"""Extras of a live job: what `ucp.save` keeps besides parameters, in the places where loaders look for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucp.errors import UsageError
from ucp.files.pickle_writer import bare_object
from ucp.formats.deepspeed.names import model_name, optim_name
from ucp.model.checkpoint import Atom, Note
from ucp.train.extras import COUNTERS, RNG_TREE, SCALER_FIELDS, STATE_TREE, current_rng, live_scaler
from ucp.train.live import LiveJob
from ucp.train.values import still

KeepTensor = Callable[[str, Any], Atom]


def collect_state(job: LiveJob, client_state: dict[str, Any]) -> dict[str, Any]:
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
            trees[STATE_TREE] = {"client_state": still(state["client_state"], "client_state", keep)}
    for rank, state in enumerate(states):
        name = RNG_TREE.format(rank)
        trees[name] = still(state["rng"], name, keep)
    return trees, step


def _engine_trees(job: LiveJob, state: dict[str, Any], keep: KeepTensor, notes: list[Note]) -> dict[str, Any]:
    """Trees under the names and keys of DeepSpeed's own files, which other loaders and writers understand."""
    import deepspeed

    model = model_name(state["mp"])
    tree: dict[str, Any] = {
        "lr_scheduler": _scheduler(state["scheduler"], model, keep, notes),
        **state["counters"],
        "dp_world_size": job.mesh.dp,
        "mp_world_size": job.mesh.tp * job.mesh.pp,
        "ds_config": still(_plain(state["config"] or {}), "ds_config", keep),
        "ds_version": str(deepspeed.__version__),
    }
    for key, value in state["client_state"].items():
        tree[key] = still(value, f"{model}/{key}", keep)
    trees = {model: tree}
    fields = still(state["scaler"], "loss_scaler", keep)
    if state["optimizer"] in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
        tree["optimizer"] = fields
    elif state["scaler_class"]:
        name = optim_name(0, state["mp"], "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        scaler = bare_object(state["scaler_module"], state["scaler_class"], fields)
        trees[name] = {"optimizer_state_dict": {"loss_scaler": scaler}}
    return trees


def _scheduler(state: Any, where: str, keep: KeepTensor, notes: list[Note]) -> Any:
    try:
        return still(state, f"{where}/lr_scheduler", keep)
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
