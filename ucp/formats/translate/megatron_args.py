"""Facts and the arguments of a Megatron job, in both directions. Megatron-DeepSpeed spells some in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ucp.formats.translate import mla_fields, moe_fields
from ucp.formats.translate.model_config import ModelConfig
from ucp.formats.translate.model_config import bool_in as _flag
from ucp.formats.translate.model_config import float_in as _real
from ucp.formats.translate.model_config import positive_int_in as _number

_GATED: Final = {"swiglu": "silu", "geglu": "gelu", "quick_geglu": "quick_gelu", "gated_linear_unit": None}
_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_LESS_ONE: Final = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_SMOOTH: Final = "gelu"  # activations that start so
_ROTARY: Final = "rope"
_LEARNED: Final = "learned_absolute"


def from_megatron_args(args: Mapping[str, Any]) -> ModelConfig:
    """What the arguments of a job say of its model."""
    heads = _number(args, "num_attention_heads")
    hidden = _number(args, "hidden_size")
    gated = next((key for key in _GATED if args.get(key) is True), None)
    known = any(key in args for key in _GATED)
    norm = args.get("normalization")
    biased = _flag(args, "add_bias_linear")
    qkv_bias = _flag(args, "add_qkv_bias")
    of_experts = moe_fields.facts_of_arguments(args) if _experts(args) else {}
    return ModelConfig(
        layers=_number(args, "num_layers") or _number(args, "encoder_num_layers"),
        hidden=hidden,
        ffn=_number(args, "moe_ffn_hidden_size") or _number(args, "ffn_hidden_size"),
        heads=heads,
        query_groups=_query_groups(args, heads),
        head_dim=_number(args, "kv_channels") or (hidden // heads if hidden and heads else None),
        experts=_experts(args),
        positions=_number(args, "max_position_embeddings") or _number(args, "seq_length"),
        gated=gated is not None if known else None,
        activation=_activation(args, gated) if known or "openai_gelu" in args else None,
        tied=None if (untied := _flag(args, "untie_embeddings_and_output_weights")) is None else not untied,
        rotary=_is_rotary(args),
        rotary_base=None if _is_rotary(args) is False else _real(args, "rotary_base") or _real(args, "rope_theta"),
        rotary_scaling=_real(args, "rope_scaling_factor") if args.get("use_rope_scaling") is True else None,
        norm=_NORMS.get(norm.lower(), norm) if isinstance(norm, str) else None,
        epsilon=_real(args, "layernorm_epsilon") or _real(args, "norm_epsilon"),
        bias=biased,
        qkv_bias=True if biased else qkv_bias,
        qk_norm=_flag(args, "qk_layernorm"),
        norm_less_one=any(_flag(args, key) for key in _LESS_ONE) if args.keys() & set(_LESS_ONE) else None,
        window=_window(args),
        unlike=_unlike(args),
        **of_experts,
        **mla_fields.facts_of_arguments(args),
    )


def to_megatron_args(facts: ModelConfig, step: int | None, dtype: str) -> dict[str, Any]:
    """The arguments of a Megatron job of one rank with such a model, as far as it is known."""
    heads, groups = facts.heads or 1, facts.query_groups or facts.heads or 1
    smooth = (facts.activation or "").startswith(_SMOOTH)
    return {
        "num_layers": facts.layers,
        "encoder_num_layers": facts.layers,
        "hidden_size": facts.hidden,
        "ffn_hidden_size": facts.dense_ffn or facts.ffn,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": facts.head_dim,
        "max_position_embeddings": facts.positions,
        "seq_length": facts.positions,
        "position_embedding_type": _LEARNED if facts.rotary is False else _ROTARY,
        "rotary_base": int(facts.rotary_base or 10000),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": facts.rotary_scaling is not None,
        "rope_scaling_factor": facts.rotary_scaling or 8.0,
        "window_size": (facts.window - 1, 0) if facts.window else None,
        "normalization": facts.norm or "LayerNorm",
        "norm_epsilon": facts.epsilon,
        "layernorm_epsilon": facts.epsilon,
        "swiglu": bool(facts.gated) and not smooth,
        "geglu": bool(facts.gated) and smooth,
        "openai_gelu": facts.activation in ("gelu_new", "gelu_pytorch_tanh"),
        "add_bias_linear": bool(facts.bias),
        "add_qkv_bias": bool(facts.qkv_bias),
        "qk_layernorm": bool(facts.qk_norm),
        "untie_embeddings_and_output_weights": facts.tied is False,
        "apply_layernorm_1p": bool(facts.norm_less_one),
        **mla_fields.arguments_for(facts),
        **moe_fields.arguments_for(facts),
        "tokenizer_type": "HuggingFaceTokenizer",
        "vocab_size": facts.vocabulary,
        "padded_vocab_size": facts.vocabulary,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "world_size": 1,
        "rank": 0,
        "local_rank": 0,
        "use_distributed_optimizer": False,
        "accumulate_allreduce_grads_in_fp32": dtype == "bfloat16",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "ddp_bucket_size": None,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "transformer_impl": "transformer_engine",
        "ckpt_format": "torch_dist",
        "iteration": step or 0,
        "consumed_train_samples": 0,
    }


def to_megatron_core_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Megatron-DeepSpeed job with what megatron-core calls by another name, or has besides."""
    facts = from_megatron_args(args)
    core = to_megatron_args(facts, None, "bfloat16" if args.get("bf16") is True else "float32")
    spelled = (
        "group_query_attention",
        "num_query_groups",
        "position_embedding_type",
        "rotary_base",
        "rotary_interleaved",
        "normalization",
        "norm_epsilon",
        "num_experts",
    )
    missing = {key: value for key, value in core.items() if key not in args}
    return {**args, **missing, **{key: core[key] for key in spelled}}


