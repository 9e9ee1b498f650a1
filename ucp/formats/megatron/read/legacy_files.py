"""One rank's model file, and the parameters in it: names over the whole model, grouped experts taken apart.

Optimizer states that a rank file keeps whole. They are numbered; nothing in the file names them.

Numbers count parameters group by group; inside a group they are in the order of the module. Which parameters make a
group follows from what the group says of itself, and shapes must agree.

`distrib_optim.pt`: the distributed optimizer's state, gathered over data-parallel ranks into flat buffers.

The layer-wise distributed optimizer (`dist_muon`): every data-parallel rank keeps the states of whole parameters.

Each writes a file of its own. Which parameters it has follows from their sizes: they are dealt like cards, the smallest
first, to all ranks in turn and then back again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, STEP
from ucp.core.dtypes import FLOAT32, DType
from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import (
    EMBEDDING,
    OUTPUT,
    canonical_name,
    expert_of,
    is_before_core,
    is_expert,
    layer_of,
    shift_expert,
    shift_layer,
    to_core_name,
)
from ucp.formats.megatron.rank_layout import BufferLayout, BufferParam, bucket_size, lay_out_buffer
from ucp.formats.megatron.read.rank_shards import (
    MegatronParamGroup,
    MegatronRank,
    MegatronRun,
    MegatronShard,
    MegatronStored,
    StoredScalar,
    TensorLocation,
    inline_scalar,
)


class MegatronFile:
    """A torch file below the checkpoint's root."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.archive = TorchFile(root / name)
        tree = self.archive.tree
        if not isinstance(tree, (dict, list)):
            raise NotUnderstoodError(f"{root / name}: holds a {type(tree).__name__}, not the state of a job")
        self.tree: Any = tree

    def mapping(self) -> Mapping[Any, Any]:
        if isinstance(self.tree, dict):
            return self.tree
        raise NotUnderstoodError(f"{self.name}: holds a list, not a dictionary")

    def spot(self, ref: TensorRef, shift: int = 0) -> TensorLocation:
        return TensorLocation(self.name, self.archive, ref, shift)

    def scalar(self, ref: TensorRef) -> StoredScalar:
        return StoredScalar(ref.dtype, self.name, self.spot(ref))


@dataclass(frozen=True, slots=True)
class StoredParam:
    """A parameter inside a stored tensor: `shift` elements from its start, row-major or transposed."""

    holding: MegatronShard
    shift: int = 0
    transposed: bool = False


@dataclass(slots=True)
class ModuleEntry:
    """A tensor of a model file, as the module of that rank has it."""

    stored: str  # its name in the module, in megatron-core's spelling
    ref: TensorRef
    chunk: int
    parts: list[StoredParam] = field(default_factory=list)

    def put(self, kind: str, file: MegatronFile, ref: TensorRef, start: int = 0) -> None:
        """A state of this tensor: the elements of `ref` from `start` on, in the tensor's own order."""
        strides = None if ref.is_contiguous or len(ref.shape) != len(self.ref.shape) else ref.strides
        if strides is not None and (len(self.parts) > 1 or self.parts[0].transposed):
            raise NotUnderstoodError(f"{file.name}: {self.stored} groups experts, but does not lie contiguous")
        for part in self.parts:
            run = MegatronRun(0, prod(part.holding.shape), file.spot(ref, start + part.shift), strides)
            part.holding.kinds[kind] = MegatronStored(ref.dtype, (run,), part.transposed)

    def put_scalar(self, kind: str, scalar: StoredScalar) -> None:
        for part in self.parts:
            part.holding.scalars[kind] = scalar

    @property
    def names(self) -> list[str]:
        return [part.holding.name for part in self.parts]


def chunks_of(tree: Mapping[Any, Any], where: str) -> list[dict[str, Any]]:
    """The model chunks of a rank file, each a flat dictionary in module order."""
    if isinstance(tree.get("model"), dict):
        return [_flatten_names(tree["model"])]
    chunks: list[dict[str, Any]] = []
    while isinstance(tree.get(f"model{len(chunks)}"), dict):
        chunks.append(_flatten_names(tree[f"model{len(chunks)}"]))
    if not chunks:
        raise NotUnderstoodError(f"{where}: holds no model", hint="was the file written by Megatron's save_checkpoint?")
    return chunks


def _flatten_names(tree: Mapping[Any, Any]) -> dict[str, Any]:
    names = dict(_walk(tree, ""))
    old = any(is_before_core(name) for name in names)
    return {canonical_name(to_core_name(name) if old else name): value for name, value in names.items()}


