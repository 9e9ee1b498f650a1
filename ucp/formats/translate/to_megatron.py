"""Extras of another framework as Megatron's: arguments, parameter groups, schedule, loss scale, random states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Checkpoint, Extras, Note, ParamGroup
from ucp.errors import ImpossibleError, first_few
from ucp.formats.megatron.folder import COMMON
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import EMBEDDING, OUTPUT
from ucp.formats.megatron.optimizer_groups import is_qk_norm, parameter_flags
from ucp.formats.sharded.shard_fragments import number_atom
from ucp.formats.translate.framework_extras import int_or, translation_note
from ucp.formats.translate.megatron_args import to_megatron_args, to_megatron_core_args
from ucp.formats.translate.model_config import ModelConfig, megatron_args_of_file, model_config_of

_DECOUPLED: Final = (EMBEDDING, OUTPUT)  # the parameters that --decoupled-lr is for
_DECAY: Final = "weight_decay"


def to_megatron(
    checkpoint: Checkpoint, trees: Mapping[int, Mapping[str, Any]], model_config: Path | None
) -> Checkpoint:
    """The checkpoint with Megatron's extras; `trees` are those of DeepSpeed's model files in it, by rank."""
    if not any(name.startswith("decoder.") for name in checkpoint.parameters):
        shown = ", ".join(list(checkpoint.parameters)[:3])
        raise ImpossibleError(
            f"the parameters do not have megatron-core's names ({shown}, …)",
            hint="rename them with --names megatron, or with a table of your own: --names FILE",
        )
    model = model_config_of(checkpoint, model_config)
    first = trees[min(trees)] if trees else {}
    mesh = checkpoint.mesh
    args, model = _arguments(checkpoint, model, first.get("args"))
    args.update(megatron_args_of_file(model_config) if model_config is not None else {})
    args.update(tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp, world_size=mesh.world)
    # The vocabulary without padding: from rules, or all rows in formats without vocabulary rules.
    sizes = {p.rule.true_size for p in checkpoint.parameters.values() if p.rule.cut == "vocab"}
    if not sizes and EMBEDDING in checkpoint.parameters:
        sizes = {checkpoint.parameters[EMBEDDING].shape[0]}
    if len(sizes) == 1 and None not in sizes:
        args["true_vocab_size"] = sizes.pop()
    tree: dict[str, Any] = {
        "args": bare_object("argparse", "Namespace", args),
        "checkpoint_version": 3.0,
        **({"iteration": checkpoint.step} if checkpoint.step is not None else {}),  # a `release` has none
        "num_floating_point_operations_so_far": 0.0,
    }
    schedule = first.get("lr_scheduler")
    has_schedule = isinstance(schedule, dict) and "num_steps" in schedule
    minimal = _minimal_schedule(checkpoint.groups, first)
    if isinstance(schedule, dict) and has_schedule:
        tree["opt_param_scheduler"] = {key: schedule[key] for key in minimal if key in schedule}
    elif checkpoint.groups:
        tree["opt_param_scheduler"] = minimal
    scaler = _loss_scaler(checkpoint)
    if scaler is not None:
        tree["optimizer"] = {"grad_scaler": scaler}
    random: dict[str, Any] = {
        f"rng_state/shard_{mp // mesh.tp}.{mp % mesh.tp}_{mesh.pp}.{mesh.tp}": values["rng_state"]
        for mp, values in trees.items()
        if isinstance(values.get("rng_state"), list)
    }
    extras = Extras({COMMON: tree, **({"objects": random} if random else {})}, dict(checkpoint.extras.files))
    groups, group_args, group_notes = megatron_groups(checkpoint, tree.get("opt_param_scheduler"))
    args.update(group_args)
    details = {**checkpoint.details, "dtype": checkpoint.details.get("dtype") or _dtype(checkpoint)}
    details.pop("pipeline", None)
    notes = [*checkpoint.notes, *group_notes, translation_note(checkpoint, "Megatron", has_schedule, bool(random))]
    mismatch = model.mismatch
    if mismatch is None and model.scaled_embedding:
        mismatch = "its embeddings are multiplied by the square root of the hidden size"
    if mismatch is not None:
        notes.append(Note("unlike", f"no argument of Megatron expresses that {mismatch}: the job must provide for it"))
    if checkpoint.groups and not has_schedule:
        text = "of the schedule only the number of samples is known: start with --override-opt-param-scheduler"
        notes.append(Note("schedule-unknown", text))
    return replace(checkpoint, extras=extras, groups=groups, details=details, notes=notes)


def _arguments(checkpoint: Checkpoint, model: ModelConfig, stored: Any) -> tuple[dict[str, Any], ModelConfig]:
    """The job's arguments: from those of a Megatron-DeepSpeed job if `stored`, else from the model's configuration."""
    if isinstance(stored, Inert) and isinstance(stored.state, dict) and "num_attention_heads" in stored.state:
        return to_megatron_core_args(stored.state), model
    model = model.over(_sizes_of_tensors(checkpoint))
    missing = [key for key in ("layers", "hidden", "heads", "ffn") if getattr(model, key) is None]
    if missing:
        raise ImpossibleError(
            f"{checkpoint.root}: does not contain the model's {', '.join(missing)}, which a Megatron job's arguments"
            " need",
            hint="give the model's config.json with --model-config FILE",
        )
    dtype = str(checkpoint.details.get("dtype") or _dtype(checkpoint))
    return to_megatron_args(model, checkpoint.step, dtype), model


def _sizes_of_tensors(checkpoint: Checkpoint) -> ModelConfig:
    """The sizes of the model that follow from the shapes of its tensors."""
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    layers = {int(m[1]) for name in shapes if (m := re.match(r"decoder\.layers\.(\d+)\.", name))}
    embedding = shapes.get(EMBEDDING)
    second = next((shape for name, shape in shapes.items() if name.endswith("mlp.linear_fc2.weight")), None)
    return ModelConfig(
        layers=max(layers) + 1 if layers else None,
        hidden=embedding[1] if embedding else None,
        ffn=second[1] if second else None,
        vocabulary=embedding[0] if embedding else None,
        tied=OUTPUT not in shapes if embedding else None,
    )


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most weights."""
    sizes: dict[str, int] = {}
    for parameter in checkpoint.parameters.values():
        atom = parameter.atoms.get("weight")
        if atom is not None and parameter.role != "buffer":
            sizes[atom.dtype.name] = sizes.get(atom.dtype.name, 0) + atom.numel
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _minimal_schedule(groups: Sequence[ParamGroup], model_file: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that Megatron loads of a schedule, for a run with another scheduler: only its position, in samples."""
    rates = [rate for group in groups if isinstance(rate := group.hyper.get("lr"), (int, float))]
    decay = max((d for group in groups if isinstance(d := group.hyper.get(_DECAY), (int, float))), default=0.0)
    return {
        "max_lr": max(rates, default=0.0),
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "num_steps": int_or(model_file.get("global_samples")),
        "lr_decay_style": "constant",
        "lr_decay_steps": 0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }


def _loss_scaler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """DeepSpeed's dynamic loss scaler as Megatron's grad scaler."""
    for tree in checkpoint.extras.trees.values():
        inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
        scaler = inner.get("loss_scaler") if isinstance(inner, dict) else None
        if isinstance(scaler, Inert) and scaler.get("dynamic", False) and isinstance(scaler.get("cur_scale"), float):
            return {
                "scale": number_atom("grad_scaler", "extra", scaler.get("cur_scale"), (1,)),
                "growth_tracker": 0,
                "hysteresis_tracker": int_or(scaler.get("cur_hysteresis"), 2),
            }
    return None


def megatron_groups(
    checkpoint: Checkpoint, schedule: Mapping[str, Any] | None
) -> tuple[list[ParamGroup], dict[str, Any], list[Note]]:
    """Parameter groups as a Megatron job makes them, the arguments that make it do so, and notes.

    A job identifies its groups in a checkpoint by their settings, and forms them by its own rules: weight decay for
    matrices, none for vectors and biases. It would not find groups formed by other rules.
    """
    parameters = checkpoint.parameters
    groups: dict[tuple[bool, bool], ParamGroup] = {}
    args = _group_args(checkpoint)
    changed: list[str] = []
    for group in checkpoint.groups:
        is_decoupled = "decoupled_lr" in args and _is_decoupled(group)
        for decayed in (True, False):
            here = [parameters[name] for name in group.names if name in parameters]
            names = [p.name for p in here if parameter_flags(p.name, len(p.shape), JobArguments(args))[1] == decayed]
            if not names:
                continue
            hyper = _group_settings(group.hyper, schedule, decayed=decayed)
            merged = groups.setdefault((not decayed, is_decoupled), ParamGroup(hyper, []))
            merged.names.extend(names)
            differs = any(merged.hyper.get(key) != hyper.get(key) for key in ("lr", _DECAY))
            if differs or (group.hyper.get(_DECAY) and not decayed):
                changed += names
    notes = []
    if changed:
        text = (
            f"{first_few(changed)} had other settings: a Megatron job has one learning rate, and weight decay for"
            " matrices only"
        )
        notes.append(Note("groups-dealt", text))
    return [groups[key] for key in sorted(groups)], args, notes


def _group_args(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments that make a job form its groups differently from its defaults."""
    args: dict[str, Any] = {}
    vectors = [
        (name, bool(group.hyper.get(_DECAY)))
        for group in checkpoint.groups
        for name in group.names
        if name in checkpoint.parameters and len(checkpoint.parameters[name].shape) < 2
    ]
    head_norms = [decayed for name, decayed in vectors if is_qk_norm(name)]
    others = [decayed for name, decayed in vectors if not is_qk_norm(name)]
    if head_norms and all(head_norms) and not any(others):
        args["apply_wd_to_qk_layernorm"] = True
    decoupled = next((group for group in checkpoint.groups if _is_decoupled(group)), None)
    if decoupled is not None:
        args["decoupled_lr"] = decoupled.hyper.get("max_lr", decoupled.hyper.get("lr"))
    return args


def _is_decoupled(group: ParamGroup) -> bool:
    """Whether this is the group of Megatron's --decoupled-lr."""
    is_marked = group.hyper.get("is_decoupled_lr") is True or group.hyper.get("default_config") is False
    return is_marked and bool(group.names) and set(group.names) <= set(_DECOUPLED)


def _group_settings(hyper: Mapping[str, Any], schedule: Mapping[str, Any] | None, *, decayed: bool) -> dict[str, Any]:
    """A group's settings, completed by those that megatron-core identifies groups by."""
    made: dict[str, Any] = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    if schedule is not None:
        made |= {key: schedule[key] for key in ("max_lr", "min_lr") if key in schedule}
    made |= {key: value for key, value in hyper.items() if key not in ("name", "params")}
    return {**made, "wd_mult": 1.0 if decayed else 0.0, **({} if decayed or _DECAY not in made else {_DECAY: 0.0})}
