"""A shadow that follows the files of a log has the state of the job after every step, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.replay.logged_job import Run, assert_same, start, state_of
from tests.training.shadow.follower import held, until, wait_for
from ucp import settings
from ucp.errors import UsageError
from ucp.log.epoch_manifest import ParentEpoch
from ucp.training.shadow.shadow import Shadow


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split tiny tensors like large ones: several blocks per tensor, in several chunks."""
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 128)


class Shadows:
    """Shadows that are stopped when the test ends."""

    def __init__(self) -> None:
        self.started: list[Shadow] = []

    def __call__(self, *arguments: Any, **options: Any) -> Shadow:
        shadow = Shadow(*arguments, **options)
        self.started.append(shadow)
        shadow.start()
        return shadow


@pytest.fixture
def shadows() -> Iterator[Shadows]:
    made = Shadows()
    yield made
    for shadow in made.started:
        shadow.stop()


OPTIMIZERS: dict[str, Any] = {
    "torch.adamw.single": None,
    "torch.adamw.fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "torch.adam.single": lambda groups: torch.optim.Adam(groups, foreach=False, amsgrad=False),
    "torch.sgd.single": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False),
    "torch.adagrad.single": lambda groups: torch.optim.Adagrad(groups, foreach=False),
}


@pytest.mark.parametrize("kernel", OPTIMIZERS)
@pytest.mark.parametrize("streams", [1, 2])
def test_every_step_equals_that_of_the_job(tmp_path: Path, shadows: Shadows, kernel: str, streams: int) -> None:
    """A skipped step, a parameter without gradient in some steps, tensors of several chunks, two ranks."""
    run = start(tmp_path, OPTIMIZERS[kernel], kernel, streams=streams, scale=0.37)
    run.save(0)
    shadow = shadows(None, tmp_path, jobs=streams)
    for step in range(1, 13):
        run.train(1)
        assert wait_for(shadow, step)["lag_steps"] == 0
        found = held(shadow)
        assert found.step == step
        assert_same(state_of(found), run.history[step])


def test_a_late_shadow_catches_up(tmp_path: Path, shadows: Shadows) -> None:
    """Started late, from the first base or from the newest."""
    run = start(tmp_path)
    base = run.save(0)
    run.train(5)
    run.save(1)
    run.train(2)
    both = [shadows(base, tmp_path), shadows(None, tmp_path)]
    for step in (7, 8, 9):
        for shadow in both:
            wait_for(shadow, step)
            assert_same(state_of(held(shadow)), run.history[step])
        run.train(1)


def test_a_step_is_applied_when_all_ranks_have_it(tmp_path: Path, shadows: Shadows) -> None:
    """The last step of one rank alone is not applied before the other rank has it."""
    run = start(tmp_path, streams=2)
    run.save(0)
    run.train(2)
    shadow = shadows(None, tmp_path)
    wait_for(shadow, 2)
    path = run.writers[1].path
    assert path is not None
    run.train(1)
    kept = path.read_bytes()
    end = run.writers[1].end
    path.write_bytes(kept[: end - 64])  # the commit of the second rank is gone
    late = shadows(None, tmp_path)
    wait_for(late, 2)
    time.sleep(0.3)  # enough time to apply an incomplete step, if it did
    assert late.status()["step"] == 2
    assert_same(state_of(held(late)), run.history[2])
    path.write_bytes(kept)
    wait_for(late, 3)
    assert_same(state_of(held(late)), run.history[3])


def test_a_snapshot_does_not_change_with_later_steps(tmp_path: Path, shadows: Shadows) -> None:
    run = start(tmp_path)
    run.save(0)
    run.train(3)
    shadow = shadows(None, tmp_path)
    wait_for(shadow, 3)
    alone = shadow.status()["state_bytes"]
    old = held(shadow)
    run.train(4)
    wait_for(shadow, 7)
    assert_same(state_of(old), run.history[3])
    assert_same(state_of(held(shadow)), run.history[7])
    assert shadow.status()["state_bytes"] == 2 * alone  # one copy of each stretch, however many steps


