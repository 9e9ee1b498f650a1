"""How megatron-core cuts each parameter over tensor-parallel ranks, by its name and its shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.recurrent import rule_of_recurrent
from ucp.model.box import Shape
from ucp.model.rules import REPLICATED, Rule

ORIGIN: Final = "megatron-core: by the module's name"

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


def rule_of(
    name: str, local: Sequence[Shape], arguments: Arguments, shape_of: Callable[[str], Shape | None]
) -> Rule | None:
    """The rule for a parameter with slices of these shapes, sizes left open; None where its name says nothing.

    `shape_of` gives the shape of another parameter's slice on the first of these ranks.
    """
    recurrent = rule_of_recurrent(name, shape_of)
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
        # Transformer Engine's down-projections are whole on every rank, those of the local implementation are cut.
        if len(local) == 1:
            return REPLICATED if arguments.has_transformer_engine else Rule("split", 0)
        return REPLICATED if local[0][0] == _down_rows(down[1], arguments) else Rule("split", 0)
    if _ROW.match(name):
        return Rule("split", 1)
    return REPLICATED if _WHOLE.match(name) else None


def _down_rows(which: str, arguments: Arguments) -> int:
    if which == "q":
        return arguments.number("q_lora_rank", 0)
    return arguments.number("kv_lora_rank", 0) + arguments.number("qk_pos_emb_head_dim", 0)
