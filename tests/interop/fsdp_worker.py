"""A process that imports torch once and forks the ranks of every job that it is sent: a JSON line in, one out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.interop.fsdp_rank import TorchJob, run_rank
from tests.interop.jobs import PROJECT, JobError

TIMEOUT = 120  # seconds a job may take


class TorchTrainer:
    """A running worker process. Use as a context manager."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.fsdp_worker"],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._log.close()

    def run(self, job: TorchJob) -> TorchResult:
        """Run a job to its end; its states and report are in the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(job.to_json() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise JobError("the worker died:\n" + self._log.read().decode(errors="replace")[-4000:])
        reply = json.loads(line)
        if "error" in reply:
            raise JobError(reply["error"])
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


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    for line in sys.stdin:
        replies.write(_run(TorchJob.from_json(line)) + "\n")


def _run(job: TorchJob) -> str:
    Path(job.out).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ranks = {_fork(job, rank): rank for rank in range(job.world)}
    failed: list[int] = []
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            if status:
                failed.append(rank)
        elif time.monotonic() - started > TIMEOUT or failed:
            time.sleep(2)  # let the others say what they know
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            failed.extend(ranks.values())
            ranks = {}
        else:
            time.sleep(0.01)
    if failed:
        errors = [path.read_text() for path in sorted(Path(job.out).glob("rank*.error"))]
        return json.dumps({"error": f"ranks {sorted(failed)} failed\n" + "\n".join(errors)})
    return json.dumps({"ok": True})


def _fork(job: TorchJob, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        import torch.distributed as dist

        store = Path(job.out) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.world)
        run_rank(job, rank)
        dist.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the job
        (Path(job.out) / f"rank{rank:02d}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
