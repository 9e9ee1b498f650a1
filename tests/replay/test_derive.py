"""States at any step of a log, bit for bit what the job held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from tests.replay.made import Run, State, start
from ucp import tunables
from ucp.log.reader import Log
from ucp.model.checkpoint import Checkpoint
from ucp.replay.derive import at_step


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors walk the path of large ones: several blocks a tensor, in several chunks."""
    monkeypatch.setattr(tunables, "LOG_BLOCK_ELEMENTS", 128)


def state_of(checkpoint: Checkpoint) -> State:
    view = ucp.api.OpenCheckpoint(checkpoint)
    return {
        f"{name}|{kind}": torch.as_tensor(parameter.read(kind, as_torch=True))
        for name, parameter in view.parameters.items()
        if parameter.parameter.role == "trained"
        for kind in parameter.kinds
    }


def assert_same(found: State, expected: State) -> None:
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key].view(-1).view(torch.int32), value.view(-1).view(torch.int32)), key


def derive(run: Run, base: Path, step: int | None, exact: bool = True) -> Checkpoint:
    for appender in run.appenders:
        appender.sync()
    with_log = Log.open(run.folder)
    return at_step(ucp.open(base).index, with_log, step, exact=exact)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_every_step_is_the_job_s(tmp_path: Path, streams: int, scale: float | None) -> None:
    run = start(tmp_path, streams=streams, scale=scale)
    base0 = run.save(0)
    run.train(5)
    base5 = run.save(1)
    run.train(6)
    for step in range(1, 12):
        assert_same(state_of(derive(run, base0, step)), run.history[step])
    for step in range(6, 12):
        assert_same(state_of(derive(run, base5, step)), run.history[step])
    newest = derive(run, base5, None)
    assert newest.step == 11
    assert newest.details["replay"] == {
        "base_step": 5,
        "step": 11,
        "log": str(run.log.resolve()),
        "exact": True,
        "labels": [],
    }
