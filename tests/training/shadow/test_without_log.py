"""Steps that are sent only to a shadow, without a log; a shadow that has missed too many frames becomes stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow.follower import held, until, wait_for
from tests.training.shadow.jobs import Job, Pair
from ucp import settings
from ucp.errors import UcpError, UsageError
from ucp.training.shadow.protocol import ShadowAddress


class Alone(Job):
    """A job without a log, which continues from a checkpoint or from the state of the shadow."""

    def __init__(self, to: Any, base: Path | None, load: Path | None = None) -> None:
        self.build(33)
        if load is not None:
            self.step = ucp.load_into(load, self.net, self.optimizer).step or 0
        self.recorder = ucp.record(None, self.net, self.optimizer, to=to, base=None if base is None else str(base))


@pytest.fixture
def beginning(tmp_path: Path) -> Path:
    """A checkpoint of the initial state of the jobs here."""
    made = Job(tmp_path / "made")
    made.recorder.close()
    return tmp_path / "made" / "base" / "base-000000" / "atoms"


def test_without_a_log_the_shadow_has_every_step(tmp_path: Path, pairs: list[Pair], beginning: Path) -> None:
    """Nothing is written. A job that restarts from the shadow's state continues, and so does the shadow."""
    pairs.append(Pair())
    before = sorted(tmp_path.rglob("*"))
    job = Alone(pairs[0].url, beginning)
    for step in range(1, 6):
        job.train()
        wait_for(pairs[0].shadow, step)
        assert_same(state_of(held(pairs[0].shadow)), job.history[step])
    with pytest.raises(UsageError, match="another job is connected"):
        Alone(pairs[0].url, None)
    assert job.recorder.stats()["shadow"]["dropped"] == 0
    job.recorder.close()
    assert sorted(tmp_path.rglob("*")) == before
    ucp.convert(pairs[0].url, tmp_path / "five")
    until(lambda: pairs[0].shadow.status()["feeds"] == 0)
    again = Alone(pairs[0].url, None, tmp_path / "five")
    assert again.step == 5
    again.train(2)
    wait_for(pairs[0].shadow, 7)
    assert pairs[0].shadow.status()["epoch"] == 1
    assert_same(state_of(held(pairs[0].shadow)), again.history[7])
    again.recorder.close()


def test_a_shadow_that_has_missed_too_many_frames(
    tmp_path: Path, pairs: list[Pair], beginning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot start from the base, and does not retry. A new base helps."""
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(settings, "SHADOW_QUEUE_BYTES", 16 * 1024)
    first = Pair()
    job = Alone(first.url, beginning)
    job.train(2)
    wait_for(first.shadow, 2)
    address = first.server.address
    first.close()
    while not job.shadow_stats()["dropped"]:
        job.train(5)
        job.recorder.flush()
    pairs.append(Pair(address=address))
    job.train(1)
    until(lambda: "it has no log" in str(job.shadow_stats()["error"]))
    assert pairs[0].shadow.status()["condition"] == "loading"
    job.recorder.close()
    ucp.save(tmp_path / "new", job.net, job.optimizer)
    again = Alone(pairs[0].url, tmp_path / "new", tmp_path / "new")
    again.train(2)
    wait_for(pairs[0].shadow, again.step)
    assert_same(state_of(held(pairs[0].shadow)), again.history[again.step])
    again.recorder.close()


def test_an_interruption_that_was_too_long(pairs: list[Pair], beginning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadow keeps its step, and reports why it cannot continue."""
    monkeypatch.setattr(settings, "SHADOW_QUEUE_BYTES", 16 * 1024)
    pairs.append(Pair())
    job = Alone(pairs[0].url, beginning)
    job.train(2)
    wait_for(pairs[0].shadow, 2)
    sinks = job.recorder._sink
    assert sinks is not None
    sink = sinks._sinks[0]
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 600)
    elsewhere = ShadowAddress("127.0.0.1", 1)
    real, sink.address = sink.address, elsewhere
    pairs[0].server.disconnect_all()
    while not job.shadow_stats()["dropped"]:
        job.train(5)
        job.recorder.flush()
    sink.address = real
    with pytest.raises(UcpError, match="it has no log"):
        sink._connect()
    found = pairs[0].shadow.status()
    assert (found["condition"], found["step"]) == ("stale", 2)
    assert "it has no log" in found["reason"]
    assert_same(state_of(held(pairs[0].shadow)), job.history[2])
    job.recorder.close()


def test_options_that_need_a_log_are_refused(pairs: list[Pair], beginning: Path) -> None:
    pairs.append(Pair())
    job = Job.__new__(Job)
    job.build(33)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "a base needs a run folder"),
        ({"base": None, "base_every": 5}, "bases need a run folder"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            ucp.record(None, job.net, job.optimizer, to=pairs[0].url, **options)
    with pytest.raises(UcpError, match="no checkpoint of step 0"):
        ucp.record(None, job.net, job.optimizer, to=pairs[0].url, base=None)
    with pytest.raises(TypeError, match="path"):
        ucp.record(None, job.net, job.optimizer)
    alone = Alone(pairs[0].url, beginning)
    with pytest.raises(UsageError, match="bases need a run folder"):
        alone.recorder.base()
    alone.recorder.close()
