"""Everything that is no parameter state, on its way into extras: trees in which tensors stand as atoms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from ucp.files.inert import TensorRef
from ucp.files.torchzip import TorchFile
from ucp.formats.tensors_in_trees import replace_leaves
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.region import Region

_STATES: Final = frozenset({"state", "fp32_from_fp16_params"})


def carried_tree(file: str, archive: TorchFile, tree: Any, label: str) -> Any:
    """A copy of `tree` with an atom of kind `extra` for every tensor; parts that are shared stay shared."""
    return replace_leaves(tree, TensorRef, partial(_atom, file, archive, label))


def without_states(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """The tree of a rank file without its parameters and their states; what else the modules keep stays."""
    kept: dict[Any, Any] = {}
    for key, value in tree.items():
        if isinstance(key, str) and key.rstrip("0123456789") == "model" and isinstance(value, dict):
            kept[key] = _without_tensors(value)
        elif key == "optimizer":
            kept[key] = strip_optimizer(value)
        else:
            kept[key] = value
    return kept


def strip_optimizer(value: Any) -> Any:
    """What an optimizer keeps beside states: groups, gradient scaler, markers. Step counters stay."""
    if isinstance(value, list):
        return [strip_optimizer(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[Any, Any] = {}
    for key, item in value.items():
        if key in _STATES:
            if isinstance(item, dict) and any(isinstance(name, str) for name in item):
                out[key] = {name: number for name, number in item.items() if isinstance(name, str)}
            continue
        out[key] = strip_optimizer(item) if key == "optimizer" or type(key) is int else item
    return out


def _without_tensors(model: Mapping[Any, Any]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, value in model.items():
        if isinstance(value, dict):
            kept[key] = _without_tensors(value)
        elif not isinstance(value, TensorRef) or str(key).endswith("_extra_state"):
            kept[key] = value
    return kept


def _atom(file: str, archive: TorchFile, label: str, ref: TensorRef, number: int) -> Atom:
    name = f"{label}#{number}"
    if not ref.numel:
        return Atom(name, "extra", ref.shape, ref.dtype, ())
    strides = None if ref.is_contiguous else ref.strides
    fragment = Fragment(Region.all_of(ref.shape), file, archive.position(ref), ref.dtype, strides=strides)
    return Atom(name, "extra", ref.shape, ref.dtype, (fragment,))
