"""Made-up Megatron checkpoints hold together, and the benchmark of them runs at any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ucp
from tests.paths import PROJECT
from ucp.formats.megatron.read.sharded_containers import read_torch_dist

pytestmark = pytest.mark.slow  # processes of their own, one of which imports torch


def run(*command: str | Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_made_up_checkpoints_hold_together(tmp_path: Path) -> None:
    run(PROJECT / "scripts" / "bench" / "synthetic_megatron.py", tmp_path / "made", "--gb", "0.03")
    made = ucp.open(tmp_path / "made")
    assert (made.index.mesh.tp, made.index.mesh.pp, made.index.step) == (2, 2, 100)
    assert 0.02e9 < sum(made.index.sizes.values()) < 0.05e9
    assert ucp.verify(tmp_path / "made", "deep").ok
    stored = read_torch_dist(tmp_path / "made/iter_0000100").tensors
    weight = stored["decoder.layers.self_attention.linear_qkv.weight"]
    assert {block.file for block in weight.blocks.values()} == {f"__{rank}_0.distcp" for rank in range(4)}


def test_benchmark_runs_at_any_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    small = ["--gb", "0.03", "--rounds", "1", "--skip-megatron", "--work", tmp_path, "--json", result]
    run(PROJECT / "scripts" / "bench" / "torch_dist.py", *small)
    figures = {figure["what"].partition(": ")[2]: figure for figure in json.loads(result.read_text())["figures"]}
    assert figures["peak RSS"]["met"]
    assert figures["wall"]["unit"] == "× cp"
    assert figures["dcp_to_torch_save: memory"]["value"] > 0
    assert list(tmp_path.iterdir()) == [result]  # cleaned up
