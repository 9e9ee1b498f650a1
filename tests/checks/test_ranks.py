"""What rank files must agree on (iteration, scheduler, hyper-parameters), and extras."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import FIXTURES

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from tests.checks.expected_findings import only
from ucp.checks.runner import verify
from ucp.core.checkpoint import Rank
from ucp.core.findings import Finding

STEP = "global_step3"


@pytest.fixture
def tp2(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "z1_bf16_tp2_dp2", tmp_path / "tp2")


def change(path: Path, edit: Callable[[Any], None]) -> None:
    tree = torch.load(path, weights_only=False)
    edit(tree)
    torch.save(tree, path)


def alarm(folder: Path, check: str, level: str = "quick") -> Finding:
    """The only finding that is not a note, which must be of this check."""
    report = verify(folder, level)
    report.findings = [finding for finding in report.findings if finding.severity != "note"]
    return only(report, check)


def test_a_learning_rate_of_one_rank(tp2: Path) -> None:
    name = f"{STEP}/bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"

    def edit(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["lr"] = 0.5

    change(tp2 / name, edit)
    finding = alarm(tp2, "hyper-parameters")
    assert "lr of group 1 is 0.5, but 0.009000000000000001 in 3 of 4 files" in finding.message
    assert (finding.file, finding.rank, finding.severity) == (name, Rank(tp=1, dp=1), "error")
    assert verify(tp2, "quick").exit_code == 1


def test_a_loss_scale_of_one_rank(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "z1_fp16_dp2", tmp_path / "fp16")
    (path,) = (folder / STEP).glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")

    def edit(tree: Any) -> None:
        tree["optimizer_state_dict"]["loss_scaler"].cur_scale *= 2

    change(path, edit)
    assert "loss_scaler.cur_scale is" in alarm(folder, "hyper-parameters").message


@pytest.mark.parametrize("key", ["global_samples", "skipped_steps", "lr_scheduler", "iteration"])
def test_a_counter_or_the_scheduler_of_one_rank(tp2: Path, key: str) -> None:
    def edit(tree: Any) -> None:
        if key == "lr_scheduler":
            tree[key]["last_epoch"] -= 1
        else:
            tree[key] += 1

    change(tp2 / STEP / "mp_rank_01_model_states.pt", edit)
    finding = alarm(tp2, "iteration")
    assert key in finding.message
    assert (finding.severity, finding.rank) == ("error", Rank(tp=1))


def test_a_folder_of_another_step_is_a_warning(tp2: Path) -> None:
    (tp2 / STEP).rename(tp2 / "global_step4")
    (tp2 / "latest").write_text("global_step4")
    finding = alarm(tp2, "iteration")
    assert finding.severity == "warning"
    assert "saved at step 3, but is in the folder global_step4" in finding.message
    (tp2 / "global_step4").rename(tp2 / "best")
    (tp2 / "latest").write_text("best")
    assert [f for f in verify(tp2, "quick").findings if f.severity != "note"] == []


def test_json_next_to_the_step_folder_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(FIXTURES / "z1_bf16_dp2", folder)
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    (folder / "tokenizer.txt").write_text("no JSON at all")
    report = verify(folder)
    assert [f for f in report.findings if f.severity != "note"] == []
    (folder / "trainer_state.json").write_text('{"global_step": 3')
    finding = alarm(folder, "extras", "default")
    assert finding.file == "trainer_state.json"
    assert "is not valid JSON" in finding.message
    assert verify(folder).exit_code == 4
