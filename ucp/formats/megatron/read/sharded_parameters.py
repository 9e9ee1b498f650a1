"""From a sharded checkpoint to parameters: rules by name, steps and groups from the common part.

The distributed optimizer may store its flat buffers, which do not name their parameters: `dp_reshardable` stores every
bucket as a tensor, `dp_zero_gather_scatter` an object with all of them. Their layout is computed from the module.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ucp.containers.inert import TensorRef
from ucp.containers.tree import with_atoms
from ucp.core.box import Box
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, LazyFragments, Note, Parameter, ParamGroup, Rank
from ucp.core.dtypes import DType
from ucp.core.rules import REPLICATED, Rule, RuleBook, logical_shape, resolve
from ucp.errors import InconsistentError, first_few
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.folder import COMMON
from ucp.formats.megatron.job_arguments import JobArguments, arguments_of
from ucp.formats.megatron.job_extras import without_optimizer_states
from ucp.formats.megatron.optimizer_groups import (
    GroupFlags,
    groups_of,
    hyper_of,
    optimizers_of,
    parameter_flags,
    stored_group_flags,
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
from ucp.formats.megatron.read.legacy_files import MegatronFile, inline_number
from ucp.formats.megatron.read.sharded_tensors import (
    ShardedBlock,
    ShardedContents,
    ShardedState,
    ShardedTensor,
    StateTable,
    UnstackedParameters,
)
from ucp.formats.sharded.shard_fragments import RankSlice, StoredRun, StoredShard, fragments_of, scalar_fragments

_OPTIMIZER: Final = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1$")
_BUCKET: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)"
    r"\.bucket_idx_(\d+)\.(\w+)$"
)
_GATHERED: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1$"
)
_ALL_BUCKETS: Final = -1  # in place of a bucket's number: all buckets of a buffer, one after the other
_BUFFER_HINT: Final = "the layout of the buffers cannot be computed; take the weights alone with --only weights"


class CommonState(Protocol):
    """What all ranks have in common: a tree without tensors of the model."""

    def mapping(self) -> Mapping[Any, Any]: ...

    def step(self, optimizer: Mapping[str, Any]) -> StoredShard | None:
        """Return the step that an optimizer counts for all of its parameters."""

    def with_atoms(self, tree: Any) -> Any:
        """Return a copy of a part of it with atoms in place of tensors."""


class CommonFile:
    """`common.pt`."""

    def __init__(self, root: Path) -> None:
        self._file = MegatronFile(root, COMMON)

    def mapping(self) -> Mapping[Any, Any]:
        return self._file.mapping()

    def step(self, optimizer: Mapping[str, Any]) -> StoredShard | None:
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state") if isinstance(inner, dict) else None
        step = state.get("common_step") if isinstance(state, dict) else None
        if isinstance(step, TensorRef):
            return self._file.scalar(step)
        return inline_number(COMMON, step) if isinstance(step, (int, float)) else None

    def with_atoms(self, tree: Any) -> Any:
        return with_atoms(tree, self._file.archive, COMMON, COMMON)


class ShardedReader:
    """The parameters, groups and extras of one sharded checkpoint."""

    def __init__(
        self,
        root: Path,
        sharded: ShardedContents,
        common: CommonState,
        user: RuleBook | None,
        *,
        repair: bool = False,
        is_damaged: bool = False,
    ) -> None:
        self.common = common
        self.arguments: JobArguments = arguments_of(common.mapping().get("args"), str(root / COMMON))
        self.notes: list[Note] = []
        self._sharded = sharded
        self._user = user
        self._unstacked = UnstackedParameters(sharded, str(root))
        self._rules = {name: self._rule(name) for name in self._unstacked.shapes}
        states = self._unstacked.states
        model = {  # the parameters of the optimizer, as ranks slice them
            name: GlobalParam(shape, self._rules[name][0], states[name][WEIGHT].dtype)
            for name, shape in self._unstacked.shapes.items()
            if WEIGHT in states[name] and not mcore.is_buffer(name)
        }
        buckets = ShardedBuckets(self._unstacked.buckets, sharded.objects, self.arguments, str(root))
        buckets.add_to(states, model)
        content = common.mapping().get("content_metadata")
        sharding = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
        first = next(iter(optimizers_of(common.mapping().get("optimizer"))), {})
        sharding = sharding or first.get("param_state_sharding_type")
        if sharding == "fully_reshardable" and not is_damaged:
            self.notes += handle_shifted_state(root, model, states, self.arguments, repair=repair)

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter in the order of the model, without step counters."""
        return {name: self._parameter(name) for name in sorted(self._unstacked.shapes, key=mcore.order_key)}

    def groups(self, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
        """Return the parameter groups, and add the step of each group or optimizer to its parameters."""
        left = [parameter for parameter in parameters.values() if parameter.role == "trained"]
        assigned: list[tuple[GroupFlags, Mapping[str, Any], StoredShard | None, list[Parameter]]] = []
        for optimizer in self._optimizers():
            step = self.common.step(optimizer)
            for group in groups_of(optimizer):
                wanted = stored_group_flags(group, self.arguments)
                mine = [p for p in left if self._flags(p) == wanted]
                taken = {p.name for p in mine}
                left = [p for p in left if p.name not in taken]
                counted = group.get(STEP)
                group_step = inline_number(COMMON, counted) if isinstance(counted, (int, float)) else step
                assigned.append((wanted, group, group_step, mine))
        lost = [p for p in left if assigned and _has_optimizer_state(p)]
        for parameter in lost:
            flags = self._flags(parameter)
            most_alike = max(assigned, key=lambda item: sum(a == b for a, b in zip(item[0], flags, strict=True)))
            most_alike[3].append(parameter)
        if lost:
            shown = first_few([p.name for p in lost], 3)
            text = f"no group of the optimizer matches {shown}: put in the most similar"
            self.notes.append(Note("group-guessed", text))
        for _, _, step, mine in assigned:
            for parameter in mine:
                if step is not None and _has_optimizer_state(parameter):
                    fragments = scalar_fragments(Rank(), step)
                    parameter.atoms[STEP] = Atom(parameter.name, STEP, (), step.dtype, fragments)
        return [ParamGroup(hyper_of(group), [p.name for p in mine]) for _, group, _, mine in assigned]

    def trees(self) -> dict[str, Any]:
        """Return what is not a parameter state: the common part and the sharded objects."""
        rest = {
            key: without_optimizer_states(value) if key == "optimizer" else value
            for key, value in self.common.mapping().items()
        }
        trees = {COMMON: self.common.with_atoms(rest)}
        if self._sharded.objects:
            trees["objects"] = {key: value for key, value in self._sharded.objects.items() if not _GATHERED.match(key)}
        return trees

    def _rule(self, name: str) -> tuple[Rule, str]:
        shape = self._unstacked.shapes[name]
        named = self._user.find(name) if self._user is not None else None
        if named is not None:
            return resolve(named.rule, [shape], name), named.origin
        rule = mcore.split_rule(name, [shape], self.arguments, self._unstacked.shapes.get)
        if rule is None:
            return REPLICATED, mcore.NOT_CUT_ORIGIN
        return resolve(rule, [shape], name), mcore.RULE_ORIGIN

    def _parameter(self, name: str) -> Parameter:
        rule, origin = self._rules[name]
        padded = self._unstacked.shapes[name]
        shape = logical_shape(rule, padded)
        states = self._unstacked.states[name]
        is_float = all(state.dtype.family == "float" for state in states.values())
        atoms: dict[str, Atom] = {}
        for kind in sorted(states, key=lambda kind: (kind != WEIGHT, kind != MASTER, kind)):
            state = states[kind]
            fragments = LazyFragments(state.fragments, state.count)
            atoms[kind] = Atom(name, kind, shape, state.dtype, fragments, tuple(state.copies))
        return Parameter(
            name,
            shape,
            "trained" if is_float and not mcore.is_buffer(name) else "buffer",
            atoms,
            rule,
            origin,
            padded if padded != shape else None,
            aliases=(mcore.OUTPUT,) if name == mcore.EMBEDDING and self.arguments.tied else (),
            expert=mcore.expert_of(name),
        )

    def _optimizers(self) -> list[Mapping[str, Any]]:
        """Return every optimizer of a chain with its groups: from the common part, or from an object of each rank."""
        found = optimizers_of(self.common.mapping().get("optimizer"))
        if any(map(groups_of, found)):
            return found
        by_chain: dict[str, Mapping[str, Any]] = {}
        for key, value in sorted(self._sharded.objects.items()):
            match = _OPTIMIZER.match(key)
            if match and isinstance(value, dict):
                by_chain.setdefault(match[1] or "", value)
        return list(by_chain.values())

    def _flags(self, parameter: Parameter) -> GroupFlags:
        return parameter_flags(parameter.name, len(parameter.shape), self.arguments)


def _has_optimizer_state(parameter: Parameter) -> bool:
    return any(kind not in (WEIGHT, MASTER) for kind in parameter.atoms)


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

    def is_split_at(self, position: BucketRange) -> bool:
        """Whether blocks start and end where a parameter does; true if there is a single block."""
        start, stop = self.first + position.start, self.first + position.start + position.numel
        if len(self._blocks) < 2:
            return True
        at, end = bisect_left(self._starts, start), bisect_left(self._stops, stop)
        return self._starts[at : at + 1] == [start] and self._stops[end : end + 1] == [stop]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, ShardedBlock, int]]:
        """Yield what blocks hold of elements [start, stop): interval from `start` on, block, elements to skip in it."""
        start, stop = start + self.first, stop + self.first
        for number in range(bisect_right(self._stops, start), len(self._blocks)):
            lo, hi = max(start, self._starts[number]), min(stop, self._stops[number])
            if lo >= hi:
                return
            yield lo - start, hi - start, self._blocks[number], lo - self._starts[number]


