"""Everything that is no parameter state, on its way into extras: trees in which tensors stand as atoms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ucp import tunables
from ucp.errors import UnsafeError
from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Size, TensorRef, is_class
from ucp.files.torchzip import TorchFile
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.region import Region

_STATES: Final = frozenset({"state", "fp32_from_fp16_params"})


def carried_tree(file: str, archive: TorchFile, tree: Any, label: str) -> Any:
    """A copy of `tree` with an atom of kind `extra` for every tensor; parts that are shared stay shared."""
    return _Carrier(file, archive, label).walk(tree, 0)


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


class _Carrier:
    def __init__(self, file: str, archive: TorchFile, label: str) -> None:
        self._file = file
        self._archive = archive
        self._label = label
        self._count = 0
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, kept alive; what it became)

    def walk(self, value: Any, depth: int) -> Any:
        if not isinstance(value, (dict, list, tuple, Inert, TensorRef)) or isinstance(value, Size) or is_class(value):
            return value
        known = self._done.get(id(value))
        if known is None:
            if depth > tunables.MAX_EXTRAS_DEPTH:
                raise UnsafeError(f"{self._file}: what it stores is nested beyond any honest use")
            known = self._done[id(value)] = (value, self._copy(value, depth + 1))
        return known[1]

    def _copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, TensorRef):
            return self._atom(value)
        if isinstance(value, InertOrderedDict):
            made = InertDefaultDict(value.factory) if isinstance(value, InertDefaultDict) else InertOrderedDict()
            made.update((key, self.walk(item, depth)) for key, item in value.items())
            made.attributes = self.walk(value.attributes, depth)
            return made
        if isinstance(value, dict):
            return {key: self.walk(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.walk(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.walk(item, depth) for item in value)
        return self._instance(value, depth)

    def _instance(self, value: Inert, depth: int) -> Inert:
        args = tuple(self.walk(item, depth) for item in value.args)
        kwargs = {key: self.walk(item, depth) for key, item in value.kwargs.items()}
        made: Inert = Inert.__new__(type(value), *args, **kwargs)
        made.called = value.called
        made.state = self.walk(value.state, depth)
        made.items.extend(self.walk(item, depth) for item in value.items)
        made.pairs.extend((key, self.walk(item, depth)) for key, item in value.pairs)
        return made

    def _atom(self, ref: TensorRef) -> Atom:
        name = f"{self._label}#{self._count}"
        self._count += 1
        if not ref.numel:
            return Atom(name, "extra", ref.shape, ref.dtype, ())
        strides = None if ref.is_contiguous else ref.strides
        offset = self._archive.position(ref)
        return Atom(
            name,
            "extra",
            ref.shape,
            ref.dtype,
            (Fragment(Region.all_of(ref.shape), self._file, offset, ref.dtype, strides=strides),),
        )
