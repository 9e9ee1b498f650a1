"""`ucp.load_into` with real engines: what is loaded, and what is trained from there, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, places, state, unequal, zero
from tests.interop.spec import Spec
from tests.references import differences
from tests.training.worlds import Worlds

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RANKS = "tests.training.deepspeed_ranks:"


# ----------------------------------------------------------------------------------------------------------------------
# The same number of ranks: training goes on as if nothing had happened

RESUMED: dict[str, Spec] = {
    "zero 0, bf16": Spec(zero=0),
    "zero 0, fp16": Spec(zero=0, dtype="fp16"),
    "zero 0, fp32": Spec(zero=0, dtype="fp32", optimizer="amsgrad"),
    "zero 1, bf16": Spec(zero=1),
    "zero 1, fp32": Spec(zero=1, dtype="fp32"),
    "zero 2, bf16, round robin": Spec(zero=2, groups=3, config=zero(2, round_robin_gradients=True)),
    "zero 2, fp16, offload, frozen": Spec(
        zero=2, dtype="fp16", frozen=("pos", "blocks.0"), config=zero(2, offload_optimizer={"device": "cpu"})
    ),
    "zero 2, fp32, momentum": Spec(zero=2, dtype="fp32", optimizer="sgd"),
    "zero 3, bf16": Spec(zero=3, groups=3),
    "zero 3, fp32, sub-groups, frozen": Spec(
        zero=3, dtype="fp32", frozen=("pos", "qkv"), config=zero(3, sub_group_size=700)
    ),
    "zero 3, fp16, offload": Spec(zero=3, dtype="fp16", config=zero(3, offload_optimizer={"device": "cpu"})),
    "bf16 optimizer": Spec(groups=3, config=BF16_OPTIMIZER),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_job_trains_on_bit_for_bit(worlds: Worlds, tmp_path: Path, name: str) -> None:
    spec = RESUMED[name]
    out = tmp_path / "run"
    results = worlds.run(2, RANKS + "resume", out, spec=asdict(spec), steps=3, more=2, used=1)
    for rank, result in enumerate(results):
        first, second = result["first"], result["second"]
        assert unequal(state(out, "reference", rank), state(out, "loaded", rank)) == []
        assert second["loaded"] == first["final"]
        assert second["losses"] == first["losses_after"]
        assert unequal(state(out, "end", rank), state(out, "resumed", rank)) == []
        report = second["report"]
        assert report["step"] == 3
        assert report["client_state"]["note"] == "client state survives"
        assert report["not_restored"] == []
        assert report["bytes_held"] > 0
        assert report["bytes_read"] <= 1.05 * report["bytes_held"]


# ----------------------------------------------------------------------------------------------------------------------
# Another world, another stage

Saved = Callable[[Spec, int], Path]


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run of a spec on a world that left its files in `saved`; made once."""
    made: dict[str, Path] = {}

    def make(spec: Spec, world: int) -> Path:
        key = f"{spec} {world}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("source") / "run"
            worlds.run(
                world, RANKS + "train_and_save", made[key], spec=asdict(spec), steps=2, saved=made[key] / "saved"
            )
        return made[key]

    return make


def rule_file(folder: Path) -> dict[str, Any]:
    """What a checkpoint of one tensor-parallel rank cannot know."""
    rules = {
        r".*attn\.qkv\.(weight|bias)": 'cut = "split"\ndim = 0\nratio = [1, 1, 1]\n',
        r".*embed\.weight": 'cut = "vocab"\ndim = 0\n',
    }
    path = folder / "rules.toml"
    path.write_text("\n".join(f"[[rule]]\nmatch = {json.dumps(match)}\n{body}" for match, body in rules.items()))
    return {"rules": str(path)}


MOVED: dict[str, tuple[int, Spec, int, Spec]] = {
    "zero 1, dp 2 → zero 3, dp 3": (2, Spec(zero=1), 3, Spec(zero=3)),
    "zero 1, dp 2 → zero 1, dp 1": (2, Spec(zero=1), 1, Spec(zero=1)),
    "zero 1, dp 2 → zero 2, dp 3, round robin": (
        *(2, Spec(zero=1)),
        *(3, Spec(zero=2, config=zero(2, round_robin_gradients=True))),
    ),
    "zero 3, dp 3 → zero 0, dp 1": (3, Spec(zero=3), 1, Spec(zero=0)),
    "zero 3, dp 3 → zero 1, dp 2": (3, Spec(zero=3), 2, Spec(zero=1)),
    "zero 0, fp32 → zero 2, fp32, dp 3": (2, Spec(zero=0, dtype="fp32"), 3, Spec(zero=2, dtype="fp32")),
    "zero 0, fp32 → zero 3, bf16": (2, Spec(zero=0, dtype="fp32"), 2, Spec(zero=3)),
    "zero 1, bf16 → bf16 optimizer, dp 3": (2, Spec(zero=1), 3, Spec(zero=1, config=BF16_OPTIMIZER)),
}


