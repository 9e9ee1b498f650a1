"""The structure of a state dict: where model and optimizer are in it, how it is nested, and two keys of our own.

The reader records the structure in the checkpoint's details, so that the writer can use the same one. A folder does not
say which tensors are buffers, nor how many steps a job has taken: folders that we write have this in `ucp.buffers` and
`ucp.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.containers.distcp import DcpEntry, DcpObject, KeyPath
from ucp.core.checkpoint import Atom, Checkpoint

STYLE_DETAIL: Final = "dcp"  # key of a style in `Checkpoint.details`
_STEP: Final[KeyPath] = ("ucp", "step")
_BUFFERS: Final[KeyPath] = ("ucp", "buffers")


@dataclass(frozen=True, slots=True)
class StateDictSection:
    """A dictionary of the state dict: its folder (empty, or with a slash at the end) and its path."""

    folder: str
    prefix: KeyPath

    def to_json(self) -> dict[str, Any]:
        return {"folder": self.folder, "prefix": list(self.prefix)}


@dataclass(frozen=True, slots=True)
class StateDictStyle:
    """`flattened` is torch's `flatten_optimizer_state_dict`: one key per parameter and field, no numbered groups."""

    model: StateDictSection = StateDictSection("", ("model",))
    optimizer: StateDictSection = StateDictSection("", ("optim",))
    flattened: bool = False


def style_of(details: Any) -> StateDictStyle | None:
    """The style in a checkpoint's details, or None. For a model saved alone, the optimizer's path is the default."""
    recorded = details.get(STYLE_DETAIL) if isinstance(details, dict) else None
    if not isinstance(recorded, dict):
        return None
    model, optimizer = _section(recorded.get("model")), _section(recorded.get("optimizer"))
    if model is None and optimizer is None:
        return None
    flattened = optimizer is not None and recorded["optimizer"].get("flattened") is True
    model = model or StateDictSection("", ("model",))
    return StateDictStyle(model, optimizer or StateDictSection(model.folder, ("optim",)), flattened)


def _section(recorded: Any) -> StateDictSection | None:
    if not isinstance(recorded, dict) or not isinstance(recorded.get("prefix"), (list, tuple)):
        return None
    folder = recorded.get("folder")
    if not isinstance(folder, str) or folder.count("/") > 1 or folder.startswith((".", "/")):
        return None  # details may come from a manifest: accept only what the reader writes
    return StateDictSection(folder, tuple(part if isinstance(part, int) else str(part) for part in recorded["prefix"]))


def nest(held: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The nested dicts and lists with these values at these paths."""
    root: dict[str | int, Any] = {}
    for path, value in held.items():
        node = root
        for part in path[:-1]:
            below = node.setdefault(part, _Node())
            if not isinstance(below, _Node):  # a value at the path of a dict: keep both, this one by its key
                node[".".join(map(str, path))] = value
                break
            node = below
        else:
            node[path[-1]] = value
    return {str(key): _close(value) for key, value in root.items()}


class _Node(dict[Any, Any]):
    """A dict made from paths, unlike one that is a value."""


def _close(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if value and all(type(key) is int for key in value) and sorted(value) == list(range(len(value))):
        return [_close(value[i]) for i in range(len(value))]
    return {str(key): _close(item) for key, item in value.items()}


def flatten(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The entries of a state dict by torch's rules: values of dicts, and members of lists that contain a tensor or a
    dict, are entries of their own. Atoms are tensors."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        for key, item in tree.items():
            yield from flatten(item, (*path, key))
    elif type(tree) is list and any(_opens(item) for item in tree):
        for i, item in enumerate(tree):
            yield from flatten(item, (*path, i))
    else:
        yield path, tree


def _opens(value: Any) -> bool:
    if type(value) is list:
        return any(_opens(item) for item in value)
    return isinstance(value, (dict, Atom))


@dataclass(slots=True)
class PrivateKeys:
    """`buffers` are parameter names. Both fields are empty for folders that others wrote."""

    step: int | None = None
    buffers: frozenset[str] = frozenset()


def private_keys_of(source: Checkpoint) -> dict[KeyPath, Any]:
    """The objects to write, by their paths."""
    keys: dict[KeyPath, Any] = {}
    if source.step is not None:
        keys[_STEP] = source.step
    buffers = [name for name, parameter in source.parameters.items() if parameter.role == "buffer"]
    if buffers:
        keys[_BUFFERS] = buffers
    return keys


def take_private_keys(entries: list[DcpEntry], value: Callable[[DcpObject], Any]) -> tuple[PrivateKeys, list[DcpEntry]]:
    """The private keys among `entries`, and the other entries. Unexpected values of these keys stay in the latter."""
    keys, others = PrivateKeys(), []
    for entry in entries:
        found = value(entry) if isinstance(entry, DcpObject) and entry.path in (_STEP, _BUFFERS) else None
        if entry.path == _STEP and type(found) is int and found >= 0:
            keys.step = found
        elif entry.path == _BUFFERS and type(found) is list and all(type(name) is str for name in found):
            keys.buffers = frozenset(found)
        else:
            others.append(entry)
    return keys, others
