"""A job that a test may kill: `python -m tests.training.shadow.trainer RUN STEPS [URL]` prints every step taken.

The data of a step depend on its number alone, so that any other process can take the same steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    net = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    decayed = {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1}
    rest = {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0}
    return net, torch.optim.AdamW([decayed, rest], lr=1e-2)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Take step `number` (from 1); returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.99**number
    data = torch.randn(16, 24, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = (net(data) - data[:, :8]).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    return float(loss.detach())


def main(run: Path, steps: int, url: str | None) -> None:
    import ucp

    torch.set_num_threads(1)
    net, optimizer = build()
    recorder = ucp.record(run, net, optimizer, to=url)
    for number in range(1, steps + 1):
        step(net, optimizer, number)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
    recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
