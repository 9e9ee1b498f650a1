"""Tensors and optimizer state of the target: `optimizer_state_dict` of every ZeRO stage.

- ZeRO-1, ZeRO-2 and BF16_Optimizer: every group is one flat buffer, divided into equal partitions.
- ZeRO-3: every parameter is partitioned on its own; the slices are in flat sub-group buffers.
- ZeRO off: one entry per parameter, in the model file.

Tensors are described by the regions of atoms that fill them. Nothing is read here except scalars such as `step`, which
a flat group has only once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Final

from ucp.containers.inert import Inert, InertOrderedDict, Size
from ucp.containers.pickle_writer import NewTensor, bare_object, called_object
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, new_tensor
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Parameter, state_of_kind
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType, scalar_value
from ucp.core.optimizers import COUNTERS, is_kept_whole
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.formats.deepspeed.flat_layout import FlatLayout, flat_layout_of
from ucp.formats.deepspeed.write.target_layout import LocalParamGroup, TargetLayout, round_robin
from ucp.formats.sharded.slicer import TargetSlice
from ucp.storage.local import SourceFiles

Segment = RegionContent | ZeroContent


def flat_tensor(dtype: DType, segments: Iterable[Segment]) -> NewTensor:
    """A one-dimensional tensor of consecutive segments; neighbouring zeros are joined."""
    joined: list[Segment] = []
    for segment in segments:
        if not segment.numel:
            continue
        if isinstance(segment, ZeroContent) and joined and isinstance(joined[-1], ZeroContent):
            joined[-1] = ZeroContent(joined[-1].numel + segment.numel)
        else:
            joined.append(segment)
    return new_tensor(dtype, (sum(segment.numel for segment in joined),), *joined)


def shaped_tensor(atom: Atom, region: Region, shape: Shape) -> NewTensor:
    """A region of an atom in the given shape."""
    if region.numel != prod(shape):
        raise AssertionError(f"{atom}: a region of {region.numel} elements cannot have shape {shape}")
    return new_tensor(atom.dtype, shape, *((RegionContent(atom, region),) if region.numel else ()))


def whole_tensor(atom: Atom) -> NewTensor:
    """A whole atom."""
    return shaped_tensor(atom, Region.all_of(atom.shape), atom.shape)


def segment(atom: Atom | None, region: Region) -> Segment:
    """A region of a state; zeros if the parameter does not have the state (it took no step)."""
    return RegionContent(atom, region) if atom is not None else ZeroContent(region.numel)


def is_scalar(parameter: Parameter, kind: str, atom: Atom) -> bool:
    """Whether a state is one value for the whole parameter. For a 0-d parameter only the name decides."""
    return not atom.shape and (bool(parameter.shape) or kind in COUNTERS)


def element_kinds(members: Iterable[TargetSlice], without: Container[str] = ()) -> dict[str, DType]:
    """Kinds of states with one value per element, with their dtype; the union over the parameters, in order.

    `without`: kinds to skip, which may have any shape.
    """
    kinds: dict[str, DType] = {}
    for member in members:
        for kind, atom in member.parameter.atoms.items():
            if kind in (WEIGHT, MASTER) or is_scalar(member.parameter, kind, atom) or kind in without:
                continue
            if atom.shape != member.parameter.shape:
                raise InconsistentError(
                    f"parameter {member.parameter.name}: '{kind}' has shape {list(atom.shape)}, which cannot be split"
                    f" like the parameter's {list(member.parameter.shape)}",
                    hint="only --zero 0 with --tp 1 can write such a state, because it stays whole there",
                )
            kinds.setdefault(kind, atom.dtype)
    return kinds


@dataclass(frozen=True, slots=True)
class TargetGroupStates:
    """The optimizer states of a flat group, without the masters: kinds and scalars, which all ranks share."""

    kinds: dict[str, DType]  # states with one value per element
    scalars: dict[str, Any]

    def entries(self, tensors: dict[str, NewTensor]) -> dict[str, Any]:
        """The group's entry of the optimizer's `state`, as torch orders it: the step, the tensors, other scalars."""
        first = {kind: value for kind, value in self.scalars.items() if kind == "step"}
        return {state_of_kind(kind): value for kind, value in {**first, **tensors, **self.scalars}.items()}


class ScalarStates:
    """Reads scalars such as `step`, and checks that all parameters of a group have the same value."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[tuple[str, int], bytes] = {}

    def of(self, members: Iterable[TargetSlice]) -> dict[str, Any]:
        """Kind → number (if the source stores an integer) or tensor."""
        found: dict[str, tuple[str, bytes, Atom]] = {}
        for member in members:
            for kind, atom in member.parameter.atoms.items():
                if not is_scalar(member.parameter, kind, atom):
                    continue
                fragment = atom.fragments[0]
                key = (fragment.file, fragment.offset)
                if fragment.inline is None and key not in self._known:
                    self._known[key] = self._files.read(*key, fragment.dtype.itemsize)
                data = self._known[key] if fragment.inline is None else fragment.inline
                first = found.setdefault(kind, (member.parameter.name, data, atom))
                if first[1] != data:
                    mine, other = scalar_value(data, atom.dtype), scalar_value(first[1], first[2].dtype)
                    raise InconsistentError(
                        f"'{kind}' of {member.parameter.name} is {mine}, that of {first[0]} in the same optimizer group"
                        f" is {other}: a flat group has one value",
                        hint="this target needs equal values in a group; use --zero 0",
                    )
        return {
            kind: scalar_value(data, atom.dtype) if atom.dtype.family == "int" else whole_tensor(atom)
            for kind, (_, data, atom) in found.items()
        }

    def group(self, members: Sequence[TargetSlice]) -> TargetGroupStates:
        """Every state of a flat group."""
        return TargetGroupStates(element_kinds(members), self.of(members))


