"""G2: a real engine is recorded; every step that it saved follows from base and log, bit for bit, in any layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, state, unequal, zero
from tests.interop.spec import Spec
from tests.training.worlds import Worlds

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RECORDED = "tests.replay.replay_ranks:recorded"
CLIP = {"gradient_clipping": 0.1}

# name → (world, spec, options of the rank function)
RUNS: dict[str, tuple[int, Spec, dict[str, Any]]] = {
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32", config=CLIP), {}),
    "zero 0, bf16": (2, Spec(zero=0), {}),
    "zero 1, bf16, accumulation": (2, Spec(zero=1, gas=2, groups=3, config=CLIP), {}),
    "zero 2, fp16, overflow": (
        2,
        Spec(zero=2, dtype="fp16", config={**zero(2), **CLIP}),
        {"overflow_at": 4},
    ),
    "zero 3, bf16": (2, Spec(zero=3, groups=3, config={**zero(3, sub_group_size=900), **CLIP}), {"record_from": 2}),
    "bf16 optimizer": (2, Spec(groups=3, config={**BF16_OPTIMIZER, **CLIP}), {}),
    "zero 1, momentum": (2, Spec(zero=1, dtype="fp32", optimizer="sgd"), {}),
    "zero 2, states, overflow": (
        2,
        Spec(zero=2, dtype="fp16", groups=3, config={**zero(2), **CLIP}),
        {"overflow_at": 4, "what": "state"},
    ),
    # Optimizers that cannot be replayed: states are logged. More of them in `test_shadow.py`.
    "zero 3, NAdam, betas that are scheduled": (2, Spec(zero=3, optimizer="nadam"), {"schedule": "cycle"}),
    "zero 0, fp32, Adafactor": (2, Spec(zero=0, dtype="fp32", optimizer="adafactor"), {}),
    "zero 1, tensors as rates, schedulers in a scheduler": (
        2,
        Spec(zero=1, optimizer="adam_as_adamw", groups=3),
        {"schedule": "sequential"},
    ),
    "zero 1, tp 2": (2, Spec(zero=1, tp=2), {}),
    "zero 1, tp 2, pp 2, dp 2": (8, Spec(zero=1, tp=2, pp=2), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_what_the_job_saved(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, options = RUNS[name]
    results = worlds.run(world, RECORDED, tmp_path, spec=asdict(spec), steps=6, **options)
    assert all(result["skipped"] == (1 if "overflow_at" in options else 0) for result in results)
    run, first = tmp_path / "run", options.get("record_from", 0)
    for step in range(first + 1, 7):
        found = ucp.diff(run, tmp_path / "saved" / f"step{step}", log_a=run, step_a=step, exact=True)
        assert found.same, (step, [str(atom) for atom in found.atoms], found.settings, found.only_a, found.only_b)
        assert found.compared >= 90
        assert found.a.step == step
    report = ucp.verify(run, "deep", log=run)
    assert [finding for finding in report.findings if finding.severity != "note"] == []


def test_weights_of_a_first_step_that_was_skipped(worlds: Worlds, tmp_path: Path) -> None:
    """ZeRO off takes a step while the engine is built: until the next one, weights are not their masters, cast."""
    spec = Spec(zero=0, optimizer="rmsprop")
    worlds.run(2, RECORDED, tmp_path, spec=asdict(spec), steps=2, overflow_at=1)
    run = tmp_path / "run"
    for step in (1, 2):
        found = ucp.diff(run, tmp_path / "saved" / f"step{step}", log_a=run, step_a=step, exact=True)
        assert found.same, (step, [str(atom) for atom in found.atoms])


LOAD = "tests.training.deepspeed_ranks:load"


@pytest.fixture(scope="module")
def trained(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 run on two ranks that skipped step 3, with `run` and every step in `saved`; another base after step 4."""
    out = tmp_path_factory.mktemp("trained")
    spec = Spec(zero=2, dtype="fp16", config={**zero(2), **CLIP})
    worlds.run(2, RECORDED, out, spec=asdict(spec), steps=7, overflow_at=3, base_every=4)
    return out


@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize(
    "world, spec", [(3, Spec(zero=3, dtype="fp16", seed=9)), (1, Spec(zero=1, dtype="fp16", seed=9))]
)
def test_another_world_goes_on_from_a_merged_step(
    worlds: Worlds, trained: Path, tmp_path: Path, world: int, spec: Spec, step: int
) -> None:
    """Loaded from the log or from the job's own save of that step: the same state, the same training from there."""
    run, saved = trained / "run", trained / "saved"
    job = {"spec": asdict(spec), "steps": 2}
    merged = worlds.run(world, LOAD, tmp_path / "a", path=run, options={"log": str(run), "step": step}, **job)
    own = worlds.run(world, LOAD, tmp_path / "b", path=saved, options={"tag": f"step{step}"}, **job)
    for rank in range(world):
        assert unequal(state(tmp_path / "a", "loaded", rank), state(tmp_path / "b", "loaded", rank)) == []
        assert unequal(state(tmp_path / "a", "resumed", rank), state(tmp_path / "b", "resumed", rank)) == []
        assert merged[rank]["loaded"] == own[rank]["loaded"]
        assert merged[rank]["losses"] == own[rank]["losses"]
        assert merged[rank]["report"]["step"] == step


@pytest.mark.parametrize(
    "options",
    [
        {"to": "deepspeed", "dp": 3, "zero": 3},
        {"to": "deepspeed", "dp": 2, "zero": 1},
        {"to": "deepspeed-universal"},
        {"to": "dcp"},
        {"to": "atoms", "dtype": "bf16"},
    ],
    ids=str,
)
def test_a_merged_step_goes_to_any_target(trained: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    run = trained / "run"
    ucp.convert(run, tmp_path / "merged", log=run, step=6, exact=True, **options)
    ucp.convert(trained / "saved", tmp_path / "own", tag="step6", **options)
    found = ucp.diff(tmp_path / "merged", tmp_path / "own")
    assert found.same, (found.atoms, found.settings, found.only_a, found.only_b)
    assert found.compared > 50


def test_an_older_base_gives_the_same_bits(trained: Path) -> None:
    """Steps 5 to 7 follow from either base."""
    run = trained / "run"
    bases = [run / "base" / name / "atoms" for name in ("base-000000", "base-000001")]
    for step in (4, 5, 7):
        assert ucp.diff(bases[0], bases[1], log_a=run, step_a=step, log_b=run, step_b=step, exact=True).same
