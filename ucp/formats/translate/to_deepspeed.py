"""Megatron's extras as DeepSpeed's: counters, parameter groups, schedule, loss scale, tensor-parallel patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Extras
from ucp.core.dtypes import FLOAT32, scalar_value
from ucp.formats.deepspeed.step_files import model_file_name
from ucp.formats.sharded.shard_fragments import number_atom
from ucp.formats.translate.framework_extras import int_or, translation_note
from ucp.formats.translate.megatron_args import to_megatron_deepspeed_args
from ucp.formats.translate.model_config import CONFIG_FILE
from ucp.storage.local import SourceFiles

MEGATRON_DEEPSPEED: Final = "megatron-deepspeed"  # the names of Megatron-DeepSpeed's GPT


def megatron_to_deepspeed(checkpoint: Checkpoint, megatron: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with DeepSpeed's extras; `megatron` are the extras that all ranks of the Megatron job share."""
    from ucp.formats.megatron.job_extras import MegatronExtras  # tables of names import this module

    args, extras = megatron["args"].state, MegatronExtras(checkpoint)
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
        random = extras.rng().get((0, 0, 0))
        if isinstance(random, list):
            tree["rng_state"] = random
    elif isinstance(schedule, dict):
        # The position of the schedule, for DeepSpeed's schedulers and for torch's; the new run defines its shape.
        tree["lr_scheduler"] = {
            "last_batch_iteration": step - 1,
            "last_epoch": step,
            "_step_count": step + 1,
            "_last_lr": [group.hyper.get("lr") for group in checkpoint.groups],
            "lr_lambdas": [None] * len(checkpoint.groups),
        }
    scaler = extras.grad_scaler() if checkpoint.details.get("dtype") == "float16" else None
    scale = scaler.get("scale") if isinstance(scaler, dict) else None
    if isinstance(scale, Atom) and scale.dtype == FLOAT32:
        fragment = scale.fragments[0]
        with SourceFiles(checkpoint.root) as files:
            data = fragment.inline or files.read(fragment.file, fragment.offset, FLOAT32.itemsize)
        current = scalar_value(data, FLOAT32)
        tree["optimizer"] = {"cur_scale": current, "dynamic_loss_scale": True, "cur_iter": step}
    trees: dict[str, Any] = {model_file_name(0): tree}
    if CONFIG_FILE in checkpoint.extras.trees:
        trees[CONFIG_FILE] = checkpoint.extras.trees[CONFIG_FILE]
    # Experts become ordinary parameters: DeepSpeed's own experts have other names and one file each.
    parameters = {name: replace(parameter, expert=None) for name, parameter in checkpoint.parameters.items()}
    for parameter in parameters.values():
        # Fused optimizers keep the step in the group, DeepSpeed's per parameter.
        has_states = parameter.role == "trained" and parameter.atoms.keys() - {WEIGHT, MASTER}
        if has_states and parameter.group is not None and STEP not in parameter.atoms:
            counted = checkpoint.groups[parameter.group].hyper.get(STEP)
            if isinstance(counted, (int, float)):
                parameter.atoms = {**parameter.atoms, STEP: number_atom(parameter.name, STEP, counted)}
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
