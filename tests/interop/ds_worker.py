"""A process that imports torch and DeepSpeed once and forks the ranks of every job that it is sent.

Start-up is most of what a tiny job costs: 13 s when every rank imports DeepSpeed, 1 to 5 s this way.
One JSON line in (a job), one JSON line out ({"ok": …} or {"error": …}); everything else goes to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache/ucp-torch-extensions")),
}
TIMEOUT = 120  # seconds a job may take
GRACE = 3  # seconds the others may go on when a rank has failed: most wait for it forever
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


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    import torch

    for module in PRELOAD:
        import_module(module)

    from tests.interop.ds_rank import patch_for_cpu

    torch.set_num_threads(1)
    patch_for_cpu()
    replies.write('{"ok": "ready"}\n')
    for line in sys.stdin:
        replies.write(_run(line) + "\n")


def _run(line: str) -> str:
    import json

    from tests.interop.spec import Job

    job = Job.from_json(line)
    Path(job.out).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ranks = {_fork_rank(line, rank): rank for rank in range(job.world)}
    failed: list[int] = []
    broke = started
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            if status:
                broke = broke if failed else time.monotonic()
                failed.append(rank)
        elif time.monotonic() - started > TIMEOUT or (failed and time.monotonic() - broke > GRACE):
            failed.extend(ranks.values())
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ranks = {}
        else:
            time.sleep(0.01)
    if failed:
        errors = [path.read_text() for path in sorted(Path(job.out).glob("rank*.error"))]
        return json.dumps({"error": f"ranks {sorted(failed)} failed\n" + "\n".join(errors)})
    return json.dumps({"ok": time.monotonic() - started})


def _fork_rank(line: str, rank: int) -> int:
    """Process id of the child that runs this rank."""
    pid = os.fork()
    if pid:
        return pid
    from tests.interop.ds_rank import run_rank
    from tests.interop.spec import Job

    job = Job.from_json(line)
    status = 1
    try:
        log = os.open(Path(job.out) / f"rank{rank:02d}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
        import deepspeed
        import torch.distributed as dist

        store = Path(job.out) / "store"
        deepspeed.init_distributed(
            "gloo", auto_mpi_discovery=False, init_method=f"file://{store}", rank=rank, world_size=job.world
        )
        run_rank(job, rank)
        dist.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the job
        (Path(job.out) / f"rank{rank:02d}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
