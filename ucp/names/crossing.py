"""What a checkpoint carries besides parameter states, put in the words of another framework, so that training goes on.

Writers look for what their own framework's jobs leave behind: arguments, step, learning-rate schedule, loss scale.
A checkpoint that already carries that is left alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.inert import Inert
from ucp.files.pickle_writer import bare_object
from ucp.model.checkpoint import STEP, Atom, Checkpoint, Extras, Fragment, Note, Parameter, ParamGroup
from ucp.model.dtypes import FLOAT32
from ucp.model.region import Region
from ucp.names.arguments import arguments_for, in_core_words, in_deepspeed_words
from ucp.names.facts import CONFIG, Facts, facts_of

_DEEPSPEED: Final = ("deepspeed", "deepspeed-universal")
_MEGATRON: Final = ("megatron", "torch-dist")
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_COMMON: Final = "common.pt"
_RNG: Final = re.compile(r"^rng_state/shard_0\.0(?:\.0)?_[\d.]+$")
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


def crossed(checkpoint: Checkpoint, to: str, model_config: Path | None = None) -> Checkpoint:
    """The checkpoint for a writer of the format `to`: with its own framework's extras in place of another's."""
    megatron, deepspeed = _megatron_tree(checkpoint), _deepspeed_trees(checkpoint)
    if to in _MEGATRON and megatron is None:
        return _to_megatron(checkpoint, deepspeed, facts_of(checkpoint, model_config))
    if to in _DEEPSPEED and not deepspeed and megatron is not None:
        return _to_deepspeed(checkpoint, megatron)
    return checkpoint


def _megatron_tree(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What all ranks of a Megatron job say."""
    for name, tree in checkpoint.extras.trees.items():
        path = PurePosixPath(name)
        own = path.name == _COMMON or _RANK_FOLDER.fullmatch(path.parent.name) is not None
        if own and isinstance(tree, dict) and isinstance(tree.get("args"), Inert):
            return tree
    return None


def _deepspeed_trees(checkpoint: Checkpoint) -> dict[int, Mapping[str, Any]]:
    """Model files of DeepSpeed by model-parallel rank."""
    found: dict[int, Mapping[str, Any]] = {}
    for name, tree in checkpoint.extras.trees.items():
        match = _MODEL_FILE.fullmatch(PurePosixPath(name).name)
        if match and isinstance(tree, dict):
            found.setdefault(int(match[1]), tree)
    return found


def _to_megatron(checkpoint: Checkpoint, trees: Mapping[int, Mapping[str, Any]], facts: Facts) -> Checkpoint:
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
    fields.update(tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp, world_size=mesh.world)
    tree: dict[str, Any] = {
        "args": bare_object("argparse", "Namespace", fields),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.step or 0,
        "num_floating_point_operations_so_far": 0.0,
    }
    schedule = first.get("lr_scheduler")
    if isinstance(schedule, dict) and "num_steps" in schedule:
        tree["opt_param_scheduler"] = {key: schedule[key] for key in _SCHEDULE if key in schedule}
    scaler = _megatron_scaler(checkpoint)
    if scaler is not None:
        tree["optimizer"] = {"grad_scaler": scaler}
    random: dict[str, Any] = {
        f"rng_state/shard_{mp // mesh.tp}.{mp % mesh.tp}_{mesh.pp}.{mesh.tp}": held["rng_state"]
        for mp, held in trees.items()
        if isinstance(held.get("rng_state"), list)
    }
    extras = Extras({_COMMON: tree, **({"objects": random} if random else {})}, dict(checkpoint.extras.files))
    groups = [
        ParamGroup(_megatron_hyper(group.hyper, tree.get("opt_param_scheduler")), group.names)
        for group in checkpoint.groups
    ]
    details = {**checkpoint.details, "dtype": checkpoint.details.get("dtype") or _dtype(checkpoint)}
    details.pop("pipeline", None)
    notes = [*checkpoint.notes, _note(checkpoint, "Megatron", bool(tree.get("opt_param_scheduler")), bool(random))]
    return replace(checkpoint, extras=extras, groups=groups, details=details, notes=notes)


