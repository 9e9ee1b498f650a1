"""What the names of megatron-core's parameters mean: spellings, order in the module, and tensor-parallel rules.

Atoms are named as megatron-core's modules are, with layers and experts numbered over the whole model. Norms that
Transformer Engine fuses into the linear layer after them keep the name of their own module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ucp.core.box import Shape
from ucp.core.rules import REPLICATED, Rule
from ucp.formats.megatron.job_arguments import JobArguments

_LAYER: Final = re.compile(r"^((?:.*\.)?(?:decoder|encoder)\.layers\.)(\d+)(\..+)$")
_BLOCK: Final = re.compile(r"^(?:.*\.)?(?:(?:decoder|encoder)\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)(?=\.)")
_EXPERT: Final = re.compile(r"^(.*\.experts\.)local_experts\.(\d+)(\..+)$")

# Transformer Engine's fused norms → the module that the local implementation has.
_FUSED_NORMS: Final = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.mixer\.in_proj\.layer_norm_(weight|bias)$"), r".norm.\1"),
    (re.compile(r"\.self_attention\.in_proj\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r".q_layernorm.\1"),
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r".kv_layernorm.\1"),
    (re.compile(r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$"), r".experts.local_experts.\3.linear_fc\1.\2"),
)
# Models from before megatron-core, outermost part first.
_PRE_CORE_NAMES: Final = (
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


def to_core_name(name: str) -> str:
    """Return the name in megatron-core of a parameter of an older model."""
    for pattern, new in _PRE_CORE_NAMES:
        name = pattern.sub(new, name)
    return name


def canonical_name(name: str) -> str:
    """Return the spelling that atoms have; layer and expert numbers stay as they are."""
    for pattern, new in _FUSED_NORMS:
        name = pattern.sub(new, name)
    return name


def layer_of(name: str) -> int | None:
    """Return the number in `decoder.layers.N.`, or None."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


def block_of(name: str) -> str | None:
    """Return the prefix of the transformer layer of a parameter, multi-token prediction included; None outside."""
    found = _BLOCK.match(name)
    return found[0] if found else None


def is_prediction(name: str) -> bool:
    """Whether the parameter belongs to multi-token prediction."""
    return name.startswith("mtp.")


def shift_layer(name: str, offset: int) -> str:
    """Return the name with `offset` added to its layer number."""
    found = _LAYER.match(name)
    return f"{found[1]}{int(found[2]) + offset}{found[3]}" if found else name


def expert_of(name: str) -> int | None:
    """Return the number of the expert that the parameter belongs to, or None."""
    found = _EXPERT.match(name)
    return int(found[2]) if found else None


