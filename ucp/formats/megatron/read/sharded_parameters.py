"""The distributed optimizer's buffers in sharded checkpoints: flat, without the names of parameters.

`dp_reshardable` stores every bucket as a tensor, `dp_zero_gather_scatter` an object with all of them.

From a sharded checkpoint to parameters: rules by name, steps and groups from the common part.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ucp.containers.inert import TensorRef
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Fragment, LazyFragments, Note, Parameter, ParamGroup
from ucp.core.mesh import Rank
from ucp.core.rules import REPLICATED, Rule, RuleBook, logical_shape, resolve
from ucp.errors import InconsistentError, first_few
from ucp.formats.megatron.folder import COMMON
from ucp.formats.megatron.job_arguments import JobArguments, arguments_of
from ucp.formats.megatron.job_extras import tree_with_atoms, without_optimizer_states
from ucp.formats.megatron.mcore_modules import (
    EMBEDDING,
    OUTPUT,
    RULE_ORIGIN,
    expert_of,
    is_buffer,
    order_key,
    split_rule,
)
from ucp.formats.megatron.rank_layout import (
    BucketRange,
    BufferLayout,
    GlobalParam,
    ModuleRank,
    ModuleTensor,
    group_by_buffer,
    module_buffer_layout,
    module_tensors,
)
from ucp.formats.megatron.read.bucket_shift_bug import handle_shifted_state
from ucp.formats.megatron.read.legacy_files import (
    GroupFlags,
    MegatronFile,
    groups_of,
    hyper_of,
    optimizers_of,
    parameter_flags,
    stored_group_flags,
)
from ucp.formats.megatron.read.rank_shards import (
    MegatronRun,
    MegatronSlice,
    MegatronStored,
    StoredScalar,
    fragments_of,
    inline_scalar,
)
from ucp.formats.megatron.read.sharded_tensors import (
    BlockLocation,
    ShardedBlock,
    ShardedContents,
    ShardedState,
    ShardedTensor,
    UnstackedParameters,
)

_KEY: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)"
    r"\.bucket_idx_(\d+)\.(\w+)$"
)
_GATHERED: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1$"
)
_HINT: Final = "the layout of the buffers cannot be replayed; take the weights alone with --only weights"


@dataclass(frozen=True, slots=True)
class _BlockElement:
    """Element `skip` of a block."""

    block: ShardedBlock
    skip: int
    itemsize: int

    @property
    def file(self) -> str:
        return self.block.file

    @property
    def offset(self) -> int:
        return self.block.locate().offset + self.skip * self.itemsize


class _StoredBucket:
    """Elements `[first, first + length)` of a flat tensor, whose blocks are searchable by element."""

    def __init__(self, tensor: ShardedTensor, first: int = 0, length: int | None = None) -> None:
        self.tensor = tensor
        self.first = first
        self.length = tensor.shape[0] if length is None else length
        blocks = sorted(tensor.blocks.items(), key=lambda item: item[0].start)
        self._blocks = [block for _, block in blocks]
        self._starts = [box.start[0] for box, _ in blocks]
        self._stops = [box.start[0] + box.shape[0] for box, _ in blocks]

    def is_cut_at(self, seat: BucketRange) -> bool:
        """Whether blocks start and end where a parameter does; one block says nothing."""
        start, stop = self.first + seat.start, self.first + seat.start + seat.numel
        if len(self._blocks) < 2:
            return True
        at, end = bisect_left(self._starts, start), bisect_left(self._stops, stop)
        return self._starts[at : at + 1] == [start] and self._stops[end : end + 1] == [stop]

    def runs(self, start: int, stop: int) -> Iterator[MegatronRun]:
        """Where elements [start, stop) of the bucket lie."""
        start, stop = start + self.first, stop + self.first
        for number in range(bisect_right(self._stops, start), len(self._blocks)):
            lo, hi = max(start, self._starts[number]), min(stop, self._stops[number])
            if lo >= hi:
                return
            spot = _BlockElement(self._blocks[number], lo - self._starts[number], self.tensor.dtype.itemsize)
            yield MegatronRun(lo - start, hi - start, spot)


_WHOLE: Final = -1  # in place of a bucket's number: all buckets of a buffer, one after the other


@dataclass(frozen=True, slots=True)
class _AtomBlock:
    """A tensor inside an object, as a block."""

    fragment: Fragment

    @property
    def file(self) -> str:
        return self.fragment.file

    @property
    def writer(self) -> int:
        return self.fragment.rank.dp

    def locate(self) -> BlockLocation:
        return BlockLocation(self.fragment.offset)


@dataclass(frozen=True, slots=True, order=True)
class _StoredRankGroup:
    """Whose buffers: of which optimizer of a chain (-1: there is no chain), and of which group of ranks."""

    chained: int
    group: int


class ShardedBuckets:
    """All buckets of a checkpoint, by owner, buffer, state and number."""

    def __init__(
        self, tensors: Mapping[str, ShardedTensor], objects: Mapping[str, Any], arguments: JobArguments, where: str
    ) -> None:
        self._arguments = arguments
        self._where = where
        self._table: dict[_StoredRankGroup, dict[int, dict[str, dict[int, _StoredBucket]]]] = {}
        for key, tensor in tensors.items():
            found = _KEY.match(key)
            if not found:
                raise InconsistentError(f"{where}: {key} is a buffer of an unknown kind", hint=_HINT)
            owner = _StoredRankGroup(-1 if found[1] is None else int(found[1]), int(found[2]))
            buffers = self._table.setdefault(owner, {})
            buffers.setdefault(int(found[3]), {}).setdefault(found[6], {})[int(found[5])] = _StoredBucket(tensor)
        for key, value in objects.items():
            found = _GATHERED.match(key)
            if found and isinstance(value, dict):
                owner = _StoredRankGroup(-1 if found[1] is None else int(found[1]), int(found[2]))
                self._table[owner] = _gathered_buckets(key, value)

    def place(self, model: Mapping[str, GlobalParam], pieces: dict[str, dict[str, ShardedState]]) -> None:
        """Find every parameter in the buckets, and add what is there to `pieces`."""
        for owner, buffers in sorted(self._table.items(), key=lambda item: item[0]):
            rank, tensors = self._module(owner, model)
            self._place_owner(owner, rank, tensors, buffers, pieces)

    def _module(
        self, owner: _StoredRankGroup, model: Mapping[str, GlobalParam]
    ) -> tuple[ModuleRank, list[ModuleTensor]]:
        """The rank whose parameters an owner's buffers hold, and those parameters."""
        arguments = self._arguments
        if owner.chained == 1:
            rest, etp = divmod(owner.group, arguments.etp)
            pp, ep = divmod(rest, arguments.ep)
            rank = ModuleRank(pp, 0, ep, etp)
        else:
            pp, tp = divmod(owner.group, arguments.tp)
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
        tensors = module_tensors(rank, model, arguments)
        if owner.chained >= 0:
            tensors = [tensor for tensor in tensors if tensor.is_expert == (owner.chained == 1)]
        return rank, tensors

    def _place_owner(
        self,
        owner: _StoredRankGroup,
        rank: ModuleRank,
        tensors: Sequence[ModuleTensor],
        buffers: Mapping[int, Mapping[str, Mapping[int, _StoredBucket]]],
        pieces: dict[str, dict[str, ShardedState]],
    ) -> None:
        needed = group_by_buffer(tensors)
        if len(needed) != len(buffers):
            raise InconsistentError(
                f"{self._where}: rank group {owner.group} has {len(buffers)} buffers, its parameters need"
                f" {len(needed)}",
                hint=_HINT,
            )
        for number, mine in zip(sorted(buffers), needed, strict=True):
            layout = module_buffer_layout(mine, tensors, rank, self._arguments, expert=owner.chained == 1)
            for kind, stored in buffers[number].items():
                buckets = _split_by_layout(stored, layout)
                self._check(owner, kind, buckets, layout)
                for tensor, seat in zip(mine, layout.bucket_ranges, strict=True):
                    bucket = buckets[seat.bucket]
                    self._check_seat(bucket, seat)
                    _add_bucket_range(pieces, MASTER if kind == "param" else kind, tensor, seat, bucket, rank)

    def _check(
        self, owner: _StoredRankGroup, kind: str, buckets: Mapping[int, _StoredBucket], layout: BufferLayout
    ) -> None:
        lengths = tuple(buckets[number].length for number in sorted(buckets))
        if sorted(buckets) != list(range(len(layout.lengths))) or lengths != layout.lengths:
            raise InconsistentError(
                f"{self._where}: the buckets of '{kind}' of rank group {owner.group} have {list(lengths)} elements, its"
                f" parameters need {list(layout.lengths)}",
                hint=_HINT,
            )

    def _check_seat(self, bucket: _StoredBucket, seat: BucketRange) -> None:
        """Megatron cuts blocks where parameters start and end, so that a wrong order of parameters shows."""
        if not bucket.is_cut_at(seat):
            raise InconsistentError(
                f"{self._where}: {bucket.tensor.key} is not cut at elements {seat.start} and"
                f" {seat.start + seat.numel}, where a parameter should lie",
                hint=_HINT,
            )


