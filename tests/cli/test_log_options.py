"""`--log DIR --step N|latest` of every command that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ucp

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six recorded steps, and checkpoints that the job itself saved after the fourth and the last."""
    import ucp as library

    folder = tmp_path_factory.mktemp("logged")
    torch.manual_seed(2)
    net = torch.nn.Linear(12, 5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with library.record(folder / "run", net, optimizer):
        for step in range(1, 7):
            optimizer.zero_grad()
            net(torch.randn(3, 12)).square().mean().backward()
            optimizer.step()
            if step in (4, 6):
                library.save(folder / f"saved-{step}", net, optimizer).wait()
    return folder


def shown(*arguments: object) -> dict[str, Any]:
    done = ucp(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_inspect_shows_the_step(run: Path) -> None:
    assert shown("inspect", run / "run", "--log", run / "run", "--step", 4)["step"] == 4
    assert shown("inspect", run / "run", "--log", run / "run", "--step", "latest")["step"] == 6
    assert shown("inspect", run / "run", "--log", run / "run")["step"] == 6


def test_diff_finds_the_state_that_the_job_saved_and_no_other(run: Path) -> None:
    options = ("--log-a", run / "run", "--step-a", 4, "--exact")
    assert ucp("diff", run / "run", run / "saved-4", *options).returncode == 0
    assert ucp("diff", run / "run", run / "saved-6", *options).returncode == 1
    both = ("--log-a", run / "run", "--step-a", 6, "--log-b", run / "run", "--step-b", "latest")
    assert ucp("diff", run / "run", run / "run", *both).returncode == 0


def test_verify_reads_the_replayed_step(run: Path) -> None:
    done = ucp("verify", run / "run", "--log", run / "run", "--step", 4, "--deep", "--exact")
    assert done.returncode == 0, done.stderr


def test_convert_and_merge_write_what_the_job_saved(run: Path, tmp_path: Path) -> None:
    for command in ("convert", "merge"):
        options = ("--log", run / "run") if command == "convert" else ()
        done = ucp(command, run / "run", tmp_path / command, *options, "--step", 4, "--exact")
        assert done.returncode == 0, done.stderr
        assert ucp("diff", tmp_path / command, run / "saved-4").returncode == 0


def test_a_step_that_the_log_does_not_have_is_refused(run: Path) -> None:
    done = ucp("inspect", run / "run", "--log", run / "run", "--step", 7)
    assert done.returncode != 0
    assert "step 7 is not in the log (last complete step: 6)" in done.stderr
