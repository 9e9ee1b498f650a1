"""Logs and bases in object stores: a copied run folder replays like a local one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucp
from tests.remote.conftest import upload
from ucp.cli.main import run

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("logged") / "run"
    torch.manual_seed(5)
    model = torch.nn.Linear(17, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ucp.record(folder, model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 17)).square().sum().backward()
            optimizer.step()
    return folder


def test_a_run_in_a_store_gives_every_step(logged: Path, bucket: str, tmp_path: Path) -> None:
    url = upload(logged, bucket)
    for step in (2, 6):
        ucp.convert(logged, tmp_path / f"here-{step}", log=logged, step=step)
        ucp.convert(url, tmp_path / f"there-{step}", log=url, step=step, exact=True)
        assert ucp.diff(tmp_path / f"here-{step}", tmp_path / f"there-{step}", strict=True).same


def test_commands_about_logs_take_urls(
    logged: Path, memory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = upload(logged, memory)
    for command in (["log", "ls"], ["log", "stat"], ["log", "verify"]):
        assert run([*command, url]) == 0
    assert run(["merge", url, f"{memory}/merged", "--step", "3"]) == 0
    assert run(["merge", str(logged), str(tmp_path / "merged"), "--step", "3"]) == 0
    assert ucp.diff(f"{memory}/merged", tmp_path / "merged").same
    assert run(["verify", url, "--log", url, "--step", "3"]) == 0
    base = f"{url}/base/base-000000/atoms"
    assert run(["diff", base, str(tmp_path / "merged"), "--log-a", url, "--step-a", "3"]) == 0
    capfd.readouterr()
    for command in (["log", "truncate"], ["log", "compact"]):
        assert run([*command, url]) == 2
        assert "object store" in capfd.readouterr().err
