"""Logs of states, for optimizers that cannot be replayed, and of buffers: real jobs, every step, every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.training.recorded_jobs import TiedNet
from tests.training.state_jobs import NormedNet, StateJob, assert_same, merged, unreplayable_optimizers
from ucp.errors import UsageError
from ucp.log.base_folders import list_bases
from ucp.log.frames import FrameType
from ucp.log.reader import Log

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", unreplayable_optimizers())
def test_states_are_logged_for_an_optimizer_without_kernel(tmp_path: Path, name: str) -> None:
    job = StateJob(tmp_path, unreplayable_optimizers()[name], base_every=4, keep_bases=None)
    job.train(6)
    job.recorder.close()
    log = Log.open(tmp_path, "strict")
    [stream] = log.epochs[0].streams.values()
    assert all(not stream.blocks(step) for step in stream.steps), "no gradients"
    assert stream.states(FrameType.DIFF)
    assert stream.record(3).groups[0].lr == pytest.approx(1e-2)
    for step in range(1, 7):
        assert_same(merged(tmp_path, step), job.history[step])
    oldest = list_bases(tmp_path)[0].path
    from_the_first = ucp.open(oldest, log=tmp_path, step=6, exact=True)
    assert torch.equal(from_the_first["first.weight"].read(as_torch=True), job.history[6]["first.weight|weight"])


def test_a_state_is_computed_from_many_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per tensor, one base, a chain as long as the run, and a second epoch after it."""
    from ucp import settings

    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 16)
    job = StateJob(tmp_path, unreplayable_optimizers()["rmsprop"], model=NormedNet())
    job.train(9)
    job.recorder.close()
    again = ucp.record(tmp_path, job.model, job.optimizer, base=None, step=9)
    job.recorder = again
    job.train(3)
    again.close()
    for step in (1, 9, 12):
        assert_same(merged(tmp_path, step), job.history[step])
    assert len(list_bases(tmp_path)) == 1


def test_without_zstandard_full_values_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zstandard" else real(name))
    job = StateJob(tmp_path, unreplayable_optimizers()["rmsprop"])
    job.train(3)
    job.recorder.close()
    [stream] = Log.open(tmp_path, "strict").epochs[0].streams.values()
    assert not stream.states(FrameType.DIFF)
    for step in (1, 3):
        assert_same(merged(tmp_path, step), job.history[step])


def step_with_closure(job: StateJob) -> None:
    def closure() -> Any:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(4, 13), rare=True)
        loss.backward()
        return loss

    job.optimizer.step(closure)
    job.history.append(job.state())


def test_states_of_any_optimizer_can_be_logged(tmp_path: Path) -> None:
    """Also with a closure, which cannot be replayed; and gradients of an optimizer without kernel."""
    job = StateJob(tmp_path / "a", lambda p: torch.optim.AdamW(p, lr=1e-2), what="state")
    job.train(2)
    step_with_closure(job)
    job.recorder.close()
    for step in (1, 2, 3):
        assert_same(merged(tmp_path / "a", step), job.history[step])
    other = StateJob(tmp_path / "b", unreplayable_optimizers()["rmsprop"], what="gradients")
    other.train(2)
    other.recorder.close()
    with pytest.raises(UsageError, match="cannot be replayed"):
        merged(tmp_path / "b", 2)
    with pytest.raises(UsageError, match="gradients, state or auto"):
        StateJob(tmp_path / "c", unreplayable_optimizers()["rmsprop"], what="everything")


def test_a_log_of_states_accepts_closures_but_not_unfrozen_parameters(tmp_path: Path) -> None:
    job = StateJob(tmp_path, unreplayable_optimizers()["rmsprop"])
    step_with_closure(job)
    job.train(1)
    job.model.frozen.requires_grad_(True)
    with pytest.raises(UsageError, match="or that was frozen then"):
        job.train(1)
    for step in (1, 2):
        assert_same(merged(tmp_path, step), job.history[step])


def test_a_log_of_states_without_steps_can_be_opened(tmp_path: Path) -> None:
    StateJob(tmp_path, unreplayable_optimizers()["rmsprop"]).recorder.close()
    assert Log.open(tmp_path, "inspect").recoverable_step == 0