def _walk(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def layers_in(chunk: Mapping[str, Any]) -> dict[str, int]:
    """How many layers each stack (`decoder.layers.`, `encoder.layers.`) has in a chunk."""
    counts: dict[str, int] = {}
    for name in chunk:
        number = layer_of(name)
        if number is not None:
            stack = name[: name.index(".layers.")]
            counts[stack] = max(counts.get(stack, 0), number + 1)
    return counts


def entries_of(
    chunk: Mapping[str, Any], number: int, offsets: Mapping[str, int], holder: MegatronRank, arguments: JobArguments
) -> list[ModuleEntry]:
    """The tensors of a chunk; `offsets` are the layers before it, stack by stack."""
    experts = arguments.number("num_experts", 0) // arguments.ep
    entries: list[ModuleEntry] = []
    for name, ref in chunk.items():
        if not isinstance(ref, TensorRef) or name.endswith("_extra_state"):
            continue
        entry = ModuleEntry(name, ref, number)
        stack = name[: name.index(".layers.")] if layer_of(name) is not None else ""
        whole = shift_layer(name, offsets.get(stack, 0))
        if expert_of(whole) is not None:
            whole = shift_expert(whole, holder.ep * experts)
        stem, _, last = whole.rpartition(".")
        if last in ("weight1", "weight2") and stem.endswith(".mlp.experts"):
            entry.parts = _grouped_experts(chunk, name, stem, last, ref.shape, holder.ep * experts, experts)
        else:
            entry.parts = [StoredParam(MegatronShard(whole, ref.shape))]
        entries.append(entry)
    return entries


def _grouped_experts(
    chunk: Mapping[str, Any], name: str, stem: str, last: str, shape: Shape, first: int, count: int
) -> list[StoredParam]:
    """The experts in a tensor of the grouped GEMM: its memory is one transposed matrix an expert, back to back."""
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
        StoredParam(MegatronShard(f"{stem}.local_experts.{first + i}.{module}.weight", local), i * prod(local), True)
        for i in range(count)
    ]


_PARAMS: Final = "params"
_MASTERS: Final = "fp32_from_fp16_params"
_RESTORE_SAVE: Final = "restore the files of one save; or drop the optimizer with --only weights"
_NORMS_OF_HEADS: Final = ("q_layernorm.", "k_layernorm.")

# Of an expert-parallel, of a decayed, of a group with a learning rate of its own, of one of Muon's.
GroupFlags = tuple[bool, bool, bool, bool]


def optimizers_of(tree: Any) -> list[Mapping[str, Any]]:
    """The chained optimizers in what is stored under `optimizer`; one where there is no chain."""
    if isinstance(tree, list):
        return [item for item in tree if isinstance(item, dict)]
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        return [tree[key] for key in sorted(tree) if isinstance(tree[key], dict)]
    return [tree] if isinstance(tree, dict) else []


def groups_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter groups of one optimizer: of the inner one where it is wrapped for mixed precision."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in group.items() if key != _PARAMS}


class GroupAssigner(Protocol):
    """Who knows the parameters of the next group of a file."""

    def next_of(
        self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]
    ) -> list[ModuleEntry] | None: ...


class GroupMatcher:
    """Deals the parameters of one rank to the groups of its optimizers."""

    def __init__(self, entries: Sequence[ModuleEntry], arguments: JobArguments) -> None:
        self._arguments = arguments
        self._left = list(entries)

    def all_of(self, group: Mapping[str, Any]) -> list[ModuleEntry]:
        """Every parameter that belongs to a group which does not list its own."""
        wanted = stored_group_flags(group, self._arguments)
        taken = [entry for entry in self._left if self._flags(entry) == wanted]
        return self._take(taken)

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]) -> list[ModuleEntry] | None:
        """The next parameters of a group, one for each shape; None where shapes do not allow it."""
        wanted = stored_group_flags(group, self._arguments)
        alike = [entry for entry in self._left if self._flags(entry) == wanted][: len(shapes)]
        if len(alike) == len(shapes) and all(
            shape is None or shape == entry.ref.shape for shape, entry in zip(shapes, alike, strict=True)
        ):
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
        return parameter_flags(entry.stored, len(entry.ref.shape), self._arguments)


