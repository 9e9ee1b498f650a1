"""Type checkers see the library as it is: they accept correct calls and reject wrong ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ucp
from tests.paths import PROJECT
from ucp.formats.registry import TARGETS
from ucp.options import TargetName

# Checkers must report an error in exactly the lines that end with `# error`.
CALLS = """\
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import ucp

ckpt = ucp.open("checkpoints", names="hf", log=Path("run"), step="latest")
assert_type(ckpt, ucp.OpenCheckpoint)
ucp.opne("checkpoints")  # error
ucp.open("checkpoints", nmaes="hf")  # error

assert_type(ckpt["w"].read("exp_avg", rows=slice(0, 8)), np.ndarray[Any, Any])
assert_type(ckpt["w"].read(as_torch=True), torch.Tensor)
assert_type(ckpt.read("w", "master"), np.ndarray[Any, Any])
assert_type(ckpt.read("w", as_torch=True), torch.Tensor)
ckpt.read("w", rows=3)  # error
ckpt.read("w", as_torch="yes")  # error
assert_type(ckpt.state_dict(dtype="bf16"), ucp.StateDict[torch.Tensor])
assert_type(ckpt.state_dict("master", as_torch=False)["w"], np.ndarray[Any, Any])
torch.nn.Linear(2, 2).load_state_dict(ckpt.state_dict(dtype=torch.float32))
ckpt.state_dict(dtype=32)  # error

assert_type(ucp.convert("a", "b", to="deepspeed", tp=1, dp=3, zero=3, memory="1G", jobs=2), ucp.Checkpoint)
ucp.convert("a", Path("b"), to="megatron", stages=[0, 4], include="*.bias", shard=(1, 4))
ucp.convert("a", "b", to="deepspeeed")  # error
ucp.convert("a", "b", dp="3")  # error
ucp.convert("a", "b", shart=(1, 2))  # error
ucp.convert("a", "b", only="weight")  # error
ucp.convert("a")  # error
ucp.convert("a", "b", to=ucp.Format("tiny"))


class Bar(ucp.Progress):
    def advance(self, nbytes: int) -> None:
        print(nbytes)


plan = ucp.plan("a", "b", to="safetensors", dtype=torch.bfloat16)
assert_type(plan, ucp.Plan)
plan.run(progress=Bar())
plan.runn()  # error
ucp.plan("a", "b", resume=True)  # error

report = ucp.verify("a", "deep", fail_on="warning", allow=["finite"])
assert_type(report, ucp.Report)
assert_type(report.findings, list[ucp.Finding])
assert_type(report.ok, bool)
ucp.verify("a", "deeep")  # error
ucp.verify("a", fail_on="errors")  # error
assert_type(ucp.diff("a", "b", rtol=1e-6).same, bool)
ucp.diff("a", "b", rtol="small")  # error
ucp.report("a", "page.html", level="quick", sample="1M")

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
assert_type(ucp.load_into("a", model, optimizer), ucp.LoadReport)
assert_type(ucp.save("b", model, optimizer, asynchronous=True).wait(), Path)
ucp.save("b")  # error
with ucp.record("run", model, optimizer, base_every=500) as recorder:
    assert_type(recorder, ucp.Recorder)
assert_type(ucp.snapshot("s", model, optimizer, every=50), ucp.Snapshots)
ucp.snapshot("s", model, optimizer, every="50")  # error
assert_type(ucp.load_store("run.ucpstore"), ucp.LoadedGeneration)

try:
    ucp.convert("a", "b")
except ucp.errors.StorageError as error:
    assert_type(error.exit_code, int)
except (ucp.UsageError, ucp.UcpError) as error:
    assert_type(error.hint, str | None)
ucp.errors.StorageErr  # error
"""
CALLS += "".join(f"ucp.{name}\n" for name in ucp.__all__)  # every exported name is visible
WRONG = {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# error")}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    (tmp_path / "calls.py").write_text(CALLS, encoding="utf-8")
    return tmp_path / "calls.py"


@pytest.mark.slow  # the checkers read the annotations of torch
def test_mypy(calls: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", calls.name]
    done = subprocess.run(
        command, cwd=calls.parent, env={"MYPYPATH": str(PROJECT)}, capture_output=True, text=True, check=False
    )
    found = {int(line) for line in re.findall(r"^calls\.py:(\d+): error: ", done.stdout, re.MULTILINE)}
    assert found == WRONG, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright(calls: Path) -> None:
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(PROJECT)], "include": [calls.name]}
    (calls.parent / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=calls.parent, capture_output=True, text=True, check=False)
    errors = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in errors} == WRONG, done.stdout


def test_the_type_of_to_names_every_target() -> None:
    assert get_args(TargetName) == TARGETS
