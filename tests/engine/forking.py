"""A conversion by worker processes, with an incident: `python -m tests.engine.forking WHAT SRC DST`.

A process of its own, because pytest's has threads. Prints the workers, then, if it ends by itself, how it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from ucp import api, settings
from ucp.engine import worker
from ucp.engine.copy_tasks import CopyTask
from ucp.engine.pool import Progress
from ucp.errors import UcpError

WORKERS: list[int] = []


class Happening(Progress):
    """Causes an incident as soon as a worker has moved bytes."""

    def __init__(self, what: str) -> None:
        self.what = what
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it

    def advance(self, nbytes: int) -> None:
        if nbytes == 0 or not WORKERS:
            return
        tell("workers", *WORKERS)
        if self.what == "kill a worker":
            os.kill(WORKERS[0], signal.SIGKILL)
        elif self.what == "interrupt a worker":
            os.kill(WORKERS[0], signal.SIGINT)
        elif self.what == "kill all":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "interrupt":
            os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does
            signal.sigtimedwait([], 60)  # which does not take that long
        self.what = ""


def main(what: str, src: str, dst: str) -> None:
    settings.PROGRESS_SECONDS = 0.0
    settings.COPY_TASK_BYTES = 4096
    count_forks()
    conversion = api.plan(src, dst)
    if what == "break a worker":
        worker.CopyWorker.write = _divide  # type: ignore[method-assign]
    if what == "break the source":
        worker.CopyWorker.write = _at_a_truncated_file  # type: ignore[method-assign]
    try:
        conversion.run(jobs=3, processes=True, progress=Happening(what), resume=what == "resume")
    except (UcpError, KeyboardInterrupt, RuntimeError) as error:
        tell("ended", type(error).__name__, str(error).replace("\n", " "))
    else:
        tell("forked", len(WORKERS))


def count_forks() -> None:
    """Remember the workers that are started from now on."""
    fork = os.fork

    def counted() -> int:
        pid = fork()
        if pid:
            WORKERS.append(pid)
        return pid

    os.fork = counted


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


_write = worker.CopyWorker.write


def _divide(self: worker.CopyWorker, task: CopyTask) -> list[worker.WrittenRange]:
    del self, task
    return [worker.WrittenRange(1 // 0, 0, 0, "")]


def _at_a_truncated_file(self: worker.CopyWorker, task: CopyTask) -> list[worker.WrittenRange]:
    for fragment in task.atom.fragments if task.atom is not None else ():
        if fragment.file:
            os.truncate(self.source.root / fragment.file, fragment.offset)
    return _write(self, task)


def workers(said: str) -> list[int]:
    return [int(pid) for line in said.splitlines() if line.startswith("workers ") for pid in line.split()[1:]]


def wait_until_gone(pids: list[int]) -> None:
    """Wait until processes have ended; a zombie has ended too."""
    end = time.monotonic() + 60
    for pid in pids:
        while _lives(pid):
            assert time.monotonic() < end, f"worker {pid} lives"
            time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX" and os.getpgid(pid) > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
