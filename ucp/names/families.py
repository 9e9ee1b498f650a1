"""Families of Hugging Face's: which of them computes what a model did, and what only its configuration says."""

from __future__ import annotations

from typing import Any, Final

from ucp.names import experts, latent
from ucp.names.facts import Facts

NAMES: Final = {
    "llama": "Llama",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}
Choice = tuple[str | None, str | None]  # a family, or why there is none


def unlike_in_hugging_face(facts: Facts) -> str | None:
    """Why no module of Hugging Face's computes what this model does; None where one does."""
    if facts.unlike is not None:
        return facts.unlike
    if facts.norm_less_one and not facts.scaled_embedding:
        return (
            "its norms store their weight less one (--apply-layernorm-1p); of a Gemma, give the config.json with"
            " --model-config"
        )
    if facts.latent and facts.qk_norm is False:
        return "its latent attention has no norms of the latents (--qk-layernorm)"
    if facts.experts and not facts.latent:
        if facts.router_scores not in (None, "softmax"):
            return "its router weighs experts in another way (--moe-router-score-function)"
        if facts.router_sums is False and not (facts.shared_ffn or facts.qk_norm):
            return "its router weighs experts in another way (--moe-router-pre-softmax)"
        if facts.router_groups or facts.router_scale not in (None, 1.0) or facts.router_bias:
            return "its router chooses groups of experts, or has a scale or a bias"
    return experts.unlike_in_megatron(facts)


def family_of(facts: Facts) -> Choice:
    """The family of a decoder with rotary positions, gated MLPs and RMSNorm."""
    if facts.window and (facts.bias or facts.qkv_bias or facts.qk_norm or facts.latent or facts.norm_less_one):
        return None, "of the families with a window of attention, Mistral and Mixtral, none has biases or other norms"
    if facts.norm_less_one or facts.scaled_embedding:
        whole = facts.norm_less_one and facts.scaled_embedding and not (facts.experts or facts.latent or facts.qk_norm)
        return ("gemma", None) if whole else (None, "only Gemma has norms less one, with embeddings that are scaled")
    if facts.latent:
        return _deepseek(facts)
    if facts.experts:
        return _with_experts(facts)
    if facts.qk_norm:
        if facts.bias or facts.qkv_bias:
            return None, "no known family has norms of q and k together with biases"
        return "qwen3", None
    if facts.qkv_bias and not facts.bias:
        return "qwen2", None
    return "mistral" if facts.window else "llama", None


def _with_experts(facts: Facts) -> Choice:
    if facts.bias:
        return None, "no known family of experts has biases everywhere"
    if facts.shared_ffn:
        if facts.window:
            return None, "of the families with shared experts none has a window of attention"
        whole = facts.shared_gate and not facts.qk_norm
        return ("qwen2_moe", None) if whole else (None, "shared experts are weighed in Qwen2-MoE, which has no q norm")
    if facts.qk_norm:
        return ("qwen3_moe", None) if not facts.qkv_bias else (None, "Qwen3-MoE has no biases")
    if facts.qkv_bias or facts.moe_layers is not None:
        return None, "Mixtral has no biases, and experts in every layer"
    return "mixtral", None


def _deepseek(facts: Facts) -> Choice:
    if not facts.experts or facts.bias or facts.qkv_bias:
        return None, "of the families with latent attention all have experts, and no biases"
    if not facts.shared_ffn or facts.shared_gate or not facts.ffn or facts.shared_ffn % facts.ffn:
        return None, "DeepSeek's shared experts are as wide as some of its experts, and not weighed"
    if facts.moe_layers is not None and sorted(facts.moe_layers) != list(facts.moe_layers):
        return None, "only the first layers of DeepSeek's have no experts"
    if facts.router_scores == "sigmoid":
        return ("deepseek_v3", None) if facts.router_bias else (None, "DeepSeek-V3's router has a bias")
    if facts.router_sums is False and not facts.router_bias:
        return "deepseek_v2", None
    return None, "DeepSeek-V2's router does not divide by the sum of the chosen weights"


def own_settings(family: str, facts: Facts) -> dict[str, Any]:
    """What only the configurations of this family have."""
    some = {"num_experts_per_tok": facts.experts_per_token or 2, "moe_intermediate_size": facts.ffn}
    dense = {"intermediate_size": facts.dense_ffn or facts.ffn}
    if family == "llama":
        return {"attention_bias": bool(facts.qkv_bias), "mlp_bias": bool(facts.bias)}
    if family in ("gemma", "qwen3"):
        return {"attention_bias": bool(facts.qkv_bias)}
    if family == "mistral":
        return {"sliding_window": facts.window}
    if family == "mixtral":
        used = facts.experts_per_token or 2
        return {"num_local_experts": facts.experts, "num_experts_per_tok": used, "sliding_window": facts.window}
    if family in ("qwen2_moe", "qwen3_moe"):
        alone = [i for i, here in enumerate(facts.moe_layers or ()) if not here]
        made = {"num_experts": facts.experts, "norm_topk_prob": bool(facts.router_sums), "mlp_only_layers": alone}
        if family == "qwen3_moe":
            return made | some | dense | {"attention_bias": False}
        shared = {"shared_expert_intermediate_size": facts.shared_ffn, "qkv_bias": bool(facts.qkv_bias)}
        return made | some | dense | shared
    if family in ("deepseek_v2", "deepseek_v3"):
        grouped = {
            "n_group": facts.router_groups or 1,
            "topk_group": facts.router_top_groups or 1,
            "topk_method": "noaux_tc" if family == "deepseek_v3" else "greedy",
        }
        if facts.router_groups and family == "deepseek_v2":
            grouped["topk_method"] = "group_limited_greedy"
        routed = {
            "n_routed_experts": facts.experts,
            "n_shared_experts": (facts.shared_ffn or 0) // (facts.ffn or 1),
            "first_k_dense_replace": (facts.moe_layers or (True,)).index(True),
            "norm_topk_prob": bool(facts.router_sums),
            "routed_scaling_factor": facts.router_scale or 1.0,
            "num_key_value_heads": facts.heads,
            "head_dim": facts.rope_dim,
        }
        return routed | grouped | some | dense | latent.config_for(facts)
    return {}
