"""`ucp.save` with real engines: the folder holds what the engines held, and everything reads it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, assert_tiled, places, state, unequal, zero
from tests.interop.spec import Spec
from tests.references import differences
from tests.training.worlds import Worlds

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RANKS = "tests.training.deepspeed_ranks:"

SAVED: dict[str, tuple[int, Spec, bool]] = {
    "zero 0, bf16": (2, Spec(zero=0), True),
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32"), False),
    "zero 1": (2, Spec(zero=1), True),
    "zero 2, fp16, frozen, round robin": (
        *(3, Spec(zero=2, dtype="fp16", groups=3, frozen=("pos",), config=zero(2, round_robin_gradients=True))),
        False,
    ),
    "zero 3": (3, Spec(zero=3), True),
    "zero 3, fp32, frozen": (
        *(2, Spec(zero=3, dtype="fp32", frozen=("pos", "qkv"), config=zero(3, sub_group_size=700))),
        False,
    ),
    "bf16 optimizer": (2, Spec(config=BF16_OPTIMIZER), False),
    "tp 2 × dp 2": (4, Spec(tp=2), True),
    "tp 2, zero 3": (2, Spec(zero=3, tp=2, swiglu=True, tied=False), False),
    "pp 2 × dp 2": (4, Spec(pp=2, gas=2), False),
    "experts, ep 2": (2, Spec(experts=4, ep=2), False),
}


@pytest.mark.parametrize("name", SAVED)
def test_atoms_hold_what_the_engines_held(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, asynchronous = SAVED[name]
    out, atoms = tmp_path / "run", tmp_path / "atoms"
    results = worlds.run(
        *(world, RANKS + "save_atoms", out),
        spec=asdict(spec),
        steps=2,
        atoms=atoms,
        asynchronous=asynchronous,
        more=2 if asynchronous else 0,  # what is trained meanwhile must not show
    )
    saved, native = ucp.open(atoms), ucp.open(out / "saved")
    assert differences(saved, places(results, out, "reference", spec.experts)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"run", "atoms"}
    assert_tiled(atoms)
    assert ucp.verify(atoms, level="deep").ok
    # The same index that the native files give: names, shapes, roles, rules, groups, aliases.
    assert set(saved) == set(native)
    for parameter in native.index.parameters.values():
        mine = saved.index.parameters[parameter.name]
        assert (mine.shape, mine.role, mine.rule, mine.padded_shape, set(mine.aliases), mine.stages, mine.expert) == (
            *(parameter.shape, parameter.role, parameter.rule, parameter.padded_shape),
            *(set(parameter.aliases), parameter.stages, parameter.expert),
        )
    order = sorted if "round robin" in name else list  # which shuffles the files, not the groups
    assert [(g.hyper, order(g.names)) for g in saved.index.groups] == [
        (g.hyper, order(g.names)) for g in native.index.groups
    ]
    assert saved.index.step == native.index.step == 2


def test_a_live_save_resumes_in_another_world_and_in_this_one(worlds: Worlds, tmp_path: Path) -> None:
    spec = Spec(zero=2, dtype="fp16", groups=3)
    out, atoms = tmp_path / "run", tmp_path / "atoms"
    first = worlds.run(2, RANKS + "save_atoms", out, spec=asdict(spec), steps=3, atoms=atoms, more=2)
    again = worlds.run(2, RANKS + "load", tmp_path / "again", spec=asdict(replace(spec, seed=5)), path=atoms, steps=2)
    for rank in range(2):
        assert again[rank]["losses"] == first[rank]["losses_after"]
        assert unequal(state(out, "reference", rank), state(tmp_path / "again", "loaded", rank)) == []
        report = again[rank]["report"]
        assert report["not_restored"] == []
        assert report["bytes_read"] <= 1.05 * report["bytes_held"]
        assert report["client_state"]["note"] == "atoms"
        assert report["client_state"]["tensor"] == "tensor([0, 1, 2, 3, 4])"
        assert report["client_state"]["seen"] == "{'a': [1, 2.5, None]}"
    other = worlds.run(
        3, RANKS + "load", tmp_path / "other", spec=asdict(replace(spec, zero=3, seed=5)), path=atoms, steps=1
    )
    assert unequal(state(out, "reference", 0), state(tmp_path / "other", "loaded", 2)) == []
    assert other[0]["loaded"]["loss_scale"] == again[0]["loaded"]["loss_scale"]
    assert any("random generators: saved for 2 ranks" in text for text in other[0]["report"]["not_restored"])


def test_a_live_save_converts_like_a_native_one(worlds: Worlds, tmp_path: Path) -> None:
    spec = Spec(zero=1, groups=3)
    out, atoms = tmp_path / "run", tmp_path / "atoms"
    worlds.run(2, RANKS + "save_atoms", out, spec=asdict(spec), steps=2, atoms=atoms)
    ucp.convert(atoms, tmp_path / "native", to="deepspeed", dp=1, zero=3)
    results = worlds.run(
        1, RANKS + "native", tmp_path / "loaded", spec=asdict(replace(spec, zero=3, seed=5)), path=tmp_path / "native"
    )
    assert unequal(state(out, "reference", 0), state(tmp_path / "loaded", "loaded", 0)) == []
    assert results[0]["loaded"]["global_steps"] == 2


def test_fused_optimizers_without_zero_resume_too(worlds: Worlds, tmp_path: Path) -> None:
    spec = Spec(zero=0, dtype="fp16", groups=3)
    for result in worlds.run(2, RANKS + "fused", tmp_path / "run", spec=asdict(spec), steps=3, more=2):
        assert result["class"] == "FP16_Optimizer"
        assert result["losses"] == result["losses_after"]
        assert result["report"]["not_restored"] == []
        assert result["scale"] != 2.0**8  # where it starts


FORMS = {
    "atoms": {"to": "atoms"},
    "virtual atoms": {"to": "atoms", "link": True},
    "universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint_loads(
    worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, form: str
) -> None:
    spec = Spec(zero=1, groups=3, frozen=("pos",))
    out = tmp_path_factory.getbasetemp() / "every-form"
    if not out.exists():
        worlds.run(2, RANKS + "train_and_save", out, spec=asdict(spec), steps=2, saved=out / "saved")
    ucp.convert(out / "saved", tmp_path / "form", **FORMS[form])
    results = worlds.run(
        *(3, RANKS + "load", tmp_path / "run"),
        spec=asdict(replace(spec, zero=2, seed=5)),
        path=tmp_path / "form",
        steps=1,
    )
    for rank, result in enumerate(results):
        assert unequal(state(out, "reference", 0), state(tmp_path / "run", "loaded", rank)) == []
        assert result["report"]["bytes_read"] <= 1.05 * result["report"]["bytes_held"]
        assert [group["lr"] for group in result["loaded"]["groups"]] == pytest.approx([0.009, 0.009, 0.00225])


def test_random_generators_come_back_on_the_same_world(worlds: Worlds, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"spec": asdict(Spec()), "path": tmp_path / "atoms"}
    before = worlds.run(2, RANKS + "random_numbers", tmp_path / "a", save=True, **arguments)
    after = worlds.run(2, RANKS + "random_numbers", tmp_path / "b", save=False, **arguments)
    assert [rank["numbers"] for rank in after] == [rank["numbers"] for rank in before]
    assert before[0]["numbers"] != before[1]["numbers"]
    [fewer] = worlds.run(1, RANKS + "random_numbers", tmp_path / "c", save=False, **arguments)
    assert fewer["numbers"] not in [rank["numbers"] for rank in before]
    assert any("random generators" in text for text in fewer["left"])


def test_failures_are_raised_on_every_rank_and_leave_nothing(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    results = worlds.run(2, RANKS + "save_fails", tmp_path / "a", spec=asdict(Spec()), path=tmp_path / "there")
    assert [result["class"] for result in results] == ["UsageError", "OtherRankError"]
    assert all("already exists" in result["text"] and result["code"] == 2 for result in results)
    results = worlds.run(2, RANKS + "save_fails", tmp_path / "b", spec=asdict(Spec()), path=tmp_path / "no" / "such")
    assert all("no such folder" in result["text"] and result["code"] == 5 for result in results)
    results = worlds.run(
        2, RANKS + "save_fails", tmp_path / "c", spec=asdict(Spec(tp=2, uc_info=False)), path=tmp_path / "new"
    )
    assert all("no rule for combining its slices over tp=2" in result["text"] for result in results)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "a", "b", "c"}
