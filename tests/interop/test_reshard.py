"""Train in one world, convert, go on in another: after a plain `load_checkpoint` real engines hold the very same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.jobs import JobResult, Trainer
from tests.interop.spec import Spec
from tests.references import Place, RankState, differences

pytestmark = [pytest.mark.slow, pytest.mark.interop]


def loaded_states(run: JobResult, spec: Spec) -> list[RankState]:
    return [
        RankState(
            Place(at["tp_rank"], at["tp"], at["ep_rank"], at["ep"], spec.experts), run.state(at["rank"], "loaded")
        )
        for at in run.ranks
    ]


def world_of(spec: Spec, dp: int) -> int:
    return spec.tp * spec.pp * dp


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
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_is_bit_exact_in_the_new_world(trainer: Trainer, tmp_path: Path, change: str) -> None:
    source, dp, target, new_dp, options = CHANGES[change]
    before = trainer.run_job(
        world_of(source, dp), source, 2, tmp_path / "before", save_dir=tmp_path / "saved", steps_after=2
    )
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
