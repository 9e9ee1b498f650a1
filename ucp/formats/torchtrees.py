"""Inert trees on their way out again: extras whose tensors are atoms, as trees that a torch file can be written of."""

from __future__ import annotations

from typing import Any, Final

from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Size, is_class
from ucp.files.torchzip_writer import Fill, new_tensor
from ucp.model.checkpoint import Atom
from ucp.model.region import Region

_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})


def with_tensors(tree: Any) -> Any:
    """`tree` with a tensor for every atom in it. Values that occur twice stay one value."""
    return _Walk().walk(tree)


class _Walk:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, kept alive; what it became)

    def walk(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes, Size)) or is_class(value):
            return value
        known = self._done.get(id(value))
        if known is None:
            known = self._done[id(value)] = (value, self._convert(value))
        return known[1]

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Atom):
            contents = (Fill(value, Region.all_of(value.shape)),) if value.numel else ()
            return new_tensor(value.dtype, value.shape, *contents)
        if isinstance(value, InertOrderedDict):
            made = InertDefaultDict(value.factory) if isinstance(value, InertDefaultDict) else InertOrderedDict()
            made.update((key, self.walk(item)) for key, item in value.items())
            made.attributes = self.walk(value.attributes)
            return made
        if isinstance(value, dict):
            return {key: self.walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(value) if _PLAIN.issuperset(map(type, value)) else [self.walk(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.walk(item) for item in value)
        if isinstance(value, Inert):
            return self._instance(value)
        return value

    def _instance(self, value: Inert) -> Inert:
        parts = [self.walk(part) for part in (list(value.args), value.kwargs, value.state, value.items, value.pairs)]
        args, kwargs, state, items, pairs = parts
        made = object.__new__(type(value))
        made.called = value.called
        made.args, made.kwargs, made.state = tuple(args), kwargs, state
        made.items.extend(items)
        made.pairs.extend(pairs)
        return made
