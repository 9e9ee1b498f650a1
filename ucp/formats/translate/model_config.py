"""Numbers in configurations and arguments, where they are numbers.

What is known of a model besides its tensors: head counts and the like, whoever wrote them down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import read_json
from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint
from ucp.errors import UsageError


def positive_int_in(values: Mapping[str, Any], key: str) -> int | None:
    """A positive whole number."""
    value = values.get(key)
    return value if type(value) is int and value > 0 else None


def float_in(values: Mapping[str, Any], key: str) -> float | None:
    """Any number."""
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def bool_in(values: Mapping[str, Any], key: str) -> bool | None:
    """A truth value."""
    value = values.get(key)
    return value if isinstance(value, bool) else None


CONFIG_FILE: Final = "config.json"
_LARGEST: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder in the words of no framework. None: not known."""

    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None  # of experts, where there are any
    dense_ffn: int | None = None  # of layers without experts, in a model that has experts
    heads: int | None = None
    query_groups: int | None = None
    head_dim: int | None = None
    experts: int | None = None  # 0: no experts
    experts_per_token: int | None = None
    moe_layers: tuple[bool, ...] | None = None  # which layers have experts; None: all
    shared_ffn: int | None = None  # of experts that see every token, all together; 0: there are none
    shared_gate: bool | None = None  # whether they are weighed
    router_scores: str | None = None  # softmax or sigmoid
    router_sums: bool | None = None  # whether the weights of the chosen experts are divided by their sum
    router_groups: int | None = None
    router_top_groups: int | None = None
    router_scale: float | None = None
    router_bias: bool | None = None
    latent: bool | None = None  # multi-latent attention
    q_rank: int | None = None  # None with latent attention: queries are not compressed
    kv_rank: int | None = None
    nope_dim: int | None = None  # of a head's part without positions
    rope_dim: int | None = None  # of the part with positions
    value_dim: int | None = None
    yarn: tuple[tuple[str, float], ...] | None = None  # how rotary positions are stretched, in Hugging Face's words
    vocabulary: int | None = None  # rows of the tokenizer, without padding
    positions: int | None = None  # longest sequence
    gated: bool | None = None
    activation: str | None = None  # as Hugging Face calls it: silu, gelu, gelu_new, relu
    tied: bool | None = None
    rotary: bool | None = None  # else: learned positions
    rotary_base: float | None = None
    rotary_scaling: float | None = None  # Llama 3.1's factor, where there is one
    window: int | None = None  # how many tokens a token sees, itself included; None: all before it
    norm: str | None = None  # LayerNorm or RMSNorm
    epsilon: float | None = None
    bias: bool | None = None  # of every linear layer
    qkv_bias: bool | None = None
    qk_norm: bool | None = None  # with latent attention: norms of the latents
    norm_less_one: bool | None = None  # norms store their weight less one
    scaled_embedding: bool | None = None  # embeddings are multiplied by the root of the hidden size
    unlike: str | None = None  # why another framework's modules compute something else from the same tensors
    unmapped: str | None = None  # why no other framework has such modules

    @property
    def moe(self) -> bool | None:
        return None if self.experts is None else self.experts > 0

    def fits(self, when: Mapping[str, bool]) -> bool:
        """Whether nothing that is known speaks against these conditions."""
        return all(getattr(self, key) in (None, value) for key, value in when.items())

    def over(self, other: ModelConfig) -> ModelConfig:
        """These facts, and the other's where these are silent."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **known)


def model_config_of(checkpoint: Checkpoint, model_config: Path | None = None) -> ModelConfig:
    """What the user's file says, then the checkpoint's configuration, then Megatron's arguments in it."""
    from ucp.formats.translate.hf_config import from_hf_config
    from ucp.formats.translate.megatron_args import from_megatron_args

    found = ModelConfig()
    if model_config is not None:
        found = read_model_config(model_config)
    config = hf_config_in(checkpoint)
    if config is not None:
        found = found.over(from_hf_config(config))
    arguments = next(iter(megatron_args_in(checkpoint)), None)
    if arguments is not None:
        # What a job's arguments do not name yet, its release did not have.
        head = any(name.endswith(("output_layer.weight", "lm_head.weight")) for name in checkpoint.parameters)
        found = found.over(from_megatron_args(arguments)).over(ModelConfig(experts=0, tied=not head))
    if found.tied is None and any(p.aliases for p in checkpoint.parameters.values()):
        found = replace(found, tied=True)
    return found


def read_model_config(path: Path) -> ModelConfig:
    """The facts in a `config.json` of a model, or in a JSON object of Megatron's arguments."""
    from ucp.formats.translate.hf_config import from_hf_config
    from ucp.formats.translate.megatron_args import from_megatron_args

    values = _read_object(path)
    return from_megatron_args(values) if _is_megatron(values) else from_hf_config(values)


def megatron_args_of_file(path: Path) -> dict[str, Any]:
    """The arguments of Megatron in a file of the user's, as they stand there; none in a `config.json`."""
    values = _read_object(path)
    return values if _is_megatron(values) else {}


def _read_object(path: Path) -> dict[str, Any]:
    values = read_json(path, _LARGEST)
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds no JSON object")
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
    config = read_json(checkpoint.root / file, _LARGEST)
    return config if isinstance(config, dict) else None


def megatron_args_in(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """The arguments of Megatron jobs, and of Megatron-DeepSpeed's, that the checkpoint carries."""
    for tree in checkpoint.extras.trees.values():
        args = tree.get("args") if isinstance(tree, dict) else None
        if isinstance(args, Inert) and isinstance(args.state, dict) and "num_attention_heads" in args.state:
            yield args.state