@pytest.mark.parametrize("name", MOVED)
def test_another_world_holds_the_same_state(worlds: Worlds, saved: Saved, tmp_path: Path, name: str) -> None:
    world, old, size, new = MOVED[name]
    source = saved(old, world)
    out = tmp_path / "run"
    results = worlds.run(size, RANKS + "load", out, spec=asdict(replace(new, seed=5)), path=source / "saved", steps=1)
    reference = state(source, "reference", 0)
    for rank, result in enumerate(results):
        loaded = state(out, "loaded", rank)
        wrong = unequal(reference, loaded)
        if old.dtype != new.dtype:
            wrong = [key for key in wrong if not is_rounded(key, loaded)]
        assert wrong == []
        assert result["report"]["bytes_read"] <= 1.05 * result["report"]["bytes_held"]
        assert result["loaded"]["global_steps"] == 2
        assert "1" not in result["losses"]
        assert float.fromhex(result["losses"]["2"]) < 5


def is_rounded(key: str, loaded: dict[str, Any]) -> bool:
    """Whether a module weight of another dtype is the master rounded (or a buffer, which has none)."""
    name, kind = key.rsplit("|", 1)
    if kind != "weight":
        return False
    master = loaded.get(f"{name}|fp32")
    return master is None or unequal({"": master.to(loaded[key].dtype)}, {"": loaded[key]}) == []


