"""Trees of objects with tensors in them: copies in which each tensor became something else.

Inert trees on their way out again: extras whose tensors are atoms, as trees that a torch file can be written of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ucp import settings
from ucp.containers.inert import Inert, InertDefaultDict, InertOrderedDict, Size, is_class
from ucp.containers.torch_file_writer import RegionContent, new_tensor
from ucp.core.checkpoint import Atom
from ucp.core.region import Region
from ucp.errors import UnsafeError


def replace_leaves(tree: Any, kind: type, make: Callable[[Any, int], Any]) -> Any:
    """A copy of `tree` with `make(leaf, running number)` in place of every leaf of a kind; shared parts stay shared."""
    return _LeafReplacer(kind, make).copy(tree, 0)


class _LeafReplacer:
    def __init__(self, kind: type, make: Callable[[Any, int], Any]) -> None:
        self._kind = kind
        self._make = make
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, kept alive; what it became)
        self._open: set[int] = set()
        self._met = 0

    def copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, self._kind):
            if id(value) not in self._done:
                self._done[id(value)] = (value, self._make(value, self._met))
                self._met += 1
            return self._done[id(value)][1]
        if is_class(value) or not isinstance(value, (dict, list, tuple, Inert)) or isinstance(value, Size):
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if depth > settings.MAX_EXTRAS_DEPTH or id(value) in self._open:
            raise UnsafeError("an object is nested beyond any honest use", hint="inspect the file that holds it")
        self._open.add(id(value))
        made = self._container(value, depth + 1)
        self._open.discard(id(value))
        self._done[id(value)] = (value, made)
        return made

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, InertOrderedDict):
            made = InertDefaultDict(value.factory) if isinstance(value, InertDefaultDict) else InertOrderedDict()
            made.update((key, self.copy(item, depth)) for key, item in value.items())
            made.attributes = self.copy(value.attributes, depth)
            return made
        if isinstance(value, dict):
            return {key: self.copy(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.copy(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.copy(item, depth) for item in value)
        return self._instance(value, depth)

    def _instance(self, value: Inert, depth: int) -> Inert:
        args = tuple(self.copy(item, depth) for item in value.args)
        kwargs = {key: self.copy(item, depth) for key, item in value.kwargs.items()}
        made: Inert = Inert.__new__(type(value), *args, **kwargs)
        made.called = value.called
        made.state = self.copy(value.state, depth)
        made.items.extend(self.copy(item, depth) for item in value.items)
        made.pairs.extend((key, self.copy(item, depth)) for key, item in value.pairs)
        return made


_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})


def with_tensors(tree: Any) -> Any:
    """`tree` with a tensor for every atom in it. Values that occur twice stay one value."""
    return _TensorBuilder().walk(tree)


class _TensorBuilder:
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
            contents = (RegionContent(value, Region.all_of(value.shape)),) if value.numel else ()
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
