"""Adapter for DeepSpeed engines: which elements each optimizer class keeps in which tensor.

The maps are built from the optimizers' own lists of parameters and offsets. `p._hp_mapping` is not used because it is
wrong with `round_robin_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ucp import settings
from ucp.core.box import whole
from ucp.core.checkpoint import Mesh, Rank
from ucp.core.region import Region
from ucp.errors import UsageError
from ucp.formats.deepspeed.experts import expert_number, experts_per_layer, global_expert_name
from ucp.training.live_job import LiveJob, LiveTensor, ParamSlice, SteppedTensor
from ucp.training.torch_adapter import add_buffers, add_untrained, aliases_of, named_parameters, names_of, shapes_of


def model_parallel_coords(engine: Any) -> tuple[int, int, int, int]:
    """(tp, tp rank, pp, pp rank) from the engine's `mpu`."""
    mpu = engine.mpu
    if mpu is None:
        return 1, 0, 1, 0
    pp, pp_rank = _mpu_value(mpu, "pipe_parallel"), _mpu_value(mpu, "pipe_parallel", "rank")
    for axis in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{axis}_world_size"):
            return _mpu_value(mpu, axis), _mpu_value(mpu, axis, "rank"), pp, pp_rank
    return 1, 0, pp, pp_rank


def _mpu_value(mpu: Any, axis: str, what: str = "world_size") -> int:
    method = getattr(mpu, f"get_{axis}_{what}", None)
    return int(method()) if method is not None else (0 if what == "rank" else 1)


def data_parallel_coords(engine: Any) -> tuple[int, int]:
    """(dp, dp rank). ZeRO partitions over sequence-parallel ranks too, so these count as data parallel."""
    import torch.distributed as dist

    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    return dist.get_world_size(group=group), dist.get_rank(group=group)


def expert_names(module: Any) -> dict[str, str]:
    """Local name → name in checkpoints, which contain the expert's global number instead of the local one."""
    group_names = {name: p.group_name for name, p in named_parameters(module) if hasattr(p, "group_name")}
    counts = experts_per_layer(group_names)
    if not counts:
        return {}
    from deepspeed.utils import groups

    return {
        name: global_expert_name(name, groups._get_expert_parallel_rank(group), counts)
        for name, group in group_names.items()
        if expert_number(name) is not None
    }


def is_engine(model: Any) -> bool:
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__)


def describe_engine(engine: Any) -> LiveJob:
    """Describe a DeepSpeed engine as a `LiveJob`."""
    module, optimizer = engine.module, engine.optimizer
    kind = type(optimizer).__name__
    stage = int(engine.zero_optimization_stage())
    tp, tp_rank, pp, pp_rank = model_parallel_coords(engine)
    dp, dp_rank = data_parallel_coords(engine)
    job = LiveJob(
        f"DeepSpeed engine, ZeRO-{stage}, {kind}",
        Mesh(tp, pp, dp, 1, stage),
        Rank(pp_rank, tp_rank, dp_rank),
        shapes=shapes_of(module),
        aliases=aliases_of(module),
        checkpoint_names=expert_names(module),
        parameters=dict(named_parameters(module)),
        engine=engine,
    )
    if optimizer is None:
        add_untrained(job, module)
        return job
    job.optimizer = _innermost(optimizer)
    describe = _CLASSES.get(kind)
    if describe is not None:
        describe(job, optimizer)
    elif optimizer is job.optimizer:
        _plain(job, optimizer)
    else:
        raise UsageError(
            f"DeepSpeed optimizer {kind} is not supported in a live job",
            hint="convert the checkpoint with `ucp convert --to deepspeed` and use load_checkpoint",
        )
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _add_untrained_slices(job, module, optimizer)
    else:
        add_untrained(job, module)
    return job


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _plain(job: LiveJob, optimizer: Any) -> None:
    """ZeRO-0, fp32: the optimizer updates the parameters themselves."""
    names = names_of(job.engine.module)
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            name = names[id(p)]
            job.stepped.append(SteppedTensor(p, [ParamSlice(name, Region.all_of(tuple(p.shape)))], [name], number))
    job.begin = _clear_gradients(optimizer)


def _unfused(job: LiveJob, optimizer: Any) -> None:
    """ZeRO-0, 16 bit: an fp32 master of each parameter."""
    names = names_of(job.engine.module)
    pairs = []
    for number, (low, high) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for p, master in zip(low, high, strict=True):
            name = names[id(p)]
            param_slice = ParamSlice(name, Region.all_of(tuple(p.shape)))
            job.stepped.append(SteppedTensor(master, [param_slice], [name], number))
            job.weights.append(LiveTensor(param_slice, p))
            pairs.append((p, master))

    def refresh() -> None:
        for p, master in pairs:
            p.data.copy_(master.data)

    job.begin, job.refresh = _clear_gradients(optimizer), refresh


