"""Optimizer files of ZeRO-3: every parameter cut on its own, its slices lying in flat sub-group buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.files.inert import InertOrderedDict, Size
from ucp.files.torchzip_writer import NewTensor, Zeros
from ucp.formats.deepspeed.emit.flat import zero_stage
from ucp.formats.deepspeed.emit.slices import Local
from ucp.formats.deepspeed.emit.states import GroupStates
from ucp.formats.deepspeed.emit.tensors import Segment, flat_tensor, segment
from ucp.formats.deepspeed.emit.world import LocalGroup, World
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Region

_DEFAULT_SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Parameters that share one flat buffer."""

    group: int
    members: tuple[Local, ...]

    @property
    def shapes(self) -> InertOrderedDict:
        """The sub-group's entry of `param_shapes`."""
        return InertOrderedDict((member.name, Size(member.shape)) for member in self.members)


def share(numel: int, ranks: int) -> int:
    """Elements of a parameter that every rank holds, the last ones padded."""
    return -(-numel // ranks)


def own_slice(region: Region, ranks: int, rank: int) -> tuple[Region, int]:
    """What `rank` holds of a local tensor, and how many padding elements follow it."""
    per = share(region.numel, ranks)
    held = region.cut(rank * per, (rank + 1) * per)
    return held, per - held.numel


def sub_groups(world: World, groups: Sequence[LocalGroup]) -> list[SubGroup]:
    """Every group is cut, in order, where the sum of what one rank holds reaches `sub_group_size`."""
    limit = int(world.settings.zero_option("sub_group_size", _DEFAULT_SUB_GROUP_SIZE))
    found: list[SubGroup] = []
    for number, group in enumerate(groups):
        current: list[Local] = []
        held = 0
        for member in group.members:
            current.append(member)
            held += share(member.numel, world.mesh.dp)
            if held >= limit:
                found.append(SubGroup(number, tuple(current)))
                current, held = [], 0
        if current:
            found.append(SubGroup(number, tuple(current)))
    return found


def optimizer_tree(
    world: World, groups: Sequence[LocalGroup], subs: Sequence[SubGroup], states: Sequence[GroupStates], dp: int
) -> dict[str, Any]:
    """`optimizer_state_dict` of data-parallel rank `dp`; sub-group `n` has `states[n]`."""
    state: dict[int, Any] = {}
    masters: list[NewTensor] = []
    for number, sub in enumerate(subs):
        kinds = states[number].kinds.items()
        entries = states[number].entries(
            {kind: _buffer(world, sub, dp, world.state_of(kind), dtype) for kind, dtype in kinds}
        )
        if entries:
            state[number] = entries
        dtype = world.master(sub.members[0].parameter).dtype
        masters.append(_buffer(world, sub, dp, lambda member: world.master(member.parameter), dtype))
    carried = world.carried
    listed = [[number for number, sub in enumerate(subs) if sub.group == g] for g in range(len(groups))]
    return {
        "zero_stage": zero_stage(3),
        "loss_scaler": carried.loss_scaler,
        "dynamic_loss_scale": carried.dynamic_loss_scale,
        "overflow": carried.optimizer.get("overflow", False),
        "partition_count": world.mesh.dp,
        "optimizer_state_dict": {
            "state": state,
            "param_groups": [{**group.hyper, "params": members} for group, members in zip(groups, listed, strict=True)],
        },
        "fp32_flat_groups": masters,
    }


def _buffer(world: World, sub: SubGroup, dp: int, atom_of: Callable[[Local], Atom | None], dtype: DType) -> NewTensor:
    segments: list[Segment] = []
    for member in sub.members:
        held, padding = own_slice(member.region, world.mesh.dp, dp)
        segments.append(segment(atom_of(member), held))
        segments.append(Zeros(padding))
    return flat_tensor(dtype, segments)
