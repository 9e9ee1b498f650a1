"""Everything that was hung into a live job, and how to take it off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hooks:
    """Everything that was hung into a live job, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a method of this one object inside another function."""
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, around(before))
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def add(self, handle: Any) -> None:
        """Remember a handle of torch's."""
        self._undo.append(handle.remove)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
