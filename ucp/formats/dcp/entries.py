"""What a state dict to write holds: model, optimizer and extras, each value at its path."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.errors import UsageError
from ucp.formats.dcp.keys import GROUPS, PARAMS, STATE
from ucp.formats.dcp.nesting import flatten
from ucp.formats.dcp.own_facts import facts_to_write
from ucp.formats.dcp.style import Style
from ucp.formats.dcp.torch_optimizers import NEEDS_STEP, complete_fields
from ucp.formats.distcp_index import METADATA, KeyPath
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Note, Parameter, ParamGroup
from ucp.model.dtypes import FLOAT32, DType
from ucp.model.region import Region

_EXTRAS: Final = "extras"
_DEEPEST_GROUPS: Final = 3
_PLAIN: Final = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class NewEntry:
    """One value of the state dict: an atom, or anything that a pickle can hold."""

    folder: str
    path: KeyPath
    value: Any


class Entries:
    """Makes the entries for a source in a style. Iterate once; `notes` are complete afterwards."""

    def __init__(self, source: Checkpoint, style: Style, dtype: DType | None) -> None:
        self.source = source
        self.style = style
        self.dtype = dtype
        self.notes: list[Note] = []

    def __iter__(self) -> Iterator[NewEntry]:
        yield from self._model()
        yield from self._states()
        if self.style.flattened:
            yield from self._flat_groups()
        else:
            yield from self._numbered_groups()
        yield from self._extras()
        for path, value in facts_to_write(self.source).items():
            yield NewEntry(self.style.model.folder, path, value)

    # model ------------------------------------------------------------------------------------------------------

    def _model(self) -> Iterator[NewEntry]:
        place = self.style.model
        for parameter in self.source.parameters.values():
            atom = self._weight(parameter)
            if atom is not None:
                for name in (parameter.name, *parameter.aliases):
                    yield NewEntry(place.folder, (*place.prefix, name), atom)

    def _weight(self, parameter: Parameter) -> Atom | None:
        """The module's tensor: FSDP2 trains on the master itself, so that is what it should load."""
        best = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
        if best is None:
            return None
        if self.dtype is not None and best.dtype.family == "float" and parameter.role != "buffer":
            return best if best.dtype == self.dtype else replace(best, kind=WEIGHT, dtype=self.dtype)
        return best

    # optimizer --------------------------------------------------------------------------------------------------

    def _states(self) -> Iterator[NewEntry]:
        for parameter in self.source.parameters.values():
            states = {kind: atom for kind, atom in parameter.atoms.items() if kind not in (WEIGHT, MASTER)}
            if STEP in states:
                states[STEP] = _as_step(states[STEP])
            elif states.keys() & NEEDS_STEP:
                count = self._steps_of(parameter)
                if count is None:
                    self._note("no-step", f"the source does not say how many steps {parameter.name} has taken")
                else:
                    data = struct.pack("<f", count)
                    fragment = Fragment(Region.all_of(()), "", 0, FLOAT32, inline=data)
                    states[STEP] = Atom(parameter.name, STEP, (), FLOAT32, (fragment,))
            for kind, atom in states.items():
                yield self._optimizer_entry((STATE, parameter.name, kind), atom)

    def _steps_of(self, parameter: Parameter) -> int | None:
        hyper = self.source.groups[parameter.group].hyper if parameter.group is not None else {}
        told = hyper.get(STEP)
        return told if type(told) is int else self.source.step

    def _optimizer_entry(self, path: KeyPath, value: Any) -> NewEntry:
        place = self.style.optimizer
        if self.style.flattened:
            path = (".".join(map(str, path)),)
        return NewEntry(place.folder, (*place.prefix, *path), value)

    def _numbered_groups(self) -> Iterator[NewEntry]:
        for number, group in enumerate(self.source.groups):
            for name, value in self._fields(number, group).items():
                yield self._optimizer_entry((GROUPS, number, name), value)
            yield self._optimizer_entry((GROUPS, number, PARAMS), list(group.names))

    def _flat_groups(self) -> Iterator[NewEntry]:
        for number, group in enumerate(self.source.groups):
            fields = self._fields(number, group)
            for parameter in group.names:
                for name, value in fields.items():
                    yield self._optimizer_entry((GROUPS, parameter, name), value)

    def _fields(self, number: int, group: ParamGroup) -> dict[str, Any]:
        """The hyper-parameters of a group, complete for torch's optimizer of the same states."""
        kinds = {kind for name in group.names[:8] for kind in self.source.parameters[name].atoms}
        plain = {name: value for name, value in group.hyper.items() if _is_plain(value)}
        if len(plain) < len(group.hyper):
            left = sorted(group.hyper.keys() - plain.keys())
            self._note("hyper-left-out", f"group {number}: {', '.join(left)} are no plain values and are left out")
        fields, filled = complete_fields(plain, kinds)
        if filled:
            self._note("hyper-filled-in", f"group {number}: torch's defaults stand for {', '.join(filled)}")
        return fields

    # extras -----------------------------------------------------------------------------------------------------

    def _extras(self) -> Iterator[NewEntry]:
        folders = dict.fromkeys((self.style.model.folder, self.style.optimizer.folder))
        foreign: dict[str, Any] = {}
        for file, tree in self.source.extras.trees.items():
            if not file.endswith(METADATA):
                if isinstance(tree, dict):
                    for key, value in tree.items():
                        foreign.setdefault(str(key), value)
                else:
                    foreign.setdefault(file, tree)
                continue
            folder = file.removesuffix(METADATA)
            for path, value in flatten(tree):
                yield NewEntry(folder if folder in folders else self.style.model.folder, path, value)
        yield from self._foreign(foreign)

    def _foreign(self, values: dict[str, Any]) -> Iterator[NewEntry]:
        """Plain values of another framework's files, for whoever wants to ask for them; its objects stay behind.

        So do its own groups: whoever reads this folder would take them for a second optimizer.
        """
        values = {key: value for key, value in values.items() if key != GROUPS}
        if self.source.groups:
            values = {key: value for key, value in values.items() if not _has_groups(value)}
        left = [key for key, value in values.items() if _has_groups(value) or not _is_plain(value)]
        for path, value in flatten({_EXTRAS: {key: value for key, value in values.items() if key not in left}}):
            yield NewEntry(self.style.model.folder, path, value)
        if left:
            names = ", ".join(sorted(left))
            self._note("extras-left-out", f"not plain values, which is all that this target can hold: {names}")

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(Note(kind, text))


def _as_step(atom: Atom) -> Atom:
    """torch counts steps in float32."""
    if atom.numel != 1:
        raise UsageError(f"parameter {atom.name}: its step has the shape {list(atom.shape)}")
    return atom if atom.dtype == FLOAT32 else replace(atom, dtype=FLOAT32)


def _has_groups(value: Any, depth: int = 0) -> bool:
    """Whether an optimizer's groups are in it: at its top, below what wraps optimizers, or in a chain of them."""
    if depth > _DEEPEST_GROUPS:
        return False
    if isinstance(value, dict) and GROUPS in value:
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_groups(item, depth + 1) for item in items)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in _PLAIN or isinstance(value, Atom):
        return True
    if depth > 20:
        return False
    if type(value) in (list, tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item, depth + 1) for key, item in value.items())
    return False
