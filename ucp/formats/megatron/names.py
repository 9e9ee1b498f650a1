"""Parameter names: the many spellings of Megatron's releases and implementations, and the one that atoms have.

Atoms are named as megatron-core's modules are, with layers and experts numbered over the whole model. Norms that
Transformer Engine fuses into the linear layer after them keep their own module name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_LAYER: Final = re.compile(r"^((?:.*\.)?(?:decoder|encoder)\.layers\.)(\d+)(\..+)$")
_BLOCK: Final = re.compile(r"^(?:.*\.)?(?:(?:decoder|encoder)\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)(?=\.)")
_EXPERT: Final = re.compile(r"^(.*\.experts\.)local_experts\.(\d+)(\..+)$")

# Transformer Engine's fused norms → the module that the local implementation has.
_FUSED: Final = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.mixer\.in_proj\.layer_norm_(weight|bias)$"), r".norm.\1"),
    (re.compile(r"\.self_attention\.in_proj\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r".q_layernorm.\1"),
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r".kv_layernorm.\1"),
    (re.compile(r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$"), r".experts.local_experts.\3.linear_fc\1.\2"),
)
# Models from before megatron-core, outermost part first.
_OLD: Final = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(?:encoder|transformer)\.layers\."), "decoder.layers."),
    (re.compile(r"^(?:encoder|transformer)\.final_(?:layer)?norm\."), "decoder.final_layernorm."),
    (re.compile(r"\.attention\."), ".self_attention."),
    (re.compile(r"\.input_norm\."), ".input_layernorm."),
    (re.compile(r"\.post_attention_(?:layer)?norm\."), ".pre_mlp_layernorm."),
    (re.compile(r"\.self_attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.self_attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.linear_fc2."),
    (re.compile(r"^word_embeddings_for_head\."), "output_layer."),
)

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"
_BUFFERS: Final = re.compile(r".*\.(expert_bias|local_tokens_per_expert|inv_freq|global_tokens_per_expert)$")


def is_before_core(name: str) -> bool:
    """Whether a model with a parameter of this name is from before megatron-core."""
    return name.startswith(("language_model.", "word_embeddings_for_head."))


def modern(name: str) -> str:
    """The name that a parameter of a pre-core model has in megatron-core."""
    for pattern, new in _OLD:
        name = pattern.sub(new, name)
    return name


def plain(name: str) -> str:
    """The spelling that atoms have; layer and expert numbers stay as they are."""
    for pattern, new in _FUSED:
        name = pattern.sub(new, name)
    return name


def layer_of(name: str) -> int | None:
    """The number in `decoder.layers.N.`, or None."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


def block_of(name: str) -> str | None:
    """The transformer layer that the parameter is of, those of multi-token prediction included; None outside of any."""
    found = _BLOCK.match(name)
    return found[0] if found else None


def is_prediction(name: str) -> bool:
    """Whether the parameter belongs to multi-token prediction."""
    return name.startswith("mtp.")


def with_layer_after(name: str, offset: int) -> str:
    """The name with its layer number moved by `offset`."""
    found = _LAYER.match(name)
    return f"{found[1]}{int(found[2]) + offset}{found[3]}" if found else name


def expert_of(name: str) -> int | None:
    """The number of the expert that the parameter belongs to, or None."""
    found = _EXPERT.match(name)
    return int(found[2]) if found else None


def with_expert_after(name: str, offset: int) -> str:
    """The name with its expert number moved by `offset`."""
    found = _EXPERT.match(name)
    return f"{found[1]}local_experts.{int(found[2]) + offset}{found[3]}" if found else name


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to routed experts, alone or grouped."""
    return ".mlp.experts." in name


def is_buffer(name: str) -> bool:
    """Whether this is state of the module that no optimizer touches."""
    return _BUFFERS.match(name) is not None


@dataclass(frozen=True, slots=True)
class Stack:
    """A key of a sharded checkpoint as a stack of parameters: its leading axes count layers and experts."""

    template: str  # the name with `{layer}` and `{expert}` where an axis counts them
    axes: tuple[str, ...]  # "layer", "expert": which leading axes the stored tensor has

    def name(self, index: tuple[int, ...]) -> str:
        """The parameter at this index of the leading axes."""
        name = self.template
        for axis, number in zip(self.axes, index, strict=True):
            name = name.replace("{" + axis + "}", str(number))
        return plain(name)


_STACKED_LAYER: Final = re.compile(r"((?:^|\.)(?:decoder|encoder)\.layers\.)(?!\d)")
_STACKED_EXPERT: Final = re.compile(r"(\.mlp\.experts\.)experts\.(\d+\.)?")


def stack_of(key: str) -> Stack:
    """How the parameters lie in the tensor of this key."""
    axes: list[str] = []
    template, stacked = _STACKED_LAYER.subn(r"\1{layer}.", key)
    if stacked:
        axes.append("layer")
    found = _STACKED_EXPERT.search(template)
    if found:
        if not found[2]:
            axes.append("expert")
        template = _STACKED_EXPERT.sub(lambda m: f"{m[1]}local_experts.{m[2] or '{expert}.'}", template)
    return Stack(template, tuple(axes))