def test_the_state_matches_the_digests_of_the_job(tmp_path: Path, shadows: Shadows) -> None:
    run = start(tmp_path, streams=2)
    run.save(0)
    shadow = shadows(None, tmp_path)
    run.train(5)
    run.digest()
    wait_for(shadow, 5)
    until(lambda: shadow.status()["proven_step"] == 5)
    with torch.no_grad():
        run.net.large[0, 0] += 1.0  # something that the log does not know
    run.train(1)
    run.digest()
    wait_for(shadow, 6)
    until(lambda: not shadow.status()["exact"])
    found = shadow.status()
    assert not found["exact"]
    assert "large" in found["labels"][0]
    assert any(note.id == "approximate" for note in held(shadow).notes)


def test_a_new_epoch_continues_from_the_state(tmp_path: Path, shadows: Shadows) -> None:
    """The job restarts at its last step with other streams; only the log is read."""
    run = start(tmp_path)
    run.save(0)
    run.train(4)
    shadow = shadows(None, tmp_path)
    wait_for(shadow, 4)
    run.epoch, run.streams = 1, 2
    run.open_epoch(ParentEpoch(0, 4))
    run.train(3)
    found = wait_for(shadow, 7)
    assert found["epoch"] == 1
    assert found["streams"] == 2
    assert_same(state_of(held(shadow)), run.history[7])


def test_a_new_epoch_from_an_older_step(tmp_path: Path, shadows: Shadows) -> None:
    """The job restarts at an older step than the shadow has."""
    run = start(tmp_path)
    run.save(0)
    run.train(3)
    kept = {name: p.detach().clone() for name, p in run.named()}
    states = {name: {k: v.clone() for k, v in run.optimizer.state[p].items()} for name, p in run.named()}
    run.train(3)
    shadow = shadows(None, tmp_path)
    wait_for(shadow, 6)
    for name, p in run.named():
        with torch.no_grad():
            p.copy_(kept[name])
        run.optimizer.state[p] = states[name]
    run.step, run.epoch, run.scale = 3, 1, 0.5
    run.open_epoch(ParentEpoch(0, 3))
    run.train(1)
    until(lambda: shadow.status()["epoch"] == 1)
    wait_for(shadow, 4)
    assert_same(state_of(held(shadow)), run.history[4])


def test_a_slow_shadow_starts_again_after_segments_were_dropped(tmp_path: Path, shadows: Shadows) -> None:
    """Segments were dropped that a slow shadow still needs: it starts again from the newest base."""
    run = start(tmp_path)
    base = run.save(0)
    run.train(2)
    slow = shadows(base, tmp_path)
    wait_for(slow, 2)
    feed = slow.follower.feeds[0]  # type: ignore[union-attr]
    tail = feed.tail
    assert tail is not None
    read, looked = tail.poll, threading.Event()

    def look_away(*_: Any) -> int:
        looked.set()
        return 0

    tail.poll = look_away  # type: ignore[method-assign]  # the log is not read …
    assert looked.wait(120)  # … and no read is in progress
    run.train(2)
    run.save(1)
    run.writers[0].close_segment()
    run.train(1)
    for path in sorted((tmp_path / "log").rglob("*.ugl"))[:-1]:
        path.unlink()
    tail.poll = read  # type: ignore[method-assign]
    wait_for(slow, 5)
    assert_same(state_of(held(slow)), run.history[5])
    assert "base-000001" in slow.status()["base"]


def test_gradients_of_an_optimizer_without_kernel_are_refused(tmp_path: Path) -> None:
    run = start(tmp_path, kernel="somebody.Own")
    run.save(0)
    with pytest.raises(UsageError, match="cannot be replayed"):
        Shadow(None, tmp_path).start()


def test_a_shadow_converts_like_any_checkpoint(tmp_path: Path, shadows: Shadows) -> None:
    """Groups, counters and extras are those of the step, as in a merged log."""
    run: Run = start(tmp_path / "run")
    run.save(0)
    shadow = shadows(None, tmp_path / "run")
    run.train(6)
    wait_for(shadow, 6)
    found = held(shadow)
    merged = ucp.open(tmp_path / "run", log=tmp_path / "run", step=6).index
    assert found.groups == merged.groups
    assert found.extras.trees.keys() == merged.extras.trees.keys()
    assert found.details["replay"]["exact"]
