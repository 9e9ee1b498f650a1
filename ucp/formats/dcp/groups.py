"""Parameter groups: from the entries of an optimizer to hyper-parameters and parameter names, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ucp.errors import IntegrityError
from ucp.files.local import SourceFiles
from ucp.formats.dcp.keys import PARAMS, OptimizerKeys
from ucp.formats.distcp_archives import Archives, Objects
from ucp.formats.distcp_index import Entry, ObjectEntry, TensorEntry
from ucp.model.numbers import scalar_value


@dataclass(slots=True)
class Group:
    """Hyper-parameters, and the parameters as the optimizer calls them (names, or positions as text)."""

    hyper: dict[str, Any]
    names: list[str]


@dataclass(slots=True)
class Values:
    """Reads the small values of a checkpoint."""

    archives: Archives
    files: SourceFiles
    objects: Objects
    unread: list[Entry] = field(default_factory=list)  # tensors where a plain value was expected

    def plain(self, entry: Entry) -> Any:
        """An object's value, or the number in a one-element tensor. Anything larger goes to `unread` and gives None."""
        if isinstance(entry, ObjectEntry):
            return self.objects.value(entry)
        number = self.number(entry)
        if number is None:
            self.unread.append(entry)
        return number

    def number(self, entry: TensorEntry) -> float | int | bool | None:
        """The number in a one-element tensor; None for anything else."""
        if len(entry.chunks) != 1:
            return None
        (box, item), *_ = entry.chunks.items()
        if box.numel != 1:
            return None
        fragment = self.archives.locate(entry, box, item, self.files)
        return scalar_value(self.files.read(item.file, fragment.offset, entry.dtype.itemsize), entry.dtype)


def read_groups(optimizer: OptimizerKeys, values: Values) -> list[Group]:
    """The groups of an optimizer, in order; the optimizer is told what they list."""
    groups = _read(optimizer, values)
    optimizer.listed = [name for group in groups for name in group.names]
    return groups


def without_gradients(optimizer: OptimizerKeys, groups: Iterable[Group]) -> list[str]:
    """Parameters that have no state where others of their group have: torch's optimizers pass over those that never
    had a gradient, as frozen ones do."""
    return [
        name
        for group in groups
        if any(other in optimizer.states for other in group.names)
        for name in group.names
        if name not in optimizer.states
    ]


def _read(optimizer: OptimizerKeys, values: Values) -> list[Group]:
    if optimizer.whole is not None:
        return _from_object(optimizer.whole, values)
    if optimizer.flattened:
        return _from_parameters(optimizer.fields, values.plain)
    groups = []
    for number, fields in optimizer.fields.items():
        listed = values.plain(fields[PARAMS]) if PARAMS in fields else []
        hyper = {name: values.plain(entry) for name, entry in fields.items() if name != PARAMS}
        groups.append(Group(hyper, _names(listed, f"group {number}")))
    return groups


def _from_object(entry: ObjectEntry, values: Values) -> list[Group]:
    """Older torch versions keep the list of groups as one object."""
    listed = values.objects.value(entry)
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise IntegrityError(f"{values.archives.root}: {entry.key} is no list of parameter groups")
    return [
        Group(
            {str(name): value for name, value in group.items() if name != PARAMS},
            _names(group.get(PARAMS, []), f"group {number}"),
        )
        for number, group in enumerate(listed)
    ]


def _from_parameters(fields: Mapping[int | str, Mapping[str, Entry]], plain: Callable[[Entry], Any]) -> list[Group]:
    """The flattened form repeats the fields for every parameter: those with equal values are a group again."""
    groups: dict[str, Group] = {}
    for name, table in fields.items():
        hyper = {field_name: plain(entry) for field_name, entry in table.items()}
        groups.setdefault(repr(sorted(hyper.items())), Group(hyper, [])).names.append(str(name))
    return list(groups.values())


def _names(listed: Any, where: str) -> list[str]:
    if not isinstance(listed, Iterable) or isinstance(listed, (str, bytes)):
        raise IntegrityError(f"{where}: its list of parameters is {listed!r}")
    return [str(name) for name in listed]
