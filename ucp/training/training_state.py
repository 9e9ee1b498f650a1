"""Everything in a checkpoint besides parameters: counters, LR scheduler, loss scaler, random generators, client state.

It is found in the extras whichever framework wrote it, and restored in a running job. Only plain data is restored:
numbers, text, lists, dictionaries, tensors and numpy arrays. Nothing is unpickled, imported or called; objects of other
classes are reported as not restored.
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp.containers.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyScalar,
    Size,
    class_path,
    is_class,
)
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import UcpError, UsageError
from ucp.formats.deepspeed.step_files import classify_files
from ucp.formats.translate.framework_extras import (
    DEEPSPEED_RESERVED_KEYS,
    complete_scheduler_state,
    find_scheduler_state,
)
from ucp.read.atom_reader import read_tensor
from ucp.training.live_job import LiveJob

COUNTERS: Final = ("global_steps", "skipped_steps", "global_samples")
STATE_TREE: Final = "training_state"  # the tree in which `ucp.save` keeps the client state of a torch module
RNG_TREE: Final = "rng_state_{}.pth"  # as the Hugging Face Trainer names it, one per rank
_RNG_NAME: Final = re.compile(r"rng_state_(\d+)\.pth|rng_state\.pth")

# Fields of DeepSpeed's loss scalers. Without ZeRO, `min_scale` is called `min_loss_scale`.
SCALER_FIELDS: Final = (
    *("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "delayed_shift"),
    *("cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale", "dynamic_loss_scale"),
)


@dataclass(slots=True)
class TrainingState:
    """The state found in a checkpoint, as live values; None or empty if there is none."""

    counters: dict[str, int] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] | None = None  # of this rank, if the parallel layout is the same
    not_restored: list[str] = field(default_factory=list)  # values that could not be restored, and why


def find_training_state(source: Checkpoint, job: LiveJob, rank: int, world: int) -> TrainingState:
    """Find the training state for one rank of a job in the extras of a checkpoint."""
    found = TrainingState()
    trees = {PurePosixPath(file).name: tree for file, tree in source.extras.trees.items()}
    names = classify_files(list(trees))
    mp_rank = job.rank.pp * job.mesh.tp + job.rank.tp
    same_model = (source.mesh.tp, source.mesh.pp) == (job.mesh.tp, job.mesh.pp)
    models = {mp: trees[name] for mp, name in names.model.items()}
    for (_, mp), name in sorted(names.sharded_model.items()):
        models.setdefault(mp, trees[name])
    model = models.get(mp_rank if same_model else 0) or next(iter(models.values()), None)
    optims = [trees[name] for _, name in sorted(names.optim.items())]
    if isinstance(model, dict):
        found.counters = {key: model[key] for key in COUNTERS if type(model.get(key)) is int}
        if isinstance(model.get("lr_scheduler"), dict):
            found.scheduler = _live_tree(found, source, model["lr_scheduler"], "lr_scheduler")
        client = {key: value for key, value in model.items() if key not in DEEPSPEED_RESERVED_KEYS}
        found.client_state = _live_tree(found, source, client, "client_state")
        found.scaler = _scaler_fields(model, optims)
    elif isinstance(trees.get(STATE_TREE), dict):
        tree = trees[STATE_TREE]
        if isinstance(tree.get("client_state"), dict):
            found.client_state = _live_tree(found, source, tree["client_state"], "client_state")
    else:
        rest = {name: tree for name, tree in trees.items() if not _RNG_NAME.fullmatch(name)}
        found.client_state = _live_tree(found, source, rest, "extras")
        schedule = find_scheduler_state(found.client_state)  # saved under any key
        if schedule is not None:
            found.scheduler = complete_scheduler_state(schedule[1], [group.hyper.get("lr") for group in source.groups])
    numbered = {int(m[1] or 0): tree for name, tree in trees.items() if (m := _RNG_NAME.fullmatch(name))}
    old, new = (source.mesh.tp, source.mesh.pp, source.mesh.dp), (job.mesh.tp, job.mesh.pp, job.mesh.dp)
    if numbered and (len(numbered) != world or old != new):
        found.not_restored.append(
            f"random generators: saved for {len(numbered)} ranks ({source.mesh}), this job has {world} ({job.mesh})"
        )
    elif numbered:
        found.rng = _live_tree(found, source, numbered[rank], "random generators")
    return found


def _live_tree(found: TrainingState, source: Checkpoint, tree: Any, path: str) -> dict[str, Any]:
    live = to_live(tree, source.root, path, found.not_restored)
    return live if live is not NOT_RESTORED and isinstance(live, dict) else {}


def _scaler_fields(model: Mapping[str, Any], optims: list[Any]) -> dict[str, Any]:
    """The loss scaler's fields: those of an object in ZeRO's files, or plain entries of the optimizer without ZeRO."""
    inner = optims[0].get("optimizer_state_dict") if optims and isinstance(optims[0], dict) else None
    scaler = inner.get("loss_scaler") if isinstance(inner, dict) else None
    fields = model.get("optimizer")
    if isinstance(scaler, Inert):
        found = {name: scaler.get(name) for name in SCALER_FIELDS}
        found["dynamic_loss_scale"] = bool(scaler.get("dynamic"))
    elif isinstance(fields, dict):
        found = {**{name: fields.get(name) for name in SCALER_FIELDS}, "min_scale": fields.get("min_loss_scale")}
    else:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}


def apply_training_state(state: TrainingState, source: Checkpoint, job: LiveJob) -> list[str]:
    """Restore the state in the job; returns what was not restored, and why."""
    not_restored = list(state.not_restored)
    if job.engine is not None:
        _apply_engine(state, source, job, not_restored)
    if state.rng:
        _apply_rng(state.rng, not_restored)
    return not_restored


def _apply_engine(state: TrainingState, source: Checkpoint, job: LiveJob, not_restored: list[str]) -> None:
    engine = job.engine
    counters = dict(state.counters)
    if "global_steps" not in counters and source.step is not None:
        counters["global_steps"] = source.step
    for name in COUNTERS:
        if name in counters:
            setattr(engine, name, counters[name])
        elif name == "global_samples" and "global_steps" in counters:
            engine.global_samples = counters["global_steps"] * engine.train_batch_size()
        else:
            not_restored.append(f"{name}: not in the checkpoint")
    scheduler = engine.lr_scheduler
    if scheduler is not None and not state.scheduler:
        not_restored.append("LR scheduler: not in the checkpoint")
    elif scheduler is not None:
        try:
            scheduler.load_state_dict(state.scheduler)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            not_restored.append(f"LR scheduler: {type(scheduler).__name__} does not accept the stored state: {error!r}")
    _apply_scaler(engine.optimizer, state.scaler, not_restored)


def _apply_scaler(optimizer: Any, fields: Mapping[str, Any], not_restored: list[str]) -> None:
    scaler = live_scaler(optimizer)
    if scaler is None:
        return
    dynamic = bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))
    if not fields:
        if dynamic:
            not_restored.append("loss scaler: not in the checkpoint")
        return
    if bool(fields.get("dynamic_loss_scale", dynamic)) != dynamic:
        kinds = ("static", "dynamic")
        not_restored.append(f"loss scaler: {kinds[not dynamic]} in the checkpoint, but {kinds[dynamic]} in the job")
        return
    for name, value in fields.items():
        name = "min_loss_scale" if name == "min_scale" and hasattr(scaler, "min_loss_scale") else name
        if hasattr(scaler, name) and name != "dynamic_loss_scale":
            setattr(scaler, name, value)


def live_scaler(optimizer: Any) -> Any:
    """The object with the loss scale of a DeepSpeed optimizer; None if it does not scale the loss."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and hasattr(scaler, "cur_scale"):
        return scaler
    return getattr(optimizer, "loss_scale_config", None)


