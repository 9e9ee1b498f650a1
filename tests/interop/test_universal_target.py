"""Universal folders of ours, loaded by real engines with `load_universal: true`, in every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from tests.interop.deepspeed_jobs import auto_ep, loaded_states, world_of
from tests.interop.jobs import Trainer
from tests.interop.spec import Spec
from tests.references import differences

pytestmark = [pytest.mark.slow, pytest.mark.interop]

CASES: dict[str, tuple[Spec, int, list[tuple[Spec, int]]]] = {
    "zero 1": (Spec(), 2, [(Spec(zero=2), 3), (Spec(zero=3, groups=2), 2), (Spec(zero=1), 1)]),
    "zero 3": (Spec(zero=3), 2, [(Spec(zero=1), 3), (Spec(zero=3), 3)]),
    "zero 0": (Spec(zero=0), 2, [(Spec(zero=2), 2)]),
    "tp 2": (Spec(tp=2), 2, [(Spec(zero=2), 2), (Spec(tp=2), 1)]),
    "tp 2 swiglu": (Spec(tp=2, swiglu=True, tied=False), 1, [(Spec(tp=2, swiglu=True, tied=False), 2)]),
    "round robin": (
        Spec(zero=2, config={"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
        3,
        [(Spec(zero=1), 2)],
    ),
    "sgd, no info": (Spec(optimizer="sgd", uc_info=False), 2, [(Spec(optimizer="sgd", uc_info=False), 3)]),
    "bf16 optimizer": (Spec(config={"data_types": {"grad_accum_dtype": "fp32"}}), 2, [(Spec(zero=2), 3)]),
    "pp 2": (Spec(pp=2, gas=2), 1, [(Spec(pipeline=True), 2)]),
    "a name with a slash": (Spec(last_norm="norm/f"), 2, [(Spec(zero=2, last_norm="norm/f"), 1)]),
    "experts": (Spec(experts=4, ep=2), 2, [(Spec(experts=4), 2)]),
    "AutoEP": (auto_ep(2), 4, [(auto_ep(4, zero=2), 4), (auto_ep(1), 2), (auto_ep(2, zero=3), 2)]),
    "AutoEP, zero 3": (auto_ep(2, zero=3), 4, [(auto_ep(4), 4), (auto_ep(2, zero=3), 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_real_engines_load_it(trainer: Trainer, tmp_path: Path, case: str) -> None:
    source, dp, targets = CASES[case]
    trainer.run_job(world_of(source, dp), source, 2, tmp_path / "run", save_dir=tmp_path / "saved")
    ucp.convert(tmp_path / "saved", tmp_path / "universal", to="deepspeed-universal")
    for number, (target, new_dp) in enumerate(targets):
        after = trainer.run_job(
            world_of(target, new_dp),
            target,
            1,
            tmp_path / f"after{number}",
            load_dir=tmp_path / "universal",
            universal=True,
        )
        assert differences(ucp.open(tmp_path / "saved"), loaded_states(after, target)) == [], target
    again = ucp.open(tmp_path / "universal")
    assert set(again) >= {
        name for name, view in ucp.open(tmp_path / "saved").parameters.items() if "master" in view.kinds
    }
