"""The optimizers of a state dict: which keys are their states and group fields, and their parameter groups.

Users choose the names of the top dictionaries, so an optimizer is recognised by its `param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.containers.distcp import (
    DcpEntry,
    DcpFolder,
    DcpObject,
    DcpTensor,
    KeyPath,
    ObjectArchives,
    TensorArchives,
    join_path,
)
from ucp.core.dtypes import scalar_value
from ucp.errors import IntegrityError
from ucp.storage.local import SourceFiles

GROUPS: Final = "param_groups"
STATE: Final = "state"
PARAMS: Final = "params"
LIKE_WEIGHT: Final = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param"})
_EXTRA_STATE: Final = "_extra_state"
_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(slots=True)
class OptimizerKeys:
    """One optimizer of the state dict.

    `fields[group][name]` are the entries of its groups; the group is a number (nested form) or a parameter name
    (`flatten_optimizer_state_dict=True`). `whole` is the single object in which older torch versions store all groups.
    `listed` are the names or numbers of parameters in the groups; `read_groups` sets it.
    """

    prefix: KeyPath
    flattened: bool = False
    states: dict[str, dict[str, DcpEntry]] = field(default_factory=dict)
    fields: dict[int | str, dict[str, DcpEntry]] = field(default_factory=dict)
    whole: DcpObject | None = None
    listed: list[str] = field(default_factory=list)

    @property
    def by_number(self) -> bool:
        """Whether parameters have numbers, as in a raw `optimizer.state_dict()`, instead of names.

        Not every optimizer has states (SGD without momentum), but all list their parameters.
        """
        known = self.states or self.listed
        return bool(known) and all(name.isdecimal() for name in known)


def find_optimizers(folder: DcpFolder) -> tuple[list[OptimizerKeys], list[DcpEntry]]:
    """The optimizers of a folder, and the entries that belong to none of them."""
    paths = {key: entry.path for key, entry in folder.entries.items()}
    if not folder.has_paths:
        paths = _guess_paths(folder)
    found: dict[KeyPath, OptimizerKeys] = {}
    for key, path in paths.items():
        for at in range(len(path)):
            if _is_group_field(path[at:], folder.entries[key]):
                optimizer = found.setdefault(path[:at], OptimizerKeys(path[:at]))
                optimizer.flattened = optimizer.flattened or path[at] != GROUPS
    names = {str(path[-1]) for path in paths.values()}
    others: list[DcpEntry] = []
    for key, entry in folder.entries.items():
        if not any(_take(optimizer, entry, paths[key], names) for optimizer in found.values()):
            others.append(entry)
    for optimizer in found.values():
        # Groups with numbers are of the nested form, also if only the text of the keys is known.
        if optimizer.fields and all(isinstance(name, int) or name.isdecimal() for name in optimizer.fields):
            numbered = {int(name): table for name, table in optimizer.fields.items()}
            optimizer.fields = dict(sorted(numbered.items()))
            optimizer.flattened = False
    return list(found.values()), others


def _is_group_field(below: KeyPath, entry: DcpEntry) -> bool:
    """Whether this entry is a field of param groups, if an optimizer is at the prefix of its path.

    A module may be called `param_groups` too. But groups are a list (or one object), or in the flattened form one key
    per parameter and field, while the keys of modules are tensors, or an extra state.
    """
    word, rest = below[0], below[1:]
    if word == GROUPS:
        return isinstance(rest[0], int) if rest else isinstance(entry, DcpObject)
    if rest or not isinstance(word, str) or not isinstance(entry, DcpObject):
        return False
    return word.startswith(GROUPS + ".") and not word.endswith("." + _EXTRA_STATE)


def _guess_paths(folder: DcpFolder) -> dict[str, KeyPath]:
    """Paths of keys for a folder without any: everything before `state` or `param_groups` is an optimizer's prefix."""
    optimizers = {
        prefix
        for key, entry in folder.entries.items()
        for prefix, rest in prefix_splits(key)
        if _is_group_field((rest,), entry)
    }
    paths: dict[str, KeyPath] = {key: (key,) for key in folder.entries}
    for key in folder.entries:
        for prefix, rest in prefix_splits(key):
            if prefix in optimizers and (rest == GROUPS or rest.startswith((GROUPS + ".", STATE + "."))):
                paths[key] = (*prefix, rest)
                break
    return paths


def _take(optimizer: OptimizerKeys, entry: DcpEntry, path: KeyPath, names: set[str]) -> bool:
    """Add the entry to the optimizer if it belongs to it."""
    at = len(optimizer.prefix)
    if path[:at] != optimizer.prefix or len(path) == at:
        return False
    word, rest = path[at], path[at + 1 :]
    if word == GROUPS and not rest:
        if not isinstance(entry, DcpObject):
            return False
        optimizer.whole = entry
        return True
    if word == GROUPS and len(rest) > 1 and isinstance(rest[0], int):
        optimizer.fields.setdefault(rest[0], {})[join_path(rest[1:])] = entry
        return True
    if word == STATE and len(rest) > 1:
        optimizer.states.setdefault(str(rest[0]), {})[join_path(rest[1:])] = entry
        return True
    if rest or not isinstance(word, str):
        return False
    for section, table in ((GROUPS, optimizer.fields), (STATE, optimizer.states)):
        if word.startswith(section + "."):
            name, last = _split_flat(word[len(section) + 1 :], names)
            table.setdefault(name, {})[last] = entry
            return True
    return False


