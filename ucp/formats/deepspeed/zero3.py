"""ZeRO-3: every parameter cut on its own over the data-parallel ranks, its slices lying in flat sub-group buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.errors import NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.holdings import Group, Holder
from ucp.formats.deepspeed.hyper import group_hyper
from ucp.formats.deepspeed.names import SWAP_FOLDER
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile, describe, tensor_of, tensors_of
from ucp.formats.deepspeed.spreadranks import check_partition, sharing_ranks
from ucp.formats.deepspeed.states import FlatStates, Member, sort_states
from ucp.formats.deepspeed.stored import EvenSlices, Spot
from ucp.formats.deepspeed.swapfiles import SwapFiles
from ucp.formats.deepspeed.weights import frozen_shapes_of
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, WEIGHT
from ucp.model.dtypes import FLOAT32, DType

MASTERS = "fp32_flat_groups"


@dataclass(slots=True)
class Slices:
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


def open_slices(files: Sequence[RankFile], tp: int, tp_rank: int) -> list[Slices]:
    """The optimizer files of one model-parallel rank, by data-parallel rank."""
    found: list[Slices] = []
    for dp, file in enumerate(files):
        top = file.mapping("optimizer_state_dict")
        if MASTERS not in top:
            raise NotUnderstoodError(f"{file.name}: no {MASTERS} in it; found {', '.join(map(str, list(top)[:12]))}")
        found.append(Slices(file, dp, dp * tp + tp_rank, top, tensors_of(top[MASTERS], f"{file.name}: {MASTERS}")))
    return found


def read_slices(
    reading: Reading,
    holder: Holder,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Slices],
    swap: SwapFiles,
    data_first: bool = False,
) -> int:
    """Put master weights and optimizer states of one model-parallel rank into the holdings.

    `shapes` has one dict a sub-group. Returns the number of ranks that share a parameter: fewer than there are files
    with MiCS, whose shard groups each write the whole state. Experts that AutoEP spreads are shared by the ranks of one
    expert-parallel rank alone: consecutive ones with `data_first`.
    """
    share = _sharing_ranks(reading, holder, ranks)
    for rank in ranks:
        if len(rank.masters) != len(shapes):
            reading.problems.add(
                f"{rank.file.name} (dp rank {rank.dp}, {holder}) has {len(rank.masters)} sub-groups, but the model file"
                f" lists {len(shapes)}"
            )
    reading.problems.raise_any("look for a file of another run or of another save among them")
    spreads = reading.holdings.spreads
    for index, sub_group in enumerate(shapes):
        spread = next((spreads[name] for name in sub_group if name in spreads), None)
        for copy in range(0, len(ranks), share):
            for sharer in sharing_ranks(spread, share, data_first):
                members = [ranks[copy + dp] for dp in sharer.ranks]
                for rank in members:
                    check_partition(reading, rank.file, rank.top, index, rank.dp - copy, sharer)
                local = {name: reading.holdings.local(name, shape, sharer.ep) for name, shape in sub_group.items()}
                owner = holder if sharer.ep is None else Holder(*holder[:2], sharer.ep)
                _read_sub_group(reading, owner, index, len(shapes), local, members, swap)
    reading.holdings.groups[holder] = _groups(reading, shapes, ranks[0])
    return share


def _sharing_ranks(reading: Reading, holder: Holder, ranks: Sequence[Slices]) -> int:
    counts = {int(count) for rank in ranks if type(count := rank.top.get("partition_count")) is int}
    if len(counts) > 1:
        reading.problems.add(f"rank files of {holder} disagree on how many ranks share a parameter: {sorted(counts)}")
    count = next(iter(counts), len(ranks))
    if 0 < count <= len(ranks) and len(ranks) % count == 0:
        return count
    reading.problems.add(
        f"parameters of {holder} were cut for {count} ranks ({ranks[0].file.name}), but {len(ranks)} data-parallel rank"
        " files are here"
    )
    return len(ranks)


def _read_sub_group(
    reading: Reading,
    holder: Holder,
    index: int,
    sub_groups: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Slices],
    swap: SwapFiles,
) -> None:
    where = f"sub-group {index} ({holder})"
    pers = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    length = sum(pers.values())
    masters = _masters(reading, where, index, sub_groups, length, ranks, swap)
    states = _states(reading, where, index, sub_groups, length, ranks, swap)
    at = 0
    for name, shape in shapes.items():
        owner = reading.holdings.at(name, holder)
        held = reading.holdings.put(name, owner, shape, "trained", ranks[0].file.name)
        for kind, (dtype, spots) in {**({MASTER: masters} if masters else {}), **states.flat}.items():
            held.add(kind, EvenSlices(spots, dtype, pers[name], at, prod(shape)))
        for kind, number in states.numbers.items():
            held.add(kind, number, ())
        at += pers[name]


def _masters(
    reading: Reading, where: str, index: int, sub_groups: int, length: int, ranks: Sequence[Slices], swap: SwapFiles
) -> tuple[DType, list[Spot]] | None:
    spots: list[Spot] = []
    dtypes: set[DType] = set()
    for rank in ranks:
        ref = rank.masters[index]
        swapped = None
        if ref.numel == 0 and length:
            nbytes = length * FLOAT32.itemsize
            swapped = swap.master(rank.world_rank, index, sub_groups, ref, nbytes, rank.dp)
        if ref.numel == length and len(ref.shape) == 1 and ref.is_contiguous:
            spots.append(rank.file.spot(reading.take(ref), rank.dp))
            dtypes.add(ref.dtype)
        elif swapped is not None:
            spots.append(swapped)
            dtypes.add(FLOAT32)
            reading.take(ref)
        else:
            reading.problems.add(_wrong_length(where, rank, "the master weights", ref, length))
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        reading.problems.add(f"{where}: the master weights have a different dtype on different dp ranks: {listed}")
    return (dtypes.pop(), spots) if len(spots) == len(ranks) and dtypes else None


def _wrong_length(where: str, rank: Slices, what: str, ref: TensorRef, length: int) -> str:
    text = f"{where}: {what} on dp rank {rank.dp} ({rank.file.name}) are {describe(ref)}, expected {length} elements"
    if ref.numel == 0:
        text += (
            f"; they were offloaded to NVMe, and {SWAP_FOLDER}/rank{rank.world_rank:02d}/ has no swap file that fits"
        )
    return text


def _states(
    reading: Reading, where: str, index: int, sub_groups: int, length: int, ranks: Sequence[Slices], swap: SwapFiles
) -> FlatStates:
    def finder(rank: Slices) -> Any:
        master_id = swap.id_of(rank.world_rank, index, sub_groups, rank.masters[index])
        nbytes = length * FLOAT32.itemsize
        return lambda ref, kind: swap.state(rank.world_rank, kind, master_id, ref, nbytes, rank.dp)

    members = [
        Member(rank.file, rank.dp, rank.state(index), (length,), finder(rank) if swap else None) for rank in ranks
    ]
    return sort_states(reading, where, members)


def _groups(reading: Reading, shapes: Sequence[Mapping[str, Shape]], rank: Slices) -> list[Group]:
    """Parameter groups: each lists its sub-groups in `params`."""
    groups = [Group(group_hyper(reading, rank.file, group), []) for group in rank.param_groups] or [Group({}, [])]
    listed = [group.get("params") for group in rank.param_groups]
    owner: dict[int, int] = {}
    for g, members in enumerate(listed):
        if isinstance(members, (list, tuple)):
            owner.update({member: g for member in members if type(member) is int})
    if sorted(owner) != list(range(len(shapes))):
        # Some releases leave the lists empty: with as many groups as sub-groups, or one group, there is no doubt.
        owner = {i: i if len(groups) == len(shapes) else 0 for i in range(len(shapes))}
        if len(groups) not in (1, len(shapes)):
            reading.note(
                "groups-unknown",
                f"{rank.file.name}: does not say which parameters belong to which group; all in group 0",
            )
    for index, sub_group in enumerate(shapes):
        groups[owner[index]].names.extend(sub_group)
    return groups


def read_frozen_slices(reading: Reading, holder: Holder, files: Sequence[RankFile], share: int) -> None:
    """Frozen parameters: every rank's model file has its flat, padded slice, in the model's dtype."""
    shapes = frozen_shapes_of(files[0])
    if not shapes or not isinstance(files[0].mapping().get("frozen_param_fragments"), dict):
        return
    for name, shape in shapes.items():
        per = -(-prod(shape) // share)
        for copy in range(0, len(files), share):
            spots = _frozen_spots(reading, holder, name, shape, per, files[copy : copy + share], copy)
            if spots:
                held = reading.holdings.put(name, holder, shape, "frozen", files[0].name)
                dtype = spots[0].ref.dtype if spots[0].ref is not None else FLOAT32
                held.add(WEIGHT, EvenSlices(spots, dtype, per, 0, prod(shape)))


def _frozen_spots(
    reading: Reading, holder: Holder, name: str, shape: Shape, per: int, files: Sequence[RankFile], first: int
) -> list[Spot]:
    spots: list[Spot] = []
    for dp, file in enumerate(files, first):
        fragments = file.mapping("frozen_param_fragments")
        where = f"frozen parameter {name} (dp rank {dp}, {holder}) in {file.name}"
        if name not in fragments:
            reading.problems.add(f"{where} is missing")
            continue
        ref = tensor_of(fragments[name], where)
        if ref.numel != per or not ref.is_contiguous:
            reading.problems.add(
                f"{where} has {ref.numel} elements, expected {per}: shape {list(shape)} cut over {len(files)} ranks"
            )
            continue
        spots.append(file.spot(reading.take(ref), dp))
    return spots if len(spots) == len(files) else []
