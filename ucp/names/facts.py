"""What is known of a model besides its tensors: head counts and the like, whoever wrote them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.inert import Inert
from ucp.files.jsonfile import read_json
from ucp.model.checkpoint import Checkpoint

CONFIG: Final = "config.json"
_LARGEST: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Facts:
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

    def over(self, other: Facts) -> Facts:
        """These facts, and the other's where these are silent."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **known)


def facts_of(checkpoint: Checkpoint, model_config: Path | None = None) -> Facts:
    """What the user's file says, then the checkpoint's configuration, then Megatron's arguments in it."""
    from ucp.names.arguments import facts_of_arguments
    from ucp.names.configs import facts_of_config

    found = Facts()
    if model_config is not None:
        found = read_model_config(model_config)
    config = config_of(checkpoint)
    if config is not None:
        found = found.over(facts_of_config(config))
    arguments = next(iter(arguments_in(checkpoint)), None)
    if arguments is not None:
        # What a job's arguments do not name yet, its release did not have.
        head = any(name.endswith(("output_layer.weight", "lm_head.weight")) for name in checkpoint.parameters)
        found = found.over(facts_of_arguments(arguments)).over(Facts(experts=0, tied=not head))
    if found.tied is None and any(p.aliases for p in checkpoint.parameters.values()):
        found = replace(found, tied=True)
    return found


def read_model_config(path: Path) -> Facts:
    """The facts in a `config.json` of a model, or in a JSON object of Megatron's arguments."""
    from ucp.names.arguments import facts_of_arguments
    from ucp.names.configs import facts_of_config

    values = _object(path)
    return facts_of_arguments(values) if _is_megatron(values) else facts_of_config(values)


def raw_arguments(path: Path) -> dict[str, Any]:
    """The arguments of Megatron in a file of the user's, as they stand there; none in a `config.json`."""
    values = _object(path)
    return values if _is_megatron(values) else {}


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path, _LARGEST)
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds no JSON object")
    return values


def _is_megatron(values: Mapping[str, Any]) -> bool:
    return not values.keys() & {"model_type", "architectures", "num_hidden_layers", "n_layer"}


def config_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The `config.json` that the checkpoint carries, as a file or as a tree."""
    tree = checkpoint.extras.trees.get(CONFIG)
    if isinstance(tree, dict):
        return tree
    file = checkpoint.extras.files.get(CONFIG)
    if file is None:
        return None
    config = read_json(checkpoint.root / file, _LARGEST)
    return config if isinstance(config, dict) else None


def arguments_in(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """The arguments of Megatron jobs, and of Megatron-DeepSpeed's, that the checkpoint carries."""
    for tree in checkpoint.extras.trees.values():
        args = tree.get("args") if isinstance(tree, dict) else None
        if isinstance(args, Inert) and isinstance(args.state, dict) and "num_attention_heads" in args.state:
            yield args.state
