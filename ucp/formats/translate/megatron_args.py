"""Model configurations and the arguments of a Megatron job, in both directions.

Megatron-DeepSpeed has other names for some arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from ucp.formats.translate.hf_config import YARN_DEFAULTS, yarn_values
from ucp.formats.translate.model_config import ModelConfig, fields_only_of, positive_int, read_fields

_GATED: Final = {"swiglu": "silu", "geglu": "gelu", "quick_geglu": "quick_gelu", "gated_linear_unit": None}
_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NORM_LESS_ONE: Final = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_ROTARY: Final = "rope"
_LEARNED: Final = "learned_absolute"
_SIGMOID: Final = "sigmoid"
# Arguments of multi-latent attention, and those of YaRN by Hugging Face's keys.
_MLA: Final = {
    each.metadata["megatron"][0]: each.name for each in fields(ModelConfig) if each.metadata.get("only") == "mla"
}
_YARN: Final = {key: "rotary_scaling_factor" if key == "factor" else key for key in YARN_DEFAULTS}


def from_megatron_args(args: Mapping[str, Any]) -> ModelConfig:
    """The model that a job's arguments describe."""
    known = read_fields(args, "megatron")
    hidden, heads = known.get("hidden"), known.get("heads")
    gate = next((key for key in _GATED if args.get(key) is True), None)
    names_gate = any(key in args for key in _GATED)
    norm, untied = args.get("normalization"), args.get("untie_embeddings_and_output_weights")
    rotary = _is_rotary(args)
    is_grouped = args.get("group_query_attention") is True
    scaling = args.get("rope_scaling_factor") if args.get("use_rope_scaling") is True else None
    known |= {
        "query_groups": positive_int(args, "num_query_groups")
        if is_grouped
        else positive_int(args, "num_key_value_heads") or heads,  # Megatron-DeepSpeed
        "head_dim": known.get("head_dim") or (hidden // heads if hidden and heads else None),
        "gated": gate is not None if names_gate else None,
        "activation": _activation(args, gate) if names_gate or "openai_gelu" in args else None,
        "tied": not untied if isinstance(untied, bool) else None,
        "norm": _NORMS.get(norm.lower(), norm) if isinstance(norm, str) else None,
        "qkv_bias": True if known.get("bias") else known.get("qkv_bias"),
        "norm_less_one": any(args.get(key) is True for key in _NORM_LESS_ONE)
        if args.keys() & set(_NORM_LESS_ONE)
        else None,
        "rotary": rotary,
        "rotary_base": None if rotary is False else known.get("rotary_base"),
        "rotary_scaling": float(scaling) if isinstance(scaling, (int, float)) and scaling is not True else None,
        "window": _window(args),
        "experts": (experts := _experts(args)),
        "mismatch": _mismatch(args),
    }
    if experts:
        score = args.get("moe_router_score_function", "softmax")
        known |= {
            "moe_layers": _moe_layers(args),
            "shared_ffn": known.get("shared_ffn", 0),
            "shared_gate": known.get("shared_gate", False),
            "router_scores": score if isinstance(score, str) else "softmax",
            "router_sums": score == _SIGMOID or args.get("moe_router_pre_softmax") is not True,
            "router_bias": known.get("router_bias", False),
        }
    else:
        known = {name: value for name, value in known.items() if name not in fields_only_of("moe")}
    if args.get("multi_latent_attention") is True:
        is_yarn = args.get("rope_type") != "rope" and args.get("rotary_scaling_factor") != 1
        known |= {"latent": True, "yarn": yarn_values(args, _YARN) if is_yarn else None}
    else:
        known = {name: value for name, value in known.items() if name not in fields_only_of("mla")}
        known["latent"] = False if "multi_latent_attention" in args else None
    return ModelConfig(**known)


def to_megatron_args(model: ModelConfig, step: int | None, dtype: str) -> dict[str, Any]:
    """The arguments of a single-rank Megatron job with this model, as far as it is known."""
    heads, groups = model.heads or 1, model.query_groups or model.heads or 1
    is_gelu = (model.activation or "").startswith("gelu")
    return {
        "num_layers": model.layers,
        "encoder_num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.dense_ffn or model.ffn,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.positions,
        "seq_length": model.positions,
        "position_embedding_type": _LEARNED if model.rotary is False else _ROTARY,
        "rotary_base": int(model.rotary_base or 10000),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": model.rotary_scaling is not None,
        "rope_scaling_factor": model.rotary_scaling or 8.0,
        "window_size": (model.window - 1, 0) if model.window else None,
        "normalization": model.norm or "LayerNorm",
        "norm_epsilon": model.epsilon,
        "layernorm_epsilon": model.epsilon,
        "swiglu": bool(model.gated) and not is_gelu,
        "geglu": bool(model.gated) and is_gelu,
        "openai_gelu": model.activation in ("gelu_new", "gelu_pytorch_tanh"),
        "add_bias_linear": bool(model.bias),
        "add_qkv_bias": bool(model.qkv_bias),
        "qk_layernorm": bool(model.qk_norm),
        "untie_embeddings_and_output_weights": model.tied is False,
        "apply_layernorm_1p": bool(model.norm_less_one),
        **_latent_args(model),
        **_expert_args(model),
        "tokenizer_type": "HuggingFaceTokenizer",
        "vocab_size": model.vocabulary,
        "padded_vocab_size": model.vocabulary,
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


def _latent_args(model: ModelConfig) -> dict[str, Any]:
    if not model.latent:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "rope_type": "rope" if model.yarn is None else "yarn",
        "rotary_scaling_factor": 1.0,
        **{key: getattr(model, name) for key, name in _MLA.items()},
        **{_YARN[key]: value for key, value in model.yarn or ()},
    }


def _expert_args(model: ModelConfig) -> dict[str, Any]:
    is_sigmoid = model.router_scores == _SIGMOID
    return {
        "num_experts": model.experts or None,
        "moe_ffn_hidden_size": model.ffn if model.experts else None,
        "moe_shared_expert_intermediate_size": model.shared_ffn or None,
        "moe_shared_expert_gate": bool(model.shared_gate),
        "moe_layer_freq": [int(has_experts) for has_experts in model.moe_layers] if model.moe_layers else 1,
        "moe_router_topk": model.experts_per_token or 2,
        "moe_router_pre_softmax": bool(model.experts) and not is_sigmoid and model.router_sums is False,
        "moe_router_score_function": model.router_scores or "softmax",
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_top_groups,
        "moe_router_topk_scaling_factor": model.router_scale,
        "moe_router_enable_expert_bias": bool(model.router_bias),
        "moe_grouped_gemm": False,
    }


def to_megatron_core_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Megatron-DeepSpeed job, completed by those that megatron-core has under other names."""
    model = from_megatron_args(args)
    core = to_megatron_args(model, None, "bfloat16" if args.get("bf16") is True else "float32")
    renamed = (
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
    return {**args, **missing, **{key: core[key] for key in renamed}}


def to_megatron_deepspeed_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Megatron job, completed by those that Megatron-DeepSpeed has under other names."""
    model = from_megatron_args(args)
    return {
        **args,
        "num_key_value_heads": model.query_groups,
        "normalization": (model.norm or "LayerNorm").lower(),
        "use_rotary_position_embeddings": bool(model.rotary),
        "add_position_embedding": not model.rotary,
        "rope_theta": args.get("rotary_base", 10000),
        "num_experts": [model.experts or 1],
        "deepspeed": True,
    }


def _experts(args: Mapping[str, Any]) -> int | None:
    if "num_experts" not in args:
        return None
    value = args["num_experts"]
    if isinstance(value, list):  # Megatron-DeepSpeed: one number per group of layers
        return max((n for n in value if type(n) is int and n > 1), default=0)
    return value if type(value) is int and value > 0 else 0


def _moe_layers(args: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Which layers have experts; None if all have."""
    frequency = args.get("moe_layer_freq")
    if type(frequency) is int and frequency > 1:
        return tuple(i % frequency == 0 for i in range(positive_int(args, "num_layers") or 0))
    if isinstance(frequency, list) and not all(frequency):
        return tuple(bool(n) for n in frequency)
    return None


def _is_rotary(args: Mapping[str, Any]) -> bool | None:
    kind = args.get("position_embedding_type")
    if isinstance(kind, str):
        return kind == _ROTARY
    if args.get("use_rotary_position_embeddings") is True:
        return True
    return False if args.get("add_position_embedding") is True else None


def _activation(args: Mapping[str, Any], gate: str | None) -> str | None:
    if gate is not None:
        return "gelu_pytorch_tanh" if args.get("openai_gelu") is True and gate == "geglu" else _GATED[gate]
    if args.get("squared_relu") is True:
        return "relu2"
    return "gelu_new" if args.get("openai_gelu") is True else "gelu"


def _window(args: Mapping[str, Any]) -> int | None:
    """How many tokens a token attends to. Megatron counts those before it and those after it."""
    sizes = args.get("window_size")
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or type(sizes[0]) is not int:
        return None
    return sizes[0] + 1 if sizes[0] >= 0 else None


def _mismatch(args: Mapping[str, Any]) -> str | None:
    if _window(args) is not None and args.get("window_attn_skip_freq"):
        return "some of its layers attend to all tokens and others to a window (--window-attn-skip-freq)"
    if args.get("rotary_interleaved") is True:
        return "its rotary positions rotate neighboring elements (--rotary-interleaved)"
    percent = args.get("rotary_percent")
    if isinstance(percent, (int, float)) and percent != 1 and _is_rotary(args):
        return f"it rotates {percent:.0%} of each head (--rotary-percent)"
    return None