def _fused(job: LiveJob, optimizer: Any) -> None:
    """ZeRO-0, 16 bit, fused optimizer: one flat fp32 master per group, complete on every rank."""
    names = names_of(job.engine.module)
    for number, (parameters, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        module_slices = [ParamSlice(names[id(p)], Region.all_of(tuple(p.shape))) for p in parameters]
        starts = _running_offsets(parameters)
        slices = [ParamSlice(s.name, s.region, start) for s, start in zip(module_slices, starts, strict=True)]
        job.stepped.append(SteppedTensor(flat, slices, [s.name for s in slices], number))
        job.weights.extend(LiveTensor(s, p) for s, p in zip(module_slices, parameters, strict=True))

    def refresh() -> None:  # the parameters are views of the flat low-precision groups
        for low, high in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            low.data.copy_(high.data)

    job.begin, job.refresh = _clear_gradients(optimizer), refresh


def _zero_1_2(job: LiveJob, optimizer: Any) -> None:
    groups = optimizer.round_robin_bit16_groups
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None) or [_running_offsets(group) for group in groups]
    low = optimizer.parallel_partitioned_bit16_groups
    _flat_groups(job, optimizer, optimizer.single_partition_of_fp32_groups, low, groups, offsets)
    _order_names(job, optimizer.bit16_groups)


def _bf16_optimizer(job: LiveJob, optimizer: Any) -> None:
    groups = optimizer.bf16_groups
    offsets = [_running_offsets(group) for group in groups]
    low = optimizer.bf16_partitioned_groups
    _flat_groups(job, optimizer, optimizer.fp32_groups_flat_partition, low, groups, offsets)


def _running_offsets(parameters: Iterable[Any]) -> list[int]:
    starts, at = [], 0
    for p in parameters:
        starts.append(at)
        at += p.numel()
    return starts


def _flat_groups(
    job: LiveJob,
    optimizer: Any,
    partitions: Sequence[Any],
    low: Sequence[Sequence[Any]],
    groups: Sequence[Any],
    offsets: Sequence[Sequence[int]],
) -> None:
    """Add groups that are one flat buffer split into equal partitions; the optimizer updates this rank's partition.

    `low` are the low-precision partitions of each group, by rank.
    """
    import torch.distributed as dist

    names = names_of(job.engine.module)
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
        for p in parameters:
            job.weights.append(LiveTensor(ParamSlice(names[id(p)], Region.all_of(tuple(p.shape))), p))

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

    job.begin, job.refresh = _clear_gradients(optimizer), refresh


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


def _order_names(job: LiveJob, groups: Sequence[Any]) -> None:
    """Restore the user's order within groups: `round_robin_gradients` shuffles the flat buffer, not the group."""
    names = names_of(job.engine.module)
    for stepped, parameters in zip(job.stepped, groups, strict=True):
        order = [names[id(p)] for p in parameters]
        if set(order) == set(stepped.names):
            stepped.names = order


def _stage_3(job: LiveJob, optimizer: Any) -> None:
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UsageError(
            "ZeRO-3 with NVMe offload is not supported in a live job",
            hint="convert the checkpoint with `ucp convert --to deepspeed` and use load_checkpoint",
        )
    names = names_of(job.engine.module)
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

    clear = _clear_gradients(optimizer)

    def begin() -> None:
        optimizer.checkpoint_event_prologue()  # partitions all parameters, so that no gathered copy becomes stale
        clear()

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


def _add_untrained_slices(job: LiveJob, module: Any, optimizer: Any) -> None:
    trained = {name for stepped in job.stepped for name in stepped.names}
    for name, p in named_parameters(module):
        if name not in trained:
            job.frozen.extend(_stage_3_tensors(_stage_3_slices(name, p, optimizer, 0), p))
    add_buffers(job, module)


def _clear_gradients(optimizer: Any) -> Callable[[], None]:
    def clear() -> None:
        optimizer.zero_grad()

    return clear


_CLASSES: dict[str, Callable[[LiveJob, Any], None]] = {
    "DeepSpeedZeroOptimizer": _zero_1_2,
    "BF16_Optimizer": _bf16_optimizer,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
    "FP16_Optimizer": _fused,
    "FP16_UnfusedOptimizer": _unfused,
}
