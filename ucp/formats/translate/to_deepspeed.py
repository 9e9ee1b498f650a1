"""Megatron's extras as DeepSpeed's: counters, parameter groups, schedule, loss scale, tensor-parallel patterns."""

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
from ucp.formats.deepspeed.step_files import model_file_name
from ucp.formats.translate.framework_extras import int_or, translation_note
from ucp.formats.translate.megatron_args import to_megatron_deepspeed_args
from ucp.formats.translate.model_config import CONFIG_FILE
from ucp.storage.local import SourceFiles

_GRAD_SCALER: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\..*grad_scaler/shard_")
_RNG: Final = re.compile(r"^rng_state/shard_0\.0(?:\.0)?_[\d.]+$")

MEGATRON_DEEPSPEED: Final = "megatron-deepspeed"  # the names of Megatron-DeepSpeed's GPT


def megatron_to_deepspeed(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with DeepSpeed's extras; `megatron` are the extras that all ranks of the Megatron job share."""
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
            in_tokens = {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}
            tree["lr_scheduler"] = {**schedule, **in_tokens}
            tree["tokens"] = tokens
        tree["universal_checkpoint_info"] = _universal_info(checkpoint, args)
        random = megatron.get("rng_state") or _random_state(checkpoint)
        if isinstance(random, list):
            tree["rng_state"] = random
    elif isinstance(schedule, dict):
        tree["lr_scheduler"] = _scheduler_position(step, checkpoint.groups)
    scaler = _loss_scaler(checkpoint, megatron, step)
    if scaler:
        tree["optimizer"] = scaler
    trees: dict[str, Any] = {model_file_name(0): tree}
    if CONFIG_FILE in checkpoint.extras.trees:
        trees[CONFIG_FILE] = checkpoint.extras.trees[CONFIG_FILE]
    # Experts become ordinary parameters: DeepSpeed's own experts have other names and one file each.
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


def _universal_info(checkpoint: Checkpoint, args: Mapping[str, Any]) -> dict[str, Any]:
    """How parameters are split over ranks, in the form in which Megatron-DeepSpeed passes it to DeepSpeed."""
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


def _scheduler_position(step: int, groups: list[ParamGroup]) -> dict[str, Any]:
    """The position of a schedule, for DeepSpeed's schedulers and for torch's; the new run defines its shape."""
    return {
        "last_batch_iteration": step - 1,
        "last_epoch": step,
        "_step_count": step + 1,
        "_last_lr": [group.hyper.get("lr") for group in groups],
        "lr_lambdas": [None] * len(groups),
    }


def _with_step(parameter: Parameter, groups: list[ParamGroup]) -> Parameter:
    """The parameter with its own step: fused optimizers keep it in the group, DeepSpeed's per parameter."""
    if parameter.group is None or STEP in parameter.atoms or parameter.role != "trained":
        return parameter
    step = groups[parameter.group].hyper.get(STEP)
    if not isinstance(step, (int, float)) or not any(kind not in ("weight", "master") for kind in parameter.atoms):
        return parameter
    fragment = Fragment(Region.all_of(()), "", 0, FLOAT32, inline=struct.pack("<f", step))
    atom = Atom(parameter.name, STEP, (), FLOAT32, (fragment,))
    return replace(parameter, atoms={**parameter.atoms, STEP: atom})


def _loss_scaler(checkpoint: Checkpoint, megatron: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Megatron's grad scaler as DeepSpeed's loss scaler; empty if the run did not use one."""
    if checkpoint.details.get("dtype") != "float16":
        return {}
    for scaler in _grad_scalers(checkpoint, megatron):
        scale = scaler.get("scale") if isinstance(scaler, dict) else None
        if isinstance(scale, Atom) and scale.dtype == FLOAT32:
            fragment = scale.fragments[0]
            with SourceFiles(checkpoint.root) as files:
                data = fragment.inline or files.read(fragment.file, fragment.offset, FLOAT32.itemsize)
            return {"cur_scale": struct.unpack("<f", data)[0], "dynamic_loss_scale": True, "cur_iter": step}
    return {}


def _grad_scalers(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Iterator[Any]:
    """The states of grad scalers, wherever Megatron's formats keep them."""
    optimizer = megatron.get("optimizer")
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        if isinstance(each, dict):
            yield each.get("grad_scaler")
    objects = checkpoint.extras.trees.get("objects")
    if isinstance(objects, dict):
        yield from (value for key, value in objects.items() if isinstance(key, str) and _GRAD_SCALER.match(key))


def _random_state(checkpoint: Checkpoint) -> Any:
    objects = checkpoint.extras.trees.get("objects")
    if not isinstance(objects, dict):
        return None
    return next((value for key, value in objects.items() if isinstance(key, str) and _RNG.match(key)), None)
