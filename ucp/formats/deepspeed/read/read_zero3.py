"""ZeRO-3: every parameter cut on its own over the data-parallel ranks, its slices lying in flat sub-group buffers.

AutoEP under ZeRO-3: every rank's files say which experts it holds and with whom it shares them. Do they agree?

Optimizer state that was offloaded to NVMe: raw swap files beside the rank files, which then hold empty tensors.

DeepSpeed copies its swap folder to `offloaded_tensors/rank<RR>/`. The master weights of a sub-group are in
`<id>.tensor.swp`, its state `exp_avg` in `exp_avg-<id>.tensor.swp`; `<id>` is the numbers of its first and its last
parameter, joined by `_`, and stays on the empty tensor as attribute `ds_id`. A file holds the flat fp32 buffer from
byte 0 on; what follows is padding for I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, ParamGroup
from ucp.core.dtypes import FLOAT32, DType
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.experts import (
    ExpertPlacement,
    PartitionRanks,
    autoep_entries,
    expert_partition_ranks,
    expert_placements,
)
from ucp.formats.deepspeed.read.optimizer_values import (
    FlatGroupShare,
    FlatGroupStates,
    classify_states,
    group_hyper_parameters,
)
from ucp.formats.deepspeed.read.rank_files import RankFile, as_tensor, as_tensors, describe_value
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.read_weights import frozen_shapes
from ucp.formats.deepspeed.step_files import SWAP_FOLDER
from ucp.formats.sharded.shard_fragments import EvenSlices, TensorInFile
from ucp.formats.sharded.shard_table import RankCoord

ZERO3_MASTERS = "fp32_flat_groups"


@dataclass(slots=True)
class Zero3File:
    """One rank's optimizer file."""

    file: RankFile
    dp: int
    world_rank: int
    top: Mapping[Any, Any]
    masters: list[TensorRef]

    @property
    def optimizer(self) -> Mapping[Any, Any]:
        found = self.top.get("optimizer_state_dict")
        return found if isinstance(found, dict) else {}

    def state(self, sub_group: int) -> Mapping[Any, Any]:
        states = self.optimizer.get("state")
        found = states.get(sub_group) if isinstance(states, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def param_groups(self) -> list[Mapping[str, Any]]:
        groups = self.optimizer.get("param_groups")
        return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def open_zero3_files(files: Sequence[RankFile], tp: int, tp_rank: int) -> list[Zero3File]:
    """The optimizer files of one model-parallel rank, by data-parallel rank."""
    found: list[Zero3File] = []
    for dp, file in enumerate(files):
        top = file.mapping("optimizer_state_dict")
        if ZERO3_MASTERS not in top:
            raise NotUnderstoodError(
                f"{file.name}: no {ZERO3_MASTERS} in it; found {', '.join(map(str, list(top)[:12]))}"
            )
        found.append(
            Zero3File(file, dp, dp * tp + tp_rank, top, as_tensors(top[ZERO3_MASTERS], f"{file.name}: {ZERO3_MASTERS}"))
        )
    return found


def read_zero3(
    context: ReadContext,
    coord: RankCoord,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Zero3File],
    swap: SwapFiles,
    data_first: bool = False,
) -> int:
    """Put master weights and optimizer states of one model-parallel rank into the shard table.

    `shapes` has one dict a sub-group. Returns the number of ranks that share a parameter: fewer than there are files
    with MiCS, whose shard groups each write the whole state. Experts that AutoEP spreads are shared by the ranks of one
    expert-parallel rank alone: consecutive ones with `data_first`.
    """
    share = _partition_count(context, coord, ranks)
    for rank in ranks:
        if len(rank.masters) != len(shapes):
            context.problems.add(
                f"{rank.file.name} (dp rank {rank.dp}, {coord}) has {len(rank.masters)} sub-groups, but the model file"
                f" lists {len(shapes)}"
            )
    context.problems.raise_any("look for a file of another run or of another save among them")
    spreads = context.shards.placements
    for index, sub_group in enumerate(shapes):
        spread = next((spreads[name] for name in sub_group if name in spreads), None)
        for copy in range(0, len(ranks), share):
            for sharer in zero3_partition_ranks(spread, share, data_first):
                members = [ranks[copy + dp] for dp in sharer.ranks]
                for rank in members:
                    check_partition_ranks(context, rank.file, rank.top, index, rank.dp - copy, sharer)
                local = {name: context.shards.local(name, shape, sharer.ep) for name, shape in sub_group.items()}
                owner = coord if sharer.ep is None else RankCoord(*coord[:2], sharer.ep)
                _read_sub_group(context, owner, index, len(shapes), local, members, swap)
    context.shards.groups[coord] = _param_groups(context, shapes, ranks[0])
    return share


