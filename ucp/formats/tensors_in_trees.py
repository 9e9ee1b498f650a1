"""Trees of objects with tensors in them: copies in which each tensor became something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucp import tunables
from ucp.errors import UnsafeError
from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Size, is_class


def replace_leaves(tree: Any, kind: type, make: Callable[[Any, int], Any]) -> Any:
    """A copy of `tree` with `make(leaf, running number)` in place of every leaf of a kind; shared parts stay shared."""
    return _Copier(kind, make).copy(tree, 0)


class _Copier:
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
        if depth > tunables.MAX_EXTRAS_DEPTH or id(value) in self._open:
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