def _add_bucket_range(
    pieces: dict[str, dict[str, ShardedState]],
    kind: str,
    tensor: ModuleTensor,
    seat: BucketRange,
    bucket: _StoredBucket,
    rank: ModuleRank,
) -> None:
    for packed in tensor.packed_params:
        first = seat.start + packed.shift
        numel = sum(piece.box.numel for piece in packed.pieces)
        stored = MegatronStored(bucket.tensor.dtype, tuple(bucket.runs(first, first + numel)), packed.transposed)
        where = Rank(rank.pp, rank.tp, 0, rank.ep if tensor.is_expert else None)
        parts = [(MegatronSlice(packed.pieces, packed.shape, where), stored)]
        held = pieces.setdefault(packed.name, {}).setdefault(kind, ShardedState(bucket.tensor.dtype))
        held.add_slice(packed.pieces, fragments_of(parts))


def is_gathered_state(key: str) -> bool:
    """Whether an object of this key holds states of parameters."""
    return _GATHERED.match(key) is not None


def _gathered_buckets(key: str, value: Mapping[Any, Any]) -> dict[int, dict[str, dict[int, _StoredBucket]]]:
    """The buffers in an object that one rank gathered from all: by number, state and (as a whole) bucket."""
    found: dict[int, dict[str, dict[int, _StoredBucket]]] = {}
    numbers = sorted(number for number in value if type(number) is int)
    tables = [table for number in numbers for table in value[number].values() if isinstance(table, dict)]
    for number, table in enumerate(tables):
        for kind, atom in table.items():
            if isinstance(atom, Atom) and len(atom.shape) == 1 and atom.fragments:
                block: ShardedBlock = _AtomBlock(atom.fragments[0])
                tensor = ShardedTensor(f"{key}: {kind}", atom.shape, atom.dtype, {Box((0,), atom.shape): block})
                found.setdefault(number, {})[str(kind)] = {_WHOLE: _StoredBucket(tensor)}
    return found


