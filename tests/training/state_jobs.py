"""Jobs whose states are logged, because their optimizers cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.training.recorded_jobs import TiedNet
from ucp.core.checkpoint import kind_of_state

torch = pytest.importorskip("torch")


State = dict[str, Any]


class NormedNet(TiedNet):
    """With a batch norm, whose buffers change with every forward pass, and a buffer that is replaced sometimes."""

    def __init__(self) -> None:
        super().__init__(buffer=False)
        self.norm = torch.nn.BatchNorm1d(13)
        self.register_buffer("phase", torch.zeros(3, 2, dtype=torch.int64))
        self.register_buffer("still", torch.ones(5))

    def forward(self, x: Any, *, rare: bool) -> Any:
        return super().forward(self.norm(x), rare=rare)


class StateJob:
    """A job that keeps the state after every step."""

    def __init__(self, run: Path, make: Callable[[Any], Any], *, model: Any = None, **options: Any) -> None:
        self.model = TiedNet() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.history: list[State] = [self.state()]
        self.recorder = ucp.record(run, self.model, self.optimizer, **options)

    def state(self) -> State:
        found = {f"{name}|weight": value.clone() for name, value in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for kind, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    found[f"{name}|{kind_of_state(kind)}"] = torch.as_tensor(value).clone()
        return found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            number = len(self.history)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 13), rare=number % 3 == 0).backward()
            if hasattr(self.model, "phase") and number % 2:
                self.model.phase = self.model.phase + 1
            self.optimizer.step()
            self.history.append(self.state())


def merged(run: Path, step: int, **options: Any) -> State:
    state = ucp.open(run, log=run, step=step, exact=True, **options)
    return {
        f"{name}|{kind}": parameter.read(kind, as_torch=True)
        for name, parameter in state.parameters.items()
        for kind in parameter.kinds
    }


def assert_same(found: State, expected: State) -> None:
    expected = {key: value for key, value in expected.items() if not key.startswith("tied.")}
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].view(-1).view(torch.uint8), value.detach().view(-1).view(torch.uint8)), key


def unreplayable_optimizers() -> dict[str, Callable[[Any], Any]]:
    optim = torch.optim
    return {
        "rmsprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
        "nadam": lambda p: optim.NAdam(p, lr=1e-2),  # keeps a product besides its counter
        "asgd": lambda p: optim.ASGD(p, lr=1e-2),
        "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),  # states of other shapes than the parameter's
    }
