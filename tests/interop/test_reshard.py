"""Train in one world, convert, go on in another: after a plain `load_checkpoint` real engines hold the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import loaded_states, world_of
from tests.interop.jobs import Trainer
from tests.interop.spec import Spec
from tests.references import differences

pytestmark = [pytest.mark.slow, pytest.mark.interop]


# What no checkpoint of one tensor-parallel rank can say: how its parameters are cut.
RULES = """
[[rule]]
match = '(.*\\.)?attn\\.qkv\\.(weight|bias)'
cut = "split"
ratio = [1, 1, 1]

[[rule]]
match = '(.*\\.)?mlp\\.up\\.(weight|bias)'
cut = "split"

[[rule]]
match = '(.*\\.)?(proj|down)\\.weight'
cut = "split"
dim = 1

[[rule]]
match = '(.*\\.)?embed\\.weight'
cut = "vocab"
true_size = 53

[[rule]]
match = '.*'
cut = "replicated"
"""


# name: (source, its dp, target, its dp, options of the conversion)
CHANGES: dict[str, tuple[Spec, int, Spec, int, dict[str, Any]]] = {
    **{
        f"zero {a} dp {m} -> zero {b} dp {n}, {dtype}": (Spec(zero=a, dtype=dtype), m, Spec(zero=b, dtype=dtype), n, {})
        for a, m, b, n, dtype in (
            (1, 2, 1, 3, "bf16"),
            (1, 2, 2, 4, "bf16"),
            (1, 2, 3, 3, "bf16"),
            (1, 2, 0, 2, "bf16"),
            (2, 4, 1, 1, "bf16"),
            (2, 2, 3, 4, "fp32"),
            (3, 2, 3, 3, "bf16"),
            (3, 3, 1, 2, "bf16"),
            (3, 2, 0, 1, "fp32"),
            (3, 4, 2, 3, "fp32"),
            (0, 2, 1, 2, "bf16"),
            (0, 1, 2, 3, "fp32"),
            (0, 2, 3, 2, "bf16"),
            (0, 2, 0, 4, "fp32"),
            (1, 2, 3, 2, "fp16"),
        )
    },
    "tp 2 -> tp 1, zero 1": (Spec(tp=2), 2, Spec(), 2, {"vocab_size": Spec.vocab}),
    "tp 1 -> tp 2, zero 1": (Spec(), 2, Spec(tp=2), 1, {"vocab_size": 56, "rules": RULES}),
    "tp 2 -> tp 1, zero 3": (Spec(tp=2), 1, Spec(zero=3), 3, {"vocab_size": Spec.vocab}),
    "tp 1 -> tp 2, zero 3": (Spec(zero=3), 2, Spec(zero=3, tp=2), 2, {"vocab_size": 56, "rules": RULES}),
    "tp 2 swiglu -> tp 1, zero 0": (
        Spec(tp=2, swiglu=True, tied=False),
        1,
        Spec(zero=0, swiglu=True, tied=False),
        2,
        {"vocab_size": Spec.vocab},
    ),
    "pp 2 -> pp 1": (Spec(pp=2, gas=2), 1, Spec(pipeline=True), 2, {}),
    "pp 1 -> pp 2": (Spec(pipeline=True), 2, Spec(pp=2, gas=2), 2, {}),
    "pp 1 -> pp 2, zero 0, untied": (
        Spec(dtype="fp32", pipeline=True, tied=False),
        2,
        Spec(zero=0, dtype="fp32", pp=2, gas=2, tied=False),
        1,
        {},
    ),
    "pp 2 -> pp 1, zero 0, tied": (
        Spec(zero=0, dtype="fp32", pp=2, gas=2),
        1,
        Spec(zero=0, dtype="fp32", pipeline=True),
        2,
        {},
    ),
    "pp 1 -> pp 2, zero 0, tied": (
        Spec(zero=0, dtype="fp32", pipeline=True),
        2,
        Spec(zero=0, dtype="fp32", pp=2, gas=2),
        1,
        {},
    ),
    "tp 2 pp 2 -> pp 1 dp 3": (Spec(tp=2, pp=2, gas=2), 1, Spec(pipeline=True), 3, {"vocab_size": Spec.vocab}),
    "pp 2 -> tp 2 pp 2": (Spec(pp=2, gas=2), 2, Spec(tp=2, pp=2, gas=2), 1, {"vocab_size": 56, "rules": RULES}),
    "ep 2 -> ep 1": (Spec(experts=4, ep=2), 2, Spec(experts=4), 3, {}),
    "ep 1 -> ep 2": (Spec(experts=4), 2, Spec(experts=4, ep=2), 4, {}),
    "ep 2 -> ep 4, zero 2": (Spec(experts=4, ep=2), 4, Spec(zero=2, experts=4, ep=4), 4, {}),
    "ep 2 -> ep 2, zero 0": (Spec(experts=4, ep=2), 2, Spec(zero=0, experts=4, ep=2), 2, {}),
    "round robin dp 2 -> dp 3": (
        Spec(zero=2, config={"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
        2,
        Spec(zero=2, config={"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
        3,
        {},
    ),
    "bf16 optimizer dp 2 -> dp 3": (
        Spec(config={"data_types": {"grad_accum_dtype": "fp32"}}),
        2,
        Spec(config={"data_types": {"grad_accum_dtype": "fp32"}}),
        3,
        {},
    ),
    "parameter alignment": (
        Spec(zero=2, config={"zero_optimization": {"stage": 2, "parameter_alignment": True}}),
        2,
        Spec(zero=2, config={"zero_optimization": {"stage": 2, "parameter_alignment": True}}),
        3,
        {},
    ),
    "sub-groups, frozen, zero 3": (
        Spec(zero=3, frozen=("pos",), config={"zero_optimization": {"stage": 3, "sub_group_size": 700}}),
        2,
        Spec(zero=3, frozen=("pos",), config={"zero_optimization": {"stage": 3, "sub_group_size": 700}}),
        3,
        {},
    ),
    "frozen, zero 3 -> zero 2": (Spec(zero=3, frozen=("pos",)), 2, Spec(zero=2, frozen=("pos",)), 3, {}),
    "sgd, zero 1 -> zero 3": (Spec(optimizer="sgd"), 2, Spec(zero=3, optimizer="sgd"), 3, {}),
    "states by row and column, zero 0": (
        Spec(zero=0, dtype="fp32", optimizer="adafactor"),
        2,
        Spec(zero=0, dtype="fp32", optimizer="adafactor"),
        3,
        {},
    ),
    "tiny group": (Spec(groups=3), 2, Spec(groups=3), 4, {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_is_bit_exact_in_the_new_world(trainer: Trainer, tmp_path: Path, change: str) -> None:
    source, dp, target, new_dp, options = CHANGES[change]
    before = trainer.run_job(
        world_of(source, dp), source, 2, tmp_path / "before", save_dir=tmp_path / "saved", steps_after=2
    )
    if "rules" in options:
        (tmp_path / "rules.toml").write_text(options["rules"])
        options = {**options, "rules": tmp_path / "rules.toml"}
    ucp.convert(
        tmp_path / "saved",
        tmp_path / "new",
        to="deepspeed",
        tp=target.tp,
        pp=target.pp,
        dp=new_dp,
        ep=target.ep,
        zero=target.zero,
        **options,
    )
    after = trainer.run_job(world_of(target, new_dp), target, 2, tmp_path / "after", load_dir=tmp_path / "new")
    states = loaded_states(after, target)
    assert any(key.endswith("|fp32") for rank in states for key in rank.values)
    assert differences(ucp.open(tmp_path / "saved"), states) == []
    for step, loss in after.losses.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(before.losses[step]), rel=3e-2)
    groups = [rank["loaded"]["groups"] for rank in after.ranks]
    assert all(group == groups[0] for group in groups)
