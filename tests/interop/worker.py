"""Both ends of a worker: a process that imports a framework once and forks the ranks of every job that it is sent.

Start-up is most of what a tiny job costs: 13 s when every rank imports DeepSpeed, 1 to 5 s this way. One JSON line in
(a job), one JSON line out (`{"ok": …}` or `{"error": …}`); everything else that the worker prints goes to its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.paths import PROJECT

TIMEOUT = 120  # seconds a job may take


class JobError(Exception):
    """A rank of the job raised, died or hung; the message has every rank's traceback."""


class Worker:
    """The near end: a running worker process. Use as a context manager."""

    def __init__(self, module: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reply()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the worker stops at the end of its input
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._log.close()

    def send(self, job: str) -> None:
        """Have a job (one line of JSON) run to its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(job + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        if "error" in reply:
            raise JobError(reply["error"])

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise JobError("the worker died:\n" + self._log.read().decode(errors="replace")[-4000:])
        reply: dict[str, Any] = json.loads(line)
        return reply


def serve(prepare: Callable[[], None], run: Callable[[str], dict[str, Any]]) -> None:
    """The far end: import what ranks need, then answer every line of standard input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # frameworks log to stdout
    prepare()
    replies.write('{"ok": "ready"}\n')
    for line in sys.stdin:
        replies.write(json.dumps(run(line)) + "\n")


def fork_ranks(world: int, out: Path, work: Callable[[int], None], *, grace: float) -> dict[str, Any]:
    """Run `work(rank)` in a process of its own for every rank; the worker's reply.

    When a rank has failed, the others may go on for `grace` seconds: most of them wait for it forever.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ranks = {_fork(out, rank, work): rank for rank in range(world)}
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
        elif time.monotonic() - started > TIMEOUT or (failed and time.monotonic() - broke > grace):
            hung = sorted(ranks.values())
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ranks = {}
        else:
            time.sleep(0.01)
    if failed or hung:
        errors = [path.read_text() for path in sorted(out.glob("rank*.error"))]
        return {"error": f"ranks {sorted(failed)} failed, ranks {hung} hung\n" + "\n".join(errors)}
    return {"ok": time.monotonic() - started}


def _fork(out: Path, rank: int, work: Callable[[int], None]) -> int:
    """Process id of the child that runs this rank; it prints to `rankNN.log` and `rankNN.error` says why it failed."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(out / f"rank{rank:02d}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(rank)
        status = 0
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the job
        (out / f"rank{rank:02d}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