def shift_expert(name: str, offset: int) -> str:
    """Return the name with `offset` added to its expert number."""
    found = _EXPERT.match(name)
    return f"{found[1]}local_experts.{int(found[2]) + offset}{found[3]}" if found else name


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to routed experts, alone or grouped."""
    return ".mlp.experts." in name


def is_buffer(name: str) -> bool:
    """Whether this is a buffer, which no optimizer updates."""
    return _BUFFERS.match(name) is not None


@dataclass(frozen=True, slots=True)
class StackedKey:
    """A key of a sharded checkpoint, whose tensor stacks parameters: its leading axes are layers and experts."""

    template: str  # the name with `{layer}` and `{expert}` for the axes
    axes: tuple[str, ...]  # leading axes of the stored tensor: "layer", "expert"

    def name(self, index: tuple[int, ...]) -> str:
        """Return the name of the parameter at this index of the leading axes."""
        name = self.template
        for axis, number in zip(self.axes, index, strict=True):
            name = name.replace("{" + axis + "}", str(number))
        return canonical_name(name)


_STACKED_LAYER: Final = re.compile(r"((?:^|\.)(?:decoder|encoder)\.layers\.)(?!\d)")
_STACKED_EXPERT: Final = re.compile(r"(\.mlp\.experts\.)experts\.(\d+\.)?")


def parse_stacked_key(key: str) -> StackedKey:
    """Return how parameters are stacked in the tensor of this key."""
    axes: list[str] = []
    template, stacked = _STACKED_LAYER.subn(r"\1{layer}.", key)
    if stacked:
        axes.append("layer")
    found = _STACKED_EXPERT.search(template)
    if found:
        if not found[2]:
            axes.append("expert")
        template = _STACKED_EXPERT.sub(lambda m: f"{m[1]}local_experts.{m[2] or '{expert}.'}", template)
    return StackedKey(template, tuple(axes))


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
_PREDICTION_BLOCK: Final = "transformer_layer."
_EMBEDDINGS: Final = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_NUMBER: Final = re.compile(r"\.layers\.(\d+)\.")

# Transformer Engine fuses these norms into the linear layer after them, and so makes them with it.
_FUSED_INTO: Final = {"input_layernorm.": "self_attention.linear_qkv.", "norm.": "mixer.in_proj."}
_FUSED_INTO_LATENT: Final = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}

_KINDS: Final = {"weight": 0, "bias": 1}

OrderKey = tuple[int, int, int, int, int, int, int, str]


def order_key(name: str, *, fused: bool = False, latent: bool = False) -> OrderKey:
    """Return a sort key for the order of parameters in the module; unknown modules come after known ones.

    The distributed optimizer fills its buffers in this order, which sharded checkpoints do not store. It is that of the
    local implementation, or with `fused` that of Transformer Engine. `latent` is for multi-latent attention, where
    other norms are fused.
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
        inner = inner.removeprefix(_PREDICTION_BLOCK)
    expert = expert_of(name)
    matrix = 1 if ".linear_fc2." in name else 0
    fused_into = (_FUSED_INTO_LATENT if latent else _FUSED_INTO) if fused else {}
    at = next((i for i, prefix in enumerate(known) if inner.startswith(prefix)), None)
    place = 2 * (len(known) if at is None else at)
    if at is not None and known[at] in fused_into:
        place = 2 * known.index(fused_into[known[at]]) - 1
    last = _KINDS.get(name.rpartition(".")[2], len(_KINDS))
    return section, layer, around, place, -1 if expert is None else expert, matrix, last, name


def module_order(arguments: JobArguments) -> Callable[[str], OrderKey]:
    """Return the sort key for the order of parameters in the modules of a job."""
    latent = arguments.flag("multi_latent_attention")
    return partial(order_key, fused=arguments.has_transformer_engine, latent=latent)


_FUSED_MATRIX: Final = re.compile(r"^(.*\.(mixer|self_attention))\.(in_proj|conv1d)\.(weight|bias)$")
_BY_HEAD: Final = re.compile(r"^.*\.(?:mixer\.(?:A_log|dt_bias|D|norm\.weight)|self_attention\.(?:A_log|dt_bias))$")
_OUT: Final = re.compile(r"^.*\.(?:mixer|self_attention)\.out_proj\.weight$")
_FUSED_MATRIX_KEY: Final = re.compile(r"^(.*\.(in_proj|conv1d)\.(weight|bias))\.(\w+)$")

# Recurrent layers (Mamba's mixer, the gated delta net) have a projection and a convolution that consist of several
# matrices one above the other, each split over tensor-parallel ranks on its own. Sharded checkpoints store each under a
# key of its own, with these suffixes, in the order of the rows.
_PARTS: Final = {
    ("mixer", "in_proj"): ("z", "x", "B", "C", "dt"),
    ("mixer", "conv1d"): ("x", "B", "C"),
    ("self_attention", "in_proj"): ("query", "key", "value", "z", "beta", "alpha"),
    ("self_attention", "conv1d"): ("query", "key", "value"),
}
_DIMENSIONS: Final = {("in_proj", "weight"): 2, ("conv1d", "weight"): 3}  # a bias has one