def parameter_flags(name: str, dimensions: int, arguments: JobArguments) -> GroupFlags:
    """What the group of a parameter says of itself."""
    apart = arguments.ep > 1 or arguments.etp != arguments.tp
    of_heads = arguments.flag("apply_wd_to_qk_layernorm") and any(norm in name for norm in _NORMS_OF_HEADS)
    decayed = (dimensions > 1 and not name.endswith(".bias")) or of_heads
    own_rate = arguments.fields.get("decoupled_lr") is not None and name in (EMBEDDING, OUTPUT)
    of_muon = arguments.has_muon and dimensions == 2 and name not in (EMBEDDING, OUTPUT)
    return is_expert(name) and apart, decayed, own_rate, of_muon


def stored_group_flags(group: Mapping[str, Any], arguments: JobArguments) -> GroupFlags:
    """What a stored group says of itself."""
    return (
        group.get("is_expert_parallel") is True,
        group.get("wd_mult", 1.0) != 0.0,
        group.get("is_decoupled_lr") is True or group.get("default_config") is False,  # the second since 0.16
        is_muon_group(group, arguments),
    )


def is_muon_group(hyper: Mapping[str, Any], arguments: JobArguments) -> bool:
    """Whether Muon trains a group with these settings; what it leaves to Adam has that one's."""
    return arguments.has_muon and "betas" not in hyper


def read_states(file: MegatronFile, tree: Any, dealer: GroupAssigner) -> Iterator[MegatronParamGroup]:
    """Give parameters their states; gives the groups with the names of their parameters."""
    for optimizer in optimizers_of(tree):
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state") if isinstance(inner, dict) else None
        masters = optimizer.get(_MASTERS)
        groups = groups_of(optimizer)
        if not isinstance(state, dict) or not groups:
            raise NotUnderstoodError(f"{file.name}: its optimizer has no states and groups that are known here")
        for number, group in enumerate(groups):
            kept = masters[number] if isinstance(masters, list) and number < len(masters) else None
            yield _read_group(file, dealer, group, number, state, kept)


def _read_group(
    file: MegatronFile,
    dealer: GroupAssigner,
    group: Mapping[str, Any],
    number: int,
    state: Mapping[Any, Any],
    kept: Any,
) -> MegatronParamGroup:
    numbers = group.get(_PARAMS)
    if not isinstance(numbers, list):
        raise NotUnderstoodError(f"{file.name}: parameter group {number} does not list its parameters")
    tables: list[Mapping[str, Any]] = [table if isinstance(table := state.get(i), dict) else {} for i in numbers]
    shapes = [_shape(table) for table in tables]
    found = dealer.next_of(group, shapes)
    if found is None:
        raise InconsistentError(
            f"{file.name}: the {len(numbers)} states of parameter group {number} do not fit the parameters of the"
            f" model beside them ({', '.join(str(list(shape or ())) for shape in shapes[:6])}, …)",
            hint=_RESTORE_SAVE,
        )
    masters = iter(kept) if isinstance(kept, list) else iter(())
    step = group.get(STEP)
    for entry, table in zip(found, tables, strict=True):
        if kept is not None and entry.ref.dtype != FLOAT32:
            master = next(masters, None)
            if not isinstance(master, TensorRef) or master.shape != entry.ref.shape:
                raise InconsistentError(f"{file.name}: {entry.stored} has no master of its shape", hint=_RESTORE_SAVE)
            entry.put(MASTER, file, master)
        _add_states(file, entry, table, step)
    return MegatronParamGroup(hyper_of(group), [name for entry in found for name in entry.names])


