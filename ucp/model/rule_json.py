"""Rules as JSON values, for manifests and metadata. Fields that say nothing are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from ucp.errors import IntegrityError
from ucp.model.box import Box
from ucp.model.rules import Cut, Rule, SlicePiece

_FIELDS = frozenset({"cut", "dim", "parts", "ratio", "widths", "true_size", "logical_shape", "slices"})


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """All that a rule says, as a JSON object; `rule_from_json` gives the equal rule back."""
    out: dict[str, Any] = {"cut": rule.cut}
    if rule.cut in ("split", "vocab") or rule.dim:
        out["dim"] = rule.dim
    if rule.parts is not None:
        out["parts"] = list(rule.parts)
    if rule.ratio is not None:
        out["ratio"] = list(rule.ratio)
    if rule.widths is not None:
        out["widths"] = [list(shares) for shares in rule.widths]
    if rule.true_size is not None:
        out["true_size"] = rule.true_size
    if rule.logical_shape is not None:
        out["logical_shape"] = list(rule.logical_shape)
    if rule.slices is not None:
        out["slices"] = [[_piece_to_json(piece) for piece in pieces] for pieces in rule.slices]
    return out


def rule_from_json(data: Any) -> Rule:
    """The rule that `rule_to_json` wrote; anything else is refused."""
    if not isinstance(data, Mapping) or data.get("cut") not in get_args(Cut) or data.keys() - _FIELDS:
        raise _bad(data)
    slices = data.get("slices")
    return Rule(
        cut=cast(Cut, data["cut"]),
        dim=_int(data.get("dim", 0)),
        parts=_sizes(data.get("parts")),
        ratio=_sizes(data.get("ratio")),
        widths=_rows(data.get("widths")),
        true_size=None if data.get("true_size") is None else _int(data["true_size"]),
        logical_shape=_sizes(data.get("logical_shape")),
        slices=None if slices is None else tuple(tuple(map(_piece_from_json, _list(held))) for held in _list(slices)),
    )


def _piece_to_json(piece: SlicePiece) -> dict[str, Any]:
    out: dict[str, Any] = {"start": list(piece.box.start), "shape": list(piece.box.shape), "offset": piece.offset}
    if piece.scale != 1.0:
        out["scale"] = piece.scale
    return out


def _piece_from_json(data: Any) -> SlicePiece:
    if not isinstance(data, Mapping) or data.keys() - {"start", "shape", "offset", "scale"}:
        raise _bad(data)
    start, shape, scale = _sizes(data.get("start")), _sizes(data.get("shape")), data.get("scale", 1.0)
    if start is None or shape is None or len(start) != len(shape) or not isinstance(scale, int | float):
        raise _bad(data)
    return SlicePiece(Box(start, shape), _int(data.get("offset")), float(scale))


def _sizes(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(_int(size) for size in _list(value))


def _rows(value: Any) -> tuple[tuple[int, ...], ...] | None:
    return None if value is None else tuple(tuple(_int(size) for size in _list(row)) for row in _list(value))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(value)
    return value


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(value)
    return value


def _bad(value: Any) -> IntegrityError:
    return IntegrityError(
        f"not a rule: {str(value)[:200]}", hint="the manifest was damaged or written by a newer version of ucp"
    )
