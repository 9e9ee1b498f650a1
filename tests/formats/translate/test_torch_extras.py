"""Scheduler and client state of a torch job, converted to DeepSpeed and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.formats.dcp.state_dicts import load_all, save, small_state


def made(key: str, schedule: Any) -> dict[str, Any]:
    """A job's state dict with a scheduler under the given key, counters and random state."""
    import torch

    rest = {"train_state": {"step": 2, "tokens": torch.tensor([7])}, "rng": torch.get_rng_state(), "note": "mine"}
    return {**small_state(), key: schedule, **rest}


def torch_schedule(steps: int) -> dict[str, Any]:
    """The state of a scheduler that is composed of others and contains their states."""
    import torch
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    warm, cool = lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 9)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm, cool], [2])
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return schedule.state_dict()


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("key", ["lr_scheduler", "app", "lr_schedulers"])
def test_round_trip(tmp_path: Path, zero: int, key: str) -> None:
    """Under a key of the job's choice, in a dictionary, and in a list as in Lightning."""
    import torch

    schedule = torch_schedule(3)
    state = made(key, {"app": {"schedule": schedule}, "lr_schedulers": [schedule]}.get(key, schedule))
    save(state, tmp_path / "a")
    conversion = ucp.plan(tmp_path / "a", tmp_path / "zero", to="deepspeed", zero=zero, dp=2)
    conversion.run()
    assert conversion.writer.notes == []
    file = next(tmp_path.glob("zero/*/*mp_rank_00_model_states.pt"))
    stored = torch.load(file, weights_only=False)
    assert stored["lr_scheduler"] == {**schedule, "last_batch_iteration": 2}
    assert (stored["note"], stored["train_state"]["tokens"].tolist()) == ("mine", [7])
    assert torch.equal(stored["rng"], state["rng"])

    ucp.convert(tmp_path / "zero", tmp_path / "b", to="dcp", like=tmp_path / "a")
    got = load_all(tmp_path / "b", tmp_path / "b.pt")
    back = {"app": lambda held: held["schedule"], "lr_schedulers": lambda held: held[0]}.get(key, dict)(got[key])
    assert {name: back[name] for name in schedule} == schedule
    assert (got["note"], got["train_state"]["tokens"].tolist()) == ("mine", [7])
    assert not got["extras"].keys() & {"note", "train_state", "rng", "lr_scheduler"}


def test_a_deepspeed_scheduler_state_is_completed_for_torch(tmp_path: Path) -> None:
    save(made("lr_scheduler", {"last_batch_iteration": 4}), tmp_path / "a")
    ucp.convert(tmp_path / "a", tmp_path / "zero", to="deepspeed", zero=1, dp=1)
    ucp.convert(tmp_path / "zero", tmp_path / "b", to="dcp")
    got = load_all(tmp_path / "b", tmp_path / "b.pt")["lr_scheduler"]
    assert got == {"last_batch_iteration": 4, "last_epoch": 5, "_step_count": 6, "_last_lr": [0.125]}


def test_several_schedulers_are_client_state(tmp_path: Path) -> None:
    """An engine could not know which to use; nothing is lost."""
    import torch

    schedules = {"first": torch_schedule(1), "second": torch_schedule(2)}
    save(made("schedulers", schedules), tmp_path / "a")
    conversion = ucp.plan(tmp_path / "a", tmp_path / "zero", to="deepspeed", zero=1, dp=1)
    conversion.run()
    assert [note.id for note in conversion.writer.notes] == ["no-scheduler"]
    stored = torch.load(next(tmp_path.glob("zero/*/mp_rank_00_model_states.pt")), weights_only=False)
    assert (stored["lr_scheduler"], stored["schedulers"]) == (None, schedules)


def test_reserved_keys_are_left_out(tmp_path: Path) -> None:
    save(made("module", {"mine": 1}), tmp_path / "a")
    conversion = ucp.plan(tmp_path / "a", tmp_path / "zero", to="deepspeed", zero=1, dp=1)
    notes = [note.text for note in conversion.source.notes if note.id == "extras-left-out"]
    assert ["module" in text for text in notes] == [True]


def test_loading_into_an_engine_finds_the_schedule(tmp_path: Path) -> None:
    from ucp.core.checkpoint import Mesh, Rank
    from ucp.training.live_job import LiveJob
    from ucp.training.training_state import find_training_state

    schedule = torch_schedule(3)
    source = ucp.open(save(made("plan", schedule), tmp_path / "a")).index
    state = find_training_state(source, LiveJob("an engine", Mesh(), Rank(), {}), 0, 1)
    assert state.scheduler == {**schedule, "last_batch_iteration": 2}
