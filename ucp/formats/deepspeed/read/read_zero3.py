"""Optimizer state of ZeRO-3: every parameter partitioned on its own over the dp ranks, in flat sub-group buffers.

AutoEP: stacked experts are partitioned only over the ranks that have the same experts. The files of every rank record
which ranks these are, and `check_placements` and `check_partition_ranks` compare them.

NVMe offload: rank files have empty tensors, and DeepSpeed copies its swap folder to `offloaded_tensors/rank<RR>/`. The
master weights of a sub-group are in `<id>.tensor.swp`, its state `exp_avg` in `exp_avg-<id>.tensor.swp`; `<id>` is the
numbers of its first and last parameter joined by `_`, and is kept as attribute `ds_id` of the empty tensor. A swap file
has the flat fp32 buffer from byte 0 on, followed by I/O padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, ParamGroup
from ucp.core.dtypes import FLOAT32, DType
from ucp.formats.deepspeed.experts import (
    ExpertPlacement,
    PartitionRanks,
    autoep_entries,
    expert_partition_ranks,
    expert_placements,
)
from ucp.formats.deepspeed.read.optimizer_values import (
    FlatGroupShare,
    classify_states,
    flat_group_owners,
    group_hyper_parameters,
    open_masters,
    report_dtypes,
)
from ucp.formats.deepspeed.read.rank_files import (
    RankFile,
    as_tensor,
    describe_value,
    dict_or_empty,
    dicts_in,
    lookup,
)
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.read_weights import frozen_shapes
from ucp.formats.deepspeed.step_files import SWAP_FOLDER
from ucp.formats.sharded.shard_fragments import EvenSlices, TensorInFile
from ucp.formats.sharded.shard_table import RankCoord

ZERO3_MASTERS = "fp32_flat_groups"

_SWAP_RANK_FOLDER: Final = re.compile(r"rank(\d+)")
_SWAP_FILE: Final = re.compile(r"(.+)\.tensor\.swp")
_SUB_GROUP_ID: Final = re.compile(r"(\d+)_(\d+)")


@dataclass(slots=True)
class Zero3File:
    """One rank's optimizer file."""

    file: RankFile
    dp: int
    world_rank: int
    top: Mapping[Any, Any]  # its `optimizer_state_dict`
    masters: list[TensorRef]  # one per sub-group

    def state(self, sub_group: int) -> Mapping[Any, Any]:
        return dict_or_empty(lookup(self.top, "optimizer_state_dict", "state", sub_group))

    @property
    def param_groups(self) -> list[Mapping[str, Any]]:
        return dicts_in(lookup(self.top, "optimizer_state_dict", "param_groups"))


def open_zero3_files(files: Sequence[RankFile], tp: int, tp_rank: int) -> list[Zero3File]:
    """The optimizer files of one model-parallel rank, by data-parallel rank."""
    return [Zero3File(file, dp, dp * tp + tp_rank, *open_masters(file, ZERO3_MASTERS)) for dp, file in enumerate(files)]


def read_zero3(
    context: ReadContext,
    coord: RankCoord,
    shapes: Sequence[Mapping[str, Shape]],
    files: Sequence[Zero3File],
    swap: SwapFiles,
    data_first: bool = False,
) -> int:
    """Add master weights and optimizer states of one model-parallel rank to the shard table.

    `shapes` has one dict per sub-group. Returns the number of ranks that share a parameter: with MiCS fewer than there
    are files, because every shard group writes the whole state. AutoEP's experts are shared only by the ranks of one
    expert-parallel rank: consecutive ones with `data_first`.
    """
    count = _partition_count(context, coord, files)
    for file in files:
        if len(file.masters) != len(shapes):
            context.problems.add(
                f"{file.file.name} (dp rank {file.dp}, {coord}) has {len(file.masters)} sub-groups, but the model file"
                f" lists {len(shapes)}"
            )
    context.problems.raise_any("look for a file of another run or of another save among them")
    placements = context.shards.placements
    for index, sub_group in enumerate(shapes):
        placement = next((placements[name] for name in sub_group if name in placements), None)
        for copy in range(0, len(files), count):
            for sharing in zero3_partition_ranks(placement, count, data_first):
                members = [files[copy + dp] for dp in sharing.ranks]
                for file in members:
                    check_partition_ranks(context, file.file, file.top, index, file.dp - copy, sharing)
                local = {name: context.shards.local(name, shape, sharing.ep) for name, shape in sub_group.items()}
                owner = coord if sharing.ep is None else RankCoord(*coord[:2], sharing.ep)
                _read_sub_group(context, owner, index, len(shapes), local, members, swap)
    context.shards.groups[coord] = _param_groups(context, shapes, files[0])
    return count


