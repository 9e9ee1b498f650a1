"""Where replay begins: the states of the base that a log goes on from, and whether the two belong together."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.log.kinds import logged_kind
from ucp.log.schema import LoggedParameter
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Parameter
from ucp.model.dtypes import DType
from ucp.replay.chunks import Origin
from ucp.replay.kernels import PARAM
from ucp.replay.timeline import Update

# Element type of a counter → how `struct` packs it.
COUNTER_FORMS: Final = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


class Origins:
    """The parameters of a log, by their numbers there, in one base. Counters are read from `files`."""

    def __init__(
        self,
        base: Checkpoint,
        files: SourceFiles,
        logged: Sequence[LoggedParameter],
        step: int,
        steps: Mapping[str, int],
    ) -> None:
        """`base` is of `step`, but for the parameters in `steps`."""
        self._base = base
        self._files = files
        self._logged = logged
        self._step = step
        self._steps = steps
        self._aliases = base.aliases()
        self._found: dict[int, Origin] = {}
        self._counts_some = any(STEP in parameter.atoms for parameter in base.parameters.values())

    def of(self, number: int, updates: Sequence[Update], group: Sequence[Update]) -> Origin:
        """Parameter `number` of the log, in the base.

        `updates` are those of its optimizer tensor in the span, `group` those of any tensor of its group.
        """
        if number not in self._found:
            self._found[number] = self._look_up(self._parameter(self._logged[number]), updates, group)
        return self._found[number]

    def check(self, origins: Iterable[Origin], dtype: DType, updates: Sequence[Update], stream: int) -> None:
        """The base must be the state that the log goes on from: of the same element type, and with no more updates."""
        for origin in origins:
            held = origin.atoms[PARAM]
            if held.dtype != dtype:
                raise InconsistentError(
                    f"parameter {origin.name}: the optimizer stepped it in {dtype}, the base has it in {held.dtype}",
                    hint="take a base with masters in full precision",
                )
            after = next((update for update in updates if update.step > origin.step), None)
            if after is not None and after.before >= 0 and origin.counter > after.before:
                raise InconsistentError(
                    f"parameter {origin.name}: its optimizer had counted {origin.counter} updates in {self._base.root},"
                    f" and {after.before} before step {after.step} of the log (stream {stream})",
                    hint="the base is not of this run, or not of the step that it says",
                )

    def _parameter(self, logged: LoggedParameter) -> Parameter:
        found = self._base.parameters.get(self._aliases.get(logged.name, logged.name))
        if found is None:
            raise InconsistentError(
                f"{self._base.root}: has no parameter {logged.name}, which the log trains",
                hint="give a base of the same run",
            )
        if found.shape != logged.shape:
            raise InconsistentError(
                f"parameter {logged.name}: shape {list(found.shape)} in {self._base.root}, {list(logged.shape)} in the"
                " log",
                hint="give a base of the same run",
            )
        return found

    def _look_up(self, parameter: Parameter, updates: Sequence[Update], group: Sequence[Update]) -> Origin:
        atoms = {
            logged_kind(kind): atom
            for kind, atom in parameter.atoms.items()
            if kind not in (WEIGHT, MASTER) and not is_counter(atom)
        }
        held = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
        if held is None:
            raise InconsistentError(
                f"parameter {parameter.name}: {self._base.root} has neither weight nor master of it",
                hint="take a base with all states: --only and --exclude leave some out",
            )
        step = self._steps.get(parameter.name, self._step)
        counter = self._counter(parameter)
        if counter is None:
            began = _count_before(group, step)
            if not atoms and (began <= 0 or self._counts_some):
                counter = 0  # it had no gradient yet: the count of a step is the most of its group's
            else:
                counter = max(_count_before(updates, step), 0)
                if counter and not atoms:
                    raise InconsistentError(
                        f"parameter {parameter.name}: {self._base.root} has no optimizer states of it, after"
                        f" {counter} updates",
                        hint="take a base with all states: --only and --exclude leave some out",
                    )
        return Origin(parameter.name, step, counter, {PARAM: held, **atoms})

    def _counter(self, parameter: Parameter) -> int | None:
        """The updates that the optimizer had counted for it, where the base has such a count."""
        atom = parameter.atoms.get(STEP)
        if atom is None or atom.numel != 1 or atom.dtype.name not in COUNTER_FORMS:
            return None
        fragment = atom.fragments[0]
        size = fragment.dtype.itemsize
        data = fragment.inline or self._files.read(fragment.file, fragment.offset, size)
        return int(struct.unpack(COUNTER_FORMS[fragment.dtype.name], data)[0])


def is_counter(atom: Atom) -> bool:
    """Is it the number of updates, and not one for every element?"""
    return atom.kind == STEP and atom.numel == 1


def _count_before(updates: Sequence[Update], step: int) -> int:
    """Updates that the optimizer had counted before the first one after `step`; -1 where nobody says."""
    return next((update.before for update in updates if update.step > step), -1)
