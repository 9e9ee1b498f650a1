"""A plan is a value: it goes through JSON and comes back as the same plan, which writes the same bytes."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucp
from tests.paths import FIXTURES
from tests.trees import contents
from ucp.cli.main import run
from ucp.engine.plan import Plan
from ucp.errors import StorageError

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("z1_bf16_dp2", {}),
    ("z1_bf16_dp2", {"only": "weights", "dtype": "bf16", "include": ["*.weight"]}),
    ("z1_bf16_tp2_dp2", {"to": "deepspeed", "tp": 1, "dp": 3, "zero": 3}),
    ("z1_bf16_tp2_dp2", {"to": "deepspeed", "like": FIXTURES / "z3_fp32_dp3"}),
    ("z3_fp32_dp3", {"to": "safetensors", "max_shard_size": "100K"}),
    ("z3_fp32_dp3", {"to": "dcp"}),
]


def through_json(plan: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json())), ucp.plan)


@pytest.mark.parametrize("source, options", LAYOUTS)
def test_a_plan_from_json_is_equal_and_writes_the_same_bytes(
    source: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = ucp.plan(FIXTURES / source, tmp_path / "out", **options)
    again = through_json(plan)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert [task.ranges for task in again.tasks()] == [task.ranges for task in plan.tasks()]
    again.run(jobs=2)
    ucp.convert(FIXTURES / source, tmp_path / "direct", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "direct")


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=20)
@given(
    tp=st.sampled_from([None, 1, 2]),
    dp=st.integers(1, 4),
    zero=st.integers(0, 3),
    exclude=st.lists(st.sampled_from(["*.bias", "blocks.0.*"]), max_size=2),
)
def test_any_layout_goes_through_json(tp: int | None, dp: int, zero: int, exclude: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"to": "deepspeed", "tp": tp, "dp": dp, "zero": zero, "exclude": exclude}
        plan = ucp.plan(FIXTURES / "z1_bf16_tp2_dp2", Path(folder) / "out", **options)
        assert through_json(plan) == plan
        nbytes = sum(task.nbytes for task in plan.tasks())
        trailers = sum(file.size for file in plan.target.files) - nbytes
        assert 0 <= trailers < 0.5 * plan.target.nbytes, "only trailers are not known before the run"


def test_a_plan_does_not_depend_on_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "z1_bf16_dp2", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    data = ucp.plan("run", "out").to_json()
    monkeypatch.chdir("/")
    assert Plan.from_json(data, ucp.plan).to_json() == data
    assert data["source"]["path"] == str(tmp_path / "run")
    assert data["destination"] == str(tmp_path / "out")


def test_another_source_or_target_is_another_plan(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "z1_bf16_dp2", tmp_path / "run")
    plan = ucp.plan(tmp_path / "run", tmp_path / "out")
    assert plan == ucp.plan(tmp_path / "run", tmp_path / "out")
    assert plan != ucp.plan(tmp_path / "run", tmp_path / "elsewhere")
    assert plan != ucp.plan(tmp_path / "run", tmp_path / "out", only="weights")
    data = plan.to_json()
    file = next(path for path in (tmp_path / "run").rglob("*.pt"))
    file.touch()
    with pytest.raises(StorageError, match="differs from the plan"):
        Plan.from_json(data, ucp.plan)


def test_a_plan_is_frozen_and_states_its_cost(tmp_path: Path) -> None:
    plan = ucp.plan(FIXTURES / "z1_bf16_dp2", tmp_path / "out")
    with pytest.raises(FrozenInstanceError):
        plan.path = tmp_path  # type: ignore[misc]
    cost = plan.cost(jobs=2, memory=600)
    assert (cost.reads, cost.writes, cost.memory) == (cost.reads, plan.target.nbytes, 600)
    assert 0 < cost.reads <= cost.writes


def test_dry_run_prints_a_plan_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FIXTURES / "z1_bf16_dp2"
    assert (
        run(["convert", str(source), str(tmp_path / "out"), "--to", "deepspeed", "--dp", "3", "--dry-run", "--json"])
        == 0
    )
    plan = Plan.from_json(json.loads(capsys.readouterr().out), ucp.plan)
    assert plan == ucp.plan(source, tmp_path / "out", to="deepspeed", dp=3)
    plan.run(jobs=1)
    assert (tmp_path / "out").is_dir()