_DEFAULT_SUB_GROUP_SIZE: Final = 1_000_000_000  # of DeepSpeed


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A parameter group in flat order with the layout of its buffer."""

    group: LocalParamGroup
    members: tuple[TargetSlice, ...]  # in flat order
    paddings: tuple[int, ...]  # zeros after each member, for alignment
    layout: FlatLayout


def shapes_of(members: Iterable[TargetSlice]) -> InertOrderedDict:
    """The entry of `param_shapes` for a flat group or sub-group."""
    return InertOrderedDict((member.name, Size(member.shape)) for member in members)


def flat_groups(layout: TargetLayout, pp: int, tp: int, ep: int) -> list[FlatGroup]:
    """The flat buffers of one model-parallel rank (with experts: of one expert-parallel rank)."""
    found: list[FlatGroup] = []
    for group in layout.groups(pp, tp, ep):
        ranks = layout.mesh.dp // group.ep
        members = group.members
        if layout.settings.zero_option("round_robin_gradients", False) and not is_bf16_optimizer(layout):
            members = tuple(members[i] for i in round_robin(len(members), ranks))
        paddings = _paddings(layout, members)
        shapes = {member.name: member.shape for member in members}
        found.append(FlatGroup(group, members, paddings, flat_layout_of(shapes, paddings, ranks)))
    return found


def is_bf16_optimizer(layout: TargetLayout) -> bool:
    """Whether the engine of the target will use BF16_Optimizer.

    In bf16 it does so at stage 1 with fp32 gradient accumulation, and at stage 0 in pipelines.
    """
    if layout.dtype != BFLOAT16:
        return False
    if layout.mesh.zero == 0:
        return layout.pipeline is not None
    types = layout.settings.config.get("data_types")
    accumulates = isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"
    return layout.mesh.zero == 1 and accumulates and not layout.settings.zero_option("offload_optimizer", None)


def is_elastic(layout: TargetLayout) -> bool:
    """Whether to write the elastic form, without parameter groups, because the source has no hyper-parameters.

    The job then keeps its own. When DeepSpeed loads this form, it appends `group_paddings` zeros to every state, even
    to the step. So the padding is kept in the files, and `group_paddings` is 0.
    """
    return not is_bf16_optimizer(layout) and not any(group.hyper for group in layout.source.groups)


def _paddings(layout: TargetLayout, members: Sequence[TargetSlice]) -> tuple[int, ...]:
    """Alignment zeros after each parameter but the last (`zero_optimization.parameter_alignment`)."""
    if not layout.settings.zero_option("parameter_alignment", False) or is_bf16_optimizer(layout):
        return (0,) * len(members)
    unit = 16 // gcd(16, layout.dtype.itemsize)
    paddings: list[int] = []
    at = 0
    for i, member in enumerate(members):
        at += member.numel
        padding = 0 if i == len(members) - 1 else -at % unit
        paddings.append(padding)
        at += padding
    return tuple(paddings)


def zero12_optimizer_tree(
    layout: TargetLayout, groups: Sequence[FlatGroup], states: Sequence[TargetGroupStates], index: Sequence[int]
) -> dict[str, Any]:
    """`optimizer_state_dict` of the rank with partition `index[g]` of every group `g`, which has `states[g]`."""
    bf16 = is_bf16_optimizer(layout)
    extras = layout.extras
    state: dict[int, Any] = {}
    masters: list[NewTensor] = []
    for g, flat in enumerate(groups):
        kinds = states[g].kinds.items()
        tensors = {
            kind: _whole_parameters(flat, index[g], layout.state_of(kind), dtype)
            if not bf16 and is_kept_whole(flat.group.hyper, kind)
            else _partition(flat, index[g], layout.state_of(kind), dtype)
            for kind, dtype in kinds
        }
        entries = states[g].entries({kind: tensor for kind, tensor in tensors.items() if tensor is not None})
        if entries:
            state[g] = entries
        master_dtype = layout.master(flat.members[0].parameter).dtype
        length = None if bf16 or is_elastic(layout) else flat.layout.per - flat.layout.padding(index[g])
        masters.append(_partition(flat, index[g], layout.state_of(MASTER), master_dtype, length))
    base: Any = {
        "state": state,
        "param_groups": [{**flat.group.hyper, "params": [g]} for g, flat in enumerate(groups)],
    }
    if is_elastic(layout):
        base = [state.get(g, {}) for g in range(len(groups))]
    tree: dict[str, Any] = {}
    if not bf16:
        tree["loss_scaler"] = extras.loss_scaler
        tree["dynamic_loss_scale"] = extras.dynamic_loss_scale
        tree["overflow"] = extras.optimizer.get("overflow", False)
    tree["clip_grad"] = extras.clip_grad
    tree["base_optimizer_state"] = base
    if is_elastic(layout):
        tree["base_optimizer_state_step"] = layout.source.step or 0
    tree["single_partition_of_fp32_groups"] = masters
    if not bf16:
        tree["zero_stage"] = zero_stage_object(layout.mesh.zero)
    paddings = [flat.layout.padding(i) for flat, i in zip(groups, index, strict=True)]
    if bf16:  # BF16_Optimizer counts all zeros of a group on the last rank
        ends = [flat.layout.ranks * flat.layout.per - flat.layout.content for flat in groups]
        paddings = [end if i == flat.layout.ranks - 1 else 0 for flat, i, end in zip(groups, index, ends, strict=True)]
    tree["group_paddings"] = [0] * len(groups) if is_elastic(layout) else paddings
    if not bf16:
        tree["param_alignment_paddings"] = [list(flat.paddings) for flat in groups]
    tree["partition_count"] = [flat.layout.ranks for flat in groups]
    tree["ds_version"] = extras.version
    tree["param_slice_mappings"] = [
        InertOrderedDict(
            (name, bare_object("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": n, "start": start}))
            for name, start, n in flat.layout.overlaps(i)
        )
        for flat, i in zip(groups, index, strict=True)
    ]
    return tree


def _partition(
    flat: FlatGroup, index: int, atom_of: Callable[[TargetSlice], Atom | None], dtype: DType, length: int | None = None
) -> NewTensor:
    """Partition `index` of the buffer with one state of every member; only its first `length` elements if given."""
    buffer = flat.layout
    low, high = index * buffer.per, index * buffer.per + (buffer.per if length is None else length)

    def segments() -> Iterator[Segment]:
        at = low
        for number in buffer.overlapping(low, high):
            member, entry = flat.members[number], buffer.entries[number]
            start, stop = max(entry.begin, low), min(entry.begin + entry.numel, high)
            yield ZeroContent(start - at)
            yield segment(atom_of(member), member.region.cut(start - entry.begin, stop - entry.begin))
            at = stop
        yield ZeroContent(high - at)

    return flat_tensor(dtype, list(segments()))


def _whole_parameters(
    flat: FlatGroup, index: int, atom_of: Callable[[TargetSlice], Atom | None], dtype: DType
) -> NewTensor | None:
    """One state of all members with elements in partition `index`, whole and consecutive; None if there are none."""
    per = flat.layout.per
    members = [flat.members[number] for number in flat.layout.overlapping(index * per, (index + 1) * per)]
    return flat_tensor(dtype, [segment(atom_of(m), m.region) for m in members]) if members else None


def zero_stage_object(stage: int) -> Inert:
    return called_object("deepspeed.runtime.zero.config", "ZeroStageEnum", stage)


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Parameters of one group that share a flat buffer."""

    group: int  # position of the parameter group
    members: tuple[TargetSlice, ...]


