"""Facts and the `config.json` of a Hugging Face model, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.names import experts, latent
from ucp.names.facts import Facts
from ucp.names.families import NAMES, family_of, own_settings
from ucp.names.read_values import number_in, real_in

_BIASED: Final = ("qwen2",)  # q, k and v have one, nothing else has
_NORMED: Final = ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_WINDOWED: Final = ("mistral", "mixtral")  # every layer sees the window alone
# Of Llama 3.1's rotary positions, beside the factor. Megatron has no settings for these.
_STRETCH: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GPT2: Final = "gpt2"
_GEMMA: Final = "gemma"
_AFTER: Final = ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "olmo2")


def facts_of_config(config: Mapping[str, Any]) -> Facts:
    """What a configuration says of its model."""
    kind = config.get("model_type")
    if kind == _GPT2 or "n_head" in config:
        return _facts_of_gpt2(config)
    heads = number_in(config, "num_attention_heads")
    hidden = number_in(config, "hidden_size")
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    base = config.get("rope_theta", rope.get("rope_theta"))
    scaled = rope.get("rope_type", rope.get("type", "default"))
    attention = config.get("attention_bias") is True
    latent_facts = latent.facts_of_config(config, rope)
    known = ("default", "llama3", "yarn") if latent_facts["latent"] else ("default", "llama3")
    stretched = None if scaled in known else f"its rotary positions are scaled ({scaled})"
    if scaled == "llama3" and any(rope.get(key, value) != value for key, value in _STRETCH.items()):
        numbers = ", ".join(f"{key} {rope.get(key, value)}" for key, value in _STRETCH.items())
        stretched = f"its rotary positions are scaled by other numbers than Llama 3.1's ({numbers})"
    made = Facts(
        layers=number_in(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        query_groups=number_in(config, "num_key_value_heads") or heads,
        head_dim=number_in(config, "head_dim") or (hidden // heads if hidden and heads else None),
        vocabulary=number_in(config, "vocab_size"),
        positions=number_in(config, "max_position_embeddings"),
        gated=True,
        activation=_activation(config),
        tied=config.get("tie_word_embeddings", kind == _GEMMA) is True,
        rotary=True,
        rotary_base=float(base) if isinstance(base, (int, float)) else None,
        rotary_scaling=_factor(rope) if scaled == "llama3" else None,
        norm="RMSNorm",
        epsilon=real_in(config, "rms_norm_eps"),
        bias=attention and config.get("mlp_bias") is True,
        qkv_bias=attention or kind in _BIASED or (kind == "qwen2_moe" and config.get("qkv_bias") is not False),
        qk_norm=kind in _NORMED,
        norm_less_one=kind == _GEMMA,
        scaled_embedding=True if kind == _GEMMA else None,  # Megatron's arguments do not say it
        window=_window(config) if kind in _WINDOWED else None,
        unlike=stretched or _unlike(config),
        unmapped=_unmapped(config),
        **experts.facts_of_config(config),
        **latent_facts,
    )
    return replace(made, unlike=made.unlike or experts.unlike_in_megatron(made))


def _window(config: Mapping[str, Any]) -> int | None:
    """The length of the window of attention, where a sequence can be longer."""
    length = number_in(config, "sliding_window")
    longest = number_in(config, "max_position_embeddings")
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


def _facts_of_gpt2(config: Mapping[str, Any]) -> Facts:
    heads, hidden = number_in(config, "n_head"), number_in(config, "n_embd")
    return Facts(
        layers=number_in(config, "n_layer"),
        hidden=hidden,
        ffn=number_in(config, "n_inner") or (4 * hidden if hidden else None),
        heads=heads,
        query_groups=heads,
        head_dim=hidden // heads if hidden and heads else None,
        experts=0,
        vocabulary=number_in(config, "vocab_size"),
        positions=number_in(config, "n_positions"),
        gated=False,
        activation=str(config.get("activation_function", "gelu_new")),
        tied=config.get("tie_word_embeddings") is not False,
        rotary=False,
        norm="LayerNorm",
        epsilon=real_in(config, "layer_norm_epsilon") or 1e-5,
        bias=True,
        qkv_bias=True,
        qk_norm=False,
        norm_less_one=False,
        latent=False,
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
    family, why = family_of(facts)
    if family is None:
        return None, why
    name = NAMES[family]
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
    return config | own_settings(family, facts), None


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
