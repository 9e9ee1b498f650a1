"""Where replay begins: the states of the base that a log goes on from, and whether the two belong together.

One span of a log upon one base: which optimizer tensors there are, and where the parameters' states lie in them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ucp.core.box import intersect, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import BY_NAME, FLOAT32, DType
from ucp.core.region import Region
from ucp.errors import InconsistentError, UsageError
from ucp.log.codecs import EncodedBlock
from ucp.log.reader import EpochSpan
from ucp.log.stream_schema import PARAM, LogBlock, LoggedParameter, kind_of_logged, logged_kind
from ucp.replay.exactness import why_not_replayed
from ucp.replay.kernels import ReplayKernel
from ucp.replay.logged_states import LoggedStates, logged_atom
from ucp.replay.logged_updates import OptimizerUpdate, StreamUpdates, all_steps_skipped
from ucp.replay.replayer import BaseParameter, ReplayedTensor, computed_file_name
from ucp.storage.local import SourceFiles

# Element type of a counter → how `struct` packs it.
COUNTER_FORMS: Final = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


class BaseParameters:
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
        self._found: dict[int, BaseParameter] = {}
        self._counts_some = any(STEP in parameter.atoms for parameter in base.parameters.values())

    def of(self, number: int, updates: Sequence[OptimizerUpdate], group: Sequence[OptimizerUpdate]) -> BaseParameter:
        """Parameter `number` of the log, in the base.

        `updates` are those of its optimizer tensor in the span, `group` those of any tensor of its group.
        """
        if number not in self._found:
            self._found[number] = self._look_up(self._parameter(self._logged[number]), updates, group)
        return self._found[number]

    def check(
        self, origins: Iterable[BaseParameter], dtype: DType, updates: Sequence[OptimizerUpdate], stream: int
    ) -> None:
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

    def _look_up(
        self, parameter: Parameter, updates: Sequence[OptimizerUpdate], group: Sequence[OptimizerUpdate]
    ) -> BaseParameter:
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
        return BaseParameter(parameter.name, step, counter, {PARAM: held, **atoms})

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


def _count_before(updates: Sequence[OptimizerUpdate], step: int) -> int:
    """Updates that the optimizer had counted before the first one after `step`; -1 where nobody says."""
    return next((update.before for update in updates if update.step > step), -1)


class SpanBuilder:
    """Tensors and parameters of one span upon one base."""

    def __init__(
        self, base: Checkpoint, span: EpochSpan, kernel: ReplayKernel | None, step: int, steps: Mapping[str, int]
    ) -> None:
        """`base` is of `step`, but for the parameters in `steps`."""
        self.base = base
        self._step = step
        self.span = span
        self.kernel = kernel
        self.manifest = span.epoch.manifest
        self._files = SourceFiles(base.root, computed=base.computed)
        self._own_steps = steps
        self._origins = BaseParameters(base, self._files, self.manifest.parameters, step, steps)
        self.stored: dict[int, LoggedStates] = {}  # by stream, once `tensors` was called
        self.logged: dict[str, EncodedBlock] = {}  # computed files that are in the log as they are

    def tensors(self) -> list[ReplayedTensor]:
        """Every optimizer tensor of the span."""
        with self._files:
            return list(self._tensors())

    def _tensors(self) -> Iterator[ReplayedTensor]:
        span = self.span
        for number, stream in sorted(span.epoch.streams.items()):
            timelines = StreamUpdates(span, stream)
            stored = self.stored[number] = LoggedStates(stream, self.manifest.state_kinds)
            for index, schema in enumerate(stream.schema.tensors):
                blocks = stream.schema.blocks_of(index)
                updates = timelines.of_tensor(index)
                group = timelines.of_group(schema.group)
                origins = {block.parameter: self._origins.of(block.parameter, updates, group) for block in blocks}
                if self.kernel is None and not stored and span.first <= span.last:
                    raise self._no_kernel()
                dtype = BY_NAME[schema.dtype]
                self._origins.check(origins.values(), dtype, updates, stream.number)
                yield ReplayedTensor(
                    computed_file_name(span.epoch.number, number, index, span.last),
                    stream,
                    index,
                    schema.numel,
                    dtype,
                    self.kernel,
                    self._kinds(origins.values(), dtype, updates, stored, blocks),
                    blocks,
                    origins,
                    updates,
                    stored,
                    span.last,
                    self._resumed_at(timelines, schema.group),
                )

    def _no_kernel(self) -> UsageError:
        return UsageError(
            f"{self.span.epoch.folder}: the optimizer {self.manifest.optimizer} ({self.manifest.kernel.id}) cannot be"
            f" replayed ({why_not_replayed(self.manifest.kernel)}), and the log does not contain its states",
            hint='only the steps of its checkpoints are available; ucp.record(…, what="state") logs states as well',
        )

    def _resumed_at(self, timelines: StreamUpdates, group: int) -> int:
        """Updates that the optimizer had counted when the epoch began, where its first steps are still there."""
        for step in self.span.epoch.steps:
            record = timelines.stream.record(step)
            scalars = next((one for one in record.groups if one.group == group), None)
            if not record.skipped and scalars is not None and scalars.opt_step >= 0:
                return scalars.opt_step
        return 0

    def _kinds(
        self,
        origins: Iterable[BaseParameter],
        dtype: DType,
        updates: Sequence[OptimizerUpdate],
        stored: LoggedStates,
        blocks: Sequence[LogBlock],
    ) -> dict[str, DType]:
        """The states that there are after the span, with their element types."""
        held = {kind: atom.dtype for origin in origins for kind, atom in origin.atoms.items() if kind != PARAM}
        if self.kernel is None:
            logged = {
                kind: found for block in blocks[:1] for kind, found in stored.kinds(block.id, self.span.last).items()
            }
            if not logged:  # no step has told of any: those of the base, but for what has a shape of its own
                logged = {
                    kind: atom.dtype
                    for origin in origins
                    for kind, atom in origin.atoms.items()
                    if atom.shape == origin.atoms[PARAM].shape
                }
            return {PARAM: dtype, **{kind: found for kind, found in logged.items() if kind != PARAM}}
        made = (kind for update in updates for kind in self.kernel.kinds(update.hyper))
        kinds = dict.fromkeys(made if updates else held)  # momentum may be turned on in any step
        return {PARAM: dtype, **{kind: held.get(kind, dtype) for kind in kinds}}

    # ------------------------------------------------------------------------------------------------------------------

    def parameters(self, tensors: Sequence[ReplayedTensor]) -> dict[str, Parameter]:
        """The base's parameters, the logged ones with atoms in computed files."""
        held: dict[str, list[tuple[ReplayedTensor, LogBlock]]] = {}
        for tensor in tensors:
            for block in tensor.blocks:
                held.setdefault(tensor.origins[block.parameter].name, []).append((tensor, block))
        self._check_complete(held)
        if self._stood_still():
            return dict(self.base.parameters)  # also weights that are not their masters, cast
        return {
            name: self._computed(parameter, held[name]) if name in held else parameter
            for name, parameter in self.base.parameters.items()
        }

    def _stood_still(self) -> bool:
        """Has nothing happened to any parameter since the base, in the steps of the span?"""
        span, first = self.span, min([self._step, *self._own_steps.values()])
        return span.first <= span.last and all(
            all_steps_skipped(stream, max(first, span.first - 1), span.last) for stream in span.epoch.streams.values()
        )

    def _check_complete(self, held: dict[str, list[tuple[ReplayedTensor, LogBlock]]]) -> None:
        # What the optimizer has, and the recorder chose not to log, was frozen.
        resting = {name for group in self.manifest.groups for name in group.names}
        resting -= {parameter.name for parameter in self.manifest.parameters}
        for parameter in self.base.parameters.values():
            found = held.get(parameter.name)
            if found is None:
                known = parameter.name in resting or parameter.numel == 0
                if parameter.role == "trained" and parameter.group is not None and not known:
                    raise InconsistentError(
                        f"parameter {parameter.name}: is trained, but the log knows nothing of it",
                        hint="a log of all ranks is needed; convert the base as it is without --log",
                    )
                continue
            inside = whole(parameter.shape)
            count = sum(
                common.numel
                for _, block in found
                for piece in block.region.pieces()
                if (common := intersect(piece.box, inside)) is not None
            )
            if count != parameter.numel:
                raise InconsistentError(
                    f"parameter {parameter.name}: the log has {count} of its {parameter.numel} elements",
                    hint="a log of all ranks is needed: copy the streams of every rank into one folder",
                )

    def _computed(self, parameter: Parameter, held: Sequence[tuple[ReplayedTensor, LogBlock]]) -> Parameter:
        first = held[0][0]
        atoms: dict[str, Atom] = {}
        for kind, atom in parameter.atoms.items():
            if kind in (WEIGHT, MASTER):
                # The module's copy is the master, cast.
                fragments = _fragments(held, PARAM)
                atoms[kind] = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            elif is_counter(atom):
                atoms[kind] = self._stepped(atom, first, parameter)
            elif logged_kind(kind) in first.kinds:
                fragments = _fragments(held, logged_kind(kind))
                atoms[kind] = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            else:
                atoms[kind] = atom
        for name, dtype in first.kinds.items():
            kind = kind_of_logged(name)
            if name != PARAM and kind not in atoms:
                atoms[kind] = Atom(parameter.name, kind, parameter.shape, dtype, _fragments(held, name), computed=True)
        if STEP not in atoms and self._counts(first.updates):
            blank = Atom(parameter.name, STEP, (), FLOAT32, ())
            atoms[STEP] = self._stepped(blank, first, parameter)
        if first.stored:
            for kind, (shape, value) in first.stored.own(first.blocks[0].id, first.last).items():
                file = f"{first.file}/own/{kind}"
                atoms[kind] = logged_atom(parameter.name, kind, shape, value, file)
                self.logged[file] = value
        return replace(parameter, atoms=atoms)

    def _counts(self, updates: Sequence[OptimizerUpdate]) -> bool:
        """Does the optimizer keep the number of its updates?"""
        if not updates:
            return False
        return updates[-1].before >= 0 if self.kernel is None else self.kernel.optimizer.counts_updates

    def _stepped(self, atom: Atom, tensor: ReplayedTensor, parameter: Parameter) -> Atom:
        """The optimizer's counter after the span."""
        origin = next(origin for origin in tensor.origins.values() if origin.name == parameter.name)
        count = origin.counter + sum(update.step > origin.step for update in tensor.updates)
        data = struct.pack(COUNTER_FORMS[atom.dtype.name], count)
        region = Region.all_of(atom.shape)
        return replace(atom, fragments=(Fragment(region, "", 0, atom.dtype, inline=data),), replicas=(), combine="copy")


def _fragments(held: Sequence[tuple[ReplayedTensor, LogBlock]], kind: str) -> tuple[Fragment, ...]:
    """Where a state of a parameter lies in computed files; neighbours joined."""
    found: list[Fragment] = []
    for tensor, block in held:
        dtype = tensor.kinds[kind]
        file, offset = f"{tensor.file}/{kind}", block.offset * dtype.itemsize
        before = found[-1] if found else None
        if (
            before is not None
            and before.file == file
            and before.offset + before.nbytes == offset
            and before.region.boxes == block.region.boxes
            and before.region.stop == block.region.start
        ):
            region = Region(before.region.boxes, before.region.start, block.region.stop)
            found[-1] = before._replace(region=region)
        else:
            found.append(Fragment(block.region, file, offset, dtype, tensor.stream.schema.rank))
    return tuple(found)
