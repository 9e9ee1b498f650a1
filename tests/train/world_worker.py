"""A process that imports torch and DeepSpeed once and forks worlds of ranks: each runs one function on every rank.

One JSON line in (`{"function": "module:name", "world": n, "out": folder, "arguments": {…}}`), one JSON line out; the
ranks leave what the function returned in `rankNN.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.interop.ds_worker import PRELOAD  # sets the environment as well

TIMEOUT = 100  # seconds a world may take
GRACE = 20  # seconds the others may go on when a rank has failed: in a right program, all of them fail together


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    import torch

    for module in (*PRELOAD, "torch.distributed.checkpoint", "torch.distributed.tensor", "ucp.train.loading"):
        import_module(module)
    from tests.interop.ds_rank import patch_for_cpu

    torch.set_num_threads(1)
    patch_for_cpu()
    replies.write('{"ok": "ready"}\n')
    for line in sys.stdin:
        replies.write(json.dumps(_run(json.loads(line))) + "\n")


def _run(job: dict[str, Any]) -> dict[str, Any]:
    Path(job["out"]).mkdir(parents=True)
    started = time.monotonic()
    ranks = {_fork_rank(job, rank): rank for rank in range(job["world"])}
    failed: list[int] = []
    hung: list[int] = []
    broke = started
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            if status:
                broke = broke if failed else time.monotonic()
                failed.append(rank)
        elif time.monotonic() - started > TIMEOUT or (failed and time.monotonic() - broke > GRACE):
            hung = sorted(ranks.values())
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ranks = {}
        else:
            time.sleep(0.01)
    if failed or hung:
        errors = [path.read_text() for path in sorted(Path(job["out"]).glob("rank*.error"))]
        return {"error": f"ranks {sorted(failed)} failed, ranks {hung} hung\n" + "\n".join(errors)}
    return {"ok": time.monotonic() - started}


def _fork_rank(job: dict[str, Any], rank: int) -> int:
    """Process id of the child that runs this rank."""
    pid = os.fork()
    if pid:
        return pid
    out = Path(job["out"])
    status = 1
    try:
        log = os.open(out / f"rank{rank:02d}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"])}
        import deepspeed
        import torch.distributed as dist

        deepspeed.init_distributed(
            "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{out / 'store'}",
            rank=rank,
            world_size=job["world"],
        )
        module, _, name = job["function"].partition(":")
        result = getattr(import_module(module), name)(out, rank, **job["arguments"])
        (out / f"rank{rank:02d}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the job
        (out / f"rank{rank:02d}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
