"""The command `ucp diff`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ucp
from tests.compare.edited_atoms import atoms, poke


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ucp", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture
def clean(project: Path) -> Path:
    return project / "fixtures" / "z1_bf16_tp2_dp2"


@pytest.fixture
def changed(clean: Path, tmp_path: Path) -> Path:
    folder = atoms(clean, tmp_path / "changed")
    poke(folder, "pos.weight", "exp_avg", (2, 1), 0.25)
    return folder


def test_identical(clean: Path, tmp_path: Path) -> None:
    same = run(clean, atoms(clean, tmp_path / "atoms"))
    assert (same.returncode, same.stdout) == (0, "")
    assert same.stderr.startswith("identical: 148 atoms")


def test_different(clean: Path, changed: Path) -> None:
    found = run(clean, changed)
    assert found.returncode == 1
    header, row = found.stdout.splitlines()
    assert header.split()[:3] == ["parameter", "state", "differ"]
    assert row.split()[:4] == ["pos.weight", "exp_avg", "1", "98"]
    assert "[2, 1]" in row
    assert "DIFFERENT: 1 atom differing" in found.stderr
    assert run(clean, changed, "--atol", "10").returncode == 0
    assert run(clean, changed, "--only", "weights").returncode == 0
    assert run(clean, changed, "--exclude", "pos.*").returncode == 0
    assert run(clean, changed, "--include", "nothing").returncode == 2
    assert run(clean, changed, "--rtol", "-1").returncode == 2
    assert run(clean, clean.parent / "nowhere").returncode == 5


def test_json(clean: Path, changed: Path) -> None:
    shown = json.loads(run(clean, changed, "--json").stdout)
    assert (shown["schema"], shown["same"], shown["exit_code"]) == (1, False, 1)
    (atom,) = shown["differences"]
    assert (atom["name"], atom["kind"], atom["first"], atom["elements"]) == ("pos.weight", "exp_avg", [2, 1], 98)
    assert shown["a"]["mesh"]["tp"] == 2
    assert shown["b"]["format"] == "atoms"
    assert ucp.diff(clean, changed).to_json() == shown


def test_infinity_is_json(clean: Path, changed: Path) -> None:
    poke(changed, "pos.weight", "exp_avg", (2, 1), float("inf"))
    (atom,) = json.loads(run(clean, changed, "--json").stdout)["differences"]
    assert (atom["max_abs"], atom["max_rel"]) == ("inf", "inf")


def test_long_tables_are_cut(clean: Path, project: Path) -> None:
    cut = run(clean, project / "fixtures" / "z1_bf16_dp2", "--limit", "3")
    assert cut.stdout.count("\n") == 5
    assert "more (--limit, --json)" in cut.stdout


def test_tags(project: Path) -> None:
    fixture = project / "fixtures" / "z1_bf16_dp2"
    assert run(fixture, fixture, "--tag-a", "global_step3", "--tag-b", "global_step3").returncode == 0
    assert run(fixture, fixture, "--tag-b", "global_step9").returncode in (2, 3)


def test_updates_and_their_plot(clean: Path, changed: Path, tmp_path: Path) -> None:
    poke(changed, "pos.weight", "master", (0, 0), 3.0)
    moved = run(clean, changed, "--plot", tmp_path / "moved.svg")
    assert moved.returncode == 0, "things move in training"
    layers, parameters = moved.stdout.split("\n\n")
    assert "pos " in layers
    assert layers.splitlines()[-1].startswith("all ")
    row = next(line for line in parameters.splitlines() if line.startswith("pos.weight"))
    assert float(row.split()[1]) > 0
    assert "pos.weight" in (tmp_path / "moved.svg").read_text()
    assert json.loads(run(clean, changed, "--updates", "--json").stdout)["updates"]["total"]["relative"] > 0
    assert run(clean, changed, "--plot", tmp_path / "moved.gif").returncode == 2
