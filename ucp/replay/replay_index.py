"""The index of a replay: one span of a log applied to one base, which must belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ucp.core.box import intersect, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import BY_NAME, FLOAT32, DType, scalar_value
from ucp.core.region import Region
from ucp.errors import ImpossibleError, InconsistentError
from ucp.log.codecs import EncodedBlock
from ucp.log.reader import EpochSpan, LogStream
from ucp.log.stream_schema import PARAM, LogBlock, kind_of_logged, logged_kind
from ucp.replay.exactness import why_not_replayed
from ucp.replay.gradients import OptimizerUpdate, StreamUpdates, all_steps_skipped
from ucp.replay.kernels import ReplayKernel
from ucp.replay.logged_states import LoggedStates, shaped_atom, with_number
from ucp.replay.replayer import BaseParameter, ReplayedTensor, computed_file_name
from ucp.storage.local import SourceFiles


def is_counter(atom: Atom) -> bool:
    """Is it the number of updates, and not a state with one value per element?"""
    return atom.kind == STEP and atom.numel == 1


def _count_before(updates: Sequence[OptimizerUpdate], step: int) -> int:
    """Updates that the optimizer had counted before the first one after `step`; -1 if unknown."""
    return next((update.before for update in updates if update.step > step), -1)


class SpanBuilder:
    """Lists the optimizer tensors of a span, and where the states of each parameter of the base are in them."""

    def __init__(
        self, base: Checkpoint, span: EpochSpan, kernel: ReplayKernel | None, step: int, steps: Mapping[str, int]
    ) -> None:
        """`base` is of `step`, except for the parameters in `steps`."""
        self.base = base
        self._step = step
        self.span = span
        self.kernel = kernel
        self.manifest = span.epoch.manifest
        self._files = SourceFiles(base.root, computed=base.computed)
        self._steps = steps
        self._in_base: dict[int, BaseParameter] = {}  # by number in the log
        self._aliases = base.aliases()
        self._has_counters = any(STEP in parameter.atoms for parameter in base.parameters.values())
        self.stored: dict[int, LoggedStates] = {}  # by stream, once `tensors` was called
        self.logged: dict[str, EncodedBlock] = {}  # computed files whose content is in the log

    def tensors(self) -> list[ReplayedTensor]:
        """Every optimizer tensor of the span."""
        with self._files:
            return list(self._tensors())

    def _tensors(self) -> Iterator[ReplayedTensor]:
        span = self.span
        for number, stream in sorted(span.epoch.streams.items()):
            of_stream = StreamUpdates(span, stream)
            stored = self.stored[number] = LoggedStates(stream, self.manifest.state_kinds)
            for index, schema in enumerate(stream.schema.tensors):
                blocks = stream.schema.blocks_of(index)
                updates = of_stream.of_tensor(index)
                group = of_stream.of_group(schema.group)
                in_base = {block.parameter: self._find_in_base(block.parameter, updates, group) for block in blocks}
                if self.kernel is None and not stored and span.first <= span.last:
                    optimizer = f"{self.manifest.optimizer} ({self.manifest.kernel.id})"
                    raise ImpossibleError(
                        f"{span.epoch.folder}: the optimizer {optimizer} cannot be replayed"
                        f" ({why_not_replayed(self.manifest.kernel)}), and the log does not contain its states",
                        hint='only the steps of its checkpoints are available; ucp.record(…, what="state") logs states'
                        " as well",
                    )
                dtype = BY_NAME[schema.dtype]
                self._check_base(in_base.values(), dtype, updates, stream.number)
                yield ReplayedTensor(
                    computed_file_name(span.epoch.number, number, index, span.last),
                    stream,
                    index,
                    schema.numel,
                    dtype,
                    self.kernel,
                    self._kinds(list(in_base.values()), dtype, updates, stored, blocks),
                    blocks,
                    in_base,
                    updates,
                    stored,
                    span.last,
                    self._resumed_at(stream, schema.group),
                )

    def _resumed_at(self, stream: LogStream, group: int) -> int:
        """Updates that the optimizer had counted at the start of the epoch, if its first steps are still in the log."""
        for step in self.span.epoch.steps:
            record = stream.record(step)
            scalars = next((one for one in record.groups if one.group == group), None)
            if not record.skipped and scalars is not None and scalars.opt_step >= 0:
                return scalars.opt_step
        return 0

    def _kinds(
        self,
        in_base: Sequence[BaseParameter],
        dtype: DType,
        updates: Sequence[OptimizerUpdate],
        stored: LoggedStates,
        blocks: Sequence[LogBlock],
    ) -> dict[str, DType]:
        """The states after the span, with their dtypes."""
        known = {kind: atom.dtype for parameter in in_base for kind, atom in parameter.atoms.items() if kind != PARAM}
        if self.kernel is None:
            logged = stored.kinds(blocks[0].id, self.span.last) if blocks else {}
            if not logged:  # then those of the base that have the parameter's shape
                logged = {
                    kind: atom.dtype
                    for parameter in in_base
                    for kind, atom in parameter.atoms.items()
                    if atom.shape == parameter.atoms[PARAM].shape
                }
            return {PARAM: dtype, **{kind: found for kind, found in logged.items() if kind != PARAM}}
        created = (kind for update in updates for kind in self.kernel.kinds(update.hyper))
        kinds = dict.fromkeys(created if updates else known)  # momentum may be turned on in any step
        return {PARAM: dtype, **{kind: known.get(kind, dtype) for kind in kinds}}

    def parameters(self, tensors: Sequence[ReplayedTensor]) -> dict[str, Parameter]:
        """The base's parameters; the atoms of the logged ones are in computed files."""
        places: dict[str, list[tuple[ReplayedTensor, LogBlock]]] = {}
        for tensor in tensors:
            for block in tensor.blocks:
                places.setdefault(tensor.base_parameters[block.parameter].name, []).append((tensor, block))
        self._check_complete(places)
        if self._is_unchanged():
            return dict(self.base.parameters)  # and not weights cast from masters, which may differ
        return {
            name: self._computed(parameter, places[name]) if name in places else parameter
            for name, parameter in self.base.parameters.items()
        }

    def _is_unchanged(self) -> bool:
        """Were all steps of the span since the base skipped?"""
        span, first = self.span, min([self._step, *self._steps.values()])
        return span.first <= span.last and all(
            all_steps_skipped(stream, max(first, span.first - 1), span.last) for stream in span.epoch.streams.values()
        )

    def _check_complete(self, places: dict[str, list[tuple[ReplayedTensor, LogBlock]]]) -> None:
        # The recorder does not log parameters of the optimizer that are frozen.
        frozen = {name for group in self.manifest.groups for name in group.names}
        frozen -= {parameter.name for parameter in self.manifest.parameters}
        for parameter in self.base.parameters.values():
            found = places.get(parameter.name)
            if found is None:
                known = parameter.name in frozen or parameter.numel == 0
                if parameter.role == "trained" and parameter.group is not None and not known:
                    raise InconsistentError(
                        f"parameter {parameter.name}: is trained, but not in the log",
                        hint="the logs of all ranks are needed; without --log, the base itself is converted",
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
                    hint="the logs of all ranks are needed: copy the streams of every rank into one folder",
                )

    def _computed(self, parameter: Parameter, places: Sequence[tuple[ReplayedTensor, LogBlock]]) -> Parameter:
        first = places[0][0]
        atoms: dict[str, Atom] = {}
        for kind, atom in parameter.atoms.items():
            logged = PARAM if kind in (WEIGHT, MASTER) else logged_kind(kind)  # the module's weight is the master, cast
            if is_counter(atom):
                atoms[kind] = self._advanced_counter(atom, first, parameter)
            elif logged in first.kinds:
                fragments = _fragments(places, logged)
                atoms[kind] = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            else:
                atoms[kind] = atom
        for name, dtype in first.kinds.items():
            kind = kind_of_logged(name)
            if name != PARAM and kind not in atoms:
                atoms[kind] = Atom(
                    parameter.name, kind, parameter.shape, dtype, _fragments(places, name), computed=True
                )
        keeps_count = self.kernel is not None and self.kernel.optimizer.counts_updates
        if self.kernel is None and first.updates:
            keeps_count = first.updates[-1].before >= 0
        if STEP not in atoms and first.updates and keeps_count:
            blank = Atom(parameter.name, STEP, (), FLOAT32, ())
            atoms[STEP] = self._advanced_counter(blank, first, parameter)
        if first.stored:
            for kind, (shape, value) in first.stored.shaped(first.blocks[0].id, first.last).items():
                file = f"{first.file}/own/{kind}"
                inline = None if shape else value.bits().tobytes()
                atoms[kind] = shaped_atom(parameter.name, kind, shape, value.dtype, file=file, inline=inline)
                self.logged[file] = value
        return replace(parameter, atoms=atoms)

    def _advanced_counter(self, atom: Atom, tensor: ReplayedTensor, parameter: Parameter) -> Atom:
        """The optimizer's counter after the span."""
        before = next(one for one in tensor.base_parameters.values() if one.name == parameter.name)
        count = before.counter + sum(update.step > before.step for update in tensor.updates)
        advanced = with_number(atom, count)
        assert advanced is not None, atom.dtype
        return advanced

    # The log's parameters in the base

    def _check_base(
        self, parameters: Iterable[BaseParameter], dtype: DType, updates: Sequence[OptimizerUpdate], stream: int
    ) -> None:
        """Check that the log can continue from the base: it has the same dtype, and not more updates."""
        for parameter in parameters:
            param = parameter.atoms[PARAM]
            if param.dtype != dtype:
                raise InconsistentError(
                    f"parameter {parameter.name}: the optimizer updated it in {dtype}, the base has it in"
                    f" {param.dtype}",
                    hint="use a base with masters in full precision",
                )
            after = next((update for update in updates if update.step > parameter.step), None)
            if after is not None and after.before >= 0 and parameter.counter > after.before:
                raise InconsistentError(
                    f"parameter {parameter.name}: its optimizer had counted {parameter.counter} updates in"
                    f" {self.base.root}, and {after.before} before step {after.step} of the log (stream {stream})",
                    hint="the base is not of this run, or not of the step that it claims",
                )

    def _find_in_base(
        self, number: int, updates: Sequence[OptimizerUpdate], group: Sequence[OptimizerUpdate]
    ) -> BaseParameter:
        """Parameter `number` of the log in the base.

        `updates` are those of its optimizer tensor in the span, `group` those of any tensor of its group.
        """
        if number in self._in_base:
            return self._in_base[number]
        logged = self.manifest.parameters[number]
        parameter = self.base.parameters.get(self._aliases.get(logged.name, logged.name))
        if parameter is None:
            raise InconsistentError(
                f"{self.base.root}: does not contain parameter {logged.name}, which the log trains",
                hint="give a base of the same run",
            )
        if parameter.shape != logged.shape:
            raise InconsistentError(
                f"parameter {logged.name}: shape {list(parameter.shape)} in {self.base.root}, {list(logged.shape)} in"
                " the log",
                hint="give a base of the same run",
            )
        atoms = {
            logged_kind(kind): atom
            for kind, atom in parameter.atoms.items()
            if kind not in (WEIGHT, MASTER) and not is_counter(atom)
        }
        param = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
        if param is None:
            raise InconsistentError(
                f"parameter {parameter.name}: {self.base.root} contains neither its weight nor its master",
                hint="use a base with all states: --only and --exclude leave some out",
            )
        step = self._steps.get(parameter.name, self._step)
        counter = self._counter(parameter)
        if counter is None:
            if not atoms and (_count_before(group, step) <= 0 or self._has_counters):
                counter = 0  # it had no gradient yet: a step logs the largest count of the group
            else:
                counter = max(_count_before(updates, step), 0)
                if counter and not atoms:
                    raise InconsistentError(
                        f"parameter {parameter.name}: {self.base.root} contains no optimizer states of it after"
                        f" {counter} updates",
                        hint="use a base with all states: --only and --exclude leave some out",
                    )
        found = self._in_base[number] = BaseParameter(parameter.name, step, counter, {PARAM: param, **atoms})
        return found

    def _counter(self, parameter: Parameter) -> int | None:
        """The updates that the optimizer had counted for a parameter; None if the base has no such count."""
        atom = parameter.atoms.get(STEP)
        if atom is None or atom.numel != 1:
            return None
        fragment = atom.fragments[0]
        data = fragment.inline or self._files.read(fragment.file, fragment.offset, fragment.dtype.itemsize)
        count = scalar_value(data, fragment.dtype)
        return None if count is None else int(count)


def _fragments(places: Sequence[tuple[ReplayedTensor, LogBlock]], kind: str) -> tuple[Fragment, ...]:
    """Where a state of a parameter is in computed files; adjacent blocks are joined."""
    fragments: list[Fragment] = []
    for tensor, block in places:
        dtype = tensor.kinds[kind]
        file, offset = f"{tensor.file}/{kind}", block.offset * dtype.itemsize
        before = fragments[-1] if fragments else None
        if (
            before is not None
            and before.file == file
            and before.offset + before.nbytes == offset
            and before.region.boxes == block.region.boxes
            and before.region.stop == block.region.start
        ):
            region = Region(before.region.boxes, before.region.start, block.region.stop)
            fragments[-1] = before._replace(region=region)
        else:
            fragments.append(Fragment(block.region, file, offset, dtype, tensor.stream.schema.rank))
    return tuple(fragments)
