"""Train with real DeepSpeed, convert what it saved, and compare with what its live engines hold. Bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import auto_ep, zero
from tests.interop.jobs import JobResult, Trainer
from tests.interop.spec import Spec
from tests.references import Place, RankState, differences

pytestmark = [pytest.mark.slow, pytest.mark.interop]


JOBS: dict[str, tuple[int, Spec]] = {
    "zero 0, bf16": (2, Spec(zero=0)),
    "zero 0, fp16": (2, Spec(zero=0, dtype="fp16")),
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32")),
    "zero 1, bf16": (2, Spec(zero=1)),
    "zero 1, fp16": (2, Spec(zero=1, dtype="fp16")),
    "zero 1, fp32": (2, Spec(zero=1, dtype="fp32")),
    "zero 2, bf16": (2, Spec(zero=2)),
    "zero 2, fp32": (2, Spec(zero=2, dtype="fp32")),
    "zero 3, bf16": (2, Spec(zero=3)),
    "zero 3, fp16": (2, Spec(zero=3, dtype="fp16")),
    "zero 3, fp32": (2, Spec(zero=3, dtype="fp32")),
    "zero 1, dp 1": (1, Spec(zero=1)),
    "zero 2, dp 3, tiny group": (3, Spec(zero=2, groups=3)),
    "zero 3, dp 3, tiny group": (3, Spec(zero=3, groups=3)),
    "zero 2, dp 4, round robin": (4, Spec(zero=2, config=zero(2, round_robin_gradients=True))),
    "zero 1, elastic": (2, Spec(config=zero(1, elastic_checkpoint=True))),
    "zero 2, parameter alignment": (3, Spec(zero=2, config=zero(2, parameter_alignment=True))),
    "zero 2, offload": (2, Spec(zero=2, config=zero(2, offload_optimizer={"device": "cpu"}))),
    "zero 3, offload": (2, Spec(zero=3, config=zero(3, offload_optimizer={"device": "cpu"}))),
    "zero 3, sub-groups, frozen": (2, Spec(zero=3, frozen=("pos", "qkv"), config=zero(3, sub_group_size=700))),
    "zero 3, zero.Init, untied": (2, Spec(zero=3, zero_init=True, tied=False)),
    "zero 2, frozen": (2, Spec(zero=2, frozen=("pos", "blocks.0"))),
    "zero 1, frozen": (2, Spec(zero=1, frozen=("pos", "blocks.0"))),
    "bf16 optimizer, dp 3": (3, Spec(groups=3, config={"data_types": {"grad_accum_dtype": "fp32"}})),
    "16-bit masters": (
        2,
        Spec(zero=2, config={"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    ),
    "sgd": (2, Spec(optimizer="sgd")),
    "sgd without momentum": (2, Spec(optimizer="sgd_plain")),
    "lion, zero 3": (2, Spec(zero=3, optimizer="lion")),
    "rmsprop": (2, Spec(optimizer="rmsprop")),
    "amsgrad, zero 3": (2, Spec(zero=3, optimizer="amsgrad")),
    "adagrad, zero 0": (2, Spec(zero=0, optimizer="adagrad", dtype="fp32")),
    "tp 2 × dp 2, zero 1": (4, Spec(tp=2)),
    "tp 2, zero 2, swiglu": (2, Spec(zero=2, tp=2, swiglu=True, tied=False)),
    "tp 2 × dp 2, zero 3": (4, Spec(zero=3, tp=2)),
    "tp 2, zero 0": (2, Spec(zero=0, tp=2)),
    "tp 2, no universal_checkpoint_info": (2, Spec(tp=2, uc_info=False)),
    "pp 2 × dp 2": (4, Spec(pp=2, gas=2)),
    "pp 2, untied": (2, Spec(pp=2, gas=2, tied=False)),
    "pp 2 × dp 2, zero 0": (4, Spec(zero=0, pp=2, gas=2)),
    "pp 2 × tp 2 × dp 2": (8, Spec(pp=2, tp=2, gas=2)),
    "pipeline of one stage": (2, Spec(pipeline=True)),
    "experts, ep 2 × 2": (4, Spec(experts=4, ep=2)),
    "experts, ep 1": (2, Spec(experts=4)),
    "experts, zero 2, ep 4": (4, Spec(zero=2, experts=4, ep=4)),
    "experts, zero 0": (2, Spec(zero=0, experts=4, ep=2)),
    "AutoEP, ep 2 × 2": (4, auto_ep(2)),
    "AutoEP, ep 1, zero 2": (2, auto_ep(1, zero=2)),
    "AutoEP, ep 4, zero 2, fp32": (4, auto_ep(4, zero=2, dtype="fp32")),
    "AutoEP, zero 2, frozen": (4, auto_ep(2, zero=2, frozen=("layers.0.mlp",))),
    "AutoEP, data before experts": (4, auto_ep(2, config={"use_data_before_expert_parallelism": True})),
    "AutoEP, bf16 optimizer": (4, auto_ep(2, config={"data_types": {"grad_accum_dtype": "fp32"}})),
    "AutoEP, zero 0": (4, auto_ep(2, zero=0)),
    "AutoEP, zero 0, fp32": (2, auto_ep(2, zero=0, dtype="fp32")),
    "AutoEP, zero 3, sub-groups": (4, auto_ep(2, zero=3, config=zero(3, sub_group_size=300))),
    "AutoEP, zero 3, ep 4, fp32": (4, auto_ep(4, zero=3, dtype="fp32")),
    "AutoEP, zero 3, data before experts": (
        4,
        auto_ep(2, zero=3, config={"use_data_before_expert_parallelism": True}),
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_what_was_saved_is_what_the_engine_holds(trainer: Trainer, tmp_path: Path, job: str) -> None:
    world, spec = JOBS[job]
    run = trainer.run_job(world, spec, 2, tmp_path / "run", save_dir=tmp_path / "saved")
    states = live_states(run, spec)
    assert any(key.endswith("|fp32") for rank in states for key in rank.values)
    options = fused_rules(tmp_path) if not spec.uc_info else {}
    assert differences(ucp.open(tmp_path / "saved", **options), states) == []
    ucp.convert(tmp_path / "saved", tmp_path / "atoms", **options)
    assert differences(ucp.open(tmp_path / "atoms"), states) == []


def live_states(run: JobResult, spec: Spec) -> list[RankState]:
    return [
        RankState(Place(at["tp_rank"], at["tp"], at["ep_rank"], at["ep"], spec.experts), run.state(at["rank"]))
        for at in run.ranks
    ]


def fused_rules(folder: Path) -> dict[str, Any]:
    """What nobody can infer: that qkv is three sub-parameters, and that the vocabulary was padded."""
    (folder / "rules.toml").write_text(
        "\n".join(
            f"[[rule]]\nmatch = {json.dumps(pattern)}\n{body}"
            for pattern, body in {
                r".*attn\.qkv\.(weight|bias)": 'cut = "split"\ndim = 0\nratio = [1, 1, 1]\n',
                r"embed\.weight": f'cut = "vocab"\ndim = 0\ntrue_size = {Spec.vocab}\n',
            }.items()
        )
    )
    return {"rules": folder / "rules.toml"}


def test_steps_groups_and_scheduler_are_carried(trainer: Trainer, tmp_path: Path) -> None:
    run = trainer.run_job(2, Spec(), 3, tmp_path / "run", save_dir=tmp_path / "saved")
    ucp.convert(tmp_path / "saved", tmp_path / "atoms")
    for path in (tmp_path / "saved", tmp_path / "atoms"):
        index = ucp.open(path).index
        assert index.step == 3
        live = run.ranks[0]["final"]["groups"]
        assert [group.hyper["weight_decay"] for group in index.groups] == [group["weight_decay"] for group in live]
        assert [group.hyper["lr"] for group in index.groups] == [group["lr"] for group in live]
        assert {"embed.weight", "blocks.1.mlp.up.weight"} <= set(index.groups[0].names)
        assert {"ln_f.bias", "scale"} <= set(index.groups[1].names)
