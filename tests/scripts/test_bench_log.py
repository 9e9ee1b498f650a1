"""The benchmark of logs measures what it says: its parts run, on tiny runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ucp

# In a process of its own: it measures, and threads that other tests left behind would be measured too.
PARTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import bench_log as bench
made = bench.make(sys.argv[2] + "/run", params=20_000, steps=4, kernel="fused")
taken = bench.merge(sys.argv[2] + "/run", [2, 4], sys.argv[2] + "/out")
trained = bench.train(sys.argv[2] + "/trained", tokens=128, steps=1)
print(json.dumps([made, taken, trained]))
"""


@pytest.mark.slow
def test_the_parts_of_the_benchmark_run(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARTS, str(project / "scripts"), str(tmp_path)]
    said = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    made, taken, trained = json.loads(said.splitlines()[-1])
    assert len(taken["cpu"]) == 2
    assert taken["memcpy_ns"] > 0
    out = ucp.open(tmp_path / "out")
    assert sum(p.parameter.numel for p in out.parameters.values()) == made["params"]
    assert out.index.step == 4
    assert 2.0 <= trained["bytes_per_param"] < 2.1
    assert 0 < trained["log_cpu"] < trained["step_cpu"]
