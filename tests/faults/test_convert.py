"""Conversions on a system that fails: the old state or the new one, a clear message, and the same bytes in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import FIXTURES
from tests.trees import contents

SOURCE = FIXTURES / "z1_bf16_dp2"
ONE = ["--include", "*attn.q*", "-j", "1"]
ATOMS = [["convert", str(SOURCE), "{out}", *ONE, "--durable"]]
RESHARD = [["convert", str(SOURCE), "{out}", "-j", "1", "--to", "deepspeed", "--dp", "3"]]
PARTS = [
    ["convert", str(SOURCE), "{out}", *ONE, "--shard", "1/2"],
    ["convert", str(SOURCE), "{out}", *ONE, "--shard", "2/2"],
    ["convert", str(SOURCE), "{out}", *ONE, "--finish"],
]


def sweep(
    folder: Path, commands: list[list[str]], hit: int, kinds: list[str], project: Path, source: Path = SOURCE
) -> dict[str, Any]:
    asked = {"folder": str(folder), "commands": commands, "hit": hit, "kinds": kinds}
    before = contents(source)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.sweep"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # a fork has none of the threads that torch may have started
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert contents(source) == before, "a source is never touched"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "commands, hit, kinds",
    [
        pytest.param(ATOMS, 0, ["signals", "always short", "short"], id="atoms, short and interrupted"),
        pytest.param(ATOMS, 0, ["EIO", "ENOSPC"], id="atoms, refused"),
        pytest.param(ATOMS, 0, ["kill", "torn"], id="atoms, killed"),
        pytest.param(ATOMS, 0, ["power"], id="atoms, without power"),
        pytest.param(ATOMS, 0, ["late", "lost"], id="atoms, on a disk that is late or lies"),
        pytest.param(RESHARD, 0, ["always short", "torn"], id="reshard"),
        pytest.param(PARTS, 1, ["ENOSPC", "torn"], id="a part"),
        pytest.param(PARTS, 2, ["EIO", "kill"], id="the last act of parts"),
    ],
)
def test_a_fault_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, project: Path, commands: list[list[str]], hit: int, kinds: list[str]
) -> None:
    found = sweep(tmp_path, commands, hit, kinds, project)
    assert found["problems"] == []
    assert set(found["counts"]) == set(kinds), "every kind of fault had a call to hit"


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a base and three logged steps."""
    import torch

    import ucp

    run = tmp_path_factory.mktemp("logged") / "run"
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    with ucp.record(run, net, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(2, 5)).square().mean().backward()
            optimizer.step()
    return run


@pytest.mark.parametrize("kinds", [["always short", "EIO", "ENOSPC"], ["torn"]])
def test_faults_during_a_merge(tmp_path: Path, project: Path, logged: Path, kinds: list[str]) -> None:
    command = ["merge", str(logged), "{out}", "--step", "3", "-j", "1"]
    found = sweep(tmp_path, [command], 0, kinds, project, logged)
    assert found["problems"] == []
    assert set(found["counts"]) == set(kinds)