@dataclass(frozen=True, slots=True)
class _BucketSlice(StoredShard):
    """Elements `[begin, begin + numel)` of a bucket."""

    bucket: _StoredBucket
    dtype: DType
    begin: int
    numel: int
    transposed: bool = False

    @property
    def count(self) -> int:
        return sum(1 for _ in self.bucket.blocks(self.begin, self.begin + self.numel))

    def runs(self) -> Iterator[StoredRun]:
        for start, stop, block, skip in self.bucket.blocks(self.begin, self.begin + self.numel):
            offset = block.locate()[0] + skip * self.dtype.itemsize
            yield StoredRun(start, stop, block.file, offset)


@dataclass(frozen=True, slots=True, order=True)
class _StoredRankGroup:
    """The ranks that share buffers: which optimizer of a chain (-1 without a chain), and which group of ranks."""

    chained: int
    group: int


# Buffer number → state → bucket number → bucket.
_Buffers = dict[int, dict[str, dict[int, _StoredBucket]]]


class ShardedBuckets:
    """All buckets of a checkpoint, by rank group, buffer, state and number."""

    def __init__(
        self, tensors: Mapping[str, ShardedTensor], objects: Mapping[str, Any], arguments: JobArguments, where: str
    ) -> None:
        self._arguments = arguments
        self._where = where
        self._buffers: dict[_StoredRankGroup, _Buffers] = {}
        for key, tensor in tensors.items():
            found = _BUCKET.match(key)
            if not found:
                raise InconsistentError(f"{where}: {key} is a buffer of an unknown kind", hint=_BUFFER_HINT)
            ranks = _StoredRankGroup(-1 if found[1] is None else int(found[1]), int(found[2]))
            buffers = self._buffers.setdefault(ranks, {})
            buffers.setdefault(int(found[3]), {}).setdefault(found[6], {})[int(found[5])] = _StoredBucket(tensor)
        for key, value in objects.items():
            found = _GATHERED.match(key)
            if found and isinstance(value, dict):
                ranks = _StoredRankGroup(-1 if found[1] is None else int(found[1]), int(found[2]))
                self._buffers[ranks] = _gathered_buffers(key, value)

    def add_to(self, states: StateTable, model: Mapping[str, GlobalParam]) -> None:
        """Find every parameter of `model` in the buckets, and add its states to `states`."""
        for ranks, buffers in sorted(self._buffers.items(), key=lambda item: item[0]):
            rank, tensors = self._module(ranks, model)
            self._add_buffers(ranks, rank, tensors, buffers, states)

    def _module(
        self, ranks: _StoredRankGroup, model: Mapping[str, GlobalParam]
    ) -> tuple[ModuleRank, list[ModuleTensor]]:
        """Return the rank whose parameters are in the buffers of a group, and those parameters."""
        arguments = self._arguments
        if ranks.chained == 1:
            rest, etp = divmod(ranks.group, arguments.etp)
            pp, ep = divmod(rest, arguments.ep)
            rank = ModuleRank(pp, 0, ep, etp)
        else:
            pp, tp = divmod(ranks.group, arguments.tp)
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
        tensors = module_tensors(rank, model, arguments)
        if ranks.chained >= 0:
            tensors = [tensor for tensor in tensors if tensor.is_expert == (ranks.chained == 1)]
        return rank, tensors

    def _add_buffers(
        self,
        ranks: _StoredRankGroup,
        rank: ModuleRank,
        tensors: Sequence[ModuleTensor],
        buffers: _Buffers,
        states: StateTable,
    ) -> None:
        needed = group_by_buffer(tensors)
        if len(needed) != len(buffers):
            raise InconsistentError(
                f"{self._where}: rank group {ranks.group} has {len(buffers)} buffers, its parameters need"
                f" {len(needed)}",
                hint=_BUFFER_HINT,
            )
        for number, mine in zip(sorted(buffers), needed, strict=True):
            layout = module_buffer_layout(mine, tensors, rank, self._arguments, expert=ranks.chained == 1)
            for kind, stored in buffers[number].items():
                buckets = _split_by_layout(stored, layout)
                lengths = tuple(buckets[number].length for number in sorted(buckets))
                if sorted(buckets) != list(range(len(layout.lengths))) or lengths != layout.lengths:
                    raise InconsistentError(
                        f"{self._where}: the buckets of '{kind}' of rank group {ranks.group} have {list(lengths)}"
                        f" elements, its parameters need {list(layout.lengths)}",
                        hint=_BUFFER_HINT,
                    )
                for tensor, position in zip(mine, layout.bucket_ranges, strict=True):
                    bucket = buckets[position.bucket]
                    # Megatron splits blocks where parameters start and end, which reveals a wrong order of parameters.
                    if not bucket.is_split_at(position):
                        raise InconsistentError(
                            f"{self._where}: {bucket.tensor.key} is not split at elements {position.start} and"
                            f" {position.start + position.numel}, where a parameter should be",
                            hint=_BUFFER_HINT,
                        )
                    _add_state(states, MASTER if kind == "param" else kind, tensor, position, bucket, rank)


