"""What a checkpoint says about itself that people want to see: versions, dtype, flags, loss scale, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.files.inert import Inert
from ucp.formats.deepspeed import folder
from ucp.formats.deepspeed.names import StepFiles
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile

if TYPE_CHECKING:
    from ucp.formats.deepspeed.ranks import Ranks, Shown

_ZERO_FLAGS = (
    "round_robin_gradients",
    "elastic_checkpoint",
    "parameter_alignment",
    "sub_group_size",
    "zero_hpz_partition_size",
    "mics_shard_size",
    "stage3_gather_16bit_weights_on_model_save",
)


def framework_of(model: RankFile) -> str:
    """`DeepSpeed 0.19.8`."""
    version = model.mapping().get("ds_version")
    return f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"


def step_of(model: RankFile) -> int | None:
    """Optimizer steps taken."""
    steps = model.mapping().get("global_steps")
    return steps if type(steps) is int else None


def details_of(reading: Reading, place: folder.Place, files: StepFiles, ranks: Ranks, shown: Shown) -> dict[str, Any]:
    """Facts worth showing, as JSON values; what the checkpoint does not say is left out."""
    model = next(iter(ranks.models.values()))[0].mapping()
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    facts: dict[str, Any] = {
        "tag": place.tag,
        "wrapper": _wrapper(place, model),
        "client": _client(model),
        "dtype": _dtype(config),
        "zero": _zero(config, shown),
        "optimizer": _optimizer(config),
        "optimizer_wrapper": shown.optimizer or None,
        "groups": len(next(iter(reading.holdings.groups.values()), [])),
        "loss_scale": _loss_scale(ranks),
        "universal_checkpoint_version": _info_version(model),
        "skipped_steps": _number(model.get("skipped_steps")),
        "global_samples": _number(model.get("global_samples")),
        "files": _files(files),
        "pipeline": reading.pipeline,
    }
    return {key: value for key, value in facts.items() if value not in (None, {}, "")}


def universal_details(reading: Reading, file: RankFile) -> dict[str, Any]:
    """Facts about a universal folder, from a model file of the checkpoint that it was made from.

    How gradients were dealt out is not among them: the folder keeps nothing in that order.
    """
    model = file.mapping()
    config = model.get("ds_config")
    facts = {
        "universal": True,
        "client": _client(model),
        "dtype": _dtype(config) if isinstance(config, dict) else None,
        "universal_checkpoint_version": _info_version(model),
        "pipeline": reading.pipeline,
    }
    return {key: value for key, value in facts.items() if value not in (None, {})}


def _wrapper(place: folder.Place, model: Any) -> str | None:
    if isinstance(model.get("pytorch-lightning_version"), str):
        return "Lightning"
    found = folder.wrapper_of(place.root) if place.root != place.step else None
    return "Accelerate" if found is None and place.step.name.startswith("pytorch_model") else found


def _client(model: Any) -> str | None:
    """Megatron-DeepSpeed shows by the client state that it leaves in the model file."""
    args = model.get("args")
    is_megatron = isinstance(args, Inert) and args.path == "argparse.Namespace" and "checkpoint_version" in model
    return "Megatron-DeepSpeed" if is_megatron else None


def _dtype(config: Any) -> str:
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled") not in (None, False):
            return name
    return "float32"


def _zero(config: Any, shown: Shown) -> dict[str, Any]:
    section = config.get("zero_optimization")
    section = section if isinstance(section, dict) else {}
    facts = {key: section[key] for key in _ZERO_FLAGS if isinstance(section.get(key), (bool, int, float))}
    if type(section.get("stage")) is int:
        facts["configured_stage"] = section["stage"]
    for key in ("offload_optimizer", "offload_param"):
        offload = section.get(key)
        if isinstance(offload, dict) and isinstance(offload.get("device"), str):
            facts[key] = offload["device"]
    if shown.elastic:
        facts["elastic_checkpoint"] = True
    return facts


def _optimizer(config: Any) -> str | None:
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    return kind if isinstance(kind, str) else None


def _loss_scale(ranks: Ranks) -> float | None:
    for files in ranks.optims.values():
        scaler = files[0].mapping("optimizer_state_dict").get("loss_scaler")
        scale = scaler.get("cur_scale") if isinstance(scaler, Inert) else None
        return float(scale) if isinstance(scale, (int, float)) else None
    for files in ranks.models.values():
        optimizer = files[0].mapping().get("optimizer")
        scale = optimizer.get("cur_scale") if isinstance(optimizer, dict) else None
        return float(scale) if isinstance(scale, (int, float)) else None
    return None


def _info_version(model: Any) -> float | None:
    info = model.get("universal_checkpoint_info")
    version = info.get("universal_checkpoint_version") if isinstance(info, dict) else None
    return version if isinstance(version, (int, float)) else None


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _files(files: StepFiles) -> dict[str, int]:
    counts = {
        "model": len(files.model) + len(files.sharded_model),
        "optimizer": len(files.optim) + len(files.expert_optim),
        "layer": len(files.layers),
        "expert": len(files.experts),
        "other": len(files.other),
    }
    return {role: count for role, count in counts.items() if count}
