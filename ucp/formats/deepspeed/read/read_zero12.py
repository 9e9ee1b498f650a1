"""ZeRO-1, ZeRO-2 and BF16_Optimizer, elastic or not: flat groups cut over the data-parallel ranks.

The layout comes from `param_shapes`. `param_slice_mappings` is compared with it and never believed: DeepSpeed computes
it from the wrong order under `round_robin_gradients`. Only where `param_shapes` is missing is it the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.containers.inert import Inert, TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, ParamGroup
from ucp.core.dtypes import DType
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.experts import (
    PartitionRanks,
    expert_number,
    expert_partition_ranks,
    experts_per_layer,
    global_expert_name,
)
from ucp.formats.deepspeed.flat_layout import FlatLayout, flat_layout_of, with_oldest_alignment
from ucp.formats.deepspeed.read.optimizer_values import FlatGroupShare, classify_states, group_hyper_parameters
from ucp.formats.deepspeed.read.rank_files import RankFile, as_tensors, describe_value
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import FlatSlice, TensorInFile
from ucp.formats.sharded.shard_table import RankCoord

ZERO12_MASTERS = "single_partition_of_fp32_groups"


@dataclass(slots=True)
class Zero12File:
    """One rank's optimizer file: the parts of it that matter here."""

    file: RankFile
    dp: int
    top: Mapping[Any, Any]
    masters: list[TensorRef]
    partition_counts: list[int]

    @property
    def hyper(self) -> list[Mapping[str, Any]]:
        """Hyper-parameters by group; elastic checkpoints save none."""
        base = self.top.get("base_optimizer_state")
        groups = base.get("param_groups") if isinstance(base, dict) else None
        return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []

    def state(self, group: int) -> Mapping[Any, Any]:
        """The optimizer's states of one flat group: by index in a torch state dict, by position when elastic."""
        base = self.top.get("base_optimizer_state")
        if isinstance(base, (list, tuple)):
            found = base[group] if group < len(base) else None
        else:
            states = base.get("state") if isinstance(base, dict) else None
            found = states.get(group) if isinstance(states, dict) else None
        return found if isinstance(found, dict) else {}


def open_zero12_files(files: Sequence[RankFile]) -> list[Zero12File]:
    """The optimizer files of one model-parallel rank, by data-parallel rank."""
    partitions: list[Zero12File] = []
    for dp, file in enumerate(files):
        top = file.mapping("optimizer_state_dict")
        if "local_sub_partitions_of_fp32_groups" in top:
            raise NotUnderstoodError(
                f"{file.name}: a ZeRO-1 file from before DeepSpeed 0.3.17, whose layout was another one",
                hint="load and save it once with DeepSpeed 0.3.17 or newer",
            )
        if ZERO12_MASTERS not in top:
            raise NotUnderstoodError(
                f"{file.name}: no {ZERO12_MASTERS} in it; found {', '.join(map(str, list(top)[:12]))}"
            )
        masters = as_tensors(top[ZERO12_MASTERS], f"{file.name}: {ZERO12_MASTERS}")
        partitions.append(
            Zero12File(file, dp, top, masters, _partition_counts(top.get("partition_count"), len(masters)))
        )
    return partitions


def _partition_counts(value: object, groups: int) -> list[int]:
    """How many ranks share each group; old files have one number for all."""
    if type(value) is int:
        return [value] * groups
    return [n for n in value if type(n) is int] if isinstance(value, (list, tuple)) else []


