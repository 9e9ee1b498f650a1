"""G9: the shadow of a real engine is what the engine saved, bit for bit, after every step, and outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, state, unequal, zero
from tests.interop.spec import Spec
from tests.interop.worker import JobError
from tests.training.worlds import Worlds
from ucp.training.shadow.protocol import ShadowAddress, Transport
from ucp.training.shadow.server import ShadowServer
from ucp.training.shadow.shadow import Shadow

pytestmark = [pytest.mark.slow, pytest.mark.interop]

FOLLOWED = "tests.training.shadow.shadow_ranks:followed"
LOAD = "tests.training.deepspeed_ranks:load"
TRAINED = "tests.training.shadow.shadow_ranks:trained"
CLIP = {"gradient_clipping": 0.1}

RUNS: dict[str, tuple[int, Spec, dict[str, Any]]] = {
    "zero 1, bf16, accumulation": (2, Spec(zero=1, gas=2, groups=3, config=CLIP), {}),
    "zero 2, fp16, overflow": (2, Spec(zero=2, dtype="fp16", config={**zero(2), **CLIP}), {"overflow_at": 3}),
    "zero 3, bf16": (2, Spec(zero=3, groups=3, config={**zero(3, sub_group_size=900), **CLIP}), {}),
    "bf16 optimizer": (2, Spec(groups=3, config={**BF16_OPTIMIZER, **CLIP}), {}),
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32", config=CLIP), {}),
    "zero 2, fp16, NAdam, the first step skipped": (
        2,
        Spec(zero=2, dtype="fp16", optimizer="nadam", config={**zero(2), **CLIP}),
        {"overflow_at": 1},
    ),
    "zero 3, RMSprop": (2, Spec(zero=3, optimizer="rmsprop", config=zero(3, sub_group_size=900)), {}),
    "zero 1, tp 2": (2, Spec(zero=1, tp=2), {}),
}


@pytest.fixture
def url() -> Iterator[str]:
    """A shadow that waits for a job."""
    shadow = Shadow(wait_for_job=True)
    shadow.start()
    door = ShadowServer(shadow, ShadowAddress("127.0.0.1", 0))
    yield str(door.address)
    door.close()
    shadow.stop()


@pytest.mark.parametrize("name", RUNS)
def test_the_shadow_after_every_step(worlds: Worlds, tmp_path: Path, url: str, name: str) -> None:
    world, spec, options = RUNS[name]
    results = worlds.run(world, FOLLOWED, tmp_path, spec=asdict(spec), steps=5, to=url, **options)
    assert all(result["skipped"] == len(options) for result in results)
    assert all(result["shadow"]["dropped"] == 0 for result in results)
    for step in range(1, 6):
        found = ucp.diff(tmp_path / "shadow" / f"step{step}", tmp_path / "saved" / f"step{step}")
        assert found.same, (step, [str(atom) for atom in found.atoms], found.settings, found.only_a, found.only_b)
        assert found.compared >= 60
        assert found.a.step == step
    assert ucp.verify(tmp_path / "shadow" / "step5", "deep").ok
    if spec.optimizer != "adamw":  # the log of states that was written beside
        for step in range(1, 6):
            run, saved = tmp_path / "run", tmp_path / "saved" / f"step{step}"
            assert ucp.diff(run, saved, log_a=run, step_a=step, exact=True).same


@pytest.mark.parametrize("transport", ["shadow", "gloo"])
def test_the_shadow_of_ddp_after_every_step(worlds: Worlds, tmp_path: Path, transport: Transport) -> None:
    """Over TCP, and over groups of torch.distributed beside the job's own. It is asked over TCP."""
    shadow = Shadow(wait_for_job=True)
    shadow.start()
    doors = [ShadowServer(shadow, ShadowAddress("127.0.0.1", 0, None, each)) for each in ("shadow", transport)]
    to, ask = str(doors[1].address), str(doors[0].address)
    try:
        results = worlds.run(2, "tests.training.shadow.shadow_ranks:distributed", tmp_path, steps=4, to=to, ask=ask)
    finally:
        for door in doors:
            door.close()
        shadow.stop()
    assert all(result["shadow"]["frames"] > 8 for result in results)  # each rank sends its share
    for step in range(1, 5):
        one, two = ucp.open(tmp_path / "shadow" / f"step{step}"), ucp.open(tmp_path / "saved" / f"step{step}")
        assert one.index.step == step
        assert list(one) == list(two)
        for name in one:
            assert sorted(one[name].kinds) == sorted(two[name].kinds)
            for kind in one[name].kinds:
                ours, its = (np.asarray(each[name].read(kind)).reshape(-1).view(np.uint8) for each in (one, two))
                assert np.array_equal(ours, its), (step, name, kind)


