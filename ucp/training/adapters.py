"""Describe the user's model as a `LiveJob`: a torch module with its optimizer, or a DeepSpeed engine.

Torch modules may be plain, DDP, or sharded as DTensors (FSDP2, tensor parallelism). For DeepSpeed, the maps of which
elements are in which tensor are built from the optimizers' own lists of parameters and offsets. `p._hp_mapping` is not
used because it is wrong with `round_robin_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ucp import settings
from ucp.core.box import Box, Shape, whole
from ucp.core.checkpoint import Mesh, Rank
from ucp.core.region import Region
from ucp.errors import UsageError
from ucp.formats.dcp.optimizer_keys import strip_wrappers
from ucp.formats.deepspeed.experts import expert_number, experts_per_layer, global_expert_name
from ucp.training.collectives import rank_and_size
from ucp.training.live_job import LiveJob, LiveTensor, ParamSlice, SteppedTensor


def describe_job(model: Any, optimizer: Any = None) -> LiveJob:
    """Describe a DeepSpeed engine, or a torch module with its optimizer."""
    import torch

    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__):
        if optimizer is not None and optimizer is not model.optimizer:
            raise UsageError("a DeepSpeed engine has its own optimizer", hint="do not pass an optimizer")
        return _describe_engine(model)
    if isinstance(model, torch.nn.Module):
        return _describe_module(model, optimizer)
    raise UsageError(
        f"{type(model).__module__}.{type(model).__qualname__} is neither a DeepSpeed engine nor a torch module"
    )


# Torch modules --------------------------------------------------------------------------------------------------------


def _describe_module(model: Any, optimizer: Any) -> LiveJob:
    from torch.nn.parallel import DistributedDataParallel

    wrapper = "torch module"
    module = model
    while True:
        if isinstance(module, DistributedDataParallel):
            wrapper, module = "DDP module", module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            break
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UsageError(
            "the module is wrapped with FSDP1, whose flat parameters are not supported",
            hint="use fully_shard (FSDP2), or load a `dcp` folder with torch's own state-dict functions",
        )
    rank, size = rank_and_size()
    sharded = any(map(_is_dtensor, module.parameters()))
    mesh = Mesh(dp=size, zero=3 if sharded else 0)
    job = _new_job("FSDP2 module" if sharded else wrapper, module, mesh, Rank(dp=rank))
    job.optimizer = optimizer
    names = _names_by_id(job)
    for number, group in enumerate(job.groups):
        for p in group["params"]:
            if id(p) not in names:
                raise UsageError(
                    f"param group {number} of the optimizer has a parameter of shape {list(p.shape)} that is not in"
                    " the module",
                    hint="pass the optimizer of this module, created after the module was wrapped or sharded",
                )
            name = names[id(p)]
            job.stepped.append(SteppedTensor(p, _slice_of(name, p), [name], number))
    _add_untrained(job, module)
    return job


def _new_job(description: str, module: Any, mesh: Mesh, rank: Rank) -> LiveJob:
    """A job with the parameters of a module; for ZeRO-3, with their unpartitioned shapes."""
    parameters = {strip_wrappers(name): p for name, p in module.named_parameters()}
    first = {id(p): name for name, p in parameters.items()}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if strip_wrappers(name) != first[id(p)]:
            aliases[first[id(p)]] = (*aliases.get(first[id(p)], ()), strip_wrappers(name))
    shapes: dict[str, Shape] = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    shapes.update({name: tuple(buffer.shape) for name, buffer in _persistent_buffers(module)})
    return LiveJob(description, mesh, rank, shapes, aliases, parameters=parameters)


def _names_by_id(job: LiveJob) -> dict[int, str]:
    return {id(p): name for name, p in job.parameters.items()}


def _persistent_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Buffers that a state dict would contain."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield strip_wrappers(f"{prefix}.{name}" if prefix else name), buffer


def _slice_of(name: str, tensor: Any) -> list[ParamSlice]:
    """The slice of a parameter in a whole tensor or DTensor: a list of one, or empty without elements."""
    if not _is_dtensor(tensor):
        return [_whole_slice(name, tensor)]
    box = _local_box(tensor, name)
    return [ParamSlice(name, Region.of((box,)))] if box.numel else []


def _whole_slice(name: str, tensor: Any, start: int = 0) -> ParamSlice:
    return ParamSlice(name, Region.all_of(tuple(tensor.shape)), start)


def _whole_tensors(name: str, tensor: Any) -> list[LiveTensor]:
    return [LiveTensor(param_slice, tensor) for param_slice in _slice_of(name, tensor)]


def _add_untrained(
    job: LiveJob, module: Any, tensors_of: Callable[[str, Any], list[LiveTensor]] = _whole_tensors
) -> None:
    """Add what the optimizer does not update: frozen parameters and persistent buffers."""
    trained = {name for stepped in job.stepped for name in stepped.names}
    for name, p in job.parameters.items():
        if name not in trained:
            job.frozen.extend(tensors_of(name, p))
    for name, buffer in _persistent_buffers(module):
        job.buffers.extend(_whole_tensors(name, buffer))


# DTensors -------------------------------------------------------------------------------------------------------------


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def _local_box(tensor: Any, name: str) -> Box:
    """The box of the full tensor that this rank holds; empty if the rank holds no elements."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"parameter {name}: this rank is not part of the device mesh of its DTensor")
    box = box_of(tuple(tensor.shape), tensor.placements, tuple(mesh.shape), tuple(coordinate), name)
    found = tuple(tensor._local_tensor.shape)
    if found != box.shape and 0 not in (*found, *box.shape):
        raise UsageError(
            f"parameter {name}: the local tensor of its DTensor {_format_placements(tensor.placements)} on a mesh of"
            f" {list(mesh.shape)} has an unexpected shape (expected {list(box.shape)}, found {list(found)})",
        )
    return box