def _partition_count(context: ReadContext, coord: RankCoord, ranks: Sequence[Zero3File]) -> int:
    counts = {int(count) for rank in ranks if type(count := rank.top.get("partition_count")) is int}
    if len(counts) > 1:
        context.problems.add(f"rank files of {coord} disagree on how many ranks share a parameter: {sorted(counts)}")
    count = next(iter(counts), len(ranks))
    if 0 < count <= len(ranks) and len(ranks) % count == 0:
        return count
    context.problems.add(
        f"parameters of {coord} were cut for {count} ranks ({ranks[0].file.name}), but {len(ranks)} data-parallel rank"
        " files are here"
    )
    return len(ranks)


def _read_sub_group(
    context: ReadContext,
    coord: RankCoord,
    index: int,
    sub_groups: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Zero3File],
    swap: SwapFiles,
) -> None:
    where = f"sub-group {index} ({coord})"
    pers = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    length = sum(pers.values())
    masters = _masters(context, where, index, sub_groups, length, ranks, swap)
    states = _optimizer_states(context, where, index, sub_groups, length, ranks, swap)
    at = 0
    for name, shape in shapes.items():
        owner = context.shards.at(name, coord)
        held = context.shards.put(name, owner, shape, "trained", ranks[0].file.name)
        for kind, (dtype, spots) in {**({MASTER: masters} if masters else {}), **states.flat}.items():
            held.add(kind, EvenSlices(spots, dtype, pers[name], at, prod(shape)))
        for kind, number in states.numbers.items():
            held.add(kind, number, ())
        at += pers[name]


def _masters(
    context: ReadContext,
    where: str,
    index: int,
    sub_groups: int,
    length: int,
    ranks: Sequence[Zero3File],
    swap: SwapFiles,
) -> tuple[DType, list[TensorInFile]] | None:
    spots: list[TensorInFile] = []
    dtypes: set[DType] = set()
    for rank in ranks:
        ref = rank.masters[index]
        swapped = None
        if ref.numel == 0 and length:
            nbytes = length * FLOAT32.itemsize
            swapped = swap.master(rank.world_rank, index, sub_groups, ref, nbytes, rank.dp)
        if ref.numel == length and len(ref.shape) == 1 and ref.is_contiguous:
            spots.append(rank.file.locate(context.claim(ref), rank.dp))
            dtypes.add(ref.dtype)
        elif swapped is not None:
            spots.append(swapped)
            dtypes.add(FLOAT32)
            context.claim(ref)
        else:
            context.problems.add(_wrong_length(where, rank, "the master weights", ref, length))
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        context.problems.add(f"{where}: the master weights have a different dtype on different dp ranks: {listed}")
    return (dtypes.pop(), spots) if len(spots) == len(ranks) and dtypes else None


def _wrong_length(where: str, rank: Zero3File, what: str, ref: TensorRef, length: int) -> str:
    text = (
        f"{where}: {what} on dp rank {rank.dp} ({rank.file.name}) are {describe_value(ref)}, expected {length} elements"
    )
    if ref.numel == 0:
        text += (
            f"; they were offloaded to NVMe, and {SWAP_FOLDER}/rank{rank.world_rank:02d}/ has no swap file that fits"
        )
    return text


def _optimizer_states(
    context: ReadContext,
    where: str,
    index: int,
    sub_groups: int,
    length: int,
    ranks: Sequence[Zero3File],
    swap: SwapFiles,
) -> FlatGroupStates:
    def finder(rank: Zero3File) -> Any:
        master_id = swap.id_of(rank.world_rank, index, sub_groups, rank.masters[index])
        nbytes = length * FLOAT32.itemsize
        return lambda ref, kind: swap.state(rank.world_rank, kind, master_id, ref, nbytes, rank.dp)

    members = [
        FlatGroupShare(rank.file, rank.dp, rank.state(index), (length,), finder(rank) if swap else None)
        for rank in ranks
    ]
    return classify_states(context, where, members)


