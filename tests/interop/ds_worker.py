"""The worker that runs DeepSpeed jobs: `tests.interop.jobs` sends them."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.interop.worker import fork_ranks, serve

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache/ucp-torch-extensions")),
}
# What a rank would import on its own, at a second or more each.
PRELOAD = (
    "deepspeed",
    "deepspeed.moe.layer",
    "deepspeed.pipe",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "torch._dynamo",
    "torch.distributed.fsdp",
)


def prepare(*more: str) -> None:
    """Import DeepSpeed and everything that its ranks will need, patched to run without a GPU."""
    import torch

    for module in (*PRELOAD, *more):
        import_module(module)

    from tests.interop.ds_rank import patch_for_cpu

    torch.set_num_threads(1)
    patch_for_cpu()


def join_world(out: Path, rank: int, world: int) -> None:
    """Make this process a rank of a world that meets in the folder `out`."""
    import deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{out / 'store'}", rank=rank, world_size=world
    )


def _run(line: str) -> dict[str, Any]:
    from tests.interop.ds_rank import run_rank
    from tests.interop.spec import Job

    job = Job.from_json(line)

    def work(rank: int) -> None:
        import torch.distributed as dist

        join_world(Path(job.out), rank, job.world)
        run_rank(job, rank)
        dist.destroy_process_group()

    return fork_ranks(job.world, Path(job.out), work, grace=3)


if __name__ == "__main__":
    serve(prepare, _run)
