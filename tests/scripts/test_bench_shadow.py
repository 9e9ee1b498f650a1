"""The benchmark of shadows and snapshots runs at any size, and tells what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import PROJECT


@pytest.mark.slow
def test_every_way_of_keeping_the_state_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, str(PROJECT / "scripts" / "bench" / "shadow.py"), "--json", str(tmp_path / "told.json")]
    size = ["--width", "32", "--layers", "2", "--tokens", "8", "--steps", "5", "--every", "2", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *size], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    rows = told["rows"]
    assert rows["nothing"]["ratio"] == rows["DeepSpeed: nothing"]["ratio"] == 1
    for name, row in rows.items():
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert (row["saves"] == 0) == ("nothing" in name)
    saved = {name: row for name, row in rows.items() if "every step" in name}
    assert len(saved) == 6
    assert all(row["every_for_5_percent"] >= 1 and row["seconds_until_durable"] > 0 for row in saved.values())
    assert saved["torch.save, every step"]["saves"] == 5
    assert saved["snapshots, every step"]["hook_cpu_a_save"] > 0
    assert rows["log and shadow"]["seconds_until_held"] > 0
    assert set(told["repeated_work"]) >= set(saved)
    assert all({"10", "100"} <= set(costs) for costs in told["repeated_work"].values())
    assert "LightCheck (ICCD 2023)" in done.stdout
    assert all(each["source"].startswith("https://") for each in told["published"])