def box_of(
    shape: Shape, placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int], name: str = "?"
) -> Box:
    """The box at `coordinate` of a mesh with sizes `mesh`, given one placement per mesh dimension.

    torch splits like `torch.chunk` (chunks of `ceil(size / ranks)`, the last ones shorter or empty), one mesh dimension
    after the other. A `_StridedShard` is split after the mesh dimensions to its right: FSDP over tensor parallelism.
    """
    start, size = [0] * len(shape), list(shape)
    kinds = [type(placement).__name__ for placement in placements]
    for placement, kind in zip(placements, kinds, strict=True):
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise UsageError(
                f"parameter {name}: DTensor placement {placement} is not supported",
                hint="load into parameters that are sharded or replicated",
            )
    plain = [i for i, kind in enumerate(kinds) if kind == "Shard"]
    strided = [i for i, kind in enumerate(kinds) if kind == "_StridedShard"]
    for i in strided:
        later = 1
        for j in (*plain, *strided):
            if j > i and placements[j].dim == placements[i].dim:
                later *= mesh[j]
        if placements[i].split_factor != later:
            raise UsageError(
                f"parameter {name}: DTensor placements {_format_placements(placements)} on a mesh of"
                f" {list(mesh)} have a split order that is not supported"
            )
        if any(j < i and placements[j].dim == placements[i].dim for j in plain):
            raise UsageError(f"parameter {name}: DTensor placements {_format_placements(placements)} are not supported")
    for i in (*plain, *reversed(strided)):
        dim = placements[i].dim % len(shape)
        chunk = -(-size[dim] // mesh[i])
        first = min(coordinate[i] * chunk, size[dim])
        start[dim] += first
        size[dim] = min(chunk, size[dim] - first)
    return Box(tuple(start), tuple(size))


def _format_placements(placements: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"


# DeepSpeed engines ----------------------------------------------------------------------------------------------------


def _describe_engine(engine: Any) -> LiveJob:
    import torch.distributed as dist

    module, optimizer = engine.module, engine.optimizer
    kind = type(optimizer).__name__
    stage = int(engine.zero_optimization_stage())
    tp, tp_rank, pp, pp_rank = _model_parallel_coords(engine.mpu)
    # ZeRO partitions over sequence-parallel ranks too, so these count as data parallel.
    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    mesh = Mesh(tp, pp, dist.get_world_size(group=group), 1, stage)
    rank = Rank(pp_rank, tp_rank, dist.get_rank(group=group))
    job = _new_job(f"DeepSpeed engine, ZeRO-{stage}, {kind}", module, mesh, rank)
    job.engine = engine
    job.checkpoint_names = _expert_names(job.parameters)
    if optimizer is None:
        _add_untrained(job, module)
        return job
    job.optimizer = optimizer
    while hasattr(job.optimizer, "optimizer"):
        job.optimizer = job.optimizer.optimizer
    job.begin = optimizer.zero_grad
    describe = _OPTIMIZERS.get(kind)
    if describe is None and optimizer is job.optimizer:
        describe = _plain
    if describe is None:
        raise UsageError(
            f"DeepSpeed optimizer {kind} is not supported in a live job",
            hint="convert the checkpoint with `ucp convert --to deepspeed` and use load_checkpoint",
        )
    describe(job, optimizer, _names_by_id(job))
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _add_untrained(job, module, lambda name, p: _stage_3_tensors(_stage_3_slices(name, p, optimizer, 0), p))
    else:
        _add_untrained(job, module)
    return job


def _model_parallel_coords(mpu: Any) -> tuple[int, int, int, int]:
    """(tp, tp rank, pp, pp rank) from an engine's `mpu`."""

    def size_and_rank(axis: str) -> tuple[int, int]:
        methods = (getattr(mpu, f"get_{axis}_{what}", None) for what in ("world_size", "rank"))
        size, rank = (None if method is None else int(method()) for method in methods)
        return 1 if size is None else size, rank or 0

    for axis in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{axis}_world_size"):
            return *size_and_rank(axis), *size_and_rank("pipe_parallel")
    return 1, 0, *size_and_rank("pipe_parallel")


def _expert_names(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Local name → name in checkpoints, which contain the expert's global number instead of the local one."""
    group_names = {name: p.group_name for name, p in parameters.items() if hasattr(p, "group_name")}
    counts = experts_per_layer(group_names)
    if not counts:
        return {}
    from deepspeed.utils import groups

    return {
        name: global_expert_name(name, groups._get_expert_parallel_rank(group), counts)
        for name, group in group_names.items()
        if expert_number(name) is not None
    }


def _plain(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    """ZeRO-0, fp32: the optimizer updates the parameters themselves."""
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            name = names[id(p)]
            job.stepped.append(SteppedTensor(p, [_whole_slice(name, p)], [name], number))


def _unfused(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    """ZeRO-0, 16 bit: an fp32 master of each parameter."""
    pairs = []
    for number, (low, high) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for p, master in zip(low, high, strict=True):
            name = names[id(p)]
            job.stepped.append(SteppedTensor(master, [_whole_slice(name, p)], [name], number))
            job.weights.append(LiveTensor(_whole_slice(name, p), p))
            pairs.append((p, master))

    def refresh() -> None:
        for p, master in pairs:
            p.data.copy_(master.data)

    job.refresh = refresh


def _fused(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    """ZeRO-0, 16 bit, fused optimizer: one flat fp32 master per group, complete on every rank."""
    for number, (parameters, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        starts = _running_offsets(parameters)
        slices = [_whole_slice(names[id(p)], p, start) for p, start in zip(parameters, starts, strict=True)]
        job.stepped.append(SteppedTensor(flat, slices, [s.name for s in slices], number))
        job.weights.extend(LiveTensor(_whole_slice(names[id(p)], p), p) for p in parameters)

    def refresh() -> None:  # the parameters are views of the flat low-precision groups
        for low, high in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            low.data.copy_(high.data)

    job.refresh = refresh


def _zero_1_2(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    groups = optimizer.round_robin_bit16_groups
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None) or [_running_offsets(group) for group in groups]
    low = optimizer.parallel_partitioned_bit16_groups
    _flat_groups(job, optimizer, names, optimizer.single_partition_of_fp32_groups, low, groups, offsets)
    # `round_robin_gradients` shuffles the flat buffer, not the user's order within the group.
    for stepped, parameters in zip(job.stepped, optimizer.bit16_groups, strict=True):
        order = [names[id(p)] for p in parameters]
        if set(order) == set(stepped.names):
            stepped.names = order


def _bf16_optimizer(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    groups, low = optimizer.bf16_groups, optimizer.bf16_partitioned_groups
    offsets = [_running_offsets(group) for group in groups]
    _flat_groups(job, optimizer, names, optimizer.fp32_groups_flat_partition, low, groups, offsets)


def _running_offsets(parameters: Iterable[Any]) -> list[int]:
    return list(accumulate((p.numel() for p in parameters), initial=0))[:-1]


def _flat_groups(
    job: LiveJob,
    optimizer: Any,
    names: dict[int, str],
    partitions: Sequence[Any],
    low: Sequence[Sequence[Any]],
    groups: Sequence[Any],
    offsets: Sequence[Sequence[int]],
) -> None:
    """Add groups that are one flat buffer split into equal partitions; the optimizer updates this rank's partition.

    `low` are the low-precision partitions of each group, by rank.
    """
    import torch.distributed as dist

    for number, (partition, parameters, starts) in enumerate(zip(partitions, groups, offsets, strict=True)):
        size = partition.numel()
        first = dist.get_rank(group=optimizer.real_dp_process_group[number]) * size
        slices = []
        for p, start in zip(parameters, starts, strict=True):
            lo, hi = max(start, first), min(start + p.numel(), first + size)
            if lo < hi:
                region = Region((whole(tuple(p.shape)),), lo - start, hi - start)
                slices.append(ParamSlice(names[id(p)], region, lo - first))
        job.stepped.append(SteppedTensor(partition, slices, [names[id(p)] for p in parameters], number))
        job.weights.extend(LiveTensor(_whole_slice(names[id(p)], p), p) for p in parameters)

    def refresh() -> None:
        if low[0][0].is_cpu:
            _gather_in_slices(optimizer.real_dp_process_group, partitions, low)
        else:
            optimizer.update_lp_params()
        # Link DeepSpeed's `safe_get_full_optimizer_state` to the new moments; its old links were made before these
        # tensors existed. Before the first step, without moments, DeepSpeed makes the links after the first step.
        optimizer._hp_optimizer_states_linked = False
        if any(job.optimizer.state.get(partition) for partition in partitions):
            optimizer._lazy_init_hp_params_optimizer_state()

    job.refresh = refresh


def _gather_in_slices(process_groups: Sequence[Any], masters: Sequence[Any], low: Sequence[Sequence[Any]]) -> None:
    """Like DeepSpeed's `update_lp_params`, but a few megabytes at a time: gloo keeps two copies of what it gathers."""
    import torch.distributed as dist

    for group, master, partitions in zip(process_groups, masters, low, strict=True):
        own = partitions[dist.get_rank(group=group)]
        own.data.copy_(master.data)
        if len(partitions) == 1:
            continue
        step = max(1, settings.GATHER_BYTES // (len(partitions) * own.element_size()))
        for start in range(0, own.numel(), step):
            slices = [part.detach()[start : start + step] for part in partitions]
            dist.all_gather(slices, own.detach()[start : start + step], group=group)


def _stage_3(job: LiveJob, optimizer: Any, names: dict[int, str]) -> None:
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UsageError(
            "ZeRO-3 with NVMe offload is not supported in a live job",
            hint="convert the checkpoint with `ucp convert --to deepspeed` and use load_checkpoint",
        )
    flats = optimizer.fp32_partitioned_groups_flat
    for number, (flat, parameters) in enumerate(zip(flats, optimizer.fp16_groups, strict=True)):
        slices, at = [], 0
        for p in parameters:
            found = _stage_3_slices(names[id(p)], p, optimizer, at)
            slices.extend(found)
            at += int(p.partition_numel())
            job.weights.extend(_stage_3_tensors(found, p))
        group = int(optimizer.sub_group_to_group_id[number])
        job.stepped.append(SteppedTensor(flat, slices, [names[id(p)] for p in parameters], group))

    def begin() -> None:
        optimizer.checkpoint_event_prologue()  # partitions all parameters, so that no gathered copy becomes stale
        optimizer.zero_grad()

    def refresh() -> None:
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if len(optimizer.persistent_parameters) > 0:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()

    job.begin, job.refresh = begin, refresh


def _stage_3_slices(name: str, p: Any, optimizer: Any, start: int) -> list[ParamSlice]:
    """This rank's partition of a ZeRO-3 parameter: a list of one slice, or empty if the partition is all padding.

    A parameter without elements is complete on every rank.
    """
    import torch.distributed as dist

    per, numel = int(p.partition_numel()), int(p.ds_numel)
    rank = dist.get_rank(group=optimizer._get_param_partition_group(p))
    lo, hi = min(rank * per, numel), min((rank + 1) * per, numel)
    return [ParamSlice(name, Region((whole(tuple(p.ds_shape)),), lo, hi), start)] if lo < hi or not numel else []


def _stage_3_tensors(slices: Sequence[ParamSlice], p: Any) -> list[LiveTensor]:
    return [LiveTensor(ParamSlice(s.name, s.region), p.ds_tensor.data.narrow(0, 0, s.region.numel)) for s in slices]


_OPTIMIZERS: dict[str, Callable[[LiveJob, Any, dict[int, str]], None]] = {
    "DeepSpeedZeroOptimizer": _zero_1_2,
    "BF16_Optimizer": _bf16_optimizer,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
    "FP16_Optimizer": _fused,
    "FP16_UnfusedOptimizer": _unfused,
}