def _add_state(
    states: StateTable,
    kind: str,
    tensor: ModuleTensor,
    position: BucketRange,
    bucket: _StoredBucket,
    rank: ModuleRank,
) -> None:
    dtype = bucket.tensor.dtype
    for packed in tensor.packed_params:
        numel = sum(piece.box.numel for piece in packed.pieces)
        stored = _BucketSlice(bucket, dtype, position.start + packed.shift, numel, packed.transposed)
        coordinates = Rank(rank.pp, rank.tp, 0, rank.ep if tensor.is_expert else None)
        parts = [(RankSlice(packed.pieces, packed.shape, coordinates), stored)]
        state = states.setdefault(packed.name, {}).setdefault(kind, ShardedState(dtype))
        state.add_slice(packed.pieces, fragments_of(kind, parts))


def _gathered_buffers(key: str, value: Mapping[Any, Any]) -> _Buffers:
    """Return the buffers in an object that one rank gathered from all, each with all its buckets in one."""
    found: _Buffers = {}
    numbers = sorted(number for number in value if type(number) is int)
    tables = [table for number in numbers for table in value[number].values() if isinstance(table, dict)]
    for number, table in enumerate(tables):
        for kind, atom in table.items():
            if isinstance(atom, Atom) and len(atom.shape) == 1 and atom.fragments:
                fragment = atom.fragments[0]
                block = ShardedBlock(fragment.file, fragment.rank.dp, (fragment.offset, None))
                tensor = ShardedTensor(f"{key}: {kind}", atom.shape, atom.dtype, {Box((0,), atom.shape): block})
                found.setdefault(number, {})[str(kind)] = {_ALL_BUCKETS: _StoredBucket(tensor)}
    return found


def _split_by_layout(stored: Mapping[int, _StoredBucket], layout: BufferLayout) -> Mapping[int, _StoredBucket]:
    """Return the buckets, sliced out of the whole buffer if that is what is stored."""
    whole = stored.get(_ALL_BUCKETS)
    if whole is None or whole.length != layout.numel:
        return stored
    return {
        number: _StoredBucket(whole.tensor, start, length)
        for number, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True))
    }