def _partition_count(context: ReadContext, coord: RankCoord, files: Sequence[Zero3File]) -> int:
    counts = {int(count) for file in files if type(count := file.top.get("partition_count")) is int}
    if len(counts) > 1:
        context.problems.add(f"rank files of {coord} disagree on how many ranks share a parameter: {sorted(counts)}")
    count = next(iter(counts), len(files))
    if 0 < count <= len(files) and len(files) % count == 0:
        return count
    context.problems.add(
        f"parameters of {coord} were partitioned for {count} ranks ({files[0].file.name}), but there are {len(files)}"
        " data-parallel rank files"
    )
    return len(files)


def _read_sub_group(
    context: ReadContext,
    coord: RankCoord,
    index: int,
    sub_groups: int,
    shapes: Mapping[str, Shape],
    files: Sequence[Zero3File],
    swap: SwapFiles,
) -> None:
    where = f"sub-group {index} ({coord})"
    per_rank = {name: -(-prod(shape) // len(files)) for name, shape in shapes.items()}
    length = sum(per_rank.values())
    masters: list[TensorInFile] = []
    dtypes: set[DType] = set()
    members: list[FlatGroupShare] = []
    for file in files:
        ref, find_swapped = file.masters[index], swap.finder(file, index, sub_groups, length)
        swapped = find_swapped(ref, "") if ref.numel == 0 and length else None
        if ref.numel == length and len(ref.shape) == 1 and ref.is_contiguous:
            masters.append(file.file.locate(context.claim(ref), file.dp))
            dtypes.add(ref.dtype)
        elif swapped is not None:
            context.claim(ref)
            masters.append(swapped)
            dtypes.add(FLOAT32)
        else:
            text = f"{where}: the master weights on dp rank {file.dp} ({file.file.name}) are {describe_value(ref)},"
            text += f" expected {length} elements"
            if ref.numel == 0:
                folder = f"{SWAP_FOLDER}/rank{file.world_rank:02d}/"
                text += f"; they were offloaded to NVMe, and {folder} has no matching swap file"
            context.problems.add(text)
        share = FlatGroupShare(file.file, file.dp, file.state(index), (length,), find_swapped if swap.files else None)
        members.append(share)
    report_dtypes(context, f"{where}: the master weights have", dtypes)
    states = classify_states(context, where, members)
    flat = {**states.flat}
    if len(masters) == len(files) and dtypes:
        flat = {MASTER: (dtypes.pop(), masters), **flat}
    at = 0
    for name, shape in shapes.items():
        owner = context.shards.at(name, coord)
        shard = context.shards.put(name, owner, shape, "trained", files[0].file.name)
        for kind, (dtype, located) in flat.items():
            shard.add(kind, EvenSlices(located, dtype, per_rank[name], at, prod(shape)))
        for kind, number in states.numbers.items():
            shard.add(kind, number, ())
        at += per_rank[name]


def _param_groups(context: ReadContext, shapes: Sequence[Mapping[str, Shape]], file: Zero3File) -> list[ParamGroup]:
    """Parameter groups; each lists its sub-groups in `params`."""
    groups = [ParamGroup(group_hyper_parameters(context, file.file, group), []) for group in file.param_groups]
    groups = groups or [ParamGroup({}, [])]
    group_of = flat_group_owners(file.param_groups)
    if sorted(group_of) != list(range(len(shapes))):
        # Some releases leave the lists empty. With one group, or one per sub-group, the assignment is clear.
        group_of = {i: i if len(groups) == len(shapes) else 0 for i in range(len(shapes))}
        if len(groups) not in (1, len(shapes)):
            context.note(
                "groups-unknown",
                f"{file.file.name}: does not record which parameters belong to which group; all are in group 0",
            )
    for index, sub_group in enumerate(shapes):
        groups[group_of[index]].names.extend(sub_group)
    return groups


def read_frozen_slices(context: ReadContext, coord: RankCoord, files: Sequence[RankFile], count: int) -> None:
    """Read frozen parameters: every rank's model file has its flat, padded slice, in the model's dtype.

    `count` is the number of ranks that share a parameter.
    """
    shapes = frozen_shapes(files[0])
    if not shapes or not isinstance(files[0].mapping().get("frozen_param_fragments"), dict):
        return
    for name, shape in shapes.items():
        per_rank = -(-prod(shape) // count)
        for copy in range(0, len(files), count):
            located: list[TensorInFile] = []
            dtype = FLOAT32
            for dp, file in enumerate(files[copy : copy + count], copy):
                fragments = file.mapping("frozen_param_fragments")
                where = f"frozen parameter {name} (dp rank {dp}, {coord}) in {file.name}"
                if name not in fragments:
                    context.problems.add(f"{where} is missing")
                    continue
                ref = as_tensor(fragments[name], where)
                if ref.numel != per_rank or not ref.is_contiguous:
                    context.problems.add(
                        f"{where} has {ref.numel} elements, expected {per_rank}: shape {list(shape)} partitioned over"
                        f" {count} ranks"
                    )
                    continue
                dtype = ref.dtype
                located.append(file.locate(context.claim(ref), dp))
            if len(located) == count:
                shard = context.shards.put(name, coord, shape, "frozen", files[0].name)
                shard.add(WEIGHT, EvenSlices(located, dtype, per_rank, 0, prod(shape)))


def check_placements(context: ReadContext, models: Sequence[RankFile], data_first: bool) -> None:
    """Report model files whose AutoEP placement differs from the first file's, or that belong to another ep rank."""
    placements = context.shards.placements
    for dp, model in enumerate(models if placements else ()):
        if dp and expert_placements(model.mapping(), model.name) != placements:
            context.problems.add(f"{model.name} (dp rank {dp}): places experts differently than {models[0].name}")
            continue
        for entry in () if model.is_lost else autoep_entries(model.mapping(), model.name):
            placement = placements[f"{entry['expert_key_prefix']}.w1"]
            groups = zero3_partition_ranks(placement, len(models), data_first)
            stored, ep = entry.get("ep_rank"), next((group.ep for group in groups if dp in group.ranks), None)
            if type(stored) is int and stored != ep:
                context.problems.add(
                    f"{model.name} (dp rank {dp}): is a file of expert-parallel rank {stored}, expected {ep}:"
                    " files were exchanged"
                )
                break


def zero3_partition_ranks(placement: ExpertPlacement | None, dp: int, data_first: bool) -> list[PartitionRanks]:
    """The groups of ranks, of `dp` ranks, that share a parameter: all, or those with the same experts."""
    if placement is None or dp % placement.degree:
        return [PartitionRanks(tuple(range(dp)))]
    return expert_partition_ranks(dp, dp // placement.degree, data_first)


def check_partition_ranks(
    context: ReadContext, file: RankFile, top: Mapping[Any, Any], index: int, dp: int, expected: PartitionRanks
) -> None:
    """Report an optimizer file that records other ranks than `expected` as sharing sub-group `index`."""
    stored = top.get("ds_zero_partition_groups")
    entry = stored[index] if isinstance(stored, (list, tuple)) and index < len(stored) else None
    if not isinstance(entry, dict) or file.is_lost:
        return
    ranks, position = entry.get("partition_ranks"), entry.get("partition_rank")
    expected_position = expected.ranks.index(dp)
    if (ranks is not None and ranks != list(expected.ranks)) or position not in (None, expected_position):
        context.problems.add(
            f"{file.name} (dp rank {dp}): has part {position} of sub-group {index}, which ranks {ranks} share,"
            f" expected part {expected_position} and ranks {list(expected.ranks)}: files were exchanged"
        )


class SwapFiles:
    """The swap files of all ranks of a step folder: rank → tensor id → (file relative to the root, size in bytes)."""

    def __init__(self, step: Path, prefix: str) -> None:
        self.files: dict[int, dict[str, tuple[str, int]]] = {}
        folder = step / SWAP_FOLDER
        if not folder.is_dir():
            return
        for rank_folder in sorted(folder.iterdir()):
            if found := _SWAP_RANK_FOLDER.fullmatch(rank_folder.name):
                of_rank = self.files.setdefault(int(found[1]), {})
                for path in sorted(rank_folder.iterdir()):
                    if (swap := _SWAP_FILE.fullmatch(path.name)) and "_gradient_" not in path.name:
                        name = f"{prefix}{SWAP_FOLDER}/{rank_folder.name}/{path.name}"
                        of_rank[swap[1]] = (name, path.stat().st_size)

    def finder(
        self, file: Zero3File, sub_group: int, sub_groups: int, length: int
    ) -> Callable[[TensorRef, str], TensorInFile | None]:
        """A function of an empty tensor and its kind ("" for master weights) that locates its values, or returns None.

        The id of a sub-group is the one on its empty tensor; else by order, if every sub-group was swapped out.
        """
        of_rank = self.files.get(file.world_rank, {})
        sub_group_id = _ds_id(file.masters[sub_group])
        if sub_group_id is None:
            parsed = ((found, key) for key in of_rank if (found := _SUB_GROUP_ID.fullmatch(key)))
            ids = sorted((int(found[1]), int(found[2]), key) for found, key in parsed)
            sub_group_id = ids[sub_group][2] if len(ids) == sub_groups else None

        def find(ref: TensorRef, kind: str) -> TensorInFile | None:
            own = sub_group_id and (f"{kind}-{sub_group_id}" if kind else sub_group_id)
            name, nbytes = of_rank.get(_ds_id(ref) or own or "", ("", -1))
            if nbytes < length * FLOAT32.itemsize:
                return None
            return TensorInFile(name, None, None, file.dp, known_offset=0)

        return find


def _ds_id(ref: TensorRef) -> str | None:
    """The attribute `ds_id` that DeepSpeed leaves on the tensors it swaps."""
    attributes = ref.attributes
    for part in attributes if isinstance(attributes, tuple) else (attributes,):
        if isinstance(part, dict) and isinstance(part.get("ds_id"), str):
            return str(part["ds_id"])
    return None
