"""Where a rank of a DeepSpeed engine stands: its place in the mesh, and which experts are its own."""

from __future__ import annotations

from typing import Any

from ucp.formats.deepspeed.experts import expert_number, global_name, local_experts
from ucp.train.modules import named_parameters


def model_parallel(engine: Any) -> tuple[int, int, int, int]:
    """(tp, tp rank, pp, pp rank)."""
    mpu = engine.mpu
    if mpu is None:
        return 1, 0, 1, 0
    pp, pp_rank = _ask(mpu, "pipe_parallel"), _ask(mpu, "pipe_parallel", "rank")
    for axis in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{axis}_world_size"):
            return _ask(mpu, axis), _ask(mpu, axis, "rank"), pp, pp_rank
    return 1, 0, pp, pp_rank


def _ask(mpu: Any, axis: str, what: str = "world_size") -> int:
    found = getattr(mpu, f"get_{axis}_{what}", None)
    return int(found()) if found is not None else (0 if what == "rank" else 1)


def data_parallel(engine: Any) -> tuple[int, int]:
    """(ranks that share one model-parallel slice, this rank's place): ZeRO cuts over sequence parallelism as well."""
    import torch.distributed as dist

    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    return dist.get_world_size(group=group), dist.get_rank(group=group)


def expert_names(module: Any) -> dict[str, str]:
    """Names of DeepSpeed's experts as checkpoints have them: with the expert's number over all ranks."""
    found = {name: p.group_name for name, p in named_parameters(module) if hasattr(p, "group_name")}
    counts = local_experts(found)
    if not counts:
        return {}
    from deepspeed.utils import groups

    return {
        name: global_name(name, groups._get_expert_parallel_rank(group), counts)
        for name, group in found.items()
        if expert_number(name) is not None
    }