def _shape(table: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = [ref.shape for ref in table.values() if isinstance(ref, TensorRef) and ref.shape]
    return shapes[0] if shapes else None


def _add_states(file: MegatronFile, entry: ModuleEntry, table: Mapping[str, Any], step: Any) -> None:
    for kind, value in table.items():
        if isinstance(value, TensorRef) and value.shape == entry.ref.shape:
            entry.put(str(kind), file, value)
        elif isinstance(value, TensorRef) and value.numel == 1:
            entry.put_scalar(str(kind), file.scalar(value))
        elif isinstance(value, (int, float)):
            entry.put_scalar(str(kind), inline_scalar(file.name, value))
        elif isinstance(value, TensorRef):
            raise InconsistentError(
                f"{file.name}: state '{kind}' of {entry.stored} has shape {list(value.shape)},"
                f" the parameter {list(entry.ref.shape)}",
                hint=_RESTORE_SAVE,
            )
    if table and STEP not in table and isinstance(step, (int, float)):
        entry.put_scalar(STEP, inline_scalar(file.name, step))


_BUFFER_KINDS: Final = {"param": MASTER}
_RESTORE_RANK: Final = "the two files of this rank are from different saves or jobs; restore those of one save"


def read_buffers(
    file: MegatronFile,
    model: MegatronFile,
    tree: Any,
    entries: Sequence[ModuleEntry],
    holder: MegatronRank,
    arguments: JobArguments,
) -> Iterator[MegatronParamGroup]:
    """Give the entries of one rank their states; gives the groups with the names of their parameters."""
    chained = file.tree if isinstance(file.tree, list) else [file.tree]
    apart = len(chained) > 1
    for number, state in enumerate(chained):
        mine = [entry for entry in entries if not apart or is_expert(entry.stored) == bool(number)]
        if isinstance(state, dict):
            _read_optimizer_buffers(file, state, mine, holder, arguments, expert=apart and number == 1)
    matcher = GroupMatcher(entries, arguments)
    for optimizer in optimizers_of(tree):
        for group in groups_of(optimizer):
            found = matcher.all_of(group)
            step = group.get(STEP)
            for entry in found:
                if isinstance(step, (int, float)):
                    entry.put_scalar(STEP, inline_scalar(model.name, step))
            yield MegatronParamGroup(hyper_of(group), [name for entry in found for name in entry.names])


def _read_optimizer_buffers(
    file: MegatronFile,
    state: Mapping[Any, Any],
    entries: Sequence[ModuleEntry],
    holder: MegatronRank,
    arguments: JobArguments,
    *,
    expert: bool,
) -> None:
    if state.get("buckets_coalesced") is not True:
        raise NotUnderstoodError(
            f"{file.name}: keeps each bucket apart, as releases before February 2024 did",
            hint="load and save it once with a Megatron of 2024 or later",
        )
    buffers = group_entries_by_buffer(entries)
    stored = [
        (key, table) for number in sorted(k for k in state if type(k) is int) for key, table in state[number].items()
    ]
    if len(buffers) != len(stored):
        raise InconsistentError(
            f"{file.name}: holds {len(stored)} buffers, the model beside it needs {len(buffers)}", hint=_RESTORE_RANK
        )
    for ((chunk, dtype), mine), (key, table) in zip(buffers.items(), stored, strict=True):
        if not isinstance(key, tuple) or not key or key[0] != dtype or not isinstance(table, dict):
            raise InconsistentError(
                f"{file.name}: has a buffer of {key} where one of {dtype} belongs", hint=_RESTORE_RANK
            )
        layout = entry_buffer_layout(mine, chunk, holder.pp, arguments, expert=expert, of_model=entries)
        _add_buffer_states(file, table, mine, layout)


def group_entries_by_buffer(entries: Sequence[ModuleEntry]) -> dict[tuple[int, DType], list[ModuleEntry]]:
    """The parameters of each gradient buffer: one a model chunk and dtype, in order of first appearance."""
    buffers: dict[tuple[int, DType], list[ModuleEntry]] = {}
    for entry in entries:
        buffers.setdefault((entry.chunk, entry.ref.dtype), []).append(entry)
    return dict(sorted(buffers.items(), key=lambda item: item[0][0]))


def entry_buffer_layout(
    mine: Sequence[ModuleEntry],
    chunk: int,
    pp: int,
    arguments: JobArguments,
    *,
    expert: bool,
    of_model: Sequence[ModuleEntry],
) -> BufferLayout:
    residents = [
        BufferParam(entry.ref.numel, arguments.shares_embedding and entry.names == [EMBEDDING]) for entry in mine
    ]
    dp = arguments.expert_dp if expert else arguments.dp
    size = bucket_size(arguments, sum(entry.ref.numel for entry in of_model)) if pp == 0 and chunk == 0 else None
    return lay_out_buffer(residents, size, dp, wide=arguments.flag("ddp_pad_buckets_for_high_nccl_busbw"))


def _add_buffer_states(
    file: MegatronFile, table: Mapping[str, Any], mine: Sequence[ModuleEntry], layout: BufferLayout
) -> None:
    starts = layout.starts
    for kind, ref in table.items():
        if not isinstance(ref, TensorRef):
            continue
        if ref.numel != layout.numel or len(ref.shape) != 1 or not ref.is_contiguous:
            raise InconsistentError(
                f"{file.name}: its buffer of '{kind}' has {ref.numel} elements, the parameters beside it need"
                f" {layout.numel} in {len(layout.lengths)} buckets",
                hint=_RESTORE_RANK,
            )
        for entry, seat in zip(mine, layout.bucket_ranges, strict=True):
            entry.put(_BUFFER_KINDS.get(kind, str(kind)), file, ref, starts[seat.bucket] + seat.start)


_LAYER_WISE_FILE: Final = re.compile(r"layer_wise_optimizer_(\d+)\.pt")

LayerWiseMember = TypeVar("LayerWiseMember")


def layer_wise_files(root: Path, folder: str) -> dict[int, MegatronFile]:
    """The files of the data-parallel ranks that share a rank folder, by number."""
    names = (
        (match, child.name) for child in (root / folder).iterdir() if (match := _LAYER_WISE_FILE.fullmatch(child.name))
    )
    return {int(match[1]): MegatronFile(root, f"{folder}/{name}") for match, name in sorted(names, key=lambda x: x[1])}


def read_layer_wise(
    files: Mapping[int, MegatronFile], entries: Sequence[ModuleEntry], holder: MegatronRank, arguments: JobArguments
) -> Iterator[MegatronParamGroup]:
    """Give the entries of a rank folder the states that the files beside them hold."""
    missing = sorted(set(layer_wise_ranks(holder.tp, holder.ep, arguments)) - set(files))
    if missing:
        raise InconsistentError(
            f"{layer_wise_file_name(missing[0])} is missing beside the model of {holder}: data-parallel rank {missing[0]} kept the"  # noqa: E501
            " states of its parameters there",
            hint="copy it from the node that wrote it; without it the checkpoint is not whole",
        )
    for dp, file in files.items():
        groups = [group for optimizer in optimizers_of(file.tree) for group in groups_of(optimizer)]
        matcher = GroupMatcher(entries, arguments)
        hands = [LayerWiseGroup(matcher.all_of(group), group.get("is_expert_parallel") is True) for group in groups]
        mine = layer_wise_members(hands, _numel, holder.tp, dp, arguments)
        yield from read_states(file, file.tree, _LayerWiseAssigner(iter(mine)))


def _numel(entry: ModuleEntry) -> int:
    return entry.ref.numel


class _LayerWiseAssigner:
    """The parameters of one rank, group after group."""

    def __init__(self, groups: Iterator[list[ModuleEntry]]) -> None:
        self._groups = groups

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]) -> list[ModuleEntry] | None:
        del group
        mine = next(self._groups)
        fits = len(mine) == len(shapes) and all(
            shape in (None, entry.ref.shape) for shape, entry in zip(shapes, mine, strict=True)
        )
        return mine if fits else None