def current_rng() -> dict[str, Any]:
    """The states of this process's random generators, in the layout of the Hugging Face Trainer."""
    import numpy as np
    import torch

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), keys, int(position), int(has_gauss), float(gauss)),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _apply_rng(rng: Mapping[str, Any], not_restored: list[str]) -> None:
    import numpy as np
    import torch

    try:
        if isinstance(rng.get("python"), tuple):
            random.setstate(rng["python"])
        if isinstance(rng.get("numpy"), tuple):
            np.random.set_state(rng["numpy"])
        if isinstance(rng.get("cpu"), torch.Tensor):
            torch.set_rng_state(rng["cpu"])
        if isinstance(rng.get("cuda"), torch.Tensor) and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng["cuda"])
    except (TypeError, ValueError, RuntimeError) as error:
        not_restored.append(f"random generators: {error}")


# Inert and live values ------------------------------------------------------------------------------------------------

_ATOMIC: Final = (bool, int, float, complex, str, bytes)


NOT_RESTORED: Final = object()  # placeholder for a value that cannot be restored


def to_live(value: Any, root: Path, path: str, not_restored: list[str]) -> Any:
    """Convert an inert value to a live one.

    Whatever is not plain data becomes `NOT_RESTORED` and is described in the list `not_restored`. A dictionary loses
    such entries; a list or tuple that contains one becomes `NOT_RESTORED` itself.
    """
    if value is None or isinstance(value, _ATOMIC):
        return value
    if isinstance(value, Atom):
        return read_tensor(root, value)
    if isinstance(value, dict):
        entries = ((key, to_live(item, root, f"{path}.{key}", not_restored)) for key, item in value.items())
        kept = [(key, item) for key, item in entries if item is not NOT_RESTORED]
        ordered = isinstance(value, InertOrderedDict) and not isinstance(value, InertDefaultDict)
        return OrderedDict(kept) if ordered else dict(kept)
    if isinstance(value, Size):
        import torch

        return torch.Size(value)
    if isinstance(value, (list, tuple)):
        items = [to_live(item, root, f"{path}[{i}]", not_restored) for i, item in enumerate(value)]
        if any(item is NOT_RESTORED for item in items):
            return NOT_RESTORED
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, DType):
        import torch

        return getattr(torch, value.name)
    try:
        if isinstance(value, NumpyArray):
            return value.to_numpy().copy()
        if isinstance(value, NumpyScalar):
            return value.to_python()
    except UcpError as error:
        not_restored.append(f"{path}: {error.what}")
        return NOT_RESTORED
    what = f"an object of {value.path}" if isinstance(value, Inert) else f"a {type(value).__name__}"
    what = f"the class {class_path(value)}" if is_class(value) else what
    not_restored.append(f"{path}: {what} is not plain data")
    return NOT_RESTORED