def test_groups_find_their_own_by_name(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    """The job has the groups in another order than the checkpoint: each gets its own hyper-parameters."""
    spec = Spec(zero=3, groups=3)
    source = saved(Spec(zero=1, groups=3), 2)
    [result] = worlds.run(
        *(1, RANKS + "load", tmp_path / "run"),
        spec=asdict(replace(spec, lr=0.5)),
        path=source / "saved",
        reverse_groups=True,
    )
    assert [group["name"] for group in result["loaded"]["groups"]] == ["tiny", "no_decay", "decay"]
    assert [group["weight_decay"] for group in result["loaded"]["groups"]] == [0.0, 0.0, 0.1]
    # two steps of StepLR(2, 0.9)
    assert [group["lr"] for group in result["loaded"]["groups"]] == pytest.approx([0.9 * 0.01 / 4, 0.009, 0.009])
    assert unequal(state(source, "reference", 0), state(tmp_path / "run", "loaded", 0)) == []


# ----------------------------------------------------------------------------------------------------------------------
# Tensor and pipeline parallelism

WIDE = {"hidden": 256, "ffn": 512, "vocab": 61, "layers": 1}  # rows of slices long enough to be read one by one

PARALLEL: dict[str, tuple[int, Spec, int, Spec]] = {
    "tp 1 → tp 2": (2, Spec(zero=1, **WIDE), 2, Spec(zero=1, tp=2, **WIDE)),
    "tp 2 → tp 1, zero 3": (2, Spec(zero=1, tp=2, **WIDE), 2, Spec(zero=3, **WIDE)),
    "tp 2 → tp 2 × dp 2, zero 2": (2, Spec(zero=1, tp=2, **WIDE), 4, Spec(zero=2, tp=2, **WIDE)),
    "experts, ep 1 → ep 2 × dp 2": (2, Spec(experts=4), 4, Spec(experts=4, ep=2)),
    "tp 2, zero 0 → tp 1": (2, Spec(zero=0, tp=2, swiglu=True, tied=False), 1, Spec(swiglu=True, tied=False)),
    "pp 1 → pp 2 × dp 2": (2, Spec(pipeline=True, gas=2), 4, Spec(pp=2, gas=2)),
    "pp 2 → pp 1, zero 0": (2, Spec(pp=2, gas=2), 2, Spec(zero=0, pipeline=True, gas=2)),
    "pp 2 → pp 2 × tp 2": (2, Spec(pp=2, gas=2), 4, Spec(pp=2, tp=2, gas=2)),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_slices_and_stages_hold_their_part(worlds: Worlds, saved: Saved, tmp_path: Path, name: str) -> None:
    world, old, size, new = PARALLEL[name]
    source = saved(old, world)
    out = tmp_path / "run"
    options = rule_file(tmp_path) if new.tp > old.tp else {}
    results = worlds.run(
        *(size, RANKS + "load", out),
        spec=asdict(replace(new, seed=5)),
        path=source / "saved",
        steps=1,
        options=options,
    )
    # The reference's own arithmetic cuts the whole for each rank: both ends are checked against it.
    assert differences(ucp.open(source / "saved"), places(results, out, "loaded", new.experts)) == []
    for result in results:
        if (new.tp, new.pp, new.ep) == (old.tp, old.pp, old.ep):  # the padding rows of the vocabulary as well
            reference = state(source, "reference", result["pp_rank"] * new.tp + result["tp_rank"])
            assert unequal(reference, state(out, "loaded", result["rank"])) == []
        assert result["loaded"]["global_steps"] == 2
        report = result["report"]
        if new.hidden == WIDE["hidden"] or new.tp == old.tp:
            assert report["bytes_read"] <= 1.05 * report["bytes_held"]


def test_without_a_rule_a_fused_parameter_is_not_cut(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    source = saved(Spec(zero=1, **WIDE), 2)
    results = worlds.run(
        *(2, RANKS + "load_fails", tmp_path / "run"),
        spec=asdict(Spec(zero=1, tp=2, **WIDE)),
        path=source / "saved",
    )
    for result in results:
        assert "parameter blocks.0.attn.qkv.weight: no rule for splitting it over tp=2" in result["text"]
        assert result["unchanged"]


# ----------------------------------------------------------------------------------------------------------------------
# What does not fit


def test_a_missing_parameter_is_said_on_every_rank(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    source = saved(Spec(zero=1), 2)
    deeper = replace(Spec(zero=3), layers=3, seed=5)
    results = worlds.run(3, RANKS + "load_fails", tmp_path / "run", spec=asdict(deeper), path=source / "saved")
    for result in results:
        assert result["class"] == "InconsistentError"
        assert "parameter blocks.2.ln1.weight is not in the checkpoint" in result["text"]
        assert "nothing was changed" in result["text"]
        assert result["unchanged"]


def test_a_parameter_that_nobody_wants_is_an_error(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    source = saved(Spec(zero=1), 2)
    shallower = replace(Spec(zero=2), layers=1, seed=5)
    results = worlds.run(2, RANKS + "load_fails", tmp_path / "run", spec=asdict(shallower), path=source / "saved")
    for result in results:
        assert "trained parameter blocks.1.ln1.weight of the checkpoint is not in the job" in result["text"]
        assert result["unchanged"]


def test_what_fails_on_one_rank_fails_on_all(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    source = saved(Spec(zero=1), 2)
    results = worlds.run(
        *(2, RANKS + "load_fails", tmp_path / "run"),
        spec=asdict(Spec(zero=1)),
        path=source / "saved",
        elsewhere=str(tmp_path / "nowhere"),
    )
    assert results[1]["class"] == "StorageError"
    assert results[0]["class"] == "OtherRankError"
    assert "rank 1: " in results[0]["text"]
    assert "nowhere: no such file or folder" in results[0]["text"]
    assert results[0]["code"] == results[1]["code"]
    assert all(result["unchanged"] for result in results)


def test_gradients_that_are_half_accumulated_are_not_mixed_in(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    spec = replace(Spec(zero=1), gas=2)
    results = worlds.run(
        2,
        RANKS + "load_fails",
        tmp_path / "run",
        spec=asdict(spec),
        path=saved(Spec(zero=1), 2) / "saved",
        halfway=True,
    )
    assert all("in the middle of gradient accumulation" in result["text"] for result in results)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_job_begins_again_from_before_its_first_step(worlds: Worlds, tmp_path: Path, stage: int) -> None:
    # Of several groups, DeepSpeed shows the moments of the first one only after a first step.
    (result,) = worlds.run(1, RANKS + "begin_again", tmp_path / "run", spec=asdict(Spec(zero=stage, groups=1)))
    assert result["first"] == result["again"]
    assert result["seen"]
    assert result["left"] == []


def test_lenient_loads_leave_the_rest_and_say_so(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    source = saved(Spec(zero=1), 2)
    deeper = replace(Spec(zero=2), layers=3, seed=5)
    results = worlds.run(
        *(2, RANKS + "load", tmp_path / "run"),
        spec=asdict(deeper),
        path=source / "saved",
        options={"strict": False},
    )
    reference, loaded = state(source, "reference", 0), state(tmp_path / "run", "loaded", 0)
    assert unequal(reference, {key: loaded[key] for key in reference}) == []
    left = [text for result in results for text in result["report"]["not_restored"]]
    assert any("blocks.2.ln1.weight is not in the checkpoint" in text for text in left)
    assert float(loaded["blocks.2.attn.qkv.weight|weight"].abs().sum()) > 0
