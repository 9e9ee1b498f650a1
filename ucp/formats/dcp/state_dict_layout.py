"""How the keys of a state dict are built: under which names model and optimizer stand, and whether flattened.

Entries by their paths, nested again as the state dict was, and back to entries by torch's own rules.

What the format has no place for, kept in folders that we write as two objects of our own: `ucp.step`, `ucp.buffers`.

A folder does not say which tensors are buffers, nor how many steps a job has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.containers.distcp import DcpEntry, DcpObject, KeyPath
from ucp.core.checkpoint import Atom, Checkpoint

STYLE_DETAIL: Final = "dcp"  # key of Checkpoint.details under which a style is kept


@dataclass(frozen=True, slots=True)
class StateDictSection:
    """A dictionary of the state dict: the folder that holds it (empty, or with a slash at the end) and its path."""

    folder: str
    prefix: KeyPath

    def to_json(self) -> dict[str, Any]:
        return {"folder": self.folder, "prefix": list(self.prefix)}


@dataclass(frozen=True, slots=True)
class StateDictStyle:
    """`flattened` is torch's `flatten_optimizer_state_dict`: one key a parameter and field, no numbered groups."""

    model: StateDictSection = StateDictSection("", ("model",))
    optimizer: StateDictSection = StateDictSection("", ("optim",))
    flattened: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "optimizer": {**self.optimizer.to_json(), "flattened": self.flattened},
        }


def style_of(details: Any) -> StateDictStyle | None:
    """The style that a checkpoint's details tell, or None. A model saved alone leaves the optimizer's place open."""
    told = details.get(STYLE_DETAIL) if isinstance(details, dict) else None
    if not isinstance(told, dict):
        return None
    model, optimizer = _section(told.get("model")), _section(told.get("optimizer"))
    if model is None and optimizer is None:
        return None
    flattened = optimizer is not None and told["optimizer"].get("flattened") is True
    if model is None:
        model = StateDictSection("", ("model",))
    if optimizer is None:
        optimizer = StateDictSection(model.folder, ("optim",))
    return StateDictStyle(model, optimizer, flattened)


def _section(told: Any) -> StateDictSection | None:
    if not isinstance(told, dict) or not isinstance(told.get("prefix"), (list, tuple)):
        return None
    folder = told.get("folder")
    if not isinstance(folder, str) or folder.count("/") > 1 or folder.startswith((".", "/")):
        return None  # details may come from a manifest: only what a reader of ours would say is taken
    return StateDictSection(folder, tuple(part if isinstance(part, int) else str(part) for part in told["prefix"]))


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


_STEP: Final[KeyPath] = ("ucp", "step")
_BUFFERS: Final[KeyPath] = ("ucp", "buffers")


@dataclass(slots=True)
class PrivateKeys:
    """`buffers` are parameter names; both are empty for folders of others."""

    step: int | None = None
    buffers: frozenset[str] = frozenset()


def private_keys_of(source: Checkpoint) -> dict[KeyPath, Any]:
    """The objects to add to a folder, by their paths."""
    facts: dict[KeyPath, Any] = {}
    if source.step is not None:
        facts[_STEP] = source.step
    buffers = [name for name, parameter in source.parameters.items() if parameter.role == "buffer"]
    if buffers:
        facts[_BUFFERS] = buffers
    return facts


def take_private_keys(entries: list[DcpEntry], value: Callable[[DcpObject], Any]) -> tuple[PrivateKeys, list[DcpEntry]]:
    """The facts among `entries`, and the other entries. Anything unexpected under these names is left alone."""
    facts, others = PrivateKeys(), []
    for entry in entries:
        told = value(entry) if isinstance(entry, DcpObject) and entry.path in (_STEP, _BUFFERS) else None
        if entry.path == _STEP and type(told) is int and told >= 0:
            facts.step = told
        elif entry.path == _BUFFERS and type(told) is list and all(type(name) is str for name in told):
            facts.buffers = frozenset(told)
        else:
            others.append(entry)
    return facts, others
