"""Synthetic checkpoints are what DeepSpeed would have saved, and benchmarks of them run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import PROJECT

pytestmark = [pytest.mark.interop, pytest.mark.slow]  # imports DeepSpeed in processes of its own


def run(*command: str | Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(path: Path, gb: float, *options: str) -> Path:
    run(PROJECT / "scripts" / "bench" / "synthetic_deepspeed.py", path, "--gb", str(gb), *options)
    return path


def inspect(path: Path) -> Any:
    return json.loads(run("-m", "ucp", "inspect", path, "--json"))


MESHES = {
    "zero1": (["--dp", "3"], {"tp": 1, "pp": 1, "dp": 3, "ep": 1, "zero": 1}),
    "tp2": (["--tp", "2", "--dp", "2"], {"tp": 2, "pp": 1, "dp": 2, "ep": 1, "zero": 1}),
    "zero3": (["--zero", "3", "--dp", "3"], {"tp": 1, "pp": 1, "dp": 3, "ep": 1, "zero": 3}),
}


@pytest.fixture(scope="module", params=MESHES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    options, _ = MESHES[request.param]
    return request.param, make(tmp_path_factory.mktemp("synthetic") / request.param, 0.02, *options)


def test_ucp_reads_it_and_finds_nothing_wrong(made: tuple[str, Path]) -> None:
    name, path = made
    content = inspect(path)
    assert content["mesh"] == MESHES[name][1]
    assert all({"master", "exp_avg", "exp_avg_sq", "step"} <= set(p["states"]) for p in content["parameters"])
    total = sum(content["files"].values())
    assert 0.7 * 0.02e9 < total < 1.3 * 0.02e9
    # Compares replicas, and weights with their masters, bit for bit.
    run("-m", "ucp", "verify", path, "--deep")


def test_deepspeed_converts_it_to_what_ucp_reads(made: tuple[str, Path], tmp_path: Path) -> None:
    _, path = made
    out = tmp_path / "universal"
    command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", path / "global_step100"]
    run(*command, "--output_folder", out, "--num_extract_workers", "1", "--num_merge_workers", "1")
    compare = """
import sys, torch, ucp
from pathlib import Path
ours = ucp.open(sys.argv[1])
files = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
for name, parameter in ours.parameters.items():
    for kind, file in files.items():
        stored = torch.load(Path(sys.argv[2]) / "zero" / name / f"{file}.pt", weights_only=False)
        theirs = stored["param"] if isinstance(stored, dict) else stored
        mine = parameter.read(kind, as_torch=True)
        assert torch.equal(mine, theirs.reshape(mine.shape)), (name, kind)
print(len(ours))
"""
    assert int(run("-c", compare, path, out)) > 20


def test_sparse_files_cost_no_disk(tmp_path: Path) -> None:
    path = make(tmp_path / "sparse", 100, "--dp", "16", "--sparse")
    files = [file.stat() for file in (path / "global_step100").iterdir()]
    assert sum(file.st_size for file in files) > 90e9
    assert 512 * sum(file.st_blocks for file in files) < 4e6
    content = inspect(path)
    assert content["mesh"]["dp"] == 16
    stored = sum(state["bytes"] for p in content["parameters"] for state in p["states"].values())
    assert stored == pytest.approx(sum(file.st_size for file in files), rel=1e-3)


def test_benchmark_runs_at_any_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    small = ["--gb", "0.02", "--memory-gb", "0.02", "--link-gb", "1", "--link-ranks", "16", "--rounds", "1"]
    run(PROJECT / "scripts" / "bench" / "convert.py", *small, "--skip-deepspeed", "--work", tmp_path, "--json", result)
    figures = {figure["what"]: figure for figure in json.loads(result.read_text())["figures"]}
    assert figures["0.02 GB: convert peak RSS"]["met"]
    assert figures["extra disk during convert"]["met"]
    assert figures["ZeRO-1 dp 4, 0.02 GB: convert wall"]["unit"] == "× cp"
    assert list(tmp_path.iterdir()) == [result]  # cleaned up
