"""One span of a log upon one base: which optimizer tensors there are, and where the parameters' states lie in them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ucp.errors import InconsistentError, UsageError
from ucp.files.local import SourceFiles
from ucp.log.kinds import kind_logged_as, logged_kind
from ucp.log.reader import Span, StoredBlock
from ucp.log.schema import Block
from ucp.model.box import intersect, whole
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Parameter
from ucp.model.dtypes import BY_NAME, FLOAT32, DType
from ucp.model.region import Region
from ucp.replay.chunks import Origin, ReplayedTensor, file_of
from ucp.replay.kernels import PARAM, Kernel
from ucp.replay.origins import COUNTER_FORMS, Origins, is_counter
from ucp.replay.stored import StoredStates
from ucp.replay.timeline import Timelines, Update, stood_still
from ucp.replay.values import logged_atom


class Builder:
    """Tensors and parameters of one span upon one base."""

    def __init__(
        self, base: Checkpoint, span: Span, kernel: Kernel | None, step: int, steps: Mapping[str, int]
    ) -> None:
        """`base` is of `step`, but for the parameters in `steps`."""
        self.base = base
        self._step = step
        self.span = span
        self.kernel = kernel
        self.manifest = span.epoch.manifest
        self._files = SourceFiles(base.root, computed=base.computed)
        self._own_steps = steps
        self._origins = Origins(base, self._files, self.manifest.parameters, step, steps)
        self.stored: dict[int, StoredStates] = {}  # by stream, once `tensors` was called
        self.logged: dict[str, StoredBlock] = {}  # computed files that are in the log as they are

    def tensors(self) -> list[ReplayedTensor]:
        """Every optimizer tensor of the span."""
        with self._files:
            return list(self._tensors())

    def _tensors(self) -> Iterator[ReplayedTensor]:
        span = self.span
        for number, stream in sorted(span.epoch.streams.items()):
            timelines = Timelines(span, stream)
            stored = self.stored[number] = StoredStates(stream, self.manifest.state_kinds)
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
                    file_of(span.epoch.number, number, index, span.last),
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
            " replayed, and the log has none of its states",
            hint="only the steps of full checkpoints can be had of this run",
        )

    def _resumed_at(self, timelines: Timelines, group: int) -> int:
        """Updates that the optimizer had counted when the epoch began, where its first steps are still there."""
        for step in self.span.epoch.steps:
            record = timelines.stream.record(step)
            scalars = next((one for one in record.groups if one.group == group), None)
            if not record.skipped and scalars is not None and scalars.opt_step >= 0:
                return scalars.opt_step
        return 0

    def _kinds(
        self,
        origins: Iterable[Origin],
        dtype: DType,
        updates: Sequence[Update],
        stored: StoredStates,
        blocks: Sequence[Block],
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
        held: dict[str, list[tuple[ReplayedTensor, Block]]] = {}
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
            stood_still(stream, max(first, span.first - 1), span.last) for stream in span.epoch.streams.values()
        )

    def _check_complete(self, held: dict[str, list[tuple[ReplayedTensor, Block]]]) -> None:
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

    def _computed(self, parameter: Parameter, held: Sequence[tuple[ReplayedTensor, Block]]) -> Parameter:
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
            kind = kind_logged_as(name)
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

    def _counts(self, updates: Sequence[Update]) -> bool:
        """Does the optimizer keep the number of its updates?"""
        return bool(updates) and (updates[-1].before >= 0 if self.kernel is None else self.kernel.counts)

    def _stepped(self, atom: Atom, tensor: ReplayedTensor, parameter: Parameter) -> Atom:
        """The optimizer's counter after the span."""
        origin = next(origin for origin in tensor.origins.values() if origin.name == parameter.name)
        count = origin.counter + sum(update.step > origin.step for update in tensor.updates)
        data = struct.pack(COUNTER_FORMS[atom.dtype.name], count)
        region = Region.all_of(atom.shape)
        return replace(atom, fragments=(Fragment(region, "", 0, atom.dtype, inline=data),), replicas=(), combine="copy")


def _fragments(held: Sequence[tuple[ReplayedTensor, Block]], kind: str) -> tuple[Fragment, ...]:
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
