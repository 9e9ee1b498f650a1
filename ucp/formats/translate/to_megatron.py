"""A checkpoint of another framework in Megatron's words: arguments, groups, schedule, loss scale, random states.

Parameter groups as a Megatron job makes them, of another framework's.

A job looks for its groups in a checkpoint by what they say of themselves, and makes them by rules of its own: matrices
are decayed, vectors and biases are not. Groups that were made by other rules would not be found.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Note, Parameter, ParamGroup
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.errors import UsageError, first_few
from ucp.formats.translate.framework_extras import COMMON_FILE, int_or, translation_note
from ucp.formats.translate.megatron_args import to_megatron_args, to_megatron_core_args
from ucp.formats.translate.model_config import ModelConfig, megatron_args_of_file, model_config_of

_TABLE: Final = "embedding.word_embeddings.weight"
_SCHEDULE: Final = (
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)


def deepspeed_to_megatron(
    checkpoint: Checkpoint, trees: Mapping[int, Mapping[str, Any]], model_config: Path | None
) -> Checkpoint:
    """The checkpoint as Megatron's writers want it; `trees` are DeepSpeed's model files in it, by rank."""
    if not any(name.startswith("decoder.") for name in checkpoint.parameters):
        shown = ", ".join(list(checkpoint.parameters)[:3])
        raise UsageError(
            f"parameters are not called as megatron-core calls them ({shown}, …)",
            hint="map them with --names megatron, or with a table of your own: --names FILE",
        )
    facts = model_config_of(checkpoint, model_config)
    first = trees[min(trees)] if trees else {}
    stored = first.get("args")
    mesh = checkpoint.mesh
    if isinstance(stored, Inert) and isinstance(stored.state, dict) and "num_attention_heads" in stored.state:
        fields = to_megatron_core_args(stored.state)
    else:
        facts = _counted(checkpoint, facts)
        missing = [key for key in ("layers", "hidden", "heads", "ffn") if getattr(facts, key) is None]
        if missing:
            raise UsageError(
                f"{checkpoint.root}: says nothing of the model's {', '.join(missing)}, which a Megatron job's arguments"
                " name",
                hint="give the model's config.json with --model-config FILE",
            )
        fields = to_megatron_args(facts, checkpoint.step, str(checkpoint.details.get("dtype") or _dtype(checkpoint)))
    fields.update(megatron_args_of_file(model_config) if model_config is not None else {})
    fields.update(tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp, world_size=mesh.world)
    vocabulary = _vocabulary(checkpoint)
    if vocabulary is not None:
        fields["true_vocab_size"] = vocabulary
    tree: dict[str, Any] = {
        "args": bare_object("argparse", "Namespace", fields),
        "checkpoint_version": 3.0,
        **({"iteration": checkpoint.step} if checkpoint.step is not None else {}),  # none in a `release`
        "num_floating_point_operations_so_far": 0.0,
    }
    schedule = first.get("lr_scheduler")
    has_schedule = isinstance(schedule, dict) and "num_steps" in schedule
    if isinstance(schedule, dict) and has_schedule:
        tree["opt_param_scheduler"] = {key: schedule[key] for key in _SCHEDULE if key in schedule}
    elif checkpoint.groups:
        tree["opt_param_scheduler"] = _counted_schedule(checkpoint.groups, first)
    scaler = _megatron_scaler(checkpoint)
    if scaler is not None:
        tree["optimizer"] = {"grad_scaler": scaler}
    random: dict[str, Any] = {
        f"rng_state/shard_{mp // mesh.tp}.{mp % mesh.tp}_{mesh.pp}.{mesh.tp}": held["rng_state"]
        for mp, held in trees.items()
        if isinstance(held.get("rng_state"), list)
    }
    extras = Extras({COMMON_FILE: tree, **({"objects": random} if random else {})}, dict(checkpoint.extras.files))
    groups, of_groups, dealt = megatron_groups(checkpoint, tree.get("opt_param_scheduler"))
    fields.update(of_groups)
    details = {**checkpoint.details, "dtype": checkpoint.details.get("dtype") or _dtype(checkpoint)}
    details.pop("pipeline", None)
    notes = [*checkpoint.notes, *dealt, translation_note(checkpoint, "Megatron", has_schedule, bool(random))]
    unlike = facts.unlike
    if unlike is None and facts.scaled_embedding:
        unlike = "its embeddings are multiplied by the root of the hidden size"
    if unlike is not None:
        notes.append(Note("unlike", f"the arguments do not say that {unlike}: the job must"))
    if checkpoint.groups and not has_schedule:
        text = "of the schedule only the samples that were seen are known: start with --override-opt-param-scheduler"
        notes.append(Note("schedule-unknown", text))
    return replace(checkpoint, extras=extras, groups=groups, details=details, notes=notes)


def _counted(checkpoint: Checkpoint, facts: ModelConfig) -> ModelConfig:
    """The facts, with sizes that parameters show where nothing says them."""
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    layers = {int(m[1]) for name in shapes if (m := re.match(r"decoder\.layers\.(\d+)\.", name))}
    table = shapes.get(_TABLE)
    second = next((shape for name, shape in shapes.items() if name.endswith("mlp.linear_fc2.weight")), None)
    seen = ModelConfig(
        layers=max(layers) + 1 if layers else None,
        hidden=table[1] if table else None,
        ffn=second[1] if second else None,
        vocabulary=table[0] if table else None,
        tied="output_layer.weight" not in shapes if table else None,
    )
    return facts.over(seen)


def _vocabulary(checkpoint: Checkpoint) -> int | None:
    """The size without padding: as rules say, or all rows where a format knows neither vocabulary nor padding."""
    sizes = {p.rule.true_size for p in checkpoint.parameters.values() if p.rule.cut == "vocab"}
    table = checkpoint.parameters.get(_TABLE)
    if not sizes and table is not None:
        return table.shape[0]
    return sizes.pop() if len(sizes) == 1 else None


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights have."""
    sizes: dict[str, int] = {}
    for parameter in checkpoint.parameters.values():
        atom = parameter.atoms.get("weight")
        if atom is not None and parameter.role != "buffer":
            sizes[atom.dtype.name] = sizes.get(atom.dtype.name, 0) + atom.numel
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _counted_schedule(groups: Sequence[ParamGroup], model: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron wants to load of a schedule, for a run that had another one: how far it is, in samples."""
    rates = [rate for group in groups if isinstance(rate := group.hyper.get("lr"), (int, float))]
    decay = max((d for group in groups if isinstance(d := group.hyper.get("weight_decay"), (int, float))), default=0.0)
    return {
        "max_lr": max(rates, default=0.0),
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "num_steps": int_or(model.get("global_samples")),
        "lr_decay_style": "constant",
        "lr_decay_steps": 0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }


def _megatron_scaler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """DeepSpeed's dynamic loss scale as Megatron's."""
    for tree in checkpoint.extras.trees.values():
        inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
        scaler = inner.get("loss_scaler") if isinstance(inner, dict) else None
        if isinstance(scaler, Inert) and scaler.get("dynamic", False) and isinstance(scaler.get("cur_scale"), float):
            data = struct.pack("<f", scaler.get("cur_scale"))
            fragment = Fragment(Region.all_of((1,)), "", 0, FLOAT32, inline=data)
            scale = Atom("grad_scaler", "extra", (1,), FLOAT32, (fragment,))
            return {
                "scale": scale,
                "growth_tracker": 0,
                "hysteresis_tracker": int_or(scaler.get("cur_hysteresis"), 2),
            }
    return None


_NORMS_OF_HEADS: Final = ("q_layernorm.", "k_layernorm.")
_ENDS: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
_DECAY: Final = "weight_decay"


def megatron_groups(
    checkpoint: Checkpoint, schedule: Mapping[str, Any] | None
) -> tuple[list[ParamGroup], dict[str, Any], list[Note]]:
    """The groups, the arguments with which a job makes such groups, and what a person should know."""
    parameters = checkpoint.parameters
    dealt: dict[tuple[bool, bool], ParamGroup] = {}
    fields = _fields(checkpoint)
    moved: list[str] = []
    for group in checkpoint.groups:
        own_rate = "decoupled_lr" in fields and _has_own_rate(group)
        for decayed in (True, False):
            names = [
                name for name in group.names if name in parameters and _is_decayed(parameters[name], fields) == decayed
            ]
            if not names:
                continue
            hyper = _hyper(group.hyper, schedule, decayed=decayed)
            known = dealt.setdefault((not decayed, own_rate), ParamGroup(hyper, []))
            known.names.extend(names)
            unlike = any(known.hyper.get(key) != hyper.get(key) for key in ("lr", _DECAY))
            if unlike or (group.hyper.get(_DECAY) and not decayed):
                moved += names
    groups = [dealt[key] for key in sorted(dealt)]
    if not moved:
        return groups, fields, []
    text = (
        f"{first_few(moved)} had other settings: Megatron's jobs decay matrices, no vectors, and know one learning rate"
    )
    return groups, fields, [Note("groups-dealt", text)]


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments by which a job deals its parameters in another way than it does by default."""
    fields: dict[str, Any] = {}
    vectors = [
        (name, bool(group.hyper.get(_DECAY)))
        for group in checkpoint.groups
        for name in group.names
        if name in checkpoint.parameters and len(checkpoint.parameters[name].shape) < 2
    ]
    of_heads = [decayed for name, decayed in vectors if _is_norm_of_heads(name)]
    others = [decayed for name, decayed in vectors if not _is_norm_of_heads(name)]
    if of_heads and all(of_heads) and not any(others):
        fields["apply_wd_to_qk_layernorm"] = True
    apart = next((group for group in checkpoint.groups if _has_own_rate(group)), None)
    if apart is not None:
        fields["decoupled_lr"] = apart.hyper.get("max_lr", apart.hyper.get("lr"))
    return fields


def _has_own_rate(group: ParamGroup) -> bool:
    """Is this the group of Megatron's --decoupled-lr?"""
    said = group.hyper.get("is_decoupled_lr") is True or group.hyper.get("default_config") is False
    return said and bool(group.names) and set(group.names) <= set(_ENDS)


def _is_decayed(parameter: Parameter, fields: Mapping[str, Any]) -> bool:
    if "apply_wd_to_qk_layernorm" in fields and _is_norm_of_heads(parameter.name):
        return True
    return len(parameter.shape) > 1 and not parameter.name.endswith(".bias")


def _is_norm_of_heads(name: str) -> bool:
    return any(norm in name for norm in _NORMS_OF_HEADS)


def _hyper(hyper: Mapping[str, Any], schedule: Mapping[str, Any] | None, *, decayed: bool) -> dict[str, Any]:
    """A group's settings with those that megatron-core tells groups apart by."""
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