def read_zero12(
    context: ReadContext,
    coord: RankCoord,
    shapes: Sequence[Mapping[str, Shape]] | None,
    partitions: Sequence[Zero12File],
    data_first: bool = False,
) -> int:
    """Put master weights and optimizer states of one model-parallel rank into the shard table; returns the ep degree.

    `shapes` has one dict a group in flat order; None takes the order from the slice mappings and the shapes from the
    weights, which must have been read before.
    """
    first = partitions[0]
    shards = context.shards
    if shapes is None:
        shapes = _shapes_from_mappings(context, coord, partitions)
    for partition in partitions:
        _check_groups(context, coord, partition, first, len(shapes))
    context.problems.raise_any("look for a file of another run or of another save among them")
    ep_degree = 1
    groups: list[ParamGroup] = []
    for g, group_shapes in enumerate(shapes):
        cuts = first.partition_counts[g]
        spreads = [shards.placements[name] for name in group_shapes if name in shards.placements]
        is_expert = bool(spreads) or any(expert_number(name) is not None for name in group_shapes)
        if is_expert and 0 < cuts < len(partitions) and len(partitions) % cuts == 0:
            sharing = expert_partition_ranks(len(partitions), cuts, data_first)
        else:
            sharing = [PartitionRanks(tuple(range(len(partitions))), 0 if is_expert else None)]
            if cuts != len(partitions):
                context.problems.add(
                    f"group {g} ({coord}) was cut for {cuts} ranks ({first.file.name}), but {len(partitions)}"
                    " data-parallel rank files are here"
                )
                continue
        if any(spread.degree != len(sharing) for spread in spreads):
            context.problems.add(
                f"group {g} ({coord}) was cut for {cuts} of {len(partitions)} ranks ({first.file.name}), but AutoEP"
                f" spreads its experts over {spreads[0].degree} expert-parallel ranks"
            )
            continue
        ep_degree = max(ep_degree, len(sharing))
        hyper = group_hyper_parameters(context, first.file, first.hyper[g]) if g < len(first.hyper) else {}
        names: list[str] = []
        for sharer in sharing:
            local = {name: shards.local(name, shape, sharer.ep) for name, shape in group_shapes.items()}
            names += _read_group(context, coord, g, local, [partitions[dp] for dp in sharer.ranks], sharer.ep)
        groups.append(ParamGroup(hyper, list(dict.fromkeys(names))))
    shards.groups[coord] = groups
    return ep_degree


def _check_groups(
    context: ReadContext, coord: RankCoord, partition: Zero12File, first: Zero12File, groups: int
) -> None:
    where = f"{partition.file.name} (dp rank {partition.dp}, {coord})"
    if len(partition.masters) != groups:
        context.problems.add(f"{where} has {len(partition.masters)} flat groups, but the model file lists {groups}")
    if partition.partition_counts != first.partition_counts:
        context.problems.add(
            f"{where} was cut for {partition.partition_counts} ranks by group, but {first.file.name} for"
            f" {first.partition_counts}"
        )
    elif len(partition.partition_counts) < groups:
        context.problems.add(
            f"{where} says for {len(partition.partition_counts)} of {groups} groups how many ranks share them"
        )


def _read_group(
    context: ReadContext,
    coord: RankCoord,
    g: int,
    shapes: Mapping[str, Shape],
    partitions: Sequence[Zero12File],
    ep: int | None,
) -> list[str]:
    """One flat group over the ranks that share it. Returns the (global) names in flat order."""
    where = f"group {g} ({coord}" + (f" ep {ep})" if ep is not None else ")")
    layout = _fitting_layout(
        context,
        where,
        flat_layout_of(shapes, _alignment(partitions[0], g, len(shapes)), len(partitions)),
        partitions,
        g,
    )
    if layout is None:
        return []
    members = [
        FlatGroupShare(
            partition.file, partition.dp, partition.state(g), layout.lengths(index), None, layout.whole(index)
        )
        for index, partition in enumerate(partitions)
    ]
    states = classify_states(context, where, members)
    masters = _masters(context, where, partitions, g)
    experts = experts_per_layer(shapes)
    flat = {MASTER: masters, **states.flat}
    names: list[str] = []
    for entry in layout.entries:
        name = global_expert_name(entry.name, ep, experts) if ep is not None else entry.name
        if ep is not None and (number := expert_number(name)) is not None:
            context.shards.experts[name] = (number, ep)
        names.append(name)
        owner = context.shards.at(name, RankCoord(*coord[:2], -1 if ep is None else ep))
        held = context.shards.put(name, owner, entry.shape, "trained", partitions[0].file.name)
        for kind, (dtype, spots) in flat.items():
            held.add(kind, FlatSlice(spots, dtype, layout.per, entry.begin, entry.numel))
        for kind, number_stored in states.numbers.items():
            held.add(kind, number_stored, ())
        for kind, (dtype, spots) in states.whole.items():
            for index, begin in layout.whole_places(entry):
                held.add(kind, FlatSlice([spots[index]], dtype, layout.whole(index), begin, entry.numel))
    for index, partition in enumerate(partitions):
        _compare_mappings(context, layout, index, partition, g)
    return names


