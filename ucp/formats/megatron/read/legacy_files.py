"""The files of one rank in the legacy `torch` layout: its model, and the three forms of its optimizer.

* The plain optimizer keeps its states in the model file. They are numbered group by group, and nothing names them.
* The distributed optimizer has `distrib_optim.pt`: flat buffers, gathered over data-parallel ranks.
* The layer-wise optimizer (`dist_muon`) has one file per data-parallel rank, with the states of whole parameters.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import flatten_state_dict
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, STEP, ParamGroup
from ucp.core.dtypes import FLOAT32
from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.optimizer_groups import (
    PARAMS,
    GroupFlags,
    LayerWiseGroup,
    groups_of,
    hyper_of,
    layer_wise_file_name,
    layer_wise_members,
    layer_wise_ranks,
    optimizers_of,
    parameter_flags,
    stored_group_flags,
)
from ucp.formats.megatron.rank_layout import BufferLayout, BufferParam, group_by_buffer, optimizer_buffer_layout
from ucp.formats.sharded.shard_fragments import InlineNumber, StoredShard, TensorInFile, WholeTensor
from ucp.formats.sharded.shard_table import RankCoord, Shard

_MASTERS: Final = "fp32_from_fp16_params"
_BUFFER_KINDS: Final = {"param": MASTER}
_LAYER_WISE_FILE: Final = re.compile(r"layer_wise_optimizer_(\d+)\.pt")
_RESTORE_SAVE: Final = "restore the files of one save; or drop the optimizer with --only weights"
_RESTORE_RANK: Final = "the two files of this rank are from different saves or jobs; restore those of one save"


class MegatronFile:
    """A torch file below the root of a checkpoint."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.archive = TorchFile(root / name)
        tree = self.archive.tree
        if not isinstance(tree, (dict, list)):
            raise NotUnderstoodError(f"{root / name}: holds a {type(tree).__name__}, not the state of a job")
        self.tree: Any = tree

    def standing_in_for(self, name: str) -> MegatronFile:
        """This file in place of the lost file `name`."""
        file = copy(self)
        file.name = name
        return file

    def mapping(self) -> Mapping[Any, Any]:
        if isinstance(self.tree, dict):
            return self.tree
        raise NotUnderstoodError(f"{self.name}: holds a list, not a dictionary")

    def scalar(self, ref: TensorRef) -> WholeTensor:
        """Return a one-element tensor as a stored number."""
        return WholeTensor(TensorInFile(self.name, self.archive, ref), ref.dtype, ())


def inline_number(file: str, value: float) -> InlineNumber:
    """Return a plain number of a file, in the type in which torch's optimizers count steps."""
    return InlineNumber(file, FLOAT32, struct.pack("<f", value))


class EntryParam(NamedTuple):
    """A parameter inside a tensor of a model file: `begin` elements from its start, row-major or transposed."""

    name: str
    shape: Shape  # of the rank's slice
    begin: int = 0
    transposed: bool = False


@dataclass(slots=True)
class ModuleEntry:
    """A tensor of a model file and the parameters in it; `shards` are their shards on this rank."""

    name: str  # in the rank's module, as megatron-core spells it
    ref: TensorRef
    chunk: int
    params: list[EntryParam]
    shards: list[Shard]

    def add_state(self, kind: str, file: MegatronFile, ref: TensorRef, start: int = 0) -> None:
        """Add a state of this tensor: the elements of `ref` from `start` on, in the order of the tensor."""
        strides = None if ref.is_contiguous or len(ref.shape) != len(self.ref.shape) else ref.strides
        if strides is not None and (len(self.params) > 1 or self.params[0].transposed):
            raise NotUnderstoodError(f"{file.name}: {self.name} groups experts, but is not contiguous")
        tensor = TensorInFile(file.name, file.archive, ref)
        for param, shard in zip(self.params, self.shards, strict=True):
            begin = start + param.begin
            shard.add(kind, WholeTensor(tensor, ref.dtype, param.shape, strides, begin, param.transposed))

    def add_scalar(self, kind: str, number: StoredShard) -> None:
        for shard in self.shards:
            shard.add(kind, number, ())

    @property
    def param_names(self) -> list[str]:
        return [shard.name for shard in self.shards]


def chunks_of(tree: Mapping[Any, Any], where: str) -> list[dict[str, Any]]:
    """Return the model chunks of a rank file, each a flat dictionary in the order of the module."""
    if isinstance(tree.get("model"), dict):
        return [_flatten_names(tree["model"])]
    chunks: list[dict[str, Any]] = []
    while isinstance(tree.get(f"model{len(chunks)}"), dict):
        chunks.append(_flatten_names(tree[f"model{len(chunks)}"]))
    if not chunks:
        raise NotUnderstoodError(f"{where}: holds no model", hint="was the file written by Megatron's save_checkpoint?")
    return chunks