def test_buffers_are_logged_with_every_step(tmp_path: Path) -> None:
    job = StateJob(tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-2), model=NormedNet(), base_every=3, keep_bases=None)
    job.train(5)
    job.recorder.close()
    for step in range(1, 6):
        assert_same(merged(tmp_path, step), job.history[step])
    log = Log.open(tmp_path, "strict")
    manifest = log.epochs[0].manifest
    assert [buffer.name for buffer in manifest.buffers] == [
        *("phase", "still", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    ]
    [stream] = log.epochs[0].streams.values()
    logged = [(ref.header.step, sorted(map(int, table["block"]))) for ref, table, _ in stream.states(FrameType.FULL)]
    assert logged == [(1, [0, 2, 3, 4]), (2, [2, 3, 4]), (3, [0, 2, 3, 4]), (4, [2, 3, 4]), (5, [0, 2, 3, 4])]
    assert manifest.notes == []


def test_a_buffer_that_changes_its_shape_ends_the_recording(tmp_path: Path) -> None:
    job = StateJob(tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-2), model=NormedNet())
    job.train(1)
    job.model.phase = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UsageError, match="buffer phase has another shape"):
        job.train(1)


def calling_states(*names: str) -> Callable[[Any], Any]:
    """An optimizer without kernel, with states of these names."""

    class Named(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        for number, name in enumerate(names, 1):
                            state = self.state[p].setdefault(name, torch.zeros_like(p))
                            state.mul_(number / 11).add_(p.grad)
                        p.sub_(self.state[p][names[0]], alpha=group["lr"])

    return lambda parameters: Named(parameters, {"lr": 1e-2})


# What logs, shadows or atoms call something else; and a counter that is one for every element.
TAKEN_NAMES = ("buffer", "param", "grad", "weight", "master", "own:x:()", "own/y", "state:z", "step")


def test_states_with_reserved_names(tmp_path: Path) -> None:
    job = StateJob(tmp_path / "run", calling_states(*TAKEN_NAMES), model=NormedNet(), base_every=2, keep_bases=None)
    job.train(4)
    ucp.save(tmp_path / "saved", job.model, job.optimizer)
    job.recorder.close()
    for step in range(1, 5):
        assert_same(merged(tmp_path / "run", step), job.history[step])
    assert ucp.diff(tmp_path / "run", tmp_path / "saved", log_a=tmp_path / "run", exact=True).same
    assert ucp.verify(tmp_path / "run", "deep", log=tmp_path / "run").ok
    other = NormedNet()
    optimizer = calling_states(*TAKEN_NAMES)(other.parameters())
    ucp.load_into(tmp_path / "run", other, optimizer, log=tmp_path / "run", step=4)
    for p, q in zip(job.model.parameters(), other.parameters(), strict=True):
        assert sorted(optimizer.state[q]) == sorted(job.optimizer.state[p])
        assert all(torch.equal(job.optimizer.state[p][name], value) for name, value in optimizer.state[q].items())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW([{"params": [q], "fused": not i} for i, q in enumerate(p)], lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(torch.tensor(0.9), torch.tensor(0.99)), weight_decay=0.1),
    ],
    ids=["fused and not", "tensors"],
)
def test_states_are_logged_if_torch_computes_differently_from_the_kernel(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    job = StateJob(tmp_path, make)
    job.train(3)
    job.recorder.close()
    assert Log.open(tmp_path).epochs[0].manifest.kernel.id.endswith("(state)")
    for step in (1, 2, 3):
        assert_same(merged(tmp_path, step), job.history[step])
    model = TiedNet()
    optimizer = make(model.parameters())
    before = [group.get("betas") for group in optimizer.param_groups]
    ucp.load_into(tmp_path, model, optimizer, log=tmp_path, step=3)
    assert [[type(beta) for beta in group["betas"]] for group in optimizer.param_groups] == [
        [type(beta) for beta in betas] for betas in before
    ]


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=1.0), lambda p: torch.optim.NAdam(p, lr=1.0)])
def test_a_base_has_the_learning_rate_of_the_next_step(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """A base is saved after the optimizer's step, and the scheduler steps after that."""
    job = StateJob(tmp_path, make, base_every=2, keep_bases=None)
    for step in range(1, 6):
        job.train(1)
        job.optimizer.param_groups[0]["lr"] = 0.5**step
    job.recorder.close()
    assert [base.step for base in list_bases(tmp_path)] == [0, 2, 4]
    for step in range(1, 5):
        merged = ucp.open(tmp_path, log=tmp_path, step=step)
        assert merged.index.groups[0].hyper["lr"] == 0.5**step