def to_inert(value: Any, path: str, keep_tensor: Callable[[str, Any], Atom]) -> Any:
    """Convert a live value to an inert one. `keep_tensor` returns the atom for a tensor; other classes are refused."""
    import argparse

    import numpy as np
    import torch

    if value is None or isinstance(value, _ATOMIC):
        return value
    if isinstance(value, torch.Tensor):
        return keep_tensor(path, value)
    if isinstance(value, dict):
        entries = [
            (to_inert(key, path, keep_tensor), to_inert(v, f"{path}.{key}", keep_tensor)) for key, v in value.items()
        ]
        return InertOrderedDict(entries) if isinstance(value, OrderedDict) else dict(entries)
    if isinstance(value, torch.Size):
        return Size(value)
    if isinstance(value, (list, tuple)):
        items = [to_inert(item, f"{path}[{i}]", keep_tensor) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return {to_inert(item, path, keep_tensor) for item in value}
    if isinstance(value, torch.dtype):
        return BY_NAME[str(value).removeprefix("torch.")]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        core = np.empty(0).__reduce__()[0].__module__.rpartition(".")[0]
        return NumpyArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes(), core=core)
    if isinstance(value, argparse.Namespace):
        return bare_object("argparse", "Namespace", to_inert(vars(value), path, keep_tensor))
    raise UsageError(
        f"client_state: {path} is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data",
        hint="use numbers, text, lists, dictionaries, tensors and numpy arrays",
    )
