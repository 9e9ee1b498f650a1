"""A conversion by forked workers, with something that happens to it: `python -m tests.engine.forking WHAT SRC DST`.

A process of its own, because pytest's has threads. Prints the workers, then, if it ends by itself, how it ended.
"""

from __future__ import annotations

import os
import signal
import sys

from ucp import api, settings
from ucp.engine import worker
from ucp.engine.convert import Progress
from ucp.engine.plan import CopyTask
from ucp.errors import UcpError

WORKERS: list[int] = []


class Happening(Progress):
    """Something that happens as soon as a worker has moved bytes."""

    def __init__(self, what: str) -> None:
        self.what = what
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

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
            signal.sigtimedwait([], 60)  # which does not last so long
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


def _divide(self: worker.CopyWorker, part: CopyTask) -> list[worker.WrittenRange]:
    del self, part
    return [worker.WrittenRange(1 // 0, 0, 0, "")]


def _at_a_truncated_file(self: worker.CopyWorker, part: CopyTask) -> list[worker.WrittenRange]:
    for fragment in part.atom.fragments if part.atom is not None else ():
        if fragment.file:
            os.truncate(self.work.source.root / fragment.file, fragment.offset)
    return _write(self, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
