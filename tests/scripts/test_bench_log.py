"""The benchmark of logs measures what it says: its parts run, on tiny runs."""

from __future__ import annotations

import argparse
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
import log_tasks as bench
run, out = sys.argv[2] + "/run", sys.argv[2] + "/out"
made = bench.make(run, params=20_000, steps=4, kernel="fused")
grown = bench.memory(run, 2, out, step=2)
fast = bench.speed(run, out, step=2, rounds=1)
taken = bench.merge(run, [2, 4], out)
bench.WIDTH, bench.VOCABULARY, bench.LAYERS = 64, 512, 2
trained = bench.train(sys.argv[2] + "/trained", tokens=128, steps=1)
both = bench.both(sys.argv[2] + "/both", tokens=128, pairs=2, block=1, threads=1)
saved = bench.deepspeed_save(sys.argv[2] + "/saved")
print(json.dumps([made, grown, fast, taken, trained, both, saved]))
"""


@pytest.fixture(scope="module")
def bench(project: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_log", project / "scripts" / "bench" / "log.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_log"] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.interop  # DeepSpeed saves a checkpoint
@pytest.mark.slow
def test_the_parts_of_the_benchmark_run(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARTS, str(project / "scripts" / "bench"), str(tmp_path)]
    said = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    made, grown, fast, taken, trained, both, saved = json.loads(said.splitlines()[-1])
    assert set(grown) == {"growth", "largest"}  # too short a merge to be seen
    assert min(fast["seconds"]) > 0
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


def test_every_limit_is_judged(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures that follow from what parts measure; here parts tell what they are told to."""
    trained = {"params": 10**6, "step_cpu": 0.1, "hook_cpu": 0.0005, "writer_cpu": 0.001, "log_cpu": 0.0015}
    measured = {
        "make": {"params": 10**6},
        "merge": {"cpu": [0.0028, 0.01], "memcpy_ns": 1.2},  # of 2 and 10 steps: 0.9 ns a step, 1 ns once
        "memory": {"growth": 79 * 2**20, "largest": 30 * 2**20},
        "speed": {"seconds": [1.6, 1.0]},
        "deepspeed_save": {"save_cpu": 0.02},
        "train": {**trained, "save_cpu": 0.01, "stall_share": 0.002, "bytes_per_param": 2.0},
        "both": {"params": 10**6, "with": [1.02, 2.04, 1.02], "without": [1.0, 2.0, 1.0]},
    }

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        arguments = json.loads(command[3])
        for folder in ("run", "folder"):
            Path(arguments.get(folder, tmp_path / "none")).mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, json.dumps(measured[command[2]]), "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    given = argparse.Namespace(params=1e6, steps=10, rounds=1, tokens=[512, 1024, 2048], train_steps=None, pairs=3)
    made = bench.Bench(tmp_path, given, idle=True)
    rates = made.replay()
    made.memory()
    made.recording(rates)
    made.whole_steps()
    assert rates["fused"] == (pytest.approx(0.9), pytest.approx(1.0))
    met = {figure.what: figure.met for figure in made.figures}
    recovering = "recovering 100 steps against training them, 512 tokens/step"
    assert met == {
        "replay, single": True,
        "replay, fused": True,
        "merge memory, 1 workers": False,
        "merge memory, 2 workers": True,
        "merge, two workers against one": False,
        "recording at 2048 tokens/step, bf16": False,
        "recording at 1024 tokens/step, bf16": True,
        "recording at 512 tokens/step, bf16": None,
        "hook alone at 1024 tokens/step": True,
        **{f"producer stall at {n} tokens/step": False for n in (512, 1024, 2048)},
        **{f"torch.save of the full state every step, {n} tokens/step": None for n in (512, 1024, 2048)},
        **{f"DeepSpeed save_checkpoint of the full state every step, {n} tokens/step": None for n in (512, 1024, 2048)},
        f"{recovering}, single": True,
        f"{recovering}, fused": True,
        "log volume, raw bf16": True,
        "log volume, compressed": False,
        "log, and a base every 100 steps": True,
        "whole step with a recorder at 2048 tokens/step, upper end of the 90 % interval": True,
    }
    assert made.figures[-1].value == pytest.approx(2.0)