ShapeOf = Callable[[str], Shape | None]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows `[start, start + length)` of a fused matrix, and the suffix of their key."""

    suffix: str
    start: int
    length: int


def fused_matrix_parts(name: str, shape_of: ShapeOf) -> list[RowPart]:
    """Return the parts of a fused matrix, with sizes from the shapes of its neighbours; empty for other parameters."""
    found = _FUSED_MATRIX.match(name)
    if not found:
        return []
    stem, kind, module = found[1], found[2], found[3]
    out, heads, conv = (shape_of(f"{stem}.{other}") for other in ("out_proj.weight", "A_log", "conv1d.weight"))
    if out is None or heads is None or conv is None:
        return []
    inner, beside = out[1], (conv[0] - out[1]) // 2
    sizes = {"B": beside, "C": beside, "query": beside, "key": beside}
    sizes |= dict.fromkeys(("z", "x", "value"), inner) | dict.fromkeys(("dt", "beta", "alpha"), heads[0])
    parts: list[RowPart] = []
    at = 0
    for suffix in _PARTS[kind, module]:
        parts.append(RowPart(suffix, at, sizes[suffix]))
        at += sizes[suffix]
    return parts


def recurrent_rule(name: str, shape_of: ShapeOf) -> Rule | None:
    """Return the rule for a parameter of a recurrent layer; None for other layers, and for norms that are not split."""
    parts = fused_matrix_parts(name, shape_of)
    if parts:
        return Rule("split", 0, ratio=tuple(part.length for part in parts))
    if _BY_HEAD.match(name):
        return Rule("split", 0)
    return Rule("split", 1) if _OUT.match(name) else None


@dataclass(frozen=True, slots=True)
class FusedMatrixKeys:
    """The keys of the parts of one fused matrix: the key of the matrix, and the suffixes of all parts in order."""

    key: str
    suffixes: tuple[str, ...]
    dimensions: int  # of the matrix, without the axis of layers


def fused_matrix_keys(key: str) -> FusedMatrixKeys | None:
    """Return the fused matrix that the tensor of this key is a part of, or None."""
    found = _FUSED_MATRIX_KEY.match(key)
    if not found:
        return None
    kind = "self_attention" if f".self_attention.{found[2]}." in key else "mixer"
    suffixes = _PARTS[kind, found[2]]
    if found[4] not in suffixes:
        return None
    return FusedMatrixKeys(found[1], suffixes, _DIMENSIONS.get((found[2], found[3]), 1))


RULE_ORIGIN: Final = "megatron-core: by the module's name"
NOT_CUT_ORIGIN: Final = "not cut in the checkpoint"  # of a rule that was not needed

_VOCABULARY: Final = re.compile(r"^(?:.*\.)?(?:word_embeddings\.weight|output_layer\.(?:weight|bias))$")
_GATED: Final = re.compile(r"^(.*)\.linear_fc1\.(?:weight|bias)$")
_COLUMN: Final = re.compile(
    r"^.*\.(?:linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(?:weight|bias)$"
)
_DOWN: Final = re.compile(r"^.*\.linear_(q|kv)_down_proj\.(?:weight|bias)$")
_ROW: Final = re.compile(r"^.*\.(?:linear_proj|linear_fc2)\.weight$")
_WHOLE: Final = re.compile(
    r"^.*(?:layernorm|norm)\.(?:weight|bias)$"
    r"|^.*\.(?:linear_proj|linear_fc2)\.bias$"
    r"|^(?:.*\.)?(?:position_embeddings|tokentype_embeddings)\.weight$"
    r"|^.*\.router\.\w+$|^.*\.shared_experts\.gate_weight$|^.*\.inv_freq$"
)


def split_rule(
    name: str, local: Sequence[Shape], arguments: JobArguments, shape_of: Callable[[str], Shape | None]
) -> Rule | None:
    """Return megatron-core's rule for a parameter with slices of these shapes, without sizes; None for unknown names.

    `shape_of` returns the shape of another parameter's slice on the first of these ranks.
    """
    recurrent = recurrent_rule(name, shape_of)
    if recurrent is not None:
        return recurrent
    if _VOCABULARY.match(name):
        return Rule("vocab", 0, true_size=arguments.vocabulary)
    gate = _GATED.match(name)
    if gate:
        beside = shape_of(f"{gate[1]}.linear_fc2.weight")
        gated = local[0][0] == 2 * beside[1] if beside is not None and len(beside) == 2 else arguments.gated
        return Rule("split", 0, ratio=(1, 1)) if gated else Rule("split", 0)
    if _COLUMN.match(name):
        return Rule("split", 0)
    down = _DOWN.match(name)
    if down:
        # Transformer Engine's down-projections are whole on every rank, those of the local implementation are split.
        if len(local) == 1:
            return REPLICATED if arguments.has_transformer_engine else Rule("split", 0)
        ranks = ("q_lora_rank",) if down[1] == "q" else ("kv_lora_rank", "qk_pos_emb_head_dim")
        rows = sum(arguments.number(name, 0) for name in ranks)
        return REPLICATED if local[0][0] == rows else Rule("split", 0)
    if _ROW.match(name):
        return Rule("split", 1)
    return REPLICATED if _WHOLE.match(name) else None
