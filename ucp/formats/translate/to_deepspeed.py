"""A checkpoint of Megatron's in DeepSpeed's words: counters, groups, schedule, loss scale, how slices combine."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import STEP, Atom, Checkpoint, Extras, Fragment, Parameter, ParamGroup
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.formats.translate.framework_extras import int_or, translation_note
from ucp.formats.translate.megatron_args import to_megatron_deepspeed_args
from ucp.formats.translate.model_config import CONFIG_FILE
from ucp.storage.local import SourceFiles

_SCALER: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\..*grad_scaler/shard_")
_RNG: Final = re.compile(r"^rng_state/shard_0\.0(?:\.0)?_[\d.]+$")

MEGATRON_DEEPSPEED: Final = "megatron-deepspeed"  # the names of Megatron-DeepSpeed's GPT


def megatron_to_deepspeed(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint as DeepSpeed's writers want it; `megatron` is what all ranks of the job say."""
    args = megatron["args"].state
    step = checkpoint.step or 0
    schedule = megatron.get("opt_param_scheduler")
    is_pipeline = str(checkpoint.details.get("names", "")).startswith(MEGATRON_DEEPSPEED)
    samples = args.get("consumed_train_samples")
    tree: dict[str, Any] = {
        "global_steps": step,
        "global_samples": samples if type(samples) is int else 0,
        "skipped_steps": 0,
        "iteration": step,
        "lr_scheduler": None,
    }
    if is_pipeline:
        tree["args"] = bare_object("argparse", "Namespace", to_megatron_deepspeed_args(args))
        tree["checkpoint_version"] = megatron.get("checkpoint_version", 3.0)
        if isinstance(schedule, dict):
            tokens = int_or(schedule.get("num_steps")) * int_or(args.get("seq_length"))
            own = {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}
            tree["lr_scheduler"] = {**schedule, **own}
            tree["tokens"] = tokens
        tree["universal_checkpoint_info"] = _info(checkpoint, args)
        random = megatron.get("rng_state") or _first_random(checkpoint)
        if isinstance(random, list):
            tree["rng_state"] = random
    elif isinstance(schedule, dict):
        tree["lr_scheduler"] = _counters(step, checkpoint.groups)
    scaler = _deepspeed_scaler(checkpoint, megatron, step)
    if scaler:
        tree["optimizer"] = scaler
    trees: dict[str, Any] = {"mp_rank_00_model_states.pt": tree}
    if CONFIG_FILE in checkpoint.extras.trees:
        trees[CONFIG_FILE] = checkpoint.extras.trees[CONFIG_FILE]
    # Experts are parameters like all others there: DeepSpeed's own have other names, and files for each.
    parameters = {
        name: replace(_with_step(p, checkpoint.groups), expert=None) for name, p in checkpoint.parameters.items()
    }
    details = {**checkpoint.details, "tag": f"global_step{step}"}
    notes = [
        *checkpoint.notes,
        translation_note(checkpoint, "DeepSpeed", tree["lr_scheduler"] is not None, "rng_state" in tree),
    ]
    return replace(
        checkpoint,
        parameters=parameters,
        extras=Extras(trees, dict(checkpoint.extras.files)),
        details=details,
        notes=notes,
    )


def _info(checkpoint: Checkpoint, args: Mapping[str, Any]) -> dict[str, Any]:
    """How the ranks' slices make whole parameters, as Megatron-DeepSpeed tells DeepSpeed."""
    trained = [p for p in checkpoint.parameters.values() if p.role == "trained"]

    def named(cut: str, dim: int = 0, parts: int = 0) -> list[str]:
        return [
            f"^{re.escape(p.name)}$"
            for p in trained
            if p.rule.cut == cut and p.rule.dim == dim and len(p.rule.parts or ()) == parts
        ]

    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "vocabulary_parameter_patterns": named("vocab"),
        "pipeline_replicated_parameter_patterns": [f"^{re.escape(p.name)}$" for p in trained if len(p.stages) > 1],
        "tp_replicated_parameter_patterns": named("replicated"),
        "parameter_with_row_parallelism_patterns": named("split", 1),
        "parameter_with_2_sub_params_cat_dim_0": named("split", 0, 2),
    }
    rows = next((p.shape[0] for p in trained if p.rule.cut == "vocab"), None)
    if rows is not None:
        unit = int_or(args.get("make_vocab_size_divisible_by"), 128) * checkpoint.mesh.tp
        info |= {"original_vocab_size": rows, "padded_vocab_size": -(-rows // unit) * unit}
    return info


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
    fragment = Fragment(Region.all_of(()), "", 0, FLOAT32, inline=struct.pack("<f", counted))
    atom = Atom(parameter.name, STEP, (), FLOAT32, (fragment,))
    return replace(parameter, atoms={**parameter.atoms, STEP: atom})


def _deepspeed_scaler(checkpoint: Checkpoint, megatron: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Megatron's loss scale as DeepSpeed's; nothing where the run had none."""
    if checkpoint.details.get("dtype") != "float16":
        return {}
    for scaler in _scalers(checkpoint, megatron):
        scale = scaler.get("scale") if isinstance(scaler, dict) else None
        if isinstance(scale, Atom) and scale.dtype == FLOAT32:
            fragment = scale.fragments[0]
            with SourceFiles(checkpoint.root) as files:
                data = fragment.inline or files.read(fragment.file, fragment.offset, FLOAT32.itemsize)
            return {"cur_scale": struct.unpack("<f", data)[0], "dynamic_loss_scale": True, "cur_iter": step}
    return {}


def _scalers(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Iterator[Any]:
    """Where Megatron's layouts keep the state of a loss scaler."""
    optimizer = megatron.get("optimizer")
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        if isinstance(one, dict):
            yield one.get("grad_scaler")
    objects = checkpoint.extras.trees.get("objects")
    if isinstance(objects, dict):
        yield from (value for key, value in objects.items() if isinstance(key, str) and _SCALER.match(key))


def _first_random(checkpoint: Checkpoint) -> Any:
    objects = checkpoint.extras.trees.get("objects")
    if not isinstance(objects, dict):
        return None
    return next((value for key, value in objects.items() if isinstance(key, str) and _RNG.match(key)), None)
