"""Optimizer state of ZeRO-1, ZeRO-2 and BF16_Optimizer, elastic or not: flat groups partitioned over dp ranks.

The layout is derived from `param_shapes`. `param_slice_mappings` is only compared with it, because DeepSpeed computes
the mappings from the wrong order under `round_robin_gradients`; they are the source only if `param_shapes` is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.containers.inert import Inert, TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, ParamGroup
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.experts import (
    PartitionRanks,
    expert_number,
    expert_partition_ranks,
    experts_per_layer,
    global_expert_name,
)
from ucp.formats.deepspeed.flat_layout import FlatLayout, flat_layout_of, with_oldest_alignment
from ucp.formats.deepspeed.read.optimizer_values import (
    FlatGroupShare,
    classify_states,
    group_hyper_parameters,
    open_masters,
    report_dtypes,
)
from ucp.formats.deepspeed.read.rank_files import (
    RankFile,
    describe_value,
    dict_or_empty,
    dicts_in,
    list_or_empty,
    lookup,
)
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import FlatSlice
from ucp.formats.sharded.shard_table import RankCoord

ZERO12_MASTERS = "single_partition_of_fp32_groups"


@dataclass(slots=True)
class Zero12File:
    """One rank's optimizer file."""

    file: RankFile
    dp: int
    top: Mapping[Any, Any]  # its `optimizer_state_dict`
    masters: list[TensorRef]  # one per flat group

    @property
    def partition_counts(self) -> list[int]:
        """The number of ranks that share each group; old files store one number for all groups."""
        counts = self.top.get("partition_count")
        if type(counts) is int:
            return [counts] * len(self.masters)
        return [n for n in list_or_empty(counts) if type(n) is int]

    @property
    def hyper(self) -> list[Mapping[str, Any]]:
        """Hyper-parameters by group; empty for elastic checkpoints, which do not save any."""
        return dicts_in(lookup(self.top, "base_optimizer_state", "param_groups"))

    def state(self, group: int) -> Mapping[Any, Any]:
        """The optimizer's states of one flat group: by key in a torch state dict, by position if elastic."""
        base = self.top.get("base_optimizer_state")
        if isinstance(base, (list, tuple)):
            return dict_or_empty(base[group] if group < len(base) else None)
        return dict_or_empty(lookup(base, "state", group))

    def slice_mapping(self, group: int) -> object:
        """The entry of `param_slice_mappings` for one flat group; None if there is none."""
        mappings = list_or_empty(self.top.get("param_slice_mappings"))
        return mappings[group] if group < len(mappings) else None


def open_zero12_files(files: Sequence[RankFile]) -> list[Zero12File]:
    """The optimizer files of one model-parallel rank, by data-parallel rank."""
    opened: list[Zero12File] = []
    for dp, file in enumerate(files):
        if "local_sub_partitions_of_fp32_groups" in file.mapping("optimizer_state_dict"):
            raise NotUnderstoodError(
                f"{file.name}: the layout of ZeRO-1 files before DeepSpeed 0.3.17 is not supported",
                hint="load and save it once with DeepSpeed 0.3.17 or newer",
            )
        opened.append(Zero12File(file, dp, *open_masters(file, ZERO12_MASTERS)))
    return opened


