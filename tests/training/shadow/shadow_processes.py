"""Shadows as processes of their own, and the states that they must have."""

from __future__ import annotations

import subprocess
import sys

import torch

from tests.paths import PROJECT
from tests.training.shadow import trainer


class Processes:
    """Processes that are ended with the test."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.started: list[subprocess.Popen[str]] = []
        self._stderr = subprocess.DEVNULL if quiet else None

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self.started.append(process)
        return process

    def shadow(self, *arguments: object, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
        """A running `ucp shadow --listen`, and its address."""
        process = self.start("-m", "ucp", "shadow", "--listen", listen, *arguments)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def expected(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """The expected state of the job after a step."""
    net, optimizer = trainer.build()
    for number in range(1, step + 1):
        trainer.step(net, optimizer, number)
    found = {}
    for name, p in net.named_parameters():
        found[f"{name}|weight"] = p.detach().clone()
        found.update({f"{name}|{kind}": value.clone() for kind, value in optimizer.state[p].items()})
    return net, optimizer, found
