"""One rank of a megatron-core job on CPU: loads a `torch_dist` folder into its own layout and saves it again.

    python scripts/bench/megatron_load_rank.py RANK WORLD STORE SOURCE OUT RESULT

needs the project's root on the path. The job has WORLD tensor-parallel ranks and the plain optimizer. RESULT receives
the seconds of loading and saving, and the peak resident bytes before the model was built and at the end, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.interop import megatron_on_cpu
from tests.interop.megatron_rank import build_model, build_optimizer, load


def save(model: Any, optimizer: Any, loaded: Any, folder: Path, rank: int, world: int) -> None:
    """Save as Megatron's training loop does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    sharded: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    sharded["optimizer"] = optimizer.outer.sharded_state_dict(sharded, metadata=metadata)
    sharded["rng_state"] = ShardedObject("rng_state", [{}], (1, world), (0, rank))
    for key in ("args", "checkpoint_version", "iteration"):
        sharded[key] = loaded[key]
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded, str(folder), content_metadata=metadata)


def peak() -> int:
    """Most bytes that were resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(rank: int, world: int, store: str, source: Path, out: Path, result: Path) -> None:
    megatron_on_cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model_parallel_cuda_manual_seed(7)
    args = torch.load(source / "common.pt", weights_only=False)["args"]
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = world, 1
    args.expert_tensor_parallel_size = world
    before = peak()
    model = build_model(args, 0, 1)
    optimizer = build_optimizer(model, args, distributed=False)
    dist.barrier()
    begin = time.perf_counter()
    loaded = load(model, optimizer, source, whole=False)
    dist.barrier()
    middle = time.perf_counter()
    save(model, optimizer, loaded, out, rank, world)
    dist.barrier()
    seconds = {"load": middle - begin, "save": time.perf_counter() - middle}
    result.write_text(json.dumps({**seconds, "rss_before": before, "rss": peak()}))
    os._exit(0)  # threads of the writer's pool would keep the process alive


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]), Path(sys.argv[6]))
