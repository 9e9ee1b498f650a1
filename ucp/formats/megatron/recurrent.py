"""Layers with a state instead of attention: Mamba's mixer and the gated delta net.

Their first projection and their convolution are several matrices side by side, each cut over tensor-parallel ranks on
its own. Sharded checkpoints keep each under a key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ucp.model.box import Shape
from ucp.model.rules import Rule

_FUSED: Final = re.compile(r"^(.*\.(mixer|self_attention))\.(in_proj|conv1d)\.(weight|bias)$")
_BY_HEAD: Final = re.compile(r"^.*\.(?:mixer\.(?:A_log|dt_bias|D|norm\.weight)|self_attention\.(?:A_log|dt_bias))$")
_OUT: Final = re.compile(r"^.*\.(?:mixer|self_attention)\.out_proj\.weight$")
_KEY: Final = re.compile(r"^(.*\.(in_proj|conv1d)\.(weight|bias))\.(\w+)$")

# What the rows of the fused matrices are, in order: as keys of sharded checkpoints end.
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
    """Rows `[start, start + length)` of a fused matrix, and how the key of them ends."""

    suffix: str
    start: int
    length: int


def parts_of(name: str, shape_of: ShapeOf) -> list[RowPart]:
    """The parts of a fused matrix, in the sizes that `shape_of` gives for the matrices beside it; none of others."""
    found = _FUSED.match(name)
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


def rule_of_recurrent(name: str, shape_of: ShapeOf) -> Rule | None:
    """How a parameter of such a layer is cut; None for those of other layers, and norms that are whole everywhere."""
    parts = parts_of(name, shape_of)
    if parts:
        return Rule("split", 0, ratio=tuple(part.length for part in parts))
    if _BY_HEAD.match(name):
        return Rule("split", 0)
    return Rule("split", 1) if _OUT.match(name) else None


@dataclass(frozen=True, slots=True)
class Family:
    """The keys that are parts of one fused matrix: its own key, and all of their ends in order."""

    key: str
    suffixes: tuple[str, ...]
    dimensions: int  # of the matrix, without axes that count layers


def family_of(key: str) -> Family | None:
    """The matrix that the tensor of this key is a part of."""
    found = _KEY.match(key)
    if not found:
        return None
    kind = "self_attention" if f".self_attention.{found[2]}." in key else "mixer"
    suffixes = _PARTS[kind, found[2]]
    if found[4] not in suffixes:
        return None
    return Family(found[1], suffixes, _DIMENSIONS.get((found[2], found[3]), 1))
