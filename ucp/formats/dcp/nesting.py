"""Entries by their paths, nested again as the state dict was, and back to entries by torch's own rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ucp.formats.distcp_index import KeyPath
from ucp.model.checkpoint import Atom


def nest(held: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The nested dictionaries and lists that these paths describe."""
    root: dict[str | int, Any] = {}
    for path, value in held.items():
        node = root
        for part in path[:-1]:
            below = node.setdefault(part, _Node())
            if not isinstance(below, _Node):  # a value where others have a dictionary: keep both, by their text
                node[".".join(map(str, path))] = value
                break
            node = below
        else:
            node[path[-1]] = value
    return {str(key): _close(value) for key, value in root.items()}


class _Node(dict[Any, Any]):
    """A dictionary that paths made, as against one that is a value."""


def _close(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if (
        value
        and sorted(map(str, value)) == sorted(map(str, range(len(value))))
        and all(type(key) is int for key in value)
    ):
        return [_close(value[i]) for i in range(len(value))]
    return {str(key): _close(item) for key, item in value.items()}


def flatten(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Entries of a state dict as torch makes them: dictionaries are opened, lists only where they hold a tensor or a
    dictionary, anything else is one entry. Atoms are tensors."""
    yield from _walk((), tree)


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from _walk((*path, key), item)
    elif type(value) is list and any(_opens(item) for item in value):
        for i, item in enumerate(value):
            yield from _walk((*path, i), item)
    else:
        yield path, value


def _opens(value: Any) -> bool:
    if type(value) is list:
        return any(_opens(item) for item in value)
    return isinstance(value, (dict, Atom))