def _flatten_names(tree: Mapping[Any, Any]) -> dict[str, Any]:
    names = flatten_state_dict(tree)
    is_old = any(mcore.is_before_core(name) for name in names)
    return {mcore.canonical_name(mcore.to_core_name(name) if is_old else name): value for name, value in names.items()}


def count_layers(chunk: Mapping[str, Any]) -> dict[str, int]:
    """Return how many layers each stack (`decoder`, `encoder`) has in a chunk."""
    counts: dict[str, int] = {}
    for name in chunk:
        number = mcore.layer_of(name)
        if number is not None:
            stack = name[: name.index(".layers.")]
            counts[stack] = max(counts.get(stack, 0), number + 1)
    return counts


def params_of_entry(
    chunk: Mapping[str, Any], name: str, offsets: Mapping[str, int], ep: int, arguments: JobArguments
) -> list[EntryParam]:
    """Return the parameters in tensor `name` of a chunk of expert-parallel rank `ep`, named over the whole model.

    `offsets` has the number of layers before the chunk, by stack.
    """
    ref: TensorRef = chunk[name]
    experts = arguments.experts_on(ep)
    stack = name[: name.index(".layers.")] if mcore.layer_of(name) is not None else ""
    whole = mcore.shift_expert(mcore.shift_layer(name, offsets.get(stack, 0)), experts.start)
    stem, _, last = whole.rpartition(".")
    if last in ("weight1", "weight2") and stem.endswith(".mlp.experts"):
        return _grouped_experts(chunk, name, stem, last, ref.shape, experts)
    if whole == mcore.OUTPUT and arguments.tied:
        whole = mcore.EMBEDDING  # the last stage's copy
    return [EntryParam(whole, ref.shape)]


