"""Optimizer files of ZeRO-1, ZeRO-2 and BF16_Optimizer: every group one flat buffer, cut into equal partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from ucp.files.inert import Inert, InertOrderedDict, Size
from ucp.files.pickle_writer import bare_object, called_object
from ucp.files.torchzip_writer import NewTensor, Zeros
from ucp.formats.deepspeed.emit.slices import Local
from ucp.formats.deepspeed.emit.states import GroupStates
from ucp.formats.deepspeed.emit.tensors import Segment, flat_tensor, segment
from ucp.formats.deepspeed.emit.world import LocalGroup, World, round_robin
from ucp.formats.deepspeed.flatlayout import FlatLayout, lay_out
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import BFLOAT16, DType


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A group in flat order with its layout."""

    group: LocalGroup
    members: tuple[Local, ...]  # in flat order
    paddings: tuple[int, ...]  # zeros after each member
    layout: FlatLayout

    @property
    def shapes(self) -> InertOrderedDict:
        """The group's entry of `param_shapes`."""
        return InertOrderedDict((member.name, Size(member.shape)) for member in self.members)


def flat_groups(world: World, pp: int, tp: int, ep: int) -> list[FlatGroup]:
    """The flat buffers of one model-parallel rank (for experts: of one expert-parallel rank)."""
    found: list[FlatGroup] = []
    for group in world.groups(pp, tp, ep):
        ranks = world.mesh.dp // group.ep
        members = group.members
        if world.settings.zero_option("round_robin_gradients", False) and not is_bf16_optimizer(world):
            members = tuple(members[i] for i in round_robin(len(members), ranks))
        paddings = _paddings(world, members)
        shapes = {member.name: member.shape for member in members}
        found.append(FlatGroup(group, members, paddings, lay_out(shapes, paddings, ranks)))
    return found


def is_bf16_optimizer(world: World) -> bool:
    """Will the target's engine use BF16_Optimizer? In bf16 it does at stage 1 with fp32 accumulation, and in pipelines
    at stage 0."""
    if world.dtype != BFLOAT16:
        return False
    if world.mesh.zero == 0:
        return world.pipeline is not None
    types = world.settings.config.get("data_types")
    accumulates = isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"
    return world.mesh.zero == 1 and accumulates and not world.settings.zero_option("offload_optimizer", None)


def is_elastic(world: World) -> bool:
    """Write states without groups, so that the job keeps its own hyper-parameters: the source has none to give.

    DeepSpeed adds what `group_paddings` says to every state that it loads in this form, to the step as well. So the
    padding stays in the files, and is not counted.
    """
    return not is_bf16_optimizer(world) and not any(group.hyper for group in world.source.groups)


def _paddings(world: World, members: Sequence[Local]) -> tuple[int, ...]:
    """Alignment zeros after each parameter but the last (`zero_optimization.parameter_alignment`)."""
    if not world.settings.zero_option("parameter_alignment", False) or is_bf16_optimizer(world):
        return (0,) * len(members)
    unit = 16 // gcd(16, world.dtype.itemsize)
    paddings: list[int] = []
    at = 0
    for i, member in enumerate(members):
        at += member.numel
        padding = 0 if i == len(members) - 1 else -at % unit
        paddings.append(padding)
        at += padding
    return tuple(paddings)


