"""Fragments that are made when someone looks at them: an index of many ranks never needs them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from ucp.model.checkpoint import Fragment


class LazyFragments(Sequence[Fragment]):
    """What `make` gives, made once. `count` is how many there will be, where that is known."""

    __slots__ = ("_count", "_held", "_make")

    def __init__(self, make: Callable[[], Iterable[Fragment]], count: int | None = None) -> None:
        self._make = make
        self._count = count
        self._held: tuple[Fragment, ...] | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self._all())
        return self._count

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Fragment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...

    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        return self._all()[index]

    def _all(self) -> tuple[Fragment, ...]:
        if self._held is None:
            self._held = tuple(self._make())
        return self._held