def _grouped_experts(
    chunk: Mapping[str, Any], name: str, stem: str, last: str, shape: Shape, experts: range
) -> list[EntryParam]:
    """Return the experts in a tensor of the grouped GEMM: one transposed matrix per expert, back to back."""
    count = len(experts)
    other = chunk.get(name[:-1] + ("2" if last == "weight1" else "1"))
    if not isinstance(other, TensorRef) or len(shape) != 2 or len(other.shape) != 2 or count < 1:
        raise NotUnderstoodError(f"{name}: is a tensor of {count} grouped experts without its other half")
    (hidden, wide), (tall, _) = (shape, other.shape) if last == "weight1" else (other.shape, shape)
    if wide % count or tall % count:
        raise NotUnderstoodError(f"{name}: {list(shape)} does not divide over {count} experts")
    if last == "weight1":
        local, module = (wide // count, hidden), "linear_fc1"
    else:
        local, module = (hidden, tall // count), "linear_fc2"
    return [
        EntryParam(f"{stem}.local_experts.{expert}.{module}.weight", local, i * prod(local), True)
        for i, expert in enumerate(experts)
    ]


# Takes the next group of a file and the shapes of its states, and returns its parameters; None if these do not fit.
NextMembers = Callable[[Mapping[str, Any], Sequence[Shape | None]], list[ModuleEntry] | None]


class GroupMatcher:
    """Assigns the parameters of one rank to the groups of its optimizers, by flags and shapes."""

    def __init__(self, entries: Sequence[ModuleEntry], arguments: JobArguments) -> None:
        self._arguments = arguments
        self._left = list(entries)

    def all_of(self, group: Mapping[str, Any]) -> list[ModuleEntry]:
        """Take every parameter of a group that does not list its own."""
        wanted = stored_group_flags(group, self._arguments)
        return self._take([entry for entry in self._left if self._flags(entry) == wanted])

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[Shape | None]) -> list[ModuleEntry] | None:
        """Take the next parameters of a group, one per shape; None if the shapes do not allow it."""
        wanted = stored_group_flags(group, self._arguments)
        alike = [entry for entry in self._left if self._flags(entry) == wanted][: len(shapes)]
        if _shapes_fit(shapes, alike):
            return self._take(alike)
        rest = iter(self._left)
        found: list[ModuleEntry] = []
        for shape in shapes:
            entry = next((entry for entry in rest if entry.ref.shape == shape), None)
            if entry is None:
                return None
            found.append(entry)
        return self._take(found)

    def _take(self, entries: list[ModuleEntry]) -> list[ModuleEntry]:
        taken = set(map(id, entries))
        self._left = [entry for entry in self._left if id(entry) not in taken]
        return entries

    def _flags(self, entry: ModuleEntry) -> GroupFlags:
        return parameter_flags(entry.name, len(entry.ref.shape), self._arguments)


def _shapes_fit(shapes: Sequence[Shape | None], entries: Sequence[ModuleEntry]) -> bool:
    return len(entries) == len(shapes) and all(
        shape in (None, entry.ref.shape) for shape, entry in zip(shapes, entries, strict=True)
    )


def read_states(file: MegatronFile, tree: Any, next_members: NextMembers) -> Iterator[ParamGroup]:
    """Add numbered states to their parameters; yields the groups with the names of their parameters."""
    for optimizer in optimizers_of(tree):
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state") if isinstance(inner, dict) else None
        masters = optimizer.get(_MASTERS)
        groups = groups_of(optimizer)
        if not isinstance(state, dict) or not groups:
            raise NotUnderstoodError(f"{file.name}: its optimizer has no states and groups in a known form")
        for number, group in enumerate(groups):
            of_group = masters[number] if isinstance(masters, list) and number < len(masters) else None
            yield _read_group(file, next_members, group, number, state, of_group)


def _read_group(
    file: MegatronFile,
    next_members: NextMembers,
    group: Mapping[str, Any],
    number: int,
    state: Mapping[Any, Any],
    masters: Any,
) -> ParamGroup:
    numbers = group.get(PARAMS)
    if not isinstance(numbers, list):
        raise NotUnderstoodError(f"{file.name}: parameter group {number} does not list its parameters")
    tables: list[Mapping[str, Any]] = [table if isinstance(table := state.get(i), dict) else {} for i in numbers]
    refs = [[ref.shape for ref in table.values() if isinstance(ref, TensorRef) and ref.shape] for table in tables]
    shapes = [own[0] if own else None for own in refs]
    entries = next_members(group, shapes)
    if entries is None:
        raise InconsistentError(
            f"{file.name}: the {len(numbers)} states of parameter group {number} do not fit the parameters of the"
            f" model ({', '.join(str(list(shape or ())) for shape in shapes[:6])}, …)",
            hint=_RESTORE_SAVE,
        )
    next_masters = iter(masters) if isinstance(masters, list) else iter(())
    for entry, table in zip(entries, tables, strict=True):
        if masters is not None and entry.ref.dtype != FLOAT32:
            master = next(next_masters, None)
            if not isinstance(master, TensorRef) or master.shape != entry.ref.shape:
                raise InconsistentError(f"{file.name}: {entry.name} has no master of its shape", hint=_RESTORE_SAVE)
            entry.add_state(MASTER, file, master)
        _add_states(file, entry, table, group.get(STEP))
    return ParamGroup(hyper_of(group), [name for entry in entries for name in entry.param_names])


def _add_states(file: MegatronFile, entry: ModuleEntry, table: Mapping[str, Any], step: Any) -> None:
    scalars: dict[str, StoredShard] = {}
    for kind, value in table.items():
        if isinstance(value, TensorRef) and value.shape == entry.ref.shape:
            entry.add_state(str(kind), file, value)
        elif isinstance(value, TensorRef) and value.numel == 1:
            scalars[str(kind)] = file.scalar(value)
        elif isinstance(value, (int, float)):
            scalars[str(kind)] = inline_number(file.name, value)
        elif isinstance(value, TensorRef):
            raise InconsistentError(
                f"{file.name}: state '{kind}' of {entry.name} has shape {list(value.shape)},"
                f" the parameter {list(entry.ref.shape)}",
                hint=_RESTORE_SAVE,
            )
    if table and STEP not in table and isinstance(step, (int, float)):
        scalars[STEP] = inline_number(file.name, step)
    for kind, number in scalars.items():
        entry.add_scalar(kind, number)


def read_buffers(
    file: MegatronFile,
    model: MegatronFile,
    tree: Any,
    entries: Sequence[ModuleEntry],
    pp: int,
    arguments: JobArguments,
) -> Iterator[ParamGroup]:
    """Add the states in `distrib_optim.pt` to the parameters of a rank of stage `pp`; yields the groups.

    `tree` is what the model file keeps of the optimizer.
    """
    chained = file.tree if isinstance(file.tree, list) else [file.tree]
    has_expert_optimizer = len(chained) > 1
    for number, state in enumerate(chained):
        mine = [entry for entry in entries if not has_expert_optimizer or mcore.is_expert(entry.name) == bool(number)]
        if isinstance(state, dict):
            _read_optimizer_buffers(file, state, mine, pp, arguments, expert=has_expert_optimizer and number == 1)
    matcher = GroupMatcher(entries, arguments)
    for optimizer in optimizers_of(tree):
        for group in groups_of(optimizer):
            found = matcher.all_of(group)
            step = group.get(STEP)
            for entry in found:
                if isinstance(step, (int, float)):
                    entry.add_scalar(STEP, inline_number(model.name, step))
            yield ParamGroup(hyper_of(group), [name for entry in found for name in entry.param_names])


def _read_optimizer_buffers(
    file: MegatronFile,
    state: Mapping[Any, Any],
    entries: Sequence[ModuleEntry],
    pp: int,
    arguments: JobArguments,
    *,
    expert: bool,
) -> None:
    if state.get("buckets_coalesced") is not True:
        raise NotUnderstoodError(
            f"{file.name}: stores each bucket separately, as releases before February 2024 did",
            hint="load and save it once with a Megatron of 2024 or later",
        )
    buffers = group_by_buffer(entries, attrgetter("chunk", "ref.dtype"))
    stored = [
        (key, table) for number in sorted(k for k in state if type(k) is int) for key, table in state[number].items()
    ]
    if len(buffers) != len(stored):
        raise InconsistentError(
            f"{file.name}: holds {len(stored)} buffers, the model needs {len(buffers)}", hint=_RESTORE_RANK
        )
    for mine, (key, table) in zip(buffers, stored, strict=True):
        chunk, dtype = mine[0].chunk, mine[0].ref.dtype
        if not isinstance(key, tuple) or not key or key[0] != dtype or not isinstance(table, dict):
            raise InconsistentError(f"{file.name}: has a buffer of {key}, expected {dtype}", hint=_RESTORE_RANK)
        params = [
            BufferParam(entry.ref.numel, arguments.shares_embedding and entry.param_names == [mcore.EMBEDDING])
            for entry in mine
        ]
        numel = sum(entry.ref.numel for entry in entries)
        layout = optimizer_buffer_layout(params, numel, arguments, is_first=pp == chunk == 0, expert=expert)
        _add_buffer_states(file, table, mine, layout)


def _add_buffer_states(
    file: MegatronFile, table: Mapping[str, Any], entries: Sequence[ModuleEntry], layout: BufferLayout
) -> None:
    starts = layout.starts
    for kind, ref in table.items():
        if not isinstance(ref, TensorRef):
            continue
        if ref.numel != layout.numel or len(ref.shape) != 1 or not ref.is_contiguous:
            raise InconsistentError(
                f"{file.name}: its buffer of '{kind}' has {ref.numel} elements, the parameters need"
                f" {layout.numel} in {len(layout.lengths)} buckets",
                hint=_RESTORE_RANK,
            )
        for entry, position in zip(entries, layout.bucket_ranges, strict=True):
            start = starts[position.bucket] + position.start
            entry.add_state(_BUFFER_KINDS.get(kind, str(kind)), file, ref, start)


def layer_wise_files(root: Path, folder: str) -> dict[int, MegatronFile]:
    """Return the files of the data-parallel ranks that share a rank folder, by rank."""
    names = sorted(child.name for child in (root / folder).iterdir())
    matches = [match for name in names if (match := _LAYER_WISE_FILE.fullmatch(name))]
    return {int(match[1]): MegatronFile(root, f"{folder}/{match[0]}") for match in matches}


def read_layer_wise(
    files: Mapping[int, MegatronFile], entries: Sequence[ModuleEntry], coord: RankCoord, arguments: JobArguments
) -> Iterator[ParamGroup]:
    """Add the states in the layer-wise files of a rank folder to its parameters; yields the groups."""
    missing = sorted(set(layer_wise_ranks(coord.tp, coord.ep, arguments)) - set(files))
    if missing:
        raise InconsistentError(
            f"{layer_wise_file_name(missing[0])} is missing next to the model of {coord}: data-parallel rank"
            f" {missing[0]} kept the states of its parameters there",
            hint="copy it from the node that wrote it; without it the checkpoint is incomplete",
        )
    for dp, file in files.items():
        groups = [group for optimizer in optimizers_of(file.tree) for group in groups_of(optimizer)]
        matcher = GroupMatcher(entries, arguments)
        all_groups = [
            LayerWiseGroup(matcher.all_of(group), group.get("is_expert_parallel") is True) for group in groups
        ]
        mine = layer_wise_members(all_groups, lambda entry: entry.ref.numel, coord.tp, dp, arguments)
        yield from read_states(file, file.tree, partial(_next_of, iter(mine)))


def _next_of(
    groups: Iterator[list[ModuleEntry]], group: Mapping[str, Any], shapes: Sequence[Shape | None]
) -> list[ModuleEntry] | None:
    del group
    entries = next(groups)
    return entries if _shapes_fit(shapes, entries) else None