def optimizer_tree(
    world: World, groups: Sequence[FlatGroup], states: Sequence[GroupStates], index: Sequence[int]
) -> dict[str, Any]:
    """`optimizer_state_dict` of the rank that holds partition `index[g]` of every group `g`, which has `states[g]`."""
    bf16 = is_bf16_optimizer(world)
    carried = world.carried
    state: dict[int, Any] = {}
    masters: list[NewTensor] = []
    for g, flat in enumerate(groups):
        kinds = states[g].kinds.items()
        shares = {
            kind: _whole(flat, index[g], world.state_of(kind), dtype)
            if not bf16 and is_kept_whole(flat.group.hyper, kind)
            else _partition(flat, index[g], world.state_of(kind), dtype)
            for kind, dtype in kinds
        }
        entries = states[g].entries({kind: share for kind, share in shares.items() if share is not None})
        if entries:
            state[g] = entries
        master_dtype = world.master(flat.members[0].parameter).dtype
        length = None if bf16 or is_elastic(world) else flat.layout.per - flat.layout.padding(index[g])
        masters.append(_partition(flat, index[g], lambda member: world.master(member.parameter), master_dtype, length))
    base: Any = {
        "state": state,
        "param_groups": [{**flat.group.hyper, "params": [g]} for g, flat in enumerate(groups)],
    }
    if is_elastic(world):
        base = [state.get(g, {}) for g in range(len(groups))]
    tree: dict[str, Any] = {}
    if not bf16:
        tree["loss_scaler"] = carried.loss_scaler
        tree["dynamic_loss_scale"] = carried.dynamic_loss_scale
        tree["overflow"] = carried.optimizer.get("overflow", False)
    tree["clip_grad"] = carried.clip_grad
    tree["base_optimizer_state"] = base
    if is_elastic(world):
        tree["base_optimizer_state_step"] = world.source.step or 0
    tree["single_partition_of_fp32_groups"] = masters
    if not bf16:
        tree["zero_stage"] = zero_stage(world.mesh.zero)
    paddings = [_group_padding(flat, i, bf16) for flat, i in zip(groups, index, strict=True)]
    tree["group_paddings"] = [0] * len(groups) if is_elastic(world) else paddings
    if not bf16:
        tree["param_alignment_paddings"] = [list(flat.paddings) for flat in groups]
    tree["partition_count"] = [flat.layout.ranks for flat in groups]
    tree["ds_version"] = carried.version
    tree["param_slice_mappings"] = [_mapping(flat.layout, i) for flat, i in zip(groups, index, strict=True)]
    return tree


def _partition(
    flat: FlatGroup, index: int, atom_of: Callable[[Local], Atom | None], dtype: DType, length: int | None = None
) -> NewTensor:
    """Partition `index` of the buffer that holds one state of every member; cut to `length` elements."""
    layout = flat.layout
    low, high = index * layout.per, index * layout.per + (layout.per if length is None else length)

    def segments() -> Iterator[Segment]:
        at = low
        for number in layout.meeting(low, high):
            member, entry = flat.members[number], layout.entries[number]
            start, stop = max(entry.begin, low), min(entry.begin + entry.numel, high)
            yield Zeros(start - at)
            yield segment(atom_of(member), member.region.cut(start - entry.begin, stop - entry.begin))
            at = stop
        yield Zeros(high - at)

    return flat_tensor(dtype, list(segments()))


def is_kept_whole(hyper: Mapping[str, Any], kind: str) -> bool:
    """Muon's momentum: ranks keep that of every matrix of which they have an element, to its ends."""
    return hyper.get("use_muon") is True and kind == "momentum_buffer"


def _whole(flat: FlatGroup, index: int, atom_of: Callable[[Local], Atom | None], dtype: DType) -> NewTensor | None:
    """One state of all members that have elements in partition `index`, whole and end to end; None where none has."""
    per = flat.layout.per
    members = [flat.members[number] for number in flat.layout.meeting(index * per, (index + 1) * per)]
    return flat_tensor(dtype, [segment(atom_of(m), m.region) for m in members]) if members else None


def _group_padding(flat: FlatGroup, index: int, bf16: bool) -> int:
    """Zeros at the end of a partition; BF16_Optimizer books the whole tail on the last rank."""
    layout = flat.layout
    if bf16:
        return layout.ranks * layout.per - layout.content if index == layout.ranks - 1 else 0
    return layout.padding(index)


def _mapping(layout: FlatLayout, index: int) -> InertOrderedDict:
    return InertOrderedDict((name, _address(start, length)) for name, start, length in layout.overlaps(index))


def _address(start: int, numel: int) -> Inert:
    return bare_object("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": numel, "start": start})


def zero_stage(stage: int) -> Inert:
    return called_object("deepspeed.runtime.zero.config", "ZeroStageEnum", stage)
