"""How a parameter is spelled in the target: in a rank's module, and as a key of a sharded checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.names import expert_of, layer_of
from ucp.model.box import Box, Shape

_FUSED_MLP: Final = (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1")
_FUSED_ATTENTION: Final = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
)
_FUSED_LATENT: Final = (
    (re.compile(r"\.q_layernorm\.(weight|bias)$"), r".linear_q_up_proj.layer_norm_\1"),
    (re.compile(r"\.kv_layernorm\.(weight|bias)$"), r".linear_kv_up_proj.layer_norm_\1"),
)
_FUSED_DELTA: Final = ((re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.in_proj.layer_norm_\1"),)
_FUSED_MIXER: Final = (
    re.compile(r"(\.layers\.\d+)\.norm\.(weight|bias)$"),
    r"\1.mixer.in_proj.layer_norm_\2",
)
_LAYER: Final = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT: Final = re.compile(r"\.experts\.local_experts\.\d+\.")
_FREQUENCIES: Final = ("moe_layer_freq", "linear_attention_freq")


@dataclass(frozen=True, slots=True)
class Layer:
    """What the layer of a parameter is made of, as far as names depend on it."""

    has_experts: bool = False
    is_delta: bool = False  # a gated delta net in place of attention
    is_hybrid: bool = False  # of a model with Mamba's layers, which are never stacked


def in_module(name: str, arguments: Arguments, layer: Layer) -> str:
    """The name with its norm where the target's modules have it: Transformer Engine fuses some into linear layers."""
    if not arguments.has_transformer_engine:
        return name
    attention = _FUSED_LATENT if arguments.flag("multi_latent_attention") else _FUSED_ATTENTION
    if layer.is_delta:
        attention = _FUSED_DELTA
    for pattern, new in (*attention, _FUSED_MIXER) if layer.has_experts else (*attention, _FUSED_MIXER, _FUSED_MLP):
        name = pattern.sub(new, name)
    return name


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter in a sharded checkpoint: at `index` of the leading axes, of these lengths, of the tensor `key`."""

    key: str
    index: Shape
    lengths: Shape

    def box(self, box: Box) -> Box:
        """A block of the parameter as a block of the stack."""
        return Box((*self.index, *box.start), ((1,) * len(self.index)) + box.shape)

    def shard(self) -> str:
        """The suffix that an object at this place has."""
        index, lengths = self.index or (0,), self.lengths or (1,)
        return f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lengths))}"


def in_shards(name: str, arguments: Arguments, of: Layer) -> Stacked:
    """Where a sharded checkpoint has a parameter or an extra state: layers and experts are axes.

    Norms are called as Transformer Engine calls them, whatever the implementation; not so with multi-latent attention.
    """
    layer, expert = layer_of(name), expert_of(name)
    if arguments.has_transformer_engine:
        key = in_module(name, arguments, of)
    elif arguments.flag("multi_latent_attention") or of.is_hybrid:
        key = name
    else:
        key = name
        for pattern, new in (*_FUSED_ATTENTION, _FUSED_MLP):
            key = pattern.sub(new, key)
    index: Shape = ()
    lengths: Shape = ()
    if layer is not None and has_equal_layers(arguments) and not of.is_hybrid:
        key = _LAYER.sub("decoder.layers.", key)
        index, lengths = (layer,), (arguments.layers or 0,)
    if expert is not None:
        key = _EXPERT.sub(".experts.experts.", key)
        index, lengths = (*index, expert), (*lengths, arguments.number("num_experts"))
    return Stacked(key, index, lengths)


def has_equal_layers(arguments: Arguments) -> bool:
    """Whether all layers are alike, so that megatron-core stacks them."""
    if arguments.flag("hetereogenous_dist_checkpoint") or arguments.fields.get("heterogeneous_layers_config_path"):
        return False
    every = (arguments.fields.get(name) for name in _FREQUENCIES)
    return all(value is None or (type(value) is int and value <= 1) for value in every)
