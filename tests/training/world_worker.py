"""The worker that runs one function on every rank of a world: `tests.training.worlds` sends them.

A job is `{"function": "module:name", "world": n, "out": folder, "arguments": {…}}`; ranks leave what the function
returned in `rankNN.json`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.interop.ds_worker import join_world, prepare
from tests.interop.worker import fork_ranks, serve


def _prepare() -> None:
    prepare("torch.distributed.checkpoint", "torch.distributed.tensor", "ucp.training.load")


def _run(line: str) -> dict[str, Any]:
    job = json.loads(line)
    out = Path(job["out"])

    def work(rank: int) -> None:
        import torch.distributed as dist

        join_world(out, rank, job["world"])
        module, _, name = job["function"].partition(":")
        result = getattr(import_module(module), name)(out, rank, **job["arguments"])
        (out / f"rank{rank:02d}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()

    # In a right program all ranks fail together, and the test is there to see that.
    return fork_ranks(job["world"], out, work, grace=20)


if __name__ == "__main__":
    serve(_prepare, _run)
