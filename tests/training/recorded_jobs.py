"""Small jobs to record, and the contents of their logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from ucp.log.reader import Log

torch = pytest.importorskip("torch")


class TiedNet(torch.nn.Module):
    """Odd sizes, a tied weight, a parameter that has a gradient in some steps only, a frozen one, a buffer."""

    def __init__(self, *, buffer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(13, 7)
        self.last = torch.nn.Linear(7, 13, bias=False)
        self.last.weight = torch.nn.Parameter(self.first.weight.detach().t().contiguous())
        self.tied = self.last
        self.rare = torch.nn.Parameter(torch.randn(5))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        if buffer:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any, *, rare: bool) -> Any:
        y = self.last(torch.tanh(self.first(x)))
        return y.square().mean() + (self.rare.square().sum() if rare else 0)


def optimizers() -> dict[str, tuple[Callable[[Any], Any], str]]:
    optim = torch.optim
    return {
        "adamw single": (lambda p: optim.AdamW(p, lr=1e-2, foreach=False), "torch.adamw.single"),
        "adamw foreach": (lambda p: optim.AdamW(p, lr=1e-2, foreach=True), "torch.adamw.foreach"),
        "adamw fused": (lambda p: optim.AdamW(p, lr=1e-2, fused=True), "torch.adamw.fused"),
        "adamw, as torch chooses": (lambda p: optim.AdamW(p, lr=1e-2), "torch.adamw.single"),
        "lr tensor": (lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False), "torch.adamw.single"),
        "sgd": (lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=False), "torch.sgd.single"),
    }


class Trained:
    """A job with a recorder, and the gradients that its optimizer got in each step."""

    def __init__(self, run: Path, make: Callable[[Any], Any], **options: Any) -> None:
        self.model = TiedNet()
        self.optimizer = make(self.model.parameters())
        self.given: list[dict[str, bytes]] = []
        self.optimizer.register_step_pre_hook(self._note)
        self.recorder = ucp.record(run, self.model, self.optimizer, **options)

    def _note(self, *_: Any) -> None:
        named = self.model.named_parameters()
        self.given.append({name: p.grad.numpy().tobytes() for name, p in named if p.grad is not None})

    def train(self, steps: int, micro: int = 2) -> None:
        for number in range(steps):
            self.optimizer.zero_grad()
            for _ in range(micro):
                self.model(torch.randn(4, 13), rare=number % 3 == 0).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()


def logged(run: Path) -> list[dict[str, bytes]]:
    """Step → the gradients of a log by name."""
    with Log.open(run, "strict") as log:
        found = []
        for span in log.spans():
            [stream] = span.epoch.streams.values()
            for step in range(span.first, span.last + 1):
                parts: dict[str, list[np.ndarray]] = {}
                for block in stream.schema.blocks:
                    stored = stream.read_block(step, block.id)
                    if stored is not None:
                        name = span.epoch.manifest.parameters[block.parameter].name
                        parts.setdefault(name, []).append(stored.float32())
                found.append({name: np.concatenate(some).tobytes() for name, some in parts.items()})
        return found
