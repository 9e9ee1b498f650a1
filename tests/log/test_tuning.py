"""The tuner against closed forms, brute force over whole numbers, and simulated failures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp.errors import UsageError
from ucp.log.tuning import (
    RecordingCosts,
    Tuner,
    best_batch,
    best_interval,
    choose,
    waste,
    young_interval,
)

some = st.floats(1e-3, 1e2)


@st.composite
def costs(draw: st.DrawFn) -> RecordingCosts:
    return RecordingCosts(
        step=draw(st.floats(0.05, 10)),
        mtbf=draw(st.floats(100, 1e5)),
        base_stall=draw(some),
        sync_stall=draw(st.floats(0, 1)),
        record=draw(st.floats(0, 0.1)),
        replay=draw(some),
        restart=draw(some),
    )


@given(costs())
def test_closed_forms(c: RecordingCosts) -> None:
    every, batch = best_interval(c), best_batch(c)
    assert every == pytest.approx((2 * c.base_stall * c.mtbf / (c.replay * c.step)) ** 0.5, rel=1e-9)
    assert batch == pytest.approx((2 * c.sync_stall * c.mtbf) ** 0.5 / c.step, rel=1e-9)
    # At the best interval both sides waste the same, and no neighbour wastes less.
    assert waste(c, every, 1).bases == pytest.approx(waste(c, every, 1).replay, rel=1e-9)
    for near in (0.9, 1.1):
        assert waste(c, every * near, 1).total >= waste(c, every, 1).total * (1 - 1e-9)
        if batch > 0:
            assert waste(c, every, batch * near).total >= waste(c, every, batch).total * (1 - 1e-9)


@given(costs())
def test_without_a_log_it_is_youngs_formula(c: RecordingCosts) -> None:
    assert best_interval(replace(c, replay=c.step)) == pytest.approx(young_interval(c), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(costs())
def test_whole_numbers_are_as_good_as_brute_force(c: RecordingCosts) -> None:
    choice = choose(c, longest=3000)
    every = min(range(1, 3001), key=lambda k: waste(c, k, 1).total)
    assert abs(choice.base_every - every) <= 1
    batch = min(range(1, choice.base_every + 1), key=lambda b: waste(c, choice.base_every, b).total)
    assert abs(choice.batch_steps - batch) <= 1
    assert choice.waste.total <= waste(c, every, batch).total * (1 + 1e-9)


def simulate(c: RecordingCosts, every: int, batch: int, failures: int, seed: int) -> float:
    """Wasted time as a fraction of training time, step by step, with failures at random moments."""
    chance = random.Random(seed)
    useful = wasted = 0.0
    step = durable = base = 0
    until = chance.expovariate(1 / c.mtbf)
    left = failures
    while left:
        cost = c.step + c.record
        done = step + 1
        cost += c.sync_stall if done % batch == 0 else 0.0
        cost += c.base_stall if done % every == 0 else 0.0
        if until > cost:
            until -= cost
            step = done
            useful += c.step
            wasted += cost - c.step
            durable = done if done % batch == 0 else durable
            base = done if done % every == 0 else base
            continue
        left -= 1
        lost = (step - durable) * c.step
        useful -= lost
        wasted += until + lost + c.restart + c.replay * (durable - base)
        step = durable
        until = chance.expovariate(1 / c.mtbf)
    return wasted / (useful + wasted)


def test_predicted_waste_matches_simulated_failures() -> None:
    c = RecordingCosts(step=1.0, mtbf=4000.0, base_stall=3.0, sync_stall=0.05, record=0.01, replay=0.1, restart=30.0)
    choice = choose(c)
    measured = simulate(c, choice.base_every, choice.batch_steps, failures=1500, seed=1)
    assert measured == pytest.approx(choice.waste.total, rel=0.10)
    for worse in (choice.base_every // 8, choice.base_every * 8):
        assert simulate(c, worse, choice.batch_steps, failures=1500, seed=1) > measured


def test_limits_are_kept() -> None:
    c = RecordingCosts(step=1.0, mtbf=1e5, base_stall=1.0, replay=0.01, base_time=50, step_bytes=1e9, quota_bytes=300e9)
    assert choose(c).base_every == 300
    assert choose(replace(c, base_stall=0.0)).base_every == 50
    with pytest.raises(UsageError, match="may only hold 20"):
        choose(replace(c, quota_bytes=20e9))
    assert choose(replace(c, replay=0.0)).base_every == 300
    for wrong in ({"step": 0.0}, {"mtbf": -1.0}, {"replay": math.nan}, {"restart": -1.0}):
        with pytest.raises(UsageError):
            choose(replace(c, **wrong))


def test_the_tuner_changes_its_choice_only_if_that_saves_enough() -> None:
    c = RecordingCosts(step=1.0, mtbf=10_000.0, base_stall=2.0, replay=0.2)
    tuner = Tuner()
    first = tuner.update(c)
    assert tuner.update(replace(c, base_stall=2.1)).base_every == first.base_every
    longer = tuner.update(replace(c, base_stall=20.0))
    assert longer.base_every > 2 * first.base_every
    assert tuner.update(replace(c, base_stall=0.2)).base_every < first.base_every
