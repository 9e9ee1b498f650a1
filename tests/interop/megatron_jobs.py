"""Run ranks of a real Megatron job that load a checkpoint and compare every tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import PROJECT


def run_job(
    folder: Path, expected: Path, tp: int, pp: int, kind: str, scratch: Path, dp: int = 1, ep: int = 1
) -> list[int]:
    """The number of tensors that each rank compared; fails with the output of the ranks that did not get there."""
    world = tp * pp * dp
    command = [sys.executable, "-m", "tests.interop.megatron_rank"]
    tail = [str(world), str(scratch / "store"), *(str(next(f.glob("iter_*"))) for f in (folder, expected))]
    ranks = [start_rank([*command, str(rank), *tail, str(tp), str(pp), str(ep), kind]) for rank in range(world)]
    return [int(out.split()[-1]) for out in outputs_of(ranks)]


def start_rank(command: list[str]) -> subprocess.Popen[str]:
    quiet = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **quiet}, stdout=pipe, stderr=pipe, text=True)


def outputs_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What every rank printed; fails with what they complained of where one did not get there."""
    said = [rank.communicate(timeout=300) for rank in ranks]
    wrong = [err[-2000:] for rank, (_, err) in zip(ranks, said, strict=True) if rank.returncode]
    assert not wrong, "\n".join(wrong)
    return [out for out, _ in said]


def states_of(parameters: int, kind: str) -> int:
    """Weight, master, two moments; the plain optimizer counts steps beside them."""
    return parameters * (4 if kind.endswith("distributed") else 5)
