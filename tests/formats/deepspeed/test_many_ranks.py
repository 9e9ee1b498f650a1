"""Targets with many ranks: everything that they share is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp.api
from ucp.containers import torch_file_writer
from ucp.formats.deepspeed.write.optimizer_files import ScalarStates


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[None]:
    real, calls = getattr(owner, name), list[None]()

    def counted(*args: object, **more: object) -> object:
        calls.append(None)
        return real(*args, **more)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_of_a_group_are_computed_once(project: Path, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = project / "fixtures/z1_bf16_dp2"
    groups = len(ucp.open(source).index.groups)
    calls = count_calls(monkeypatch, ScalarStates, "of")
    ucp.api.plan(source, "nowhere", to="deepspeed", zero=zero, dp=16)
    assert len(calls) == groups


def test_equal_model_files_of_zero3_are_pickled_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, torch_file_writer, "write_pickle")
    plan = ucp.api.plan(project / "fixtures/z1_bf16_dp2", "nowhere", to="deepspeed", zero=3, dp=16)
    model_files = [file for file in plan.target.files if file.path.endswith("model_states.pt")]
    assert len(model_files) == 16
    optimizer_files = 16
    assert len(calls) == 2 + optimizer_files, "rank 0 names the tied parameters, all others are alike"


def test_model_files_with_slices_of_frozen_parameters_differ(project: Path) -> None:
    plan = ucp.api.plan(project / "fixtures/z3_bf16_frozen_subgroups_dp2", "nowhere", to="deepspeed", dp=4)
    held = [
        [item.region for item in file.items]
        for file in plan.target.files
        if file.path.endswith("model_states.pt") and file.items
    ]
    assert len(held) == 4
    assert all(held[a] != held[b] for a in range(4) for b in range(a))