def test_a_killed_engine_goes_on_in_another_world(worlds: Worlds, tmp_path: Path, url: str) -> None:
    """One of two ranks dies in step 4. Three ranks go on from the shadow as from what the job saved of step 3."""
    spec = Spec(zero=2, config={**zero(2), **CLIP})
    with pytest.raises(JobError):
        worlds.run(2, FOLLOWED, tmp_path, spec=asdict(spec), steps=6, to=url, killed_in=4)
    other: dict[str, Any] = {"to": "deepspeed", "dp": 3, "zero": 3}
    ucp.convert(url, tmp_path / "of_shadow", **other)
    ucp.convert(tmp_path / "saved", tmp_path / "of_job", tag="step3", **other)
    found = ucp.diff(tmp_path / "of_shadow", tmp_path / "of_job")
    assert found.same, (found.atoms, found.settings)
    job = {"spec": asdict(Spec(zero=3, seed=9)), "steps": 2}
    ours = worlds.run(3, LOAD, tmp_path / "a", path=tmp_path / "of_shadow", **job)
    own = worlds.run(3, LOAD, tmp_path / "b", path=tmp_path / "of_job", **job)
    for rank in range(3):
        assert unequal(state(tmp_path / "a", "resumed", rank), state(tmp_path / "b", "resumed", rank)) == []
        assert ours[rank]["losses"] == own[rank]["losses"]
        assert ours[rank]["loaded"] == own[rank]["loaded"]
        assert ours[rank]["report"]["step"] == 3


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_that_is_killed_anywhere_goes_on(worlds: Worlds, tmp_path: Path, url: str, seed: int) -> None:
    """Killed at a moment that nobody chose, the job goes on from its shadow: in its own world with the very losses of
    a job that was never killed, in another world with that world's."""
    stage, killed_after = seed + 1, Random(seed).uniform(0.05, 0.6)
    spec = Spec(zero=stage, config={**zero(stage), **CLIP})
    with pytest.raises(JobError):
        worlds.run(2, TRAINED, tmp_path / "killed", spec=asdict(spec), steps=400, to=url, killed_after=killed_after)
    ucp.convert(url, tmp_path / "atoms")
    reached = ucp.open(tmp_path / "atoms").index.step
    assert reached is not None
    assert 1 <= reached < 400
    whole = worlds.run(2, TRAINED, tmp_path / "whole", spec=asdict(spec), steps=reached + 3)
    job = {"spec": asdict(Spec(zero=stage, seed=9, config={**zero(stage), **CLIP})), "steps": 3}
    again = worlds.run(2, LOAD, tmp_path / "again", path=tmp_path / "atoms", **job)
    mine = again[0]["losses"]
    assert list(mine) == [str(reached + n) for n in range(3)]
    assert mine.items() <= whole[0]["losses"].items()
    ucp.convert(url, tmp_path / "three", to="deepspeed", dp=3, zero=4 - stage)
    three = {"spec": asdict(Spec(zero=4 - stage, seed=9, config={**zero(4 - stage), **CLIP})), "steps": 3}
    other = worlds.run(3, LOAD, tmp_path / "other", path=tmp_path / "three", **three)
    assert all(rank["report"]["step"] == reached for rank in other)
    theirs = other[0]["losses"]
    assert list(theirs) == list(mine)
    assert np.allclose(*([float.fromhex(loss) for loss in losses.values()] for losses in (mine, theirs)), rtol=0.05)
