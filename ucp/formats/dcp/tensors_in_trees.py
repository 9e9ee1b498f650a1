"""Trees of objects with tensors in them: every tensor reference replaced by what the caller makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucp import tunables
from ucp.errors import UnsafeError
from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Size, TensorRef, is_class


def lift_tensors(tree: Any, make: Callable[[TensorRef, int], Any]) -> Any:
    """A copy of `tree` in which `make(reference, running number)` stands for every tensor; shared parts stay shared."""
    return _Lifter(make).lift(tree, 0)


class _Lifter:
    def __init__(self, make: Callable[[TensorRef, int], Any]) -> None:
        self._make = make
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, kept alive; what it became)
        self._open: set[int] = set()
        self._tensors = 0

    def lift(self, value: Any, depth: int) -> Any:
        if isinstance(value, TensorRef):
            self._tensors += 1
            return self._make(value, self._tensors - 1)
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
            made.update((key, self.lift(item, depth)) for key, item in value.items())
            made.attributes = self.lift(value.attributes, depth)
            return made
        if isinstance(value, dict):
            return {key: self.lift(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.lift(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.lift(item, depth) for item in value)
        return self._instance(value, depth)

    def _instance(self, value: Inert, depth: int) -> Inert:
        args = tuple(self.lift(item, depth) for item in value.args)
        kwargs = {key: self.lift(item, depth) for key, item in value.kwargs.items()}
        made: Inert = Inert.__new__(type(value), *args, **kwargs)
        made.called = value.called
        made.state = self.lift(value.state, depth)
        made.items.extend(self.lift(item, depth) for item in value.items)
        made.pairs.extend((key, self.lift(item, depth)) for key, item in value.pairs)
        return made
