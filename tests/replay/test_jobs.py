"""Recorded torch jobs, replayed bit for bit at every step: cases that other tests do not train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.training.state_jobs import assert_same, merged
from ucp.core.checkpoint import kind_of_state
from ucp.errors import UsageError

torch = pytest.importorskip("torch")


class Odd(torch.nn.Module):
    """A parameter that is a number, one in another order in memory, one without elements, one without gradient."""

    def __init__(self, *, empty: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.turned = torch.nn.Parameter(torch.randn(7, 9).t())
        self.rare = torch.nn.Parameter(torch.randn(5))
        if empty:
            self.none = torch.nn.Parameter(torch.randn(0, 3))

    def forward(self, rare: bool) -> Any:
        y = self.conv(torch.randn(2, 3, 6, 6)).square().mean() * self.scale + self.turned.square().sum()
        y = y + self.none.sum() if hasattr(self, "none") else y
        return y + self.rare.square().sum() if rare else y


def train(run: Path, make: Callable[[Any], Any], change: Callable[[Any, int], None], **options: Any) -> list[Any]:
    """Eight steps; the states after each."""
    model = Odd()
    optimizer = make(model.parameters())

    def state() -> dict[str, Any]:
        found = {f"{name}|weight": p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            for kind, value in optimizer.state.get(p, {}).items():
                if value is not None:
                    found[f"{name}|{kind_of_state(kind)}"] = torch.as_tensor(value).clone()
        return {key: value.contiguous() for key, value in found.items()}

    history = [state()]
    with ucp.record(run, model, optimizer, **options):
        for step in range(1, 9):
            change(optimizer, step)
            optimizer.zero_grad()
            model(step % 3 == 0).backward()
            optimizer.step()
            history.append(state())
    return history


def nothing(_optimizer: Any, _step: int) -> None:
    pass


def turn_momentum_on(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9 if step > 4 else 0.0


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2), nothing),
        (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True), nothing),
        (lambda p: torch.optim.Adagrad(p, lr=1e-2), nothing),
        (lambda p: torch.optim.RMSprop(p, lr=1e-2), nothing),
        (lambda p: torch.optim.SGD(p, lr=1e-2), turn_momentum_on),
    ],
    ids=["adamw", "adam", "adagrad", "states", "momentum turned on"],
)
def test_every_step_equals_the_job(tmp_path: Path, make: Callable[[Any], Any], change: Any) -> None:
    history = train(tmp_path, make, change, base_every=3, keep_bases=None)
    for step, expected in enumerate(history):
        assert_same(merged(tmp_path, step), expected)
    assert ucp.verify(tmp_path, log=tmp_path).ok


def test_fused_kernels_of_tensors_that_are_not_row_major_are_labelled(tmp_path: Path) -> None:
    train(tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), nothing)
    notes = [note.text for note in ucp.open(tmp_path, log=tmp_path, step=3).index.notes]
    assert any("not row-major" in note for note in notes)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_parameter_without_elements(tmp_path: Path, name: str) -> None:
    model = Odd(empty=True)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    with ucp.record(tmp_path, model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(True).backward()
            optimizer.step()
    found = ucp.open(tmp_path, log=tmp_path, exact=True)
    assert found["none"].read().shape == (0, 3)
    assert torch.equal(found["rare"].read(as_torch=True), model.rare)


def test_a_step_skipped_by_grad_scaler_is_logged_as_skipped(tmp_path: Path) -> None:
    """GradScaler calls a fused optimizer anyway, and the operator does nothing."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history = []
    with ucp.record(tmp_path, model, optimizer):
        for step in range(1, 7):
            optimizer.zero_grad()
            loss = scaler.scale(model(torch.randn(4, 5)).square().mean())
            (loss * float("inf") if step in (2, 5) else loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            state = optimizer.state[model.weight]
            history.append([value.clone() for value in (model.weight.detach(), state["exp_avg"], state["step"])])
    for step, expected in enumerate(history, 1):
        found = ucp.open(tmp_path, log=tmp_path, step=step, exact=True)["weight"]
        for kind, value in zip(("weight", "exp_avg", "step"), expected, strict=True):
            assert torch.equal(found.read(kind, as_torch=True), value), (step, kind)


def test_damage_is_reported_if_a_step_is_not_available(tmp_path: Path) -> None:
    """The second of three segments is damaged in the middle of a step."""
    train(tmp_path, lambda p: torch.optim.SGD(p, lr=1e-2), nothing, base_every=3, keep_bases=None)
    segment = sorted((tmp_path / "log" / "epoch-000000" / "stream-00000").glob("*.ugl"))[1]
    data = bytearray(segment.read_bytes())
    data[len(data.rstrip(b"\0")) // 2] ^= 4
    segment.write_bytes(bytes(data))
    with pytest.raises(
        UsageError, match=r"is not in the log \(last complete step: [345]\)\n.*because of .*damaged"
    ) as caught:
        ucp.open(tmp_path, log=tmp_path, step=8)
    last = str(caught.value).partition("complete step: ")[2][0]
    hints = {finding.hint for finding in ucp.verify(tmp_path, log=tmp_path).findings if finding.check == "log"}
    assert hints == {f"steps up to {last} are good"}