def _split_by_layout(stored: Mapping[int, _StoredBucket], layout: BufferLayout) -> Mapping[int, _StoredBucket]:
    """The buckets, cut out of the whole where that is what is stored."""
    whole = stored.get(_WHOLE)
    if whole is None or whole.length != layout.numel:
        return stored
    return {
        number: _StoredBucket(whole.tensor, start, length)
        for number, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True))
    }


_OPTIMIZER: Final = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1$")


class CommonState(Protocol):
    """What all ranks have in common: a tree without tensors of the model."""

    def mapping(self) -> Mapping[Any, Any]: ...

    def step(self, optimizer: Mapping[str, Any]) -> StoredScalar | None:
        """The step that an optimizer counts for all of its parameters."""

    def carried(self, tree: Any) -> Any:
        """A copy of a part of it with atoms in place of tensors."""


class CommonFile:
    """`common.pt`."""

    def __init__(self, root: Path) -> None:
        self._file = MegatronFile(root, COMMON)

    def mapping(self) -> Mapping[Any, Any]:
        return self._file.mapping()

    def step(self, optimizer: Mapping[str, Any]) -> StoredScalar | None:
        return _common_step(self._file, optimizer)

    def carried(self, tree: Any) -> Any:
        return tree_with_atoms(COMMON, self._file.archive, tree, COMMON)


