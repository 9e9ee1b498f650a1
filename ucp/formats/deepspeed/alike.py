"""Rank files repeat each other: is what extras carry of one what they carry of another?

To find that out takes a third of the time of carrying and writing it down again, for each of a thousand ranks.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
from typing import Any, Final

from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Size, TensorRef, is_class

_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})
_MAX_DEPTH: Final = 100
_WITHOUT_SHARING: Final = 2  # a version of marshal's format that says the values and nothing else


class Alike:
    """Compares two trees. Tensors that `is_taken` says have become atoms are carried by neither, whatever they are."""

    def __init__(self, is_taken: Callable[[TensorRef], bool]) -> None:
        self._is_taken = is_taken
        self._compared: set[tuple[int, int]] = set()

    def are(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether two values carry the same; False may also mean that it is not known."""
        if a is b:
            return True
        kind = type(a)
        if kind is not type(b) or depth > _MAX_DEPTH:
            return False
        if kind in _PLAIN:
            return _same(a, b)
        if kind is TensorRef:
            return self._is_taken(a) and self._is_taken(b)
        pair = (id(a), id(b))
        if pair in self._compared:  # or being compared: then the rest decides
            return True
        self._compared.add(pair)
        if kind in (dict, InertOrderedDict, InertDefaultDict):
            return self._dicts(a, b, depth + 1)
        if kind in (list, tuple):
            return self._lists(a, b, depth + 1)
        if kind is Size:
            return bool(a == b)
        if is_class(a) or not isinstance(a, Inert):
            return a is b
        return (
            a.called is b.called
            and len(a.args) == len(b.args)
            and all(map(self.are, _parts(a), _parts(b), (depth + 1,) * 5))
        )

    def _dicts(self, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> bool:
        if not self._lists(list(a), list(b), depth):
            return False
        if isinstance(a, InertOrderedDict) and isinstance(b, InertOrderedDict):
            if not self.are(a.attributes, b.attributes, depth):
                return False
            if isinstance(a, InertDefaultDict) and isinstance(b, InertDefaultDict) and a.factory is not b.factory:
                return False
        return self._lists(list(a.values()), list(b.values()), depth)

    def _lists(self, a: Any, b: Any, depth: int) -> bool:
        if len(a) != len(b):
            return False
        if _PLAIN.issuperset(map(type, a)):
            return _PLAIN.issuperset(map(type, b)) and _same(a, b)
        return all(self.are(one, other, depth) for one, other in zip(a, b, strict=True))


def _parts(value: Inert) -> Iterable[Any]:
    return value.args, value.kwargs, value.state, value.items, value.pairs


def _same(a: Any, b: Any) -> bool:
    """Whether plain values, or lists of them, are the same to the last bit: `1`, `1.0` and `True` are not."""
    return marshal.dumps(a, _WITHOUT_SHARING) == marshal.dumps(b, _WITHOUT_SHARING)
