"""`ucp.snapshot` of real engines and torch jobs: every snapshot is what the job held after its step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, state, zero
from tests.interop.spec import Spec
from tests.references import Place, RankState, differences
from tests.training.worlds import Worlds
from ucp.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RANKS = "tests.training.snapshot_ranks:"

JOBS: dict[str, tuple[int, Spec, str]] = {
    "zero 0, bf16": (2, Spec(zero=0), "engine"),
    "bf16 optimizer": (2, Spec(config=BF16_OPTIMIZER), "engine"),
    "zero 1": (2, Spec(zero=1), "engine"),
    "zero 2, groups": (2, Spec(zero=2, groups=3, frozen=("pos",), optimizer="nadam"), "engine"),
    "zero 3, sub-groups": (2, Spec(zero=3, config=zero(3, sub_group_size=700)), "engine"),
    "ddp": (2, Spec(dtype="fp32"), "ddp"),
    "fsdp": (2, Spec(dtype="fp32"), "fsdp"),
}


@pytest.mark.parametrize("name", JOBS)
def test_snapshots_hold_what_the_job_held(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, kind = JOBS[name]
    results = worlds.run(world, RANKS + "run", tmp_path, spec=asdict(spec), kind=kind, steps=10)
    taken = results[0]["taken"]
    assert len(taken) >= 4
    assert all(result["late"] > 0 and result["waited"] > 0 for result in results)
    assert [step for step, _ in results[0]["finished"]] == taken
    for step, folder in results[0]["finished"]:
        assert_holds(tmp_path, ucp.open(folder), step, results)
    assert ucp.verify(results[0]["finished"][-1][1], level="deep").ok


@pytest.mark.parametrize("name", ["zero 1", "ddp"])
def test_ranks_fill_one_store(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, kind = JOBS[name]
    results = worlds.run(world, RANKS + "run", tmp_path, spec=asdict(spec), kind=kind, steps=5, store=True)
    newest, before = results[0]["taken"][-1], results[0]["taken"][-2]
    path = tmp_path / "run.ucpstore"
    for step in (newest, before):  # both slots
        assert_holds(tmp_path, ucp.open(path, tag=str(step)), step, results)
    assert ucp.verify(path, level="deep").ok


@pytest.mark.parametrize("name", ["zero 2, groups", "ddp"])
def test_a_log_makes_one_state_of_parts_of_many_steps(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, kind = JOBS[name]
    results = worlds.run(world, RANKS + "spread", tmp_path, spec=asdict(spec), kind=kind, rounds=4)
    spans = []
    for first, (step, folder) in zip(results[0]["firsts"], results[0]["finished"], strict=True):
        spans.append(step - first)
        with pytest.raises(UsageError, match=f"spread over steps {first} to {step}"):
            ucp.open(folder)
        assert_holds(tmp_path, ucp.open(folder, log=tmp_path / "log", step=step, exact=True), step, results)
    assert max(spans) > 1


def assert_holds(out: Path, opened: Any, step: int, results: list[Any]) -> None:
    assert opened.index.step == step
    ranks = [RankState(Place(0, 1, 0, 1, 0), state(out, f"reference{step}", result["rank"])) for result in results]
    assert differences(opened, ranks) == [], step
