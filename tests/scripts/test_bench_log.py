"""The benchmark of logs measures what it says: its parts run, on tiny runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ucp

# In a process of its own: it measures, and threads that other tests left behind would be measured too.
PARTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import bench_log_parts as bench
run, out = sys.argv[2] + "/run", sys.argv[2] + "/out"
made = bench.make(run, params=20_000, steps=4, kernel="fused")
grown = bench.memory(run, 1, out, step=2)
taken = bench.merge(run, [2, 4], out)
bench.WIDTH, bench.VOCABULARY, bench.LAYERS = 64, 512, 2
trained = bench.train(sys.argv[2] + "/trained", tokens=128, steps=1)
both = bench.both(sys.argv[2] + "/both", tokens=128, pairs=2, block=1, threads=1)
saved = bench.deepspeed_save(sys.argv[2] + "/saved")
print(json.dumps([made, grown, taken, trained, both, saved]))
"""


@pytest.fixture(scope="module")
def bench(project: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_log", project / "scripts" / "bench_log.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_log"] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.interop  # DeepSpeed saves a checkpoint
@pytest.mark.slow
def test_the_parts_of_the_benchmark_run(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARTS, str(project / "scripts"), str(tmp_path)]
    said = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    made, grown, taken, trained, both, saved = json.loads(said.splitlines()[-1])
    assert grown["seconds"] > 0
    assert len(taken["cpu"]) == 2
    assert taken["memcpy_ns"] > 0
    out = ucp.open(tmp_path / "out")
    assert sum(p.parameter.numel for p in out.parameters.values()) == made["params"]
    assert out.index.step == 4
    assert 2.0 <= trained["bytes_per_param"] < 2.3  # a small model: what a step costs beside its gradients shows
    assert trained["log_cpu"] > 0
    assert trained["step_cpu"] > 0
    assert len(both["with"]) == len(both["without"]) == 2
    assert (tmp_path / "both/log").is_dir()
    assert saved["save_cpu"] > 0
    assert sorted(p.name for p in (tmp_path / "saved").iterdir() if p.is_dir()) == ["0", "1", "2"]


def test_the_interval_of_a_median(bench: ModuleType) -> None:
    assert bench.interval([1.25] * 5) == (1.25, 1.25)
    ratios = [1.0 + i / 100 for i in range(21)]
    low, high = bench.interval(ratios)
    assert 1.0 < low < 1.1 < high < 1.2
    assert bench.interval(ratios, share=0.5)[0] > low


def test_what_could_not_be_told_is_no_miss(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    made = bench.Bench(Path(), None, idle=False)
    made.most("too much", 2.0, "B", 1.0)
    made.most("just right", 1.0, "B", 1.0)
    made.add("unknown", 2.0, "B", "≤ 1", None)
    assert [figure.met for figure in made.figures] == [False, True, None]
    assert capsys.readouterr().out.startswith("MISS  too much: 2 B (target ≤ 1)")