def read_zero12(
    context: ReadContext,
    coord: RankCoord,
    shapes: Sequence[Mapping[str, Shape]] | None,
    files: Sequence[Zero12File],
    data_first: bool = False,
) -> int:
    """Add master weights and optimizer states of one model-parallel rank to the shard table; return the ep degree.

    `shapes` has one dict per group in flat order. If it is None, the order comes from the slice mappings and the shapes
    come from the weights, which must have been read before.
    """
    first = files[0]
    shards = context.shards
    if shapes is None:
        shapes = _shapes_from_mappings(context, coord, files)
    for file in files:
        where, counts = f"{file.file.name} (dp rank {file.dp}, {coord})", file.partition_counts
        if len(file.masters) != len(shapes):
            text = f"{where} has {len(file.masters)} flat groups, but the model file lists {len(shapes)}"
            context.problems.add(text)
        if counts != first.partition_counts:
            context.problems.add(
                f"{where} was partitioned for {counts} ranks by group, but {first.file.name} for"
                f" {first.partition_counts}"
            )
        elif len(counts) < len(shapes):
            context.problems.add(f"{where} has a partition_count for {len(counts)} of {len(shapes)} groups only")
    context.problems.raise_any("look for a file of another run or of another save among them")
    ep_degree = 1
    groups: list[ParamGroup] = []
    for g, group_shapes in enumerate(shapes):
        count = first.partition_counts[g]
        placements = [shards.placements[name] for name in group_shapes if name in shards.placements]
        is_expert = bool(placements) or any(expert_number(name) is not None for name in group_shapes)
        if is_expert and 0 < count < len(files) and len(files) % count == 0:
            rank_groups = expert_partition_ranks(len(files), count, data_first)
        else:
            rank_groups = [PartitionRanks(tuple(range(len(files))), 0 if is_expert else None)]
            if count != len(files):
                context.problems.add(
                    f"group {g} ({coord}) was partitioned for {count} ranks ({first.file.name}), but there are"
                    f" {len(files)} data-parallel rank files"
                )
                continue
        if any(placement.degree != len(rank_groups) for placement in placements):
            context.problems.add(
                f"group {g} ({coord}) was partitioned for {count} of {len(files)} ranks ({first.file.name}), but AutoEP"
                f" distributes its experts over {placements[0].degree} expert-parallel ranks"
            )
            continue
        ep_degree = max(ep_degree, len(rank_groups))
        hyper = group_hyper_parameters(context, first.file, first.hyper[g]) if g < len(first.hyper) else {}
        names: list[str] = []
        for sharing in rank_groups:
            local = {name: shards.local(name, shape, sharing.ep) for name, shape in group_shapes.items()}
            names += _read_group(context, coord, g, local, [files[dp] for dp in sharing.ranks], sharing.ep)
        groups.append(ParamGroup(hyper, list(dict.fromkeys(names))))
    shards.groups[coord] = groups
    return ep_degree


def _read_group(
    context: ReadContext,
    coord: RankCoord,
    g: int,
    shapes: Mapping[str, Shape],
    files: Sequence[Zero12File],
    ep: int | None,
) -> list[str]:
    """Read one flat group from the files of the ranks that share it. Return the (global) names in flat order."""
    where = f"group {g} ({coord}" + (f" ep {ep})" if ep is not None else ")")
    stored = list_or_empty(files[0].top.get("param_alignment_paddings"))  # recent releases
    paddings = list_or_empty(stored[g]) if g < len(stored) else ()
    is_valid = len(paddings) == len(shapes) and all(type(n) is int and n >= 0 for n in paddings)
    expected = flat_layout_of(shapes, paddings if is_valid else None, len(files))
    layout = _fitting_layout(context, where, expected, files, g)
    if layout is None:
        return []
    members = [
        FlatGroupShare(file.file, file.dp, file.state(g), layout.lengths(index), None, layout.whole(index))
        for index, file in enumerate(files)
    ]
    states = classify_states(context, where, members)
    report_dtypes(context, f"{where}: the master weights have", {file.masters[g].dtype for file in files})
    masters = [file.file.locate(context.claim(file.masters[g]), file.dp) for file in files]
    flat = {MASTER: (files[0].masters[g].dtype, masters), **states.flat}
    experts = experts_per_layer(shapes)
    names: list[str] = []
    for entry in layout.entries:
        name = global_expert_name(entry.name, ep, experts) if ep is not None else entry.name
        if ep is not None and (expert := expert_number(name)) is not None:
            context.shards.experts[name] = (expert, ep)
        names.append(name)
        owner = context.shards.at(name, RankCoord(*coord[:2], -1 if ep is None else ep))
        shard = context.shards.put(name, owner, entry.shape, "trained", files[0].file.name)
        for kind, (dtype, located) in flat.items():
            shard.add(kind, FlatSlice(located, dtype, layout.per, entry.begin, entry.numel))
        for kind, number in states.numbers.items():
            shard.add(kind, number, ())
        for kind, (dtype, located) in states.whole.items():
            for index, begin in layout.whole_places(entry):
                shard.add(kind, FlatSlice([located[index]], dtype, layout.whole(index), begin, entry.numel))
    for index, file in enumerate(files):
        _compare_mappings(context, layout, index, file, g)
    return names


