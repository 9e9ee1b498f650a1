"""The configuration of a model, independent of the framework that wrote it down: head counts, widths, experts.

It is read from a `config.json` of Hugging Face (`hf_config`) or from the arguments of a Megatron job (`megatron_args`),
and written as either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import read_json
from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint
from ucp.errors import UsageError

CONFIG_FILE: Final = "config.json"
_MAX_BYTES: Final = 16 << 20


def _known(*, hf: str = "", megatron: str = "", only: str = "") -> Any:
    """A field with the keys that it is read from, best first; `only` is "moe" or "mla" if other models lack it."""
    return field(default=None, metadata={"hf": hf.split(), "megatron": megatron.split(), "only": only})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. None means unknown.

    Fields without keys are computed from several settings, in the modules of the two frameworks.
    """

    layers: int | None = _known(hf="num_hidden_layers", megatron="num_layers encoder_num_layers")
    hidden: int | None = _known(hf="hidden_size", megatron="hidden_size")
    # Width of the MLP; in a model with experts, of one expert, and `dense_ffn` is that of layers without experts.
    ffn: int | None = _known(
        hf="moe_intermediate_size intermediate_size", megatron="moe_ffn_hidden_size ffn_hidden_size"
    )
    dense_ffn: int | None = _known(hf="intermediate_size", megatron="ffn_hidden_size", only="moe")
    heads: int | None = _known(hf="num_attention_heads", megatron="num_attention_heads")
    query_groups: int | None = _known(hf="num_key_value_heads")
    head_dim: int | None = _known(hf="head_dim", megatron="kv_channels")
    vocabulary: int | None = _known(hf="vocab_size")  # rows that the tokenizer uses, without padding
    positions: int | None = _known(hf="max_position_embeddings", megatron="max_position_embeddings seq_length")
    activation: str | None = _known(hf="hidden_activation hidden_act")  # Hugging Face's name: silu, gelu, gelu_new, …
    gated: bool | None = None  # whether the MLP has a gate
    tied: bool | None = _known(hf="tie_word_embeddings")
    norm: str | None = None  # LayerNorm or RMSNorm
    epsilon: float | None = _known(hf="rms_norm_eps", megatron="layernorm_epsilon norm_epsilon")
    norm_less_one: bool | None = None  # norms store their weight minus one
    scaled_embedding: bool | None = None  # embeddings are multiplied by the square root of the hidden size
    bias: bool | None = _known(megatron="add_bias_linear")  # of every linear layer
    qkv_bias: bool | None = _known(megatron="add_qkv_bias")
    qk_norm: bool | None = _known(megatron="qk_layernorm")  # with latent attention: norms of the latents
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    rotary: bool | None = None  # False: learned positions
    rotary_base: float | None = _known(megatron="rotary_base rope_theta")
    rotary_scaling: float | None = None  # factor of Llama 3.1's scaling
    yarn: tuple[tuple[str, float], ...] | None = None  # YaRN scaling, with Hugging Face's keys

    experts: int | None = _known(hf="num_local_experts num_experts n_routed_experts")  # 0: a model without experts
    experts_per_token: int | None = _known(hf="num_experts_per_tok", megatron="moe_router_topk", only="moe")
    moe_layers: tuple[bool, ...] | None = _known(only="moe")  # which layers have experts; None: all
    # Total width of the experts that process every token; 0 if there are none.
    shared_ffn: int | None = _known(megatron="moe_shared_expert_intermediate_size", only="moe")
    shared_gate: bool | None = _known(megatron="moe_shared_expert_gate", only="moe")  # shared experts have a gate
    router_scores: str | None = _known(megatron="moe_router_score_function", only="moe")  # softmax or sigmoid
    router_sums: bool | None = _known(hf="norm_topk_prob", only="moe")  # chosen experts' weights are normalized
    router_groups: int | None = _known(megatron="moe_router_num_groups", only="moe")
    router_top_groups: int | None = _known(megatron="moe_router_group_topk", only="moe")
    router_scale: float | None = _known(megatron="moe_router_topk_scaling_factor", only="moe")  # None: 1
    router_bias: bool | None = _known(megatron="moe_router_enable_expert_bias", only="moe")

    latent: bool | None = None  # multi-latent attention (MLA)
    q_rank: int | None = _known(hf="q_lora_rank", megatron="q_lora_rank", only="mla")  # None: queries not compressed
    kv_rank: int | None = _known(hf="kv_lora_rank", megatron="kv_lora_rank", only="mla")
    nope_dim: int | None = _known(hf="qk_nope_head_dim", megatron="qk_head_dim", only="mla")  # of a head, unrotated
    rope_dim: int | None = _known(hf="qk_rope_head_dim", megatron="qk_pos_emb_head_dim", only="mla")  # rotated
    value_dim: int | None = _known(hf="v_head_dim", megatron="v_head_dim", only="mla")

    mismatch: str | None = None  # why the other framework's modules compute something else from the same tensors
    unsupported: str | None = None  # why the other framework has no such modules

    @property
    def moe(self) -> bool | None:
        return None if self.experts is None else self.experts > 0

    def allows(self, conditions: Mapping[str, bool]) -> bool:
        """Whether nothing that is known contradicts these conditions."""
        return all(getattr(self, key) in (None, value) for key, value in conditions.items())

    def over(self, other: ModelConfig) -> ModelConfig:
        """This configuration, completed by the other one where this one is unknown."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **known)


def read_fields(values: Mapping[str, Any], side: str, keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields that `values` holds under their keys of a framework (`hf` or `megatron`); `keys` override these."""
    found: dict[str, Any] = {}
    for each in fields(ModelConfig):
        own = [keys[each.name]] if keys and each.name in keys else each.metadata.get(side, ())
        for key in own:
            value = _typed(values.get(key), str(each.type))
            if value:
                found[each.name] = value
                break
            if value is False:
                found.setdefault(each.name, False)
    if found.get("router_scale") == 1:
        del found["router_scale"]
    return found