def to_megatron_deepspeed_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Megatron job with what Megatron-DeepSpeed calls by another name, or has besides."""
    facts = from_megatron_args(args)
    return {
        **args,
        "num_key_value_heads": facts.query_groups,
        "normalization": (facts.norm or "LayerNorm").lower(),
        "use_rotary_position_embeddings": bool(facts.rotary),
        "add_position_embedding": not facts.rotary,
        "rope_theta": args.get("rotary_base", 10000),
        "num_experts": [facts.experts or 1],
        "deepspeed": True,
    }


def _query_groups(args: Mapping[str, Any], heads: int | None) -> int | None:
    if args.get("group_query_attention") is True:
        return _number(args, "num_query_groups")
    return _number(args, "num_key_value_heads") or heads  # of Megatron-DeepSpeed


def _experts(args: Mapping[str, Any]) -> int | None:
    if "num_experts" not in args:
        return None
    value = args["num_experts"]
    if isinstance(value, list):  # of Megatron-DeepSpeed, one number a group of layers
        return max((n for n in value if type(n) is int and n > 1), default=0)
    return value if type(value) is int and value > 0 else 0


def _is_rotary(args: Mapping[str, Any]) -> bool | None:
    kind = args.get("position_embedding_type")
    if isinstance(kind, str):
        return kind == _ROTARY
    if args.get("use_rotary_position_embeddings") is True:
        return True
    return False if args.get("add_position_embedding") is True else None


def _activation(args: Mapping[str, Any], gated: str | None) -> str | None:
    if gated is not None:
        return "gelu_pytorch_tanh" if args.get("openai_gelu") is True and gated == "geglu" else _GATED[gated]
    if args.get("squared_relu") is True:
        return "relu2"
    return "gelu_new" if args.get("openai_gelu") is True else "gelu"


def _window(args: Mapping[str, Any]) -> int | None:
    """How many tokens a token sees, of Megatron's numbers of those before it and behind it."""
    sizes = args.get("window_size")
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or type(sizes[0]) is not int:
        return None
    return sizes[0] + 1 if sizes[0] >= 0 else None


def _unlike(args: Mapping[str, Any]) -> str | None:
    if _window(args) is not None and args.get("window_attn_skip_freq"):
        return "some of its layers see all tokens, others a window (--window-attn-skip-freq)"
    if args.get("rotary_interleaved") is True:
        return "its rotary positions turn neighbouring elements (--rotary-interleaved)"
    percent = args.get("rotary_percent")
    if isinstance(percent, (int, float)) and percent != 1 and _is_rotary(args):
        return f"it turns {percent:.0%} of each head (--rotary-percent)"
    return None
