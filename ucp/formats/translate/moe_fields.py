"""Experts and their router: Hugging Face's configurations, Megatron's arguments, and the facts between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ucp.formats.translate.model_config import float_in, positive_int_in

if TYPE_CHECKING:
    from ucp.formats.translate.model_config import ModelConfig

_LATENT: Final = ("deepseek_v2", "deepseek_v3")
_SIGMOID: Final = "sigmoid"


def facts_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of experts, as fields of `Facts`."""
    kind = config.get("model_type")
    layers = positive_int_in(config, "num_hidden_layers") or 0
    experts = next((n for key in _COUNTS if (n := positive_int_in(config, key))), 0)
    wide = positive_int_in(config, "intermediate_size")
    ffn = positive_int_in(config, "moe_intermediate_size") or wide
    if not experts:
        return {"experts": 0, "ffn": wide}
    shared = positive_int_in(config, "shared_expert_intermediate_size") if kind == "qwen2_moe" else None
    if kind in _LATENT:
        shared = (positive_int_in(config, "n_shared_experts") or 0) * (ffn or 0)
    sums = config.get("norm_topk_prob", kind == "deepseek_v3") is True if kind != "mixtral" else True
    groups = positive_int_in(config, "n_group") if kind in _LATENT else None
    if kind == "deepseek_v2":
        sums = False  # transformers never divides them by their sum
        groups = groups if config.get("topk_method", "greedy") != "greedy" else None
    return {
        "experts": experts,
        "ffn": ffn,
        "dense_ffn": wide,
        "experts_per_token": positive_int_in(config, "num_experts_per_tok"),
        "moe_layers": _layers_of_config(config, layers),
        "shared_ffn": shared or 0,
        "shared_gate": kind == "qwen2_moe",
        "router_scores": _SIGMOID if kind == "deepseek_v3" else "softmax",
        "router_sums": sums,
        "router_groups": groups if groups and groups > 1 else None,
        "router_top_groups": positive_int_in(config, "topk_group") if groups and groups > 1 else None,
        "router_scale": float_in(config, "routed_scaling_factor") if kind in _LATENT else None,
        "router_bias": kind == "deepseek_v3",
    }


_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def _layers_of_config(config: Mapping[str, Any], layers: int) -> tuple[bool, ...] | None:
    """Which layers have experts; None for all."""
    dense = positive_int_in(config, "first_k_dense_replace") or 0
    if dense:
        return tuple(i >= dense for i in range(layers))
    step = positive_int_in(config, "decoder_sparse_step") or 1
    alone = config.get("mlp_only_layers")
    alone = set(alone) if isinstance(alone, list) and all(type(n) is int for n in alone) else set()
    found = tuple(i not in alone and (i + 1) % step == 0 for i in range(layers))
    return None if all(found) else found


def facts_of_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of a job with experts say of them, as fields of `Facts`."""
    score = args.get("moe_router_score_function", "softmax")
    return {
        "dense_ffn": positive_int_in(args, "ffn_hidden_size"),
        "experts_per_token": positive_int_in(args, "moe_router_topk"),
        "moe_layers": _layers_of_arguments(args),
        "shared_ffn": positive_int_in(args, "moe_shared_expert_intermediate_size") or 0,
        "shared_gate": args.get("moe_shared_expert_gate") is True,
        "router_scores": score if isinstance(score, str) else "softmax",
        "router_sums": score == _SIGMOID or args.get("moe_router_pre_softmax") is not True,
        "router_groups": positive_int_in(args, "moe_router_num_groups"),
        "router_top_groups": positive_int_in(args, "moe_router_group_topk"),
        "router_scale": float_in(args, "moe_router_topk_scaling_factor"),
        "router_bias": args.get("moe_router_enable_expert_bias") is True,
    }


def _layers_of_arguments(args: Mapping[str, Any]) -> tuple[bool, ...] | None:
    frequency = args.get("moe_layer_freq")
    layers = positive_int_in(args, "num_layers") or 0
    if type(frequency) is int and frequency > 1:
        return tuple(i % frequency == 0 for i in range(layers))
    if isinstance(frequency, list) and not all(frequency):
        return tuple(bool(n) for n in frequency)
    return None


def arguments_for(facts: ModelConfig) -> dict[str, Any]:
    """Megatron's arguments for the experts of a model, or for one without."""
    has = bool(facts.experts)
    sigmoid = facts.router_scores == _SIGMOID
    return {
        "num_experts": facts.experts or None,
        "moe_ffn_hidden_size": facts.ffn if has else None,
        "moe_shared_expert_intermediate_size": facts.shared_ffn or None,
        "moe_shared_expert_gate": bool(facts.shared_gate),
        "moe_layer_freq": [int(here) for here in facts.moe_layers] if facts.moe_layers else 1,
        "moe_router_topk": facts.experts_per_token or 2,
        "moe_router_pre_softmax": has and not sigmoid and facts.router_sums is False,
        "moe_router_score_function": facts.router_scores or "softmax",
        "moe_router_num_groups": facts.router_groups,
        "moe_router_group_topk": facts.router_top_groups,
        "moe_router_topk_scaling_factor": facts.router_scale if facts.router_scale != 1 else None,
        "moe_router_enable_expert_bias": bool(facts.router_bias),
        "moe_grouped_gemm": False,
    }


def unlike_in_megatron(facts: ModelConfig) -> str | None:
    """Why megatron-core's router would weigh experts in another way than Hugging Face's; None where it would not."""
    sigmoid, chosen = facts.router_scores == _SIGMOID, facts.experts_per_token or 1
    if not facts.experts:
        return None
    if sigmoid and (facts.router_sums is False or chosen == 1):
        return "its router does not divide the weights of the chosen experts by their sum"
    # Hugging Face judges a group by its best two experts (DeepSeek-V3) or by its best one (V2), Megatron by as many as
    # are chosen of it.
    judged = chosen // (facts.router_top_groups or 1) == (2 if sigmoid else 1)
    if facts.router_groups and facts.router_top_groups != facts.router_groups and not judged:
        return "its router judges groups of experts by other numbers of them"
    return None