def _to_deepspeed(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Checkpoint:
    args = megatron["args"].state
    step = checkpoint.step or 0
    schedule = megatron.get("opt_param_scheduler")
    is_pipeline = str(checkpoint.details.get("names", "")).startswith("megatron-deepspeed")
    samples = args.get("consumed_train_samples")
    tree: dict[str, Any] = {
        "global_steps": step,
        "global_samples": samples if type(samples) is int else 0,
        "skipped_steps": 0,
        "iteration": step,
        "lr_scheduler": None,
    }
    if is_pipeline:
        tree["args"] = bare_object("argparse", "Namespace", in_deepspeed_words(args))
        tree["checkpoint_version"] = megatron.get("checkpoint_version", 3.0)
        if isinstance(schedule, dict):
            tokens = _whole(schedule.get("num_steps")) * _whole(args.get("seq_length"))
            own = {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}
            tree["lr_scheduler"] = {**schedule, **own}
            tree["tokens"] = tokens
        random = megatron.get("rng_state") or _first_random(checkpoint)
        if isinstance(random, list):
            tree["rng_state"] = random
    elif isinstance(schedule, dict):
        tree["lr_scheduler"] = _counters(step, checkpoint.groups)
    scaler = _deepspeed_scaler(checkpoint, megatron, step)
    if scaler:
        tree["optimizer"] = scaler
    trees: dict[str, Any] = {"mp_rank_00_model_states.pt": tree}
    if CONFIG in checkpoint.extras.trees:
        trees[CONFIG] = checkpoint.extras.trees[CONFIG]
    parameters = {name: _with_step(p, checkpoint.groups) for name, p in checkpoint.parameters.items()}
    details = {**checkpoint.details, "tag": f"global_step{step}"}
    notes = [*checkpoint.notes, _note(checkpoint, "DeepSpeed", tree["lr_scheduler"] is not None, "rng_state" in tree)]
    return replace(
        checkpoint,
        parameters=parameters,
        extras=Extras(trees, dict(checkpoint.extras.files)),
        details=details,
        notes=notes,
    )


def _note(checkpoint: Checkpoint, to: str, scheduled: bool, random: bool) -> Note:
    carried = ["step"] if checkpoint.step is not None else []
    if checkpoint.groups:
        carried.append("optimizer groups")
    if scheduled:
        carried.append("learning-rate schedule")
    if random:
        carried.append("random states")
    text = ", ".join(carried) if carried else "weights alone"
    rest = "" if random else "; random states start anew"
    return Note("crossed", f"put in {to}'s words: {text}{rest}")


def _counted(checkpoint: Checkpoint, facts: Facts) -> Facts:
    """The facts, with sizes that parameters show where nothing says them."""
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    layers = {int(m[1]) for name in shapes if (m := re.match(r"decoder\.layers\.(\d+)\.", name))}
    table = shapes.get("embedding.word_embeddings.weight")
    second = next((shape for name, shape in shapes.items() if name.endswith("mlp.linear_fc2.weight")), None)
    seen = Facts(
        layers=max(layers) + 1 if layers else None,
        hidden=table[1] if table else None,
        ffn=second[1] if second else None,
        vocabulary=table[0] if table else None,
        tied="output_layer.weight" not in shapes if table else None,
    )
    return facts.over(seen)


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights have."""
    sizes: dict[str, int] = {}
    for parameter in checkpoint.parameters.values():
        atom = parameter.atoms.get("weight")
        if atom is not None and parameter.role != "buffer":
            sizes[atom.dtype.name] = sizes.get(atom.dtype.name, 0) + atom.numel
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _megatron_hyper(hyper: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> dict[str, Any]:
    """A group's settings with those that megatron-core tells groups apart by."""
    decays = bool(hyper.get("weight_decay"))
    made: dict[str, Any] = {
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    if schedule is not None:
        made |= {key: schedule[key] for key in ("max_lr", "min_lr") if key in schedule}
    return {**made, **{key: value for key, value in hyper.items() if key not in ("name", "params")}}


def _counters(step: int, groups: list[ParamGroup]) -> dict[str, Any]:
    """Where a schedule is, in the words of DeepSpeed's schedulers and of torch's; its shape is the new run's own."""
    return {
        "last_batch_iteration": step - 1,
        "last_epoch": step,
        "_step_count": step + 1,
        "_last_lr": [group.hyper.get("lr") for group in groups],
        "lr_lambdas": [None] * len(groups),
    }


def _with_step(parameter: Parameter, groups: list[ParamGroup]) -> Parameter:
    """The parameter with a step of its own: fused optimizers count in the group, DeepSpeed's do it here."""
    if parameter.group is None or STEP in parameter.atoms or parameter.role != "trained":
        return parameter
    counted = groups[parameter.group].hyper.get(STEP)
    if not isinstance(counted, (int, float)) or not any(kind not in ("weight", "master") for kind in parameter.atoms):
        return parameter
    atom = _number(parameter.name, STEP, float(counted))
    return replace(parameter, atoms={**parameter.atoms, STEP: atom})


def _number(name: str, kind: str, value: float, shape: tuple[int, ...] = ()) -> Atom:
    fragment = Fragment(Region.all_of(shape), "", 0, FLOAT32, inline=struct.pack("<f", value))
    return Atom(name, kind, shape, FLOAT32, (fragment,))


def _megatron_scaler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """DeepSpeed's dynamic loss scale as Megatron's."""
    for tree in checkpoint.extras.trees.values():
        inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
        scaler = inner.get("loss_scaler") if isinstance(inner, dict) else None
        if isinstance(scaler, Inert) and scaler.get("dynamic", False) and isinstance(scaler.get("cur_scale"), float):
            scale = _number("grad_scaler", "extra", scaler.get("cur_scale"), (1,))
            return {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": _whole(scaler.get("cur_hysteresis"), 2)}
    return None


def _deepspeed_scaler(checkpoint: Checkpoint, megatron: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Megatron's loss scale as DeepSpeed's."""
    optimizer = megatron.get("optimizer")
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    scale = scaler.get("scale") if isinstance(scaler, dict) else None
    if not isinstance(scale, Atom) or checkpoint.details.get("dtype") != "float16":
        return {}
    fragment = scale.fragments[0]
    data = fragment.inline
    if data is None:
        with (checkpoint.root / fragment.file).open("rb") as file:
            file.seek(fragment.offset)
            data = file.read(4)
    return {"cur_scale": struct.unpack("<f", data[:4])[0], "dynamic_loss_scale": True, "cur_iter": step}


def _first_random(checkpoint: Checkpoint) -> Any:
    objects = checkpoint.extras.trees.get("objects")
    if not isinstance(objects, dict):
        return None
    return next((value for key, value in objects.items() if isinstance(key, str) and _RNG.match(key)), None)


def _whole(value: Any, default: int = 0) -> int:
    return value if type(value) is int else default
