"""Facts and the `config.json` of a Hugging Face model, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ucp.names.facts import Facts

_BIASED: Final = ("qwen2",)  # q, k and v have one, nothing else has
_NORMED: Final = ("qwen3", "qwen3_moe")
_GPT2: Final = "gpt2"


def facts_of_config(config: Mapping[str, Any]) -> Facts:
    """What a configuration says of its model."""
    kind = config.get("model_type")
    if kind == _GPT2 or "n_head" in config:
        return _facts_of_gpt2(config)
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    base = config.get("rope_theta", rope.get("rope_theta"))
    scaled = rope.get("rope_type", rope.get("type", "default"))
    attention = config.get("attention_bias") is True
    return Facts(
        layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_number(config, "moe_intermediate_size") or _number(config, "intermediate_size"),
        heads=heads,
        query_groups=_number(config, "num_key_value_heads") or heads,
        head_dim=_number(config, "head_dim") or (hidden // heads if hidden and heads else None),
        experts=_number(config, "num_local_experts") or _number(config, "num_experts") or 0,
        experts_per_token=_number(config, "num_experts_per_tok"),
        vocabulary=_number(config, "vocab_size"),
        positions=_number(config, "max_position_embeddings"),
        gated=True,
        activation=config.get("hidden_act") if isinstance(config.get("hidden_act"), str) else None,
        tied=config.get("tie_word_embeddings") is True,
        rotary=True,
        rotary_base=float(base) if isinstance(base, (int, float)) else None,
        rotary_scaling=_factor(rope) if scaled == "llama3" else None,
        norm="RMSNorm",
        epsilon=_real(config, "rms_norm_eps"),
        bias=attention and config.get("mlp_bias") is True,
        qkv_bias=attention or kind in _BIASED,
        qk_norm=kind in _NORMED,
        unlike=None if scaled in ("default", "llama3") else f"its rotary positions are scaled ({scaled})",
    )


def _facts_of_gpt2(config: Mapping[str, Any]) -> Facts:
    heads, hidden = _number(config, "n_head"), _number(config, "n_embd")
    return Facts(
        layers=_number(config, "n_layer"),
        hidden=hidden,
        ffn=_number(config, "n_inner") or (4 * hidden if hidden else None),
        heads=heads,
        query_groups=heads,
        head_dim=hidden // heads if hidden and heads else None,
        experts=0,
        vocabulary=_number(config, "vocab_size"),
        positions=_number(config, "n_positions"),
        gated=False,
        activation=str(config.get("activation_function", "gelu_new")),
        tied=config.get("tie_word_embeddings") is not False,
        rotary=False,
        norm="LayerNorm",
        epsilon=_real(config, "layer_norm_epsilon") or 1e-5,
        bias=True,
        qkv_bias=True,
        qk_norm=False,
    )


def config_for(facts: Facts, vocabulary: int | None) -> tuple[dict[str, Any] | None, str | None]:
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
    family, why = _family(facts)
    if family is None:
        return None, why
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.rotary_base or 10000.0}
    if facts.rotary_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": facts.rotary_scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
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
    if family in ("llama", "qwen3"):
        config["attention_bias"] = bool(facts.qkv_bias)
    if family == "llama":
        config["mlp_bias"] = bool(facts.bias)
    if family == "mixtral":
        config |= {"num_local_experts": facts.experts, "num_experts_per_tok": facts.experts_per_token or 2}
        config["sliding_window"] = None
    return config, None


def _family(facts: Facts) -> tuple[str | None, str | None]:
    if facts.experts:
        plain = not (facts.qkv_bias or facts.bias or facts.qk_norm)
        return ("mixtral", None) if plain else (None, "Mixtral has no biases and no norms of q and k")
    if facts.qk_norm:
        if facts.bias or facts.qkv_bias:
            return None, "no known family has norms of q and k together with biases"
        return "qwen3", None
    if facts.qkv_bias and not facts.bias:
        return "qwen2", None
    return "llama", None


def _gpt2(facts: Facts, vocabulary: int | None) -> tuple[dict[str, Any] | None, str | None]:
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


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value > 0 else None


def _real(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
