"""Converts a step in forked workers: `python -m tests.replay.convert_in_workers SRC LOG STEP DST [SETTING=NUMBER …]`.

A process of its own, because pytest has threads. Prints which chunk was replayed in which process.
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
    # Start torch's threads, which forks do not inherit: a worker that uses them would wait forever.
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    compute, parent = ReplayedFiles._compute, os.getpid()

    def reporting(self: ReplayedFiles, tensor: ReplayedTensor, number: int) -> Any:
        process = "fork" if os.getpid() != parent else "parent"
        os.write(1, f"replayed {process} {tensor.file}/{number}\n".encode())
        return compute(self, tensor, number)

    ReplayedFiles._compute = reporting  # type: ignore[method-assign]
    api.plan(src, dst, log=log, step=int(step)).run(jobs=2, processes=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