class ShardedReader:
    """The parameters, groups and extras of one sharded checkpoint."""

    def __init__(
        self, root: Path, sharded: ShardedContents, common: CommonState, user: RuleBook | None, *, repair: bool = False
    ) -> None:
        self.common = common
        self.arguments: JobArguments = arguments_of(common.mapping().get("args"), str(root / COMMON))
        self.notes: list[Note] = []
        self._root = root
        self._sharded = sharded
        self._user = user
        self._unstacked = UnstackedParameters(sharded, str(root))
        self._rules = {name: self._rule(name) for name in self._unstacked.shapes}
        buckets = ShardedBuckets(self._unstacked.buckets, sharded.objects, self.arguments, str(root))
        buckets.place(self._model(), self._unstacked.pieces)
        if self._sharding() == "fully_reshardable":
            self.notes += handle_shifted_state(
                root, self._model(), self._unstacked.pieces, self.arguments, repair=repair
            )

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter in the model's order, without step counters."""
        return {name: self._parameter(name) for name in sorted(self._unstacked.shapes, key=order_key)}

    def _model(self) -> dict[str, GlobalParam]:
        """The parameters that the optimizer has, as ranks cut them."""
        unstacked = self._unstacked
        return {
            name: GlobalParam(shape, self._rules[name][0], unstacked.pieces[name][WEIGHT].dtype)
            for name, shape in unstacked.shapes.items()
            if WEIGHT in unstacked.pieces[name] and not is_buffer(name)
        }

    def _sharding(self) -> Any:
        """How the distributed optimizer's state was laid out, where the common part says it."""
        content = self.common.mapping().get("content_metadata")
        said = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
        first = next(iter(optimizers_of(self.common.mapping().get("optimizer"))), {})
        return said or first.get("param_state_sharding_type")

    def _rule(self, name: str) -> tuple[Rule, str]:
        shape = self._unstacked.shapes[name]
        named = self._user.find(name) if self._user is not None else None
        rule = (
            named.rule if named is not None else split_rule(name, [shape], self.arguments, self._unstacked.shapes.get)
        )
        if rule is None:
            return REPLICATED, "not cut in the checkpoint"
        return resolve(rule, [shape], name), named.origin if named is not None else RULE_ORIGIN

    def _parameter(self, name: str) -> Parameter:
        rule, origin = self._rules[name]
        padded = self._unstacked.shapes[name]
        shape = logical_shape(rule, padded)
        pieces = self._unstacked.pieces[name]
        kinds = sorted(pieces, key=lambda kind: (kind != WEIGHT, kind != MASTER, kind))
        return Parameter(
            name,
            shape,
            "buffer" if is_buffer(name) or _is_no_float(pieces) else "trained",
            {kind: _atom(name, kind, shape, pieces[kind]) for kind in kinds},
            rule,
            origin,
            padded if padded != shape else None,
            aliases=(OUTPUT,) if name == EMBEDDING and self.arguments.tied else (),
            expert=expert_of(name),
        )

    def groups(self, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
        """The parameter groups; gives parameters the step that their group or optimizer counts."""
        left = [parameter for parameter in parameters.values() if parameter.role == "trained"]
        return list(self._groups(left))

    def _optimizers(self) -> list[Mapping[str, Any]]:
        """What every optimizer of a chain says of its groups: in the common part, or as an object of each rank."""
        found = optimizers_of(self.common.mapping().get("optimizer"))
        if any(map(groups_of, found)):
            return found
        by_chain: dict[str, Mapping[str, Any]] = {}
        for key, value in sorted(self._sharded.objects.items()):
            match = _OPTIMIZER.match(key)
            if match and isinstance(value, dict):
                by_chain.setdefault(match[1] or "", value)
        return list(by_chain.values())

    def _groups(self, left: list[Parameter]) -> Iterator[ParamGroup]:
        dealt: list[tuple[GroupFlags, Mapping[str, Any], StoredScalar | None, list[Parameter]]] = []
        for optimizer in self._optimizers():
            step = self.common.step(optimizer)
            for group in groups_of(optimizer):
                wanted = stored_group_flags(group, self.arguments)
                mine = [p for p in left if self._flags(p) == wanted]
                taken = {p.name for p in mine}
                left = [p for p in left if p.name not in taken]
                counted = group.get(STEP)
                step_here = inline_scalar(COMMON, counted) if isinstance(counted, (int, float)) else step
                dealt.append((wanted, group, step_here, mine))
        lost = [p for p in left if dealt and any(kind not in (WEIGHT, MASTER) for kind in p.atoms)]
        for parameter in lost:
            flags = self._flags(parameter)
            most_alike = max(dealt, key=lambda one: sum(a == b for a, b in zip(one[0], flags, strict=True)))
            most_alike[3].append(parameter)
        if lost:
            shown = first_few([p.name for p in lost])
            self.notes.append(Note("group-guessed", f"no group of the optimizer is that of {shown}: put in the likest"))
        for _, group, step, mine in dealt:
            add_steps(mine, step)
            yield ParamGroup(hyper_of(group), [p.name for p in mine])

    def _flags(self, parameter: Parameter) -> GroupFlags:
        return parameter_flags(parameter.name, len(parameter.shape), self.arguments)

    def trees(self) -> dict[str, Any]:
        """What is no parameter state: the common part and the sharded objects."""
        rest = {
            key: without_optimizer_states(value) if key == "optimizer" else value
            for key, value in self.common.mapping().items()
        }
        trees = {COMMON: self.common.carried(rest)}
        if self._sharded.objects:
            trees["objects"] = {
                key: value for key, value in self._sharded.objects.items() if not is_gathered_state(key)
            }
        return trees


def add_steps(parameters: Sequence[Parameter], step: StoredScalar | None) -> None:
    """Give parameters that have optimizer states the counter of their group."""
    for parameter in parameters:
        if step is not None and any(kind not in (WEIGHT, MASTER) for kind in parameter.atoms):
            fragment = step.fragment(Rank())
            parameter.atoms[STEP] = Atom(parameter.name, STEP, (), step.dtype, (fragment,))


def _common_step(common: MegatronFile, optimizer: Mapping[str, Any]) -> StoredScalar | None:
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    step = state.get("common_step") if isinstance(state, dict) else None
    if isinstance(step, TensorRef):
        return common.scalar(step)
    return inline_scalar(common.name, step) if isinstance(step, (int, float)) else None


def _atom(name: str, kind: str, shape: Shape, pieces: ShardedState) -> Atom:
    return Atom(name, kind, shape, pieces.dtype, LazyFragments(pieces.fragments, pieces.count), tuple(pieces.copies))


def _is_no_float(pieces: Mapping[str, ShardedState]) -> bool:
    return any(piece.dtype.family != "float" for piece in pieces.values())