def _alignment(partition: Zero12File, g: int, count: int) -> Sequence[int] | None:
    """Padding after each parameter of the group, where the file says (recent releases)."""
    paddings = partition.top.get("param_alignment_paddings")
    if not isinstance(paddings, (list, tuple)) or g >= len(paddings):
        return None
    group = paddings[g]
    if not isinstance(group, (list, tuple)) or len(group) != count or any(type(n) is not int or n < 0 for n in group):
        return None
    return group


def _fitting_layout(
    context: ReadContext, where: str, layout: FlatLayout, partitions: Sequence[Zero12File], g: int
) -> FlatLayout | None:
    """The layout whose partition lengths agree with the files, or None after reporting what does not fit."""
    for candidate in (layout, with_oldest_alignment(layout)):
        if all(p.masters[g].numel in candidate.lengths(index) for index, p in enumerate(partitions)):
            return candidate
    for index, partition in enumerate(partitions):
        numel = partition.masters[g].numel
        if numel not in layout.lengths(index):
            context.problems.add(
                f"{where}: {partition.file.name} (dp rank {partition.dp}) holds {numel} elements, expected"
                f" {' or '.join(map(str, layout.lengths(index)))}: {layout.content} elements of"
                f" {len(layout.entries)} parameters cut over {layout.ranks} ranks"
            )
    return None


def _masters(
    context: ReadContext, where: str, partitions: Sequence[Zero12File], g: int
) -> tuple[DType, list[TensorInFile]]:
    refs = [partition.masters[g] for partition in partitions]
    dtypes = {ref.dtype for ref in refs}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        context.problems.add(f"{where}: the master weights have a different dtype on different dp ranks: {listed}")
    spots = [p.file.locate(context.claim(ref), p.dp) for p, ref in zip(partitions, refs, strict=True)]
    return refs[0].dtype, spots


def _compare_mappings(context: ReadContext, layout: FlatLayout, index: int, partition: Zero12File, g: int) -> None:
    """Count the parameters for which this rank's slice mapping does not say what the layout says."""
    mappings = partition.top.get("param_slice_mappings")
    if not isinstance(mappings, (list, tuple)) or g >= len(mappings) or not isinstance(mappings[g], dict):
        return
    said = {name: _parse_address(value) for name, value in mappings[g].items()}
    true = {name: (start, length) for name, start, length in layout.overlaps(index)}
    context.checked_mappings.update(said, true)
    for name in said.keys() | true.keys():
        if said.get(name) != true.get(name):
            context.wrong_mappings[name] += 1


def _parse_address(value: object) -> tuple[int, int] | None:
    """(start, length) of a `fragment_address`."""
    if isinstance(value, Inert):
        start, numel = value.get("start"), value.get("numel")
        if type(start) is int and type(numel) is int:
            return start, numel
    return None


def _shapes_from_mappings(
    context: ReadContext, coord: RankCoord, partitions: Sequence[Zero12File]
) -> list[dict[str, Shape]]:
    """Flat order from the slice mappings, shapes from the weights, where the model file has no `param_shapes`.

    (bf16 with a pipeline and ZeRO off is sharded by BF16_Optimizer, yet DeepSpeed leaves `param_shapes` empty.)
    """
    groups = len(partitions[0].masters)
    found: list[dict[str, Shape]] = [{} for _ in range(groups)]
    for g in range(groups):
        lengths: dict[str, int] = {}
        for partition in partitions:
            mappings = partition.top.get("param_slice_mappings")
            mapping = mappings[g] if isinstance(mappings, (list, tuple)) and g < len(mappings) else None
            if not isinstance(mapping, dict):
                raise NotUnderstoodError(
                    f"{partition.file.name}: neither param_shapes in the model file nor param_slice_mappings here say"
                    f" which parameters group {g} holds (found {describe_value(mapping)})"
                )
            addresses = {str(name): _parse_address(value) for name, value in mapping.items()}
            for name, address in sorted(addresses.items(), key=lambda item: item[1] or (0, 0)):
                lengths[name] = lengths.get(name, 0) + (address[1] if address else 0)
        for name, length in lengths.items():
            held = context.shards.get(name, coord) or next(iter(context.shards.row(name).values()), None)
            if held is None:
                context.problems.add(
                    f"parameter {name} ({coord}) has optimizer state, but no file holds its weight or shape"
                )
            elif prod(held.shape) != length:
                context.problems.add(
                    f"parameter {name} ({coord}) has shape {list(held.shape)}, but {length} elements of state"
                )
            else:
                found[g][name] = held.shape
    return found
