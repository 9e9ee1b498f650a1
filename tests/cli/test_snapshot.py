"""`ucp snapshot plan`: the schedule as a table, as JSON, as a chart, and with other rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.without import without_matplotlib
from ucp.cli.main import run

SCHEDULE: dict[str, Any] = {
    "schema": 1,
    "step": 12,
    "costs": {"link": 1000.0, "local": 10000.0, "share": 1.0},
    "tensors": [
        {"name": "last|weight", "bytes": 100, "deadline": 0.5, "copied": [0.0, 0.1], "by_trainer": 0},
        {"name": "first|weight", "bytes": 600, "deadline": 0.8, "copied": [0.1, 0.8], "by_trainer": 100},
        {"name": "frozen|weight", "bytes": 50, "deadline": None, "copied": [0.8, 0.9], "by_trainer": 0},
    ],
    "measured": {"stall": 0.01, "late_bytes": 100, "prepare": 0.002, "write": 0.5},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "schedule.json").write_text(json.dumps(SCHEDULE))
    return tmp_path


def test_the_schedule_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["snapshot", "plan", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "last|weight    100 B  500.00     0.00-100.00" in out
    assert "100.00-700.00" in out
    assert "700.00-750.00" in out  # frozen: last, and without a deadline
    assert "stall planned 0.00 ms, measured 10.00 ms" in out
    assert "do not fit" not in out


def test_the_plan_for_other_rates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["snapshot", "plan", str(folder), "--bandwidth", "1000", "--fraction", "0.5", "--window", "0.4", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert not told["feasible"]
    assert told["planned"]["late_bytes"] == pytest.approx(700 - 0.4 * 500)
    assert told["planned"]["stall"] == pytest.approx(500 / 10000)
    assert told["spread"] == 4  # 750 bytes, 200 an iteration
    assert run(["snapshot", "plan", str(folder), "--bandwidth", "1000", "--window", "0.4"]) == 0
    assert "spread over 2 iterations" in capsys.readouterr().out


def test_the_chart(folder: Path) -> None:
    assert run(["snapshot", "plan", str(folder), "-o", str(folder / "plan.svg")]) == 0
    svg = (folder / "plan.svg").read_text()
    assert svg.count('class="planned"') == 3
    assert svg.count('class="measured"') == 2
    assert svg.count('class="late"') == 1
    assert svg.count('class="deadline"') == 2
    assert "first|weight" in svg
    assert run(["snapshot", "plan", str(folder), "-o", str(folder / "plan.txt")]) == 2


def test_snapshots_spread_over_several_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step has its own schedule; nothing is planned during the gradient exchange."""
    tensors = [{**tensor, "step": 12 - number % 2} for number, tensor in enumerate(SCHEDULE["tensors"])]
    told = {**SCHEDULE, "tensors": tensors, "parts": [11, 12], "blocked": [[0.05, 0.45]]}
    (folder / "schedule.json").write_text(json.dumps(told))
    assert run(["snapshot", "plan", str(folder), "-o", str(folder / "plan.svg")]) == 0
    out = capsys.readouterr().out
    assert "spread over steps 11 to 12" in out
    assert "no copies while gradients are exchanged: 50.00-450.00 ms" in out
    assert "0.00-50.00, 450.00-500.00" in out  # the last layer, before and after
    svg = (folder / "plan.svg").read_text()
    assert "stall 20.00 ms planned, 10.00 ms measured" in svg  # 600 bytes, room for 400
    assert "11: first|weight" in svg
    assert svg.count('class="blocked"') == 1
    assert run(["snapshot", "plan", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parts"] == [11, 12]
    assert [schedule["step"] for schedule in told["schedules"]] == [11, 12]
    assert told["spread"] == 8  # 750 bytes in the 0.1 s before 0.5 s that are free


def test_a_png_chart(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["snapshot", "plan", str(folder), "-o", str(folder / "plan.png")]) == 0
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    without_matplotlib(monkeypatch)
    assert run(["snapshot", "plan", str(folder), "-o", str(folder / "again.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_errors_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["snapshot", "plan", str(tmp_path)]) == 5
    assert "after its first snapshot" in capsys.readouterr().err
    (tmp_path / "schedule.json").write_text("{")
    assert run(["snapshot", "plan", str(tmp_path)]) == 4
    (tmp_path / "schedule.json").write_text(json.dumps({**SCHEDULE, "costs": None}))
    assert run(["snapshot", "plan", str(tmp_path)]) == 2
    assert "give --bandwidth" in capsys.readouterr().err
