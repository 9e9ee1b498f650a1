"""A checkpoint of another framework in Megatron's words: arguments, groups, schedule, loss scale, random states."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.inert import Inert
from ucp.files.pickle_writer import bare_object
from ucp.model.checkpoint import Atom, Checkpoint, Extras, Fragment, Note, ParamGroup
from ucp.model.dtypes import FLOAT32
from ucp.model.region import Region
from ucp.names.arguments import arguments_for, in_core_words
from ucp.names.carried import COMMON, carried_note, whole_number
from ucp.names.facts import Facts, facts_of, raw_arguments
from ucp.names.megatron_groups import megatron_groups

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


def into_megatron(
    checkpoint: Checkpoint, trees: Mapping[int, Mapping[str, Any]], model_config: Path | None
) -> Checkpoint:
    """The checkpoint as Megatron's writers want it; `trees` are DeepSpeed's model files in it, by rank."""
    if not any(name.startswith("decoder.") for name in checkpoint.parameters):
        shown = ", ".join(list(checkpoint.parameters)[:3])
        raise UsageError(
            f"parameters are not called as megatron-core calls them ({shown}, …)",
            hint="map them with --names megatron, or with a table of your own: --names FILE",
        )
    facts = facts_of(checkpoint, model_config)
    first = trees[min(trees)] if trees else {}
    stored = first.get("args")
    mesh = checkpoint.mesh
    if isinstance(stored, Inert) and isinstance(stored.state, dict) and "num_attention_heads" in stored.state:
        fields = in_core_words(stored.state)
    else:
        facts = _counted(checkpoint, facts)
        missing = [key for key in ("layers", "hidden", "heads", "ffn") if getattr(facts, key) is None]
        if missing:
            raise UsageError(
                f"{checkpoint.root}: says nothing of the model's {', '.join(missing)}, which a Megatron job's arguments"
                " name",
                hint="give the model's config.json with --model-config FILE",
            )
        fields = arguments_for(facts, checkpoint.step, str(checkpoint.details.get("dtype") or _dtype(checkpoint)))
    fields.update(raw_arguments(model_config) if model_config is not None else {})
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
    extras = Extras({COMMON: tree, **({"objects": random} if random else {})}, dict(checkpoint.extras.files))
    groups, of_groups, dealt = megatron_groups(checkpoint, tree.get("opt_param_scheduler"))
    fields.update(of_groups)
    details = {**checkpoint.details, "dtype": checkpoint.details.get("dtype") or _dtype(checkpoint)}
    details.pop("pipeline", None)
    notes = [*checkpoint.notes, *dealt, carried_note(checkpoint, "Megatron", has_schedule, bool(random))]
    unlike = facts.unlike
    if unlike is None and facts.scaled_embedding:
        unlike = "its embeddings are multiplied by the root of the hidden size"
    if unlike is not None:
        notes.append(Note("unlike", f"the arguments do not say that {unlike}: the job must"))
    if checkpoint.groups and not has_schedule:
        text = "of the schedule only the samples that were seen are known: start with --override-opt-param-scheduler"
        notes.append(Note("schedule-unknown", text))
    return replace(checkpoint, extras=extras, groups=groups, details=details, notes=notes)


def _counted(checkpoint: Checkpoint, facts: Facts) -> Facts:
    """The facts, with sizes that parameters show where nothing says them."""
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    layers = {int(m[1]) for name in shapes if (m := re.match(r"decoder\.layers\.(\d+)\.", name))}
    table = shapes.get(_TABLE)
    second = next((shape for name, shape in shapes.items() if name.endswith("mlp.linear_fc2.weight")), None)
    seen = Facts(
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
        "num_steps": whole_number(model.get("global_samples")),
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
                "hysteresis_tracker": whole_number(scaler.get("cur_hysteresis"), 2),
            }
    return None
