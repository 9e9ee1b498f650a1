"""The order of a model's parameters: that of megatron-core's modules, which no sharded checkpoint stores.

It is what people expect to see, and the distributed optimizer fills its buffers by it.
"""

from __future__ import annotations

import re
from typing import Final

from ucp.formats.megatron.names import expert_of, layer_of

_SECTIONS: Final = ("embedding.", "encoder.layers.", "encoder.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
_ATTENTION: Final = (
    "linear_proj",  # the base class of all attention makes it before its heirs make theirs
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_q",
    "linear_kv",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
)
_INNER: Final = (
    "input_layernorm.",
    *(f"self_attention.{name}." for name in _ATTENTION),
    "pre_cross_attn_layernorm.",
    *(f"cross_attention.{name}." for name in _ATTENTION),
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
_EMBEDDINGS: Final = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_NUMBER: Final = re.compile(r"\.layers\.(\d+)\.")

Key = tuple[int, int, int, int, int, int]


def order_key(name: str) -> Key:
    """Sorts parameters into the order of the local implementation's modules; unknown modules come after known ones."""
    section = next((i for i, prefix in enumerate(_SECTIONS) if name.startswith(prefix)), len(_SECTIONS))
    found = _NUMBER.search(name)
    layer = layer_of(name)
    if layer is None:
        layer = int(found[1]) if found else 0
    inner = name[found.end() :] if found else name
    known = _EMBEDDINGS if section == 0 else _INNER
    probe = name.removeprefix("embedding.") if section == 0 else inner
    place = next((i for i, prefix in enumerate(known) if probe.startswith(prefix)), len(known))
    expert = expert_of(name)
    matrix = 1 if ".linear_fc2." in name else 0
    return section, layer, place, -1 if expert is None else expert, matrix, 1 if name.endswith(".bias") else 0
