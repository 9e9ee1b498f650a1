"""Families of Hugging Face's: which of them computes what a model did, and what only its configuration says.

Facts and the `config.json` of a Hugging Face model, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.formats.translate import mla_fields, moe_fields
from ucp.formats.translate.model_config import ModelConfig, float_in, positive_int_in

FAMILIES: Final = {
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
FamilyChoice = tuple[str | None, str | None]  # a family, or why there is none


def hf_mismatch(facts: ModelConfig) -> str | None:
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
    return moe_fields.unlike_in_megatron(facts)


def family_of(facts: ModelConfig) -> FamilyChoice:
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


def _with_experts(facts: ModelConfig) -> FamilyChoice:
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


def _deepseek(facts: ModelConfig) -> FamilyChoice:
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


def family_settings(family: str, facts: ModelConfig) -> dict[str, Any]:
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
        return routed | grouped | some | dense | mla_fields.config_for(facts)
    return {}


_BIASED: Final = ("qwen2",)  # q, k and v have one, nothing else has
_NORMED: Final = ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_WINDOWED: Final = ("mistral", "mixtral")  # every layer sees the window alone
# Of Llama 3.1's rotary positions, beside the factor. Megatron has no settings for these.
_STRETCH: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GPT2: Final = "gpt2"
_GEMMA: Final = "gemma"
_AFTER: Final = ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "olmo2")


def from_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """What a configuration says of its model."""
    kind = config.get("model_type")
    if kind == _GPT2 or "n_head" in config:
        return _facts_of_gpt2(config)
    heads = positive_int_in(config, "num_attention_heads")
    hidden = positive_int_in(config, "hidden_size")
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    base = config.get("rope_theta", rope.get("rope_theta"))
    scaled = rope.get("rope_type", rope.get("type", "default"))
    attention = config.get("attention_bias") is True
    latent_facts = mla_fields.facts_of_config(config, rope)
    known = ("default", "llama3", "yarn") if latent_facts["latent"] else ("default", "llama3")
    stretched = None if scaled in known else f"its rotary positions are scaled ({scaled})"
    if scaled == "llama3" and any(rope.get(key, value) != value for key, value in _STRETCH.items()):
        numbers = ", ".join(f"{key} {rope.get(key, value)}" for key, value in _STRETCH.items())
        stretched = f"its rotary positions are scaled by other numbers than Llama 3.1's ({numbers})"
    made = ModelConfig(
        layers=positive_int_in(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        query_groups=positive_int_in(config, "num_key_value_heads") or heads,
        head_dim=positive_int_in(config, "head_dim") or (hidden // heads if hidden and heads else None),
        vocabulary=positive_int_in(config, "vocab_size"),
        positions=positive_int_in(config, "max_position_embeddings"),
        gated=True,
        activation=_activation(config),
        tied=config.get("tie_word_embeddings", kind == _GEMMA) is True,
        rotary=True,
        rotary_base=float(base) if isinstance(base, (int, float)) else None,
        rotary_scaling=_factor(rope) if scaled == "llama3" else None,
        norm="RMSNorm",
        epsilon=float_in(config, "rms_norm_eps"),
        bias=attention and config.get("mlp_bias") is True,
        qkv_bias=attention or kind in _BIASED or (kind == "qwen2_moe" and config.get("qkv_bias") is not False),
        qk_norm=kind in _NORMED,
        norm_less_one=kind == _GEMMA,
        scaled_embedding=True if kind == _GEMMA else None,  # Megatron's arguments do not say it
        window=_window(config) if kind in _WINDOWED else None,
        unlike=stretched or _unlike(config),
        unmapped=_unmapped(config),
        **moe_fields.facts_of_config(config),
        **latent_facts,
    )
    return replace(made, unlike=made.unlike or moe_fields.unlike_in_megatron(made))


def _window(config: Mapping[str, Any]) -> int | None:
    """The length of the window of attention, where a sequence can be longer."""
    length = positive_int_in(config, "sliding_window")
    longest = positive_int_in(config, "max_position_embeddings")
    if length is None or config.get("use_sliding_window") is False:
        return None
    return length if longest is None or length < longest else None


def _unlike(config: Mapping[str, Any]) -> str | None:
    attention, mlp = config.get("attention_bias") is True, config.get("mlp_bias") is True
    if attention != mlp:
        has, lacks = ("attention", "MLP") if attention else ("MLP", "attention")
        return f"the output of its {has} has a bias, and its {lacks} has none"
    window = _window(config)
    if window is not None and config.get("model_type") not in _WINDOWED:
        return f"some of its layers see {window} tokens alone (sliding_window)"
    return None


def _activation(config: Mapping[str, Any]) -> str | None:
    value = config.get("hidden_activation") or config.get("hidden_act")
    if config.get("model_type") == _GEMMA and value in (None, "gelu"):
        return "gelu_pytorch_tanh"  # what its first configurations meant
    return value if isinstance(value, str) else None


def _unmapped(config: Mapping[str, Any]) -> str | None:
    if config.get("model_type") in _AFTER:
        return "its layers have norms behind attention and MLP, which megatron-core's have not"
    if config.get("rope_interleave") is False:
        return "its latent attention turns the halves of a head against each other, megatron-core's its neighbours"
    return None


def _facts_of_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    heads, hidden = positive_int_in(config, "n_head"), positive_int_in(config, "n_embd")
    return ModelConfig(
        layers=positive_int_in(config, "n_layer"),
        hidden=hidden,
        ffn=positive_int_in(config, "n_inner") or (4 * hidden if hidden else None),
        heads=heads,
        query_groups=heads,
        head_dim=hidden // heads if hidden and heads else None,
        experts=0,
        vocabulary=positive_int_in(config, "vocab_size"),
        positions=positive_int_in(config, "n_positions"),
        gated=False,
        activation=str(config.get("activation_function", "gelu_new")),
        tied=config.get("tie_word_embeddings") is not False,
        rotary=False,
        norm="LayerNorm",
        epsilon=float_in(config, "layer_norm_epsilon") or 1e-5,
        bias=True,
        qkv_bias=True,
        qk_norm=False,
        norm_less_one=False,
        latent=False,
    )


def to_hf_config(facts: ModelConfig, vocabulary: int | None) -> tuple[dict[str, Any] | None, str | None]:
    """A configuration for a model with these facts, of a family that computes what the model did; else None and why."""
    needed = (facts.layers, facts.hidden, facts.heads, facts.ffn, vocabulary, facts.positions, facts.epsilon)
    if any(value is None for value in needed):
        return None, "the checkpoint does not say all of the model's sizes"
    if facts.unlike is not None:
        return None, facts.unlike
    if facts.rotary is False:
        return _gpt2(facts, vocabulary)
    if not facts.gated or facts.norm != "RMSNorm":
        return None, "no known family has rotary positions without a gated MLP and RMSNorm"
    family, why = family_of(facts)
    if family is None:
        return None, why
    name = FAMILIES[family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.rotary_base or 10000.0}
    if facts.rotary_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": facts.rotary_scaling,
            **_STRETCH,
        }
    if facts.yarn is not None:
        rope |= {"rope_type": "yarn", **dict(facts.yarn)}
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": family,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.ffn,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.query_groups,
        "head_dim": facts.head_dim,
        "hidden_act": facts.activation or "silu",
        "max_position_embeddings": facts.positions,
        "rms_norm_eps": facts.epsilon,
        "rope_theta": facts.rotary_base or 10000.0,
        "rope_parameters": rope,
        "tie_word_embeddings": bool(facts.tied),
        "vocab_size": vocabulary,
    }
    return config | family_settings(family, facts), None


def _gpt2(facts: ModelConfig, vocabulary: int | None) -> tuple[dict[str, Any] | None, str | None]:
    if facts.gated or facts.norm != "LayerNorm" or not facts.bias or facts.query_groups != facts.heads or facts.experts:
        return None, "GPT-2 has LayerNorm, biases, as many key heads as query heads, and no gate"
    assert facts.heads is not None
    assert facts.hidden is not None
    if facts.head_dim is not None and facts.head_dim * facts.heads != facts.hidden:
        return None, "heads of GPT-2 are as wide as the hidden size allows"
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": _GPT2,
        "n_embd": facts.hidden,
        "n_head": facts.heads,
        "n_layer": facts.layers,
        "n_inner": facts.ffn,
        "n_positions": facts.positions,
        "activation_function": facts.activation or "gelu",
        "layer_norm_epsilon": facts.epsilon,
        "tie_word_embeddings": bool(facts.tied),
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config, None


def _factor(rope: Mapping[str, Any]) -> float | None:
    factor = rope.get("factor")
    return float(factor) if isinstance(factor, (int, float)) else None
