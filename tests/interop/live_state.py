"""Read the whole optimizer state out of a live DeepSpeed engine: `name|fp32`, `name|exp_avg`, …, `name|weight`.

Values are whole over data parallelism and local to this rank's tensor, pipeline and expert slice. The element maps come
from the optimizer's own lists, not from its files and not from `p._hp_mapping` (wrong under round robin).
All functions are collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def export_state(engine: Any) -> dict[str, Tensor]:
    """Master and every optimizer state of each trained parameter, and every module weight and persistent buffer."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    state: dict[str, Tensor] = {}
    for parameter, kind, value in _optimizer_state(engine):
        state[f"{names[id(parameter)]}|{kind}"] = value.detach().cpu().clone().contiguous()
    for name, p in engine.module.named_parameters():
        state[f"{name}|weight"] = _whole_weight(p)
    persistent = set(engine.module.state_dict().keys())
    for name, buffer in engine.module.named_buffers():
        if name in persistent:
            state[f"{name}|weight"] = buffer.detach().cpu().clone().contiguous()
    return state


def _whole_weight(p: Any) -> Tensor:
    if not hasattr(p, "ds_id"):
        return p.detach().cpu().clone().contiguous()
    import deepspeed

    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().cpu().clone().contiguous()


def _optimizer_state(engine: Any) -> Iterator[tuple[Any, str, Tensor]]:
    optimizer = engine.optimizer
    if optimizer is None:
        return
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        yield from _zero_1_2(optimizer, inner)
    elif kind == "BF16_Optimizer":
        yield from _bf16_optimizer(optimizer, inner)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        yield from _zero_3(optimizer, inner)
    elif kind == "FP16_UnfusedOptimizer":
        yield from _unfused(optimizer, inner)
    elif optimizer is inner:
        yield from _plain(inner)
    else:
        raise NotImplementedError(kind)


def _states_of(inner: Any, tensor: Tensor, master: bool) -> Iterator[tuple[str, Tensor]]:
    """The optimizer tensor itself and what the optimizer keeps for it; numbers become 0-d tensors."""
    if master:
        yield "fp32", tensor
    for kind, value in inner.state.get(tensor, {}).items():
        yield kind, value if isinstance(value, Tensor) else torch.tensor(float(value))


def _gather(part: Tensor, group: Any) -> list[Tensor]:
    """Every rank's part, bit for bit (as bytes: gloo knows few dtypes)."""
    raw = part.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, raw, group=group)
    return [p.view(part.dtype) for p in parts]


def _plain(inner: Any) -> Iterator[tuple[Any, str, Tensor]]:
    for group in inner.param_groups:
        for p in group["params"]:
            for kind, value in _states_of(inner, p, master=True):
                yield p, kind, value


def _unfused(optimizer: Any, inner: Any) -> Iterator[tuple[Any, str, Tensor]]:
    for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for p, master in zip(low, high, strict=True):
            for kind, value in _states_of(inner, master, master=True):
                yield p, kind, value


def _flat_groups(
    inner: Any, partitions: list[Tensor], groups: list[Any], offsets: list[list[int]], process_groups: list[Any]
) -> Iterator[tuple[Any, str, Tensor]]:
    """Groups that are one flat buffer cut into equal partitions."""
    for partition, parameters, starts, process_group in zip(partitions, groups, offsets, process_groups, strict=True):
        for kind, value in _states_of(inner, partition, master=True):
            if value.dim() == 0:
                for p in parameters:
                    yield p, kind, value
                continue
            flat = torch.cat(_gather(value, process_group))
            for p, start in zip(parameters, starts, strict=True):
                yield p, kind, flat[start : start + p.numel()].view(p.shape)


def _zero_1_2(optimizer: Any, inner: Any) -> Iterator[tuple[Any, str, Tensor]]:
    yield from _flat_groups(
        inner,
        optimizer.single_partition_of_fp32_groups,
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        optimizer.real_dp_process_group,
    )


def _bf16_optimizer(optimizer: Any, inner: Any) -> Iterator[tuple[Any, str, Tensor]]:
    offsets = []
    for parameters in optimizer.bf16_groups:
        starts, at = [], 0
        for p in parameters:
            starts.append(at)
            at += p.numel()
        offsets.append(starts)
    yield from _flat_groups(
        inner,
        optimizer.fp32_groups_flat_partition,
        optimizer.bf16_groups,
        offsets,
        optimizer.real_dp_process_group,
    )


def _zero_3(optimizer: Any, inner: Any) -> Iterator[tuple[Any, str, Tensor]]:
    """Each sub-group is a flat buffer in which every parameter has a slice of its own on every rank."""
    for partition, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        process_group = optimizer._get_param_partition_group(parameters[0])
        for kind, value in _states_of(inner, partition, master=True):
            if value.dim() == 0:
                for p in parameters:
                    yield p, kind, value
                continue
            ranks = _gather(value, process_group)
            at = 0
            for p in parameters:
                per = p.partition_numel()
                yield p, kind, torch.cat([r[at : at + per] for r in ranks])[: p.ds_numel].view(p.ds_shape)
                at += per