def elements_per_rank(numel: int, ranks: int) -> int:
    """Elements of a parameter on every rank, including padding."""
    return -(-numel // ranks)


def slice_of_rank(region: Region, ranks: int, rank: int) -> tuple[Region, int]:
    """The region of a local tensor on `rank`, and the number of padding elements after it."""
    per = elements_per_rank(region.numel, ranks)
    own = region.cut(rank * per, (rank + 1) * per)
    return own, per - own.numel


def sub_groups(layout: TargetLayout, groups: Sequence[LocalParamGroup]) -> list[SubGroup]:
    """Divide every group, in order, whenever the elements on one rank reach `sub_group_size`."""
    limit = int(layout.settings.zero_option("sub_group_size", _DEFAULT_SUB_GROUP_SIZE))
    found: list[SubGroup] = []
    for number, group in enumerate(groups):
        current: list[TargetSlice] = []
        size = 0
        for member in group.members:
            current.append(member)
            size += elements_per_rank(member.numel, layout.mesh.dp)
            if size >= limit:
                found.append(SubGroup(number, tuple(current)))
                current, size = [], 0
        if current:
            found.append(SubGroup(number, tuple(current)))
    return found


def zero3_optimizer_tree(
    layout: TargetLayout,
    groups: Sequence[LocalParamGroup],
    subs: Sequence[SubGroup],
    states: Sequence[TargetGroupStates],
    dp: int,
) -> dict[str, Any]:
    """`optimizer_state_dict` of data-parallel rank `dp`; sub-group `n` has `states[n]`."""
    state: dict[int, Any] = {}
    masters: list[NewTensor] = []
    for number, sub in enumerate(subs):
        kinds = states[number].kinds.items()
        entries = states[number].entries(
            {kind: _sub_group_buffer(layout, sub, dp, layout.state_of(kind), dtype) for kind, dtype in kinds}
        )
        if entries:
            state[number] = entries
        dtype = layout.master(sub.members[0].parameter).dtype
        masters.append(_sub_group_buffer(layout, sub, dp, layout.state_of(MASTER), dtype))
    extras = layout.extras
    listed = [[number for number, sub in enumerate(subs) if sub.group == g] for g in range(len(groups))]
    return {
        "zero_stage": zero_stage_object(3),
        "loss_scaler": extras.loss_scaler,
        "dynamic_loss_scale": extras.dynamic_loss_scale,
        "overflow": extras.optimizer.get("overflow", False),
        "partition_count": layout.mesh.dp,
        "optimizer_state_dict": {
            "state": state,
            "param_groups": [{**group.hyper, "params": members} for group, members in zip(groups, listed, strict=True)],
        },
        "fp32_flat_groups": masters,
    }


def _sub_group_buffer(
    layout: TargetLayout, sub: SubGroup, dp: int, atom_of: Callable[[TargetSlice], Atom | None], dtype: DType
) -> NewTensor:
    segments: list[Segment] = []
    for member in sub.members:
        own, padding = slice_of_rank(member.region, layout.mesh.dp, dp)
        segments += [segment(atom_of(member), own), ZeroContent(padding)]
    return flat_tensor(dtype, segments)


def zero0_optimizer_tree(
    layout: TargetLayout, groups: Sequence[LocalParamGroup], scalars: ScalarStates
) -> dict[str, Any]:
    """The value of `optimizer`: a torch state dict; for 16-bit models inside a dict with the master weights."""
    state: dict[int, Any] = {}
    listed: list[dict[str, Any]] = []
    masters: list[list[NewTensor]] = []
    at = 0
    for group in groups:
        for number, member in enumerate(group.members, at):
            entries = _parameter_states(layout, member, scalars)
            if entries:
                state[number] = entries
        listed.append({**group.hyper, "params": list(range(at, at + len(group.members)))})
        at += len(group.members)
        masters.append([shaped_tensor(layout.master(m.parameter), m.region, m.shape) for m in group.members])
    optimizer = {"state": state, "param_groups": listed}
    if layout.dtype == FLOAT32:
        return optimizer
    extras = layout.extras
    scaler = extras.loss_scaler
    tree: dict[str, Any] = {
        "dynamic_loss_scale": extras.dynamic_loss_scale,
        "cur_scale": scaler.get("cur_scale", 1.0),
        "cur_iter": extras.optimizer.get("cur_iter", scaler.get("cur_iter", layout.source.step or 0)),
    }
    if layout.dtype == FLOAT16 and extras.dynamic_loss_scale:
        tree["last_overflow_iter"] = extras.optimizer.get("last_overflow_iter", scaler.get("last_overflow_iter", -1))
        tree["scale_factor"] = extras.optimizer.get("scale_factor", scaler.get("scale_factor", 2.0))
        tree["scale_window"] = extras.optimizer.get("scale_window", scaler.get("scale_window", 1000))
    tree["optimizer_state_dict"] = optimizer
    tree["fp32_groups"] = masters
    return tree


def _parameter_states(layout: TargetLayout, member: TargetSlice, scalars: ScalarStates) -> dict[str, Any]:
    numbers = scalars.of([member])
    entries: dict[str, Any] = {kind: value for kind, value in numbers.items() if kind == "step"}
    # States with other shapes than the parameter (Adafactor's rows and columns), if the parameter is not split.
    parameter = member.parameter
    odd = {
        kind: atom
        for kind, atom in parameter.atoms.items()
        if kind not in (WEIGHT, MASTER) and atom.shape not in ((), parameter.shape) and member.shape == parameter.shape
    }
    for kind in element_kinds([member], without=odd):
        atom = layout.state(parameter, kind)
        assert atom is not None
        entries[kind] = shaped_tensor(atom, member.region, member.shape)
    entries.update((kind, whole_tensor(atom)) for kind, atom in odd.items())
    entries.update((kind, value) for kind, value in numbers.items() if kind != "step")
    return {state_of_kind(kind): value for kind, value in entries.items()}
