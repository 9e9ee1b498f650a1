"""G2: a real engine is recorded; every step that it saved follows from base and log, bit for bit, in any layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.spec import Spec
from tests.interop.test_load_into import BF16_OPTIMIZER, zero
from tests.train.worlds import Worlds

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RECORDED = "tests.replay.ranks:recorded"
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
