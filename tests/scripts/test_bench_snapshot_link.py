"""The benchmark of snapshots on a throttled link runs at any size, and plans as the link allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import PROJECT


@pytest.mark.slow
def test_room_and_none(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = str(PROJECT / "scripts" / "bench" / "snapshot_link.py")
    size = ["--seconds", "0.05", "--elements", "200000", "--count", "3", "--room", "100", "0.02"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *size, "--json", str(tmp_path / "told.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wide, narrow = json.loads((tmp_path / "told.json").read_text())["rows"]
    assert (wide["feasible"], wide["planned"]) == (1, 0)
    assert narrow["feasible"] == 0
    assert narrow["planned"] > 0 < narrow["measured"]
