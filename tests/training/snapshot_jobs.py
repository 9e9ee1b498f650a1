"""A small job to take snapshots of, and the comparison of its states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ucp

torch = pytest.importorskip("torch")


nn = torch.nn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny layers: threads of torch would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class BatchNormNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, width)
        self.norm = nn.BatchNorm1d(width)  # forward passes write its buffers
        self.rest = nn.Linear(width, 4)
        self.frozen = nn.Parameter(torch.randn(50), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.rest(self.norm(self.first(x))).square().mean() + self.frozen.sum()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam, single": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


def held(net: Any, optimizer: Any) -> dict[tuple[str, str], Any]:
    """Copies of all states of the job."""
    state = {(name, "weight"): value.detach().clone() for name, value in net.state_dict().items()}
    for name, p in net.named_parameters():
        for kind, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                state[name, kind] = value.detach().clone()
    return state


def wrong(path: Path, wanted: dict[tuple[str, str], Any], **options: Any) -> list[tuple[str, str]]:
    """The atoms of a snapshot that differ from `wanted`."""
    opened = ucp.open(path, **options)
    bad = [
        key
        for key, value in wanted.items()
        if not torch.equal(opened[key[0]].read(key[1], as_torch=True).reshape(value.shape), value)
    ]
    there = {(name, kind) for name in opened for kind in opened[name].kinds}
    return bad + sorted(there - wanted.keys())


def train(net: Any, optimizer: Any, step: int, nap: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(step)
    loss = net(torch.randn(8, 12, generator=generator))
    if nap:
        time.sleep(nap)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