def _split_flat(text: str, names: set[str]) -> tuple[str, str]:
    """Split `<parameter>.<field>` after the longest known parameter name, or at the last dot."""
    at = text.rfind(".")
    while at > 0:
        if text[:at] in names:
            return text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
    name, _, last = text.rpartition(".")
    return name, last


def prefix_splits(key: str) -> Iterator[tuple[KeyPath, str]]:
    """Every way to split a key into a prefix and a name."""
    yield (), key
    at = key.find(".")
    while at > 0:
        yield (key[:at],), key[at + 1 :]
        at = key.find(".", at + 1)


def strip_wrappers(name: str) -> str:
    """A parameter name without the parts that module wrappers add: torch.compile, activation checkpointing, FSDP1."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(slots=True)
class DcpParamGroup:
    """Hyper-parameters, and the optimizer's names of its parameters (or their numbers as text)."""

    hyper: dict[str, Any]
    names: list[str]


@dataclass(slots=True)
class EntryValues:
    """Reads the small values of a checkpoint."""

    archives: TensorArchives
    files: SourceFiles
    objects: ObjectArchives
    unread: list[DcpEntry] = field(default_factory=list)  # tensors in place of plain values

    def plain(self, entry: DcpEntry) -> Any:
        """The value of an object or of a one-element tensor. A larger tensor is added to `unread`; returns None."""
        if isinstance(entry, DcpObject):
            return self.objects.value(entry)
        number = self.number(entry)
        if number is None:
            self.unread.append(entry)
        return number

    def number(self, entry: DcpTensor) -> float | int | bool | None:
        """The number in a one-element tensor; None for anything else."""
        if len(entry.chunks) != 1:
            return None
        (box, item), *_ = entry.chunks.items()
        if box.numel != 1 or item.file in self.archives.lost:
            return None
        fragment = self.archives.locate(entry, box, item, self.files)
        return scalar_value(self.files.read(item.file, fragment.offset, entry.dtype.itemsize), entry.dtype)


def read_groups(optimizer: OptimizerKeys, values: EntryValues) -> list[DcpParamGroup]:
    """The groups of an optimizer, in order. Sets `optimizer.listed`."""
    if optimizer.whole is not None:
        groups = _from_object(optimizer.whole, values)
    elif optimizer.flattened:
        groups = _from_parameters(optimizer.fields, values.plain)
    else:
        groups = []
        for number, fields in optimizer.fields.items():
            listed = values.plain(fields[PARAMS]) if PARAMS in fields and not _is_lost(fields[PARAMS]) else []
            hyper = {name: values.plain(entry) for name, entry in fields.items() if name != PARAMS}
            groups.append(DcpParamGroup(hyper, _names(listed, f"group {number}")))
    optimizer.listed = [name for group in groups for name in group.names]
    return groups


def without_gradients(optimizer: OptimizerKeys, groups: Iterable[DcpParamGroup]) -> list[str]:
    """Parameters without state in groups where others have one: torch's optimizers skip parameters without gradient,
    such as frozen ones."""
    return [
        name
        for group in groups
        if any(other in optimizer.states for other in group.names)
        for name in group.names
        if name not in optimizer.states
    ]


def _from_object(entry: DcpObject, values: EntryValues) -> list[DcpParamGroup]:
    """The groups of older torch versions, which store the list as one object."""
    if _is_lost(entry):
        return []
    listed = values.objects.value(entry)
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise IntegrityError(f"{values.archives.root}: {entry.key} is not a list of parameter groups")
    return [
        DcpParamGroup(
            {str(name): value for name, value in group.items() if name != PARAMS},
            _names(group.get(PARAMS, []), f"group {number}"),
        )
        for number, group in enumerate(listed)
    ]


def _from_parameters(
    fields: Mapping[int | str, Mapping[str, DcpEntry]], plain: Callable[[DcpEntry], Any]
) -> list[DcpParamGroup]:
    """The groups of the flattened form, which repeats the fields for every parameter: equal fields are one group."""
    groups: dict[str, DcpParamGroup] = {}
    for name, table in fields.items():
        hyper = {field_name: plain(entry) for field_name, entry in table.items()}
        groups.setdefault(repr(sorted(hyper.items())), DcpParamGroup(hyper, [])).names.append(str(name))
    return list(groups.values())


def _is_lost(entry: DcpEntry) -> bool:
    return isinstance(entry, DcpObject) and not entry.items


def _names(listed: Any, where: str) -> list[str]:
    if not isinstance(listed, Iterable) or isinstance(listed, (str, bytes)):
        raise IntegrityError(f"{where}: its list of parameters is {listed!r}")
    return [str(name) for name in listed]