def fields_only_of(kind: str) -> list[str]:
    """Fields that only models with experts ("moe") or with multi-latent attention ("mla") have."""
    return [each.name for each in fields(ModelConfig) if each.metadata.get("only") == kind]


def _typed(value: Any, type_: str) -> Any:
    """A value of the field's type (integers must be positive), or None."""
    if type_.startswith("int"):
        return value if type(value) is int and value > 0 else None
    if type_.startswith("float"):
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return value if isinstance(value, bool if type_.startswith("bool") else str) else None


def positive_int(values: Mapping[str, Any], key: str) -> int | None:
    value: int | None = _typed(values.get(key), "int")
    return value


def model_config_of(checkpoint: Checkpoint, model_config: Path | None = None) -> ModelConfig:
    """What is known about a checkpoint's model.

    The user's file comes first, then the checkpoint's `config.json`, then Megatron's arguments in it.
    """
    from ucp.formats.translate.hf_config import from_hf_config
    from ucp.formats.translate.megatron_args import from_megatron_args

    found = ModelConfig() if model_config is None else read_model_config(model_config)
    config = hf_config_in(checkpoint)
    if config is not None:
        found = found.over(from_hf_config(config))
    arguments = next(iter(megatron_args_in(checkpoint)), None)
    if arguments is not None:
        # If a job's arguments lack an option, its release did not have the feature.
        head = any(name.endswith(("output_layer.weight", "lm_head.weight")) for name in checkpoint.parameters)
        found = found.over(from_megatron_args(arguments)).over(ModelConfig(experts=0, tied=not head))
    if found.tied is None and any(p.aliases for p in checkpoint.parameters.values()):
        found = replace(found, tied=True)
    return found


def read_model_config(path: Path) -> ModelConfig:
    """The configuration in a `config.json`, or in a JSON object of Megatron's arguments."""
    from ucp.formats.translate.hf_config import from_hf_config
    from ucp.formats.translate.megatron_args import from_megatron_args

    values = _read_object(path)
    return from_megatron_args(values) if _is_megatron(values) else from_hf_config(values)


def megatron_args_of_file(path: Path) -> dict[str, Any]:
    """Megatron's arguments in the user's file, unchanged; empty if the file is a `config.json`."""
    values = _read_object(path)
    return values if _is_megatron(values) else {}


def _read_object(path: Path) -> dict[str, Any]:
    values = read_json(path, _MAX_BYTES)
    if not isinstance(values, dict):
        raise UsageError(f"{path}: is not a JSON object")
    return values


def _is_megatron(values: Mapping[str, Any]) -> bool:
    return not values.keys() & {"model_type", "architectures", "num_hidden_layers", "n_layer"}


def hf_config_in(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The `config.json` that the checkpoint carries, as a file or as a tree."""
    tree = checkpoint.extras.trees.get(CONFIG_FILE)
    if isinstance(tree, dict):
        return tree
    file = checkpoint.extras.files.get(CONFIG_FILE)
    if file is None:
        return None
    config = read_json(checkpoint.root / file, _MAX_BYTES)
    return config if isinstance(config, dict) else None


def megatron_args_in(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Arguments of Megatron or Megatron-DeepSpeed jobs that the checkpoint carries."""
    for tree in checkpoint.extras.trees.values():
        args = tree.get("args") if isinstance(tree, dict) else None
        if isinstance(args, Inert) and isinstance(args.state, dict) and "num_attention_heads" in args.state:
            yield args.state
