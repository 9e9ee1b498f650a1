"""Packages that are not installed: the error names the extra that installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ucp
from ucp.log import codecs
from ucp.replay import kernels

HIDDEN = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from ucp.cli.main import run
sys.exit(run(sys.argv[2:]))
"""


def ucp_without(package: str, *arguments: object) -> str:
    """What a command prints that needs a package which is not there."""
    command = [sys.executable, "-c", HIDDEN, package, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a gradient log."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ucp.record(folder, model, optimizer):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "merge {run} {out}",
        "convert {run} {out} --log {run} --to safetensors",
        "verify {run} --log {run}",
        "diff {run} {run} --log-a {run} --log-b {run}",
        "shadow --log {run} --listen 127.0.0.1:0",
    ],
)
def test_torch(recorded: Path, tmp_path: Path, command: str) -> None:
    said = ucp_without("torch", *command.format(run=recorded, out=tmp_path / "out").split())
    assert "needs torch, which is not installed\n  → pip install 'universal-checkpoint[torch]'" in said


def test_fsspec_and_s3fs() -> None:
    said = ucp_without("fsspec,fsspec.core", "inspect", "s3://bucket/run")
    needed = "s3://bucket needs fsspec, which is not installed\n  → pip install 'universal-checkpoint[remote]'"
    assert needed in said
    assert "pip install 'universal-checkpoint[remote]' for s3://" in ucp_without("s3fs", "inspect", "s3://bucket/run")


def test_ray(project: Path, tmp_path: Path) -> None:
    source = project / "fixtures" / "z1_bf16_dp2"
    said = ucp_without("ray", "convert", source, tmp_path / "out", "--engine", "ray")
    assert "--engine ray needs ray" in said
    assert "pip install 'universal-checkpoint[ray]', here and on the cluster" in said


def test_matplotlib(tmp_path: Path) -> None:
    plot = tmp_path / "waste.png"
    costs = ["--mtbf", "6h", "--step-time", "2.1", "--base-stall", "4", "--replay-time", "40ms"]
    said = ucp_without("matplotlib", "tune", *costs, "--plot", plot)
    assert f"{plot}: a PNG plot needs matplotlib" in said
    assert "pip install 'universal-checkpoint[report]', or name an .svg file" in said


@pytest.mark.parametrize("use, package, extra", [(codecs._zstd, "zstandard", "log"), (None, "deepspeed", "deepspeed")])
def test_packages_of_logs(monkeypatch: pytest.MonkeyPatch, use: object, package: str, extra: str) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)  # another test has imported it
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ucp.UsageError, match=f"needs {package}, which is not installed") as failure:
        codecs._zstd() if use else kernels.load_native_op.__wrapped__("adam")
    assert failure.value.hint == f"pip install 'universal-checkpoint[{extra}]'"
