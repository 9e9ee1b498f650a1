"""Multi-latent attention (DeepSeek): ranks and widths of heads, and the rotary positions that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ucp.formats.translate.model_config import float_in, positive_int_in

if TYPE_CHECKING:
    from ucp.formats.translate.model_config import ModelConfig

# Fields of facts → Hugging Face's names and Megatron's.
_SIZES: Final = {
    "q_rank": ("q_lora_rank", "q_lora_rank"),
    "kv_rank": ("kv_lora_rank", "kv_lora_rank"),
    "nope_dim": ("qk_nope_head_dim", "qk_head_dim"),
    "rope_dim": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    "value_dim": ("v_head_dim", "v_head_dim"),
}
_YARN: Final = {
    "factor": ("rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}


def facts_of_config(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says, as fields of `Facts`; `rope` are its rotary parameters."""
    if positive_int_in(config, "kv_lora_rank") is None:
        return {"latent": False}
    yarn = None
    if rope.get("rope_type", rope.get("type")) == "yarn":
        yarn = tuple((key, _value(rope, key, default)) for key, (_, default) in _YARN.items())
    return {"latent": True, "yarn": yarn, **{field: positive_int_in(config, hf) for field, (hf, _) in _SIZES.items()}}


def facts_of_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """What a job's arguments say, as fields of `Facts`."""
    if args.get("multi_latent_attention") is not True:
        return {"latent": False} if "multi_latent_attention" in args else {}
    yarn = None
    if args.get("rope_type") != "rope" and float_in(args, "rotary_scaling_factor") != 1.0:
        yarn = tuple((key, _value(args, core, default)) for key, (core, default) in _YARN.items())
    return {"latent": True, "yarn": yarn, **{field: positive_int_in(args, core) for field, (_, core) in _SIZES.items()}}


def arguments_for(facts: ModelConfig) -> dict[str, Any]:
    """Megatron's arguments for the attention of a model."""
    if not facts.latent:
        return {"multi_latent_attention": False}
    made: dict[str, Any] = {
        "multi_latent_attention": True,
        "rope_type": "rope" if facts.yarn is None else "yarn",
        "rotary_scaling_factor": 1.0,
        **{core: getattr(facts, field) for field, (_, core) in _SIZES.items()},
    }
    return made | {_YARN[key][0]: value for key, value in facts.yarn or ()}


def config_for(facts: ModelConfig) -> dict[str, Any]:
    """Hugging Face's names for the sizes."""
    return {hf: getattr(facts, field) for field, (hf, _) in _SIZES.items()}


def _value(values: Mapping[str, Any], key: str, default: float) -> float:
    found = values.get(key)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else default
