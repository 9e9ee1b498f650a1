"""The benchmark of logs measures what it says: its parts run, on tiny runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import ucp


@pytest.mark.slow
def test_the_parts_of_the_benchmark_run(tmp_path: Path) -> None:
    bench = import_module("scripts.bench_log")
    run, out = tmp_path / "run", tmp_path / "out"
    made = bench.make(str(run), params=20_000, steps=4, kernel="fused")
    taken = bench.merge(str(run), [2, 4], str(out))
    assert len(taken["cpu"]) == 2
    assert taken["memcpy_ns"] > 0
    assert sum(p.parameter.numel for p in ucp.open(out).parameters.values()) == made["params"]
    assert ucp.open(out).index.step == 4
    trained = bench.train(str(tmp_path / "trained"), tokens=128, steps=1)
    assert 2.0 <= trained["bytes_per_param"] < 2.1
    assert 0 < trained["log_cpu"] < trained["step_cpu"]
