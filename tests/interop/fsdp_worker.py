"""Run FSDP2, HSDP and DDP jobs of plain torch from tests: both ends of their worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.interop.fsdp_rank import TorchJob, run_rank
from tests.interop.worker import Worker, fork_ranks, serve


class TorchTrainer(Worker):
    """A running worker process. Use as a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.interop.fsdp_worker")

    def __enter__(self) -> TorchTrainer:
        return self

    def run(self, job: TorchJob) -> TorchResult:
        """Run a job to its end; its states and report are in the result."""
        self.send(job.to_json())
        return TorchResult(Path(job.out))


class TorchResult:
    """What a job left behind."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.report: dict[str, Any] = json.loads((out / "report.json").read_text())

    def state(self, when: str = "final") -> dict[str, Any]:
        """`name|kind` → whole torch tensor, after loading (`loaded`) or after the steps (`final`)."""
        from safetensors.torch import load_file

        return load_file(self.out / when / "state.safetensors")


def _prepare() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.set_num_threads(1)


def _run(line: str) -> dict[str, Any]:
    job = TorchJob.from_json(line)

    def work(rank: int) -> None:
        import torch.distributed as dist

        store = Path(job.out) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.world)
        run_rank(job, rank)
        dist.destroy_process_group()

    return fork_ranks(job.world, Path(job.out), work, grace=2)


if __name__ == "__main__":
    serve(_prepare, _run)
