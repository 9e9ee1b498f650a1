"""What tests of shadows need: wait for a step, and compare what is held with what a job held."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.replay.made import State
from ucp.api import OpenCheckpoint
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.model.checkpoint import Checkpoint
from ucp.shadow.assembling import HeldFiles, assemble
from ucp.shadow.following import Shadow


def wait_for(shadow: Shadow, step: int, seconds: float = 20.0) -> dict[str, Any]:
    """Wait until the shadow holds a step; gives its status then."""
    end = time.monotonic() + seconds
    while True:
        told = shadow.status()
        if told["step"] is not None and told["step"] >= step:
            return told
        if told["condition"] == "stale" or time.monotonic() > end:
            raise AssertionError(f"the shadow does not come to step {step}: {told}")
        time.sleep(0.002)


def held(shadow: Shadow) -> Checkpoint:
    """The state that the shadow holds now, as a checkpoint in this process."""
    snapshot = shadow.snapshot()
    base = open_checkpoint(Path(snapshot.told["base"]), ReadOptions())
    return assemble(base, snapshot.told, HeldFiles(snapshot))


def state_of(checkpoint: Checkpoint) -> State:
    """A copy of everything that is trained."""
    view = OpenCheckpoint(checkpoint)
    return {
        f"{name}|{kind}": torch.as_tensor(parameter.read(kind, as_torch=True)).clone()
        for name, parameter in view.parameters.items()
        if parameter.parameter.role == "trained"
        for kind in parameter.kinds
    }


def assert_same(found: State, expected: State) -> None:
    """Equal in every bit."""
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key].view(-1).view(torch.int32), value.view(-1).view(torch.int32)), key
