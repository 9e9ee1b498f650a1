"""A merge by forked workers: `python -m tests.replay.forking SRC LOG STEP DST [TUNABLE=NUMBER …]`.

A process of its own, because pytest's has threads. Prints what was replayed where.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ucp import api, settings
from ucp.replay.replayer import ReplayedFiles, ReplayedTensor


def main(src: str, log: str, step: str, dst: str, *assignments: str) -> None:
    import torch

    for setting in assignments:
        name, _, value = setting.partition("=")
        setattr(settings, name, int(value))
    # Threads of torch's own, which no fork has: a worker that wants them would wait for ever.
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    compute, parent = ReplayedFiles._compute, os.getpid()

    def told(self: ReplayedFiles, tensor: ReplayedTensor, number: int) -> Any:
        tell("replayed", os.getpid() - parent and "fork", f"{tensor.file}/{number}")
        return compute(self, tensor, number)

    ReplayedFiles._compute = told  # type: ignore[method-assign]
    api.plan(src, dst, log=log, step=int(step)).run(jobs=2, processes=True)


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
