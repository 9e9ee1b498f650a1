"""The order of a model's parameters: that of megatron-core's modules, which no sharded checkpoint stores.

It is what people expect to see, and the distributed optimizer fills its buffers by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from ucp.formats.megatron.names import expert_of, is_prediction, layer_of

_SECTIONS: Final = ("embedding.", "encoder.layers.", "encoder.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
_ATTENTION: Final = (
    "linear_proj.",  # the base class of all attention makes it before its heirs make theirs
    "dt_bias",
    "A_log",
    "linear_qkv.",
    "in_proj.",
    "conv1d.",
    "out_norm.",
    "out_proj.",
    "linear_q_proj.",
    "linear_q_down_proj.",
    "linear_q_up_proj.",
    "linear_kv_down_proj.",
    "linear_kv_up_proj.",
    "linear_q.",
    "linear_kv.",
    "q_layernorm.",
    "k_layernorm.",
    "kv_layernorm.",
)
_MIXER: Final = ("dt_bias", "A_log", "D", "in_proj.", "conv1d.", "norm.", "out_proj.")
_INNER: Final = (
    *(f"mixer.{name}" for name in _MIXER),
    "norm.",
    "input_layernorm.",
    *(f"self_attention.{name}" for name in _ATTENTION),
    "pre_cross_attn_layernorm.",
    *(f"cross_attention.{name}" for name in _ATTENTION),
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
# Around the transformer layer of a depth of multi-token prediction.
_PREDICTION: Final = ("enorm.", "hnorm.", "eh_proj.", "transformer_layer.", "final_layernorm.")
_BLOCK: Final = "transformer_layer."
_EMBEDDINGS: Final = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_NUMBER: Final = re.compile(r"\.layers\.(\d+)\.")

# Transformer Engine fuses these norms into the linear layer after them, and so makes them with it.
_FUSED_INTO: Final = {"input_layernorm.": "self_attention.linear_qkv.", "norm.": "mixer.in_proj."}
_FUSED_INTO_LATENT: Final = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}

_KINDS: Final = {"weight": 0, "bias": 1}

Key = tuple[int, int, int, int, int, int, int, str]


def order_key(name: str, *, fused: bool = False, latent: bool = False) -> Key:
    """Sorts parameters into the order of the modules; unknown modules come after known ones.

    The order is that of the local implementation, or with `fused` of Transformer Engine's. `latent` is for models with
    multi-latent attention, where other norms are fused.
    """
    section = next((i for i, prefix in enumerate(_SECTIONS) if name.startswith(prefix)), len(_SECTIONS))
    found = _NUMBER.search(name)
    layer = layer_of(name)
    if layer is None:
        layer = int(found[1]) if found else 0
    known = _EMBEDDINGS if section == 0 else _INNER
    inner = name.removeprefix("embedding.") if section == 0 else name[found.end() :] if found else name
    around = 0
    if is_prediction(name):
        around = next((i for i, prefix in enumerate(_PREDICTION) if inner.startswith(prefix)), len(_PREDICTION))
        inner = inner.removeprefix(_BLOCK)
    expert = expert_of(name)
    matrix = 1 if ".linear_fc2." in name else 0
    place = _place(inner, known, (_FUSED_INTO_LATENT if latent else _FUSED_INTO) if fused else {})
    last = _KINDS.get(name.rpartition(".")[2], len(_KINDS))
    return section, layer, around, place, -1 if expert is None else expert, matrix, last, name


def _place(inner: str, known: Sequence[str], fused: Mapping[str, str]) -> int:
    for i, prefix in enumerate(known):
        if inner.startswith(prefix):
            return 2 * known.index(fused[prefix]) - 1 if prefix in fused else 2 * i
    return 2 * len(known)