def _param_groups(context: ReadContext, shapes: Sequence[Mapping[str, Shape]], rank: Zero3File) -> list[ParamGroup]:
    """Parameter groups: each lists its sub-groups in `params`."""
    groups = [ParamGroup(group_hyper_parameters(context, rank.file, group), []) for group in rank.param_groups] or [
        ParamGroup({}, [])
    ]
    listed = [group.get("params") for group in rank.param_groups]
    owner: dict[int, int] = {}
    for g, members in enumerate(listed):
        if isinstance(members, (list, tuple)):
            owner.update({member: g for member in members if type(member) is int})
    if sorted(owner) != list(range(len(shapes))):
        # Some releases leave the lists empty: with as many groups as sub-groups, or one group, there is no doubt.
        owner = {i: i if len(groups) == len(shapes) else 0 for i in range(len(shapes))}
        if len(groups) not in (1, len(shapes)):
            context.note(
                "groups-unknown",
                f"{rank.file.name}: does not say which parameters belong to which group; all in group 0",
            )
    for index, sub_group in enumerate(shapes):
        groups[owner[index]].names.extend(sub_group)
    return groups


def read_frozen_slices(context: ReadContext, coord: RankCoord, files: Sequence[RankFile], share: int) -> None:
    """Frozen parameters: every rank's model file has its flat, padded slice, in the model's dtype."""
    shapes = frozen_shapes(files[0])
    if not shapes or not isinstance(files[0].mapping().get("frozen_param_fragments"), dict):
        return
    for name, shape in shapes.items():
        per = -(-prod(shape) // share)
        for copy in range(0, len(files), share):
            spots = _frozen_spots(context, coord, name, shape, per, files[copy : copy + share], copy)
            if spots:
                held = context.shards.put(name, coord, shape, "frozen", files[0].name)
                dtype = spots[0].ref.dtype if spots[0].ref is not None else FLOAT32
                held.add(WEIGHT, EvenSlices(spots, dtype, per, 0, prod(shape)))


def _frozen_spots(
    context: ReadContext, coord: RankCoord, name: str, shape: Shape, per: int, files: Sequence[RankFile], first: int
) -> list[TensorInFile]:
    spots: list[TensorInFile] = []
    for dp, file in enumerate(files, first):
        fragments = file.mapping("frozen_param_fragments")
        where = f"frozen parameter {name} (dp rank {dp}, {coord}) in {file.name}"
        if name not in fragments:
            context.problems.add(f"{where} is missing")
            continue
        ref = as_tensor(fragments[name], where)
        if ref.numel != per or not ref.is_contiguous:
            context.problems.add(
                f"{where} has {ref.numel} elements, expected {per}: shape {list(shape)} cut over {len(files)} ranks"
            )
            continue
        spots.append(file.locate(context.claim(ref), dp))
    return spots if len(spots) == len(files) else []


def check_placements(context: ReadContext, models: Sequence[RankFile], data_first: bool) -> None:
    """Report model files that deal the experts out in another way than the first, or are of another rank."""
    spreads = context.shards.placements
    for dp, model in enumerate(models if spreads else ()):
        if dp and expert_placements(model.mapping(), model.name) != spreads:
            context.problems.add(f"{model.name} (dp rank {dp}): deals experts out in another way than {models[0].name}")
            continue
        for entry in autoep_entries(model.mapping(), model.name):
            spread = spreads[f"{entry['expert_key_prefix']}.w1"]
            said, ep = entry.get("ep_rank"), _ep_rank(spread, len(models), dp, data_first)
            if type(said) is int and said != ep:
                context.problems.add(
                    f"{model.name} (dp rank {dp}): says that it is of expert-parallel rank {said}, expected {ep}:"
                    " files were exchanged"
                )
                break


def _ep_rank(spread: ExpertPlacement, dp: int, rank: int, data_first: bool) -> int | None:
    return next((s.ep for s in zero3_partition_ranks(spread, dp, data_first) if rank in s.ranks), None)


def zero3_partition_ranks(spread: ExpertPlacement | None, dp: int, data_first: bool) -> list[PartitionRanks]:
    """Who cuts a parameter among themselves under ZeRO-3, of `dp` ranks: all, or those with the same experts."""
    if spread is None or dp % spread.degree:
        return [PartitionRanks(tuple(range(dp)))]
    return expert_partition_ranks(dp, dp // spread.degree, data_first)


def check_partition_ranks(
    context: ReadContext, file: RankFile, top: Mapping[Any, Any], index: int, dp: int, own: PartitionRanks
) -> None:
    """Report an optimizer file that says of itself that it shares sub-group `index` with other ranks."""
    said = top.get("ds_zero_partition_groups")
    entry = said[index] if isinstance(said, (list, tuple)) and index < len(said) else None
    if not isinstance(entry, dict):
        return
    ranks, rank = entry.get("partition_ranks"), entry.get("partition_rank")
    if (ranks is not None and ranks != list(own.ranks)) or (rank is not None and rank != own.ranks.index(dp)):
        context.problems.add(
            f"{file.name} (dp rank {dp}): says that it has part {rank} of sub-group {index}, which ranks {ranks} share,"
            f" expected part {own.ranks.index(dp)} and ranks {list(own.ranks)}: files were exchanged"
        )


_SWAP_RANK_FOLDER: Final = re.compile(r"rank(\d+)")
_SWAP_FILE: Final = re.compile(r"(.+)\.tensor\.swp")
_SUB_GROUP_ID: Final = re.compile(r"(\d+)_(\d+)")


class SwapFiles:
    """The swap files of all ranks of a step folder: rank → id of the tensor → (file relative to the root, bytes)."""

    def __init__(self, step: Path, prefix: str) -> None:
        self.files: dict[int, dict[str, tuple[str, int]]] = {}
        folder = step / SWAP_FOLDER
        if not folder.is_dir():
            return
        for rank_folder in sorted(folder.iterdir()):
            if found := _SWAP_RANK_FOLDER.fullmatch(rank_folder.name):
                held = self.files.setdefault(int(found[1]), {})
                for path in sorted(rank_folder.iterdir()):
                    if (swap := _SWAP_FILE.fullmatch(path.name)) and "_gradient_" not in path.name:
                        name = f"{prefix}{SWAP_FOLDER}/{rank_folder.name}/{path.name}"
                        held[swap[1]] = (name, path.stat().st_size)

    def __bool__(self) -> bool:
        return bool(self.files)

    def master(
        self, rank: int, sub_group: int, sub_groups: int, ref: TensorRef, nbytes: int, dp: int
    ) -> TensorInFile | None:
        """Where the master weights of a sub-group were swapped to, or None."""
        return self._spot(rank, self.id_of(rank, sub_group, sub_groups, ref), nbytes, dp)

    def state(
        self, rank: int, kind: str, master_id: str | None, ref: TensorRef, nbytes: int, dp: int
    ) -> TensorInFile | None:
        """Where a state of the sub-group with this id was swapped to, or None."""
        named = _ds_id(ref)
        return self._spot(rank, named or (f"{kind}-{master_id}" if master_id else None), nbytes, dp)

    def id_of(self, rank: int, sub_group: int, sub_groups: int, ref: TensorRef) -> str | None:
        """The id of a sub-group: as its empty tensor says; else by order, when every sub-group was swapped out."""
        if named := _ds_id(ref):
            return named
        ids = sorted(
            (tuple(map(int, found.groups())), key) for key in self._of(rank) if (found := _SUB_GROUP_ID.fullmatch(key))
        )
        return ids[sub_group][1] if len(ids) == sub_groups else None

    def _of(self, rank: int) -> Mapping[str, tuple[str, int]]:
        return self.files.get(rank, {})

    def _spot(self, rank: int, key: str | None, nbytes: int, dp: int) -> TensorInFile | None:
        held = self._of(rank).get(key) if key is not None else None
        if held is None or held[1] < nbytes:
            return None
        return TensorInFile(held[0], None, None, dp, offset=0)


def _ds_id(ref: TensorRef) -> str | None:
    """The attribute `ds_id` that DeepSpeed leaves on the tensors it swaps."""
    attributes = ref.attributes
    parts = attributes if isinstance(attributes, tuple) else (attributes,)
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("ds_id"), str):
            return str(part["ds_id"])
    return None
