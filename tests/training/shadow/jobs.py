"""A small job, and a shadow with its server, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ucp
from ucp.training.shadow.protocol import ShadowAddress
from ucp.training.shadow.server import ShadowServer
from ucp.training.shadow.shadow import Shadow

HERE = ShadowAddress("127.0.0.1", 0)


class Pair:
    """A shadow with its server."""

    def __init__(self, *arguments: Any, address: ShadowAddress = HERE, **options: Any) -> None:
        self.notes: list[str] = []
        self.shadow = Shadow(*arguments, wait_for_job=True, note=self.notes.append, **options)
        self.shadow.start()
        self.server = ShadowServer(self.shadow, address, self.notes.append)
        self.url = str(self.server.address)

    def close(self) -> None:
        self.server.close()
        self.shadow.stop()


class Job:
    """A small torch job that is recorded; keeps the state after every step."""

    def __init__(self, run: Path, width: int = 33, **options: Any) -> None:
        self.build(width)
        self.recorder = ucp.record(run, self.net, self.optimizer, **options)

    def build(self, width: int) -> None:
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(13, width), torch.nn.Tanh(), torch.nn.Linear(width, 5))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.history: dict[int, dict[str, torch.Tensor]] = {}
        self.step = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.randn(8, 13)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            found = {}
            for name, p in self.net.named_parameters():
                found[f"{name}|weight"] = p.detach().clone()
                found.update({f"{name}|{kind}": value.clone() for kind, value in self.optimizer.state[p].items()})
            self.history[self.step] = found

    def shadow_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.recorder.stats()["shadow"]
        return stats
