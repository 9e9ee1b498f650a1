"""The harness is trusted by other tests, so it is tested: its exports against DeepSpeed's own resume and own API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.interop.jobs import Trainer
from tests.interop.spec import Spec
from tests.interop.worker import JobError

pytestmark = [pytest.mark.slow, pytest.mark.interop]

JOBS = {
    "zero 0": (2, Spec(zero=0)),
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32")),
    "zero 1": (2, Spec()),
    "zero 2, round robin, dp 3": (3, Spec(zero=2, config={"zero_optimization": {"round_robin_gradients": True}})),
    "zero 3, small sub-groups": (
        2,
        Spec(zero=3, frozen=("pos",), config={"zero_optimization": {"sub_group_size": 900}}),
    ),
    "bf16 optimizer": (2, Spec(config={"data_types": {"grad_accum_dtype": "fp32"}})),
    "tp 2": (2, Spec(tp=2)),
    "pp 2": (2, Spec(pp=2, gas=2)),
    "experts": (2, Spec(experts=4, ep=2)),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_resumed_job_holds_what_was_exported(trainer: Trainer, tmp_path: Path, job: str) -> None:
    """Export, save, native load into fresh weights, export: the same bits, and the same next loss."""
    import torch

    world, spec = JOBS[job]
    before = trainer.run_job(world, spec, 2, tmp_path / "a", save_dir=tmp_path / "saved", steps_after=1)
    after = trainer.run_job(world, replace(spec, seed=99), 1, tmp_path / "b", load_dir=tmp_path / "saved")
    for rank in range(world):
        saved, loaded = before.state(rank), after.state(rank, "loaded")
        assert saved.keys() == loaded.keys()
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []
    assert before.losses[2] == after.losses[2]
    assert before.ranks[0]["final"] == after.ranks[0]["loaded"]


def test_every_layout_starts_from_the_same_model(trainer: Trainer, tmp_path: Path) -> None:
    """So that losses can be compared closely between worlds."""
    specs = [(1, Spec()), (3, Spec()), (2, Spec(tp=2)), (2, Spec(zero=3))]
    losses = [trainer.run_job(w, s, 2, tmp_path / str(i)).losses for i, (w, s) in enumerate(specs)]
    for step in (0, 1):
        first, *others = (float.fromhex(run[step]) for run in losses)
        assert others == pytest.approx([first] * len(others), abs=0.01)


def test_a_failing_rank_is_reported(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="rank 1"):
        trainer.run_job(2, Spec(), 1, tmp_path, load_dir=tmp_path / "nothing")