def _fitting_layout(
    context: ReadContext, where: str, layout: FlatLayout, files: Sequence[Zero12File], g: int
) -> FlatLayout | None:
    """The layout whose partition lengths agree with the files, or None after reporting those that do not."""
    for candidate in (layout, with_oldest_alignment(layout)):
        if all(f.file.is_lost or f.masters[g].numel in candidate.lengths(index) for index, f in enumerate(files)):
            return candidate
    for index, file in enumerate(files):
        numel = file.masters[g].numel
        if not file.file.is_lost and numel not in layout.lengths(index):
            context.problems.add(
                f"{where}: {file.file.name} (dp rank {file.dp}) has {numel} elements, expected"
                f" {' or '.join(map(str, layout.lengths(index)))}: {layout.content} elements of"
                f" {len(layout.entries)} parameters partitioned over {layout.ranks} ranks"
            )
    return None


def _compare_mappings(context: ReadContext, layout: FlatLayout, index: int, file: Zero12File, g: int) -> None:
    """Count the parameters for which this rank's slice mapping disagrees with the layout."""
    mapping = file.slice_mapping(g)
    if not isinstance(mapping, dict) or file.file.is_lost:
        return
    stored = {name: _parse_address(value) for name, value in mapping.items()}
    actual = {name: (start, length) for name, start, length in layout.overlaps(index)}
    context.checked_mappings.update(stored, actual)
    for name in stored.keys() | actual.keys():
        if stored.get(name) != actual.get(name):
            context.wrong_mappings[name] += 1


def _parse_address(value: object) -> tuple[int, int] | None:
    """(start, length) of a `fragment_address`."""
    if isinstance(value, Inert):
        start, numel = value.get("start"), value.get("numel")
        if type(start) is int and type(numel) is int:
            return start, numel
    return None


def _shapes_from_mappings(
    context: ReadContext, coord: RankCoord, files: Sequence[Zero12File]
) -> list[dict[str, Shape]]:
    """Flat order from the slice mappings and shapes from the weights, if the model file has no `param_shapes`.

    (bf16 with a pipeline and ZeRO off is sharded by BF16_Optimizer, yet DeepSpeed leaves `param_shapes` empty.)
    """
    found: list[dict[str, Shape]] = [{} for _ in files[0].masters]
    for g, group_shapes in enumerate(found):
        lengths: dict[str, int] = {}
        for file in files:
            mapping = file.slice_mapping(g)
            if not isinstance(mapping, dict):
                raise NotUnderstoodError(
                    f"{file.file.name}: the parameters of group {g} are unknown: the model file has no param_shapes,"
                    f" and param_slice_mappings has {describe_value(mapping)} for it"
                )
            addresses = {str(name): _parse_address(value) for name, value in mapping.items()}
            for name, address in sorted(addresses.items(), key=lambda item: item[1] or (0, 0)):
                lengths[name] = lengths.get(name, 0) + (address[1] if address else 0)
        for name, length in lengths.items():
            shard = context.shards.get(name, coord) or next(iter(context.shards.row(name).values()), None)
            if shard is None and context.lost is not None:
                group_shapes[name] = (length,)  # the model file is lost
            elif shard is None:
                context.problems.add(
                    f"parameter {name} ({coord}) has optimizer state, but no file has its weight or shape"
                )
            elif prod(shard.shape) != length:
                context.problems.add(
                    f"parameter {name} ({coord}) has shape {list(shard.shape)}, but {length} elements of state"
                )
            else:
                group_shapes[name] = shard.shape
    return found