def layer_wise_file_name(dp: int) -> str:
    """Of the file of a data-parallel rank."""
    return f"layer_wise_optimizer_{dp}.pt"


def layer_wise_ranks(tp: int, ep: int, arguments: JobArguments) -> list[int]:
    """The data-parallel ranks that write into the folder of these tensor- and expert-parallel ranks."""
    places = ((dp, tp + arguments.tp * dp) for dp in range(arguments.dp))
    return [dp for dp, place in places if place // arguments.etp % arguments.ep == ep]


@dataclass(frozen=True, slots=True)
class LayerWiseGroup(Generic[LayerWiseMember]):
    """The parameters of a group, in the order of the module."""

    cards: Sequence[LayerWiseMember]
    of_experts: bool  # which have data-parallel ranks of their own


def layer_wise_members(
    groups: Sequence[LayerWiseGroup[LayerWiseMember]],
    numel: Callable[[LayerWiseMember], int],
    tp: int,
    dp: int,
    arguments: JobArguments,
) -> list[list[LayerWiseMember]]:
    """What data-parallel rank `dp` has of each group."""
    if arguments.dp == 1:
        return [list(group.cards) for group in groups]
    mine: list[list[LayerWiseMember]] = [[] for _ in groups]
    expert_dp = (tp + arguments.tp * dp) // (arguments.etp * arguments.ep)
    for of_experts, player, players in ((False, dp, arguments.dp), (True, expert_dp, arguments.expert_dp)):
        cards = [
            (card, number)
            for number, group in enumerate(groups)
            if group.of_experts == of_experts
            for card in group.cards
        ]
        cards.sort(key=lambda one: numel(one[0]))
        for turn, (card, number) in enumerate(cards):
            lap, seat = divmod(turn, players)
            if (players - 1 - seat if lap % 2 else seat) == player:
                mine[number].append(card)
    return mine
