"""Several shadows of one job, each with a shard of the state: together they are one checkpoint of one step."""

from __future__ import annotations

import contextlib
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucp
from tests.replay.logged_job import assert_same, start, state_of
from tests.training.shadow.follower import until, wait_for
from tests.training.shadow.jobs import Job, Pair
from ucp import settings
from ucp.core.checkpoint import Mesh, Rank
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, UsageError
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint
from ucp.log.stream_schema import OptimizerTensor, StreamSchema
from ucp.training.shadow.client import status
from ucp.training.shadow.step_assembler import stream_shards


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split tensors of a few hundred elements."""
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 64)


def shards(count: int, *arguments: Any, **options: Any) -> list[Pair]:
    return [Pair(*arguments, shard=WorkShard(number, count), **options) for number in range(count)]


def urls(pairs: list[Pair]) -> str:
    return ",".join(pair.url for pair in pairs)


@pytest.mark.parametrize("count", [2, 3])
def test_every_step_from_all_shards(tmp_path: Path, pairs: list[Pair], count: int) -> None:
    """Without the log: each has a part of the state, gets a part of the gradients, and all together are one step."""
    pairs += shards(count)
    whole = Pair()
    pairs.append(whole)
    job = Job(tmp_path / "run", to=[pair.url for pair in pairs[:count]])
    other = Job(tmp_path / "other", to=whole.url)
    for pair in pairs[:count]:
        for feed in pair.shadow.follower.feeds.values():  # type: ignore[union-attr]
            feed.tail = None
    for step in range(1, 6):
        job.train()
        for pair in pairs[:count]:
            wait_for(pair.shadow, step)
        opened = ucp.open(urls(pairs[:count]))
        assert opened.index.step == step
        assert_same(state_of(opened.index), job.history[step])
        del opened
    other.train(5)
    job.recorder.flush()
    other.recorder.flush()
    wait_for(whole.shadow, 5)
    found = [status(pair.url) for pair in pairs]
    assert [one["share"] for one in found] == [*([number + 1, count] for number in range(count)), [1, 1]]
    everything = found[-1]["state_bytes"]
    assert sum(one["state_bytes"] for one in found[:-1]) == everything
    assert all(abs(one["state_bytes"] - everything / count) < 0.2 * everything for one in found[:-1])
    sent = job.shadow_stats()["shadows"]
    assert all(sent[pair.url]["bytes"] < other.shadow_stats()["bytes"] for pair in pairs[:count])
    job.recorder.close()
    other.recorder.close()
    ucp.convert(urls(pairs[:count]), tmp_path / "out")
    assert ucp.verify(tmp_path / "out", "deep").ok
    assert_same(state_of(ucp.open(tmp_path / "out").index), job.history[5])


def test_a_shard_that_is_behind(tmp_path: Path, pairs: list[Pair]) -> None:
    """The job is gone, and the last steps have reached only one of the shadows: an older step is read."""
    pairs += shards(2)
    job = Job(tmp_path / "run", to=urls(pairs))
    for pair in pairs:
        for feed in pair.shadow.follower.feeds.values():  # type: ignore[union-attr]
            feed.tail = None
    job.train(3)
    for pair in pairs:
        wait_for(pair.shadow, 3)
    sinks = job.recorder._sink
    assert sinks is not None
    sinks._sinks[1].offer = lambda *_: None  # type: ignore[method-assign]  # what the second was to get is lost
    job.train(4)
    job.recorder.flush()
    wait_for(pairs[0].shadow, 7)
    pairs[1].shadow.fail("cut off")  # what it has kept back it still gives
    opened = ucp.open(urls(pairs))
    assert opened.index.step == 3
    assert_same(state_of(opened.index), job.history[3])
    job.recorder.close()


def test_shards_without_a_common_step(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """One is too far ahead and the other cannot follow: an error after a timeout."""
    monkeypatch.setattr(settings, "SHADOW_RETAINED_STEPS", 2)
    monkeypatch.setattr(settings, "SHADOW_ALIGN_SECONDS", 0.2)
    pairs += shards(2)
    job = Job(tmp_path / "run", to=urls(pairs))
    for pair in pairs:
        for feed in pair.shadow.follower.feeds.values():  # type: ignore[union-attr]
            feed.tail = None
    sinks = job.recorder._sink
    assert sinks is not None
    sinks._sinks[1].offer = lambda *_: None  # type: ignore[method-assign]
    job.train(8)
    job.recorder.flush()
    wait_for(pairs[0].shadow, 8)
    until(lambda: pairs[0].shadow.status()["applied_step"] == 6)
    with pytest.raises(InconsistentError, match=r"no step in common: .* has steps 6 to 8.* steps 0 to 0"):
        ucp.open(urls(pairs))
    job.recorder.close()


def test_a_pin_expires(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that pins the steps and then sends nothing more delays the shadow only for a limited time."""
    monkeypatch.setattr(settings, "SHADOW_RETAINED_STEPS", 1)
    monkeypatch.setattr(settings, "SHADOW_ALIGN_SECONDS", 600)
    pairs += shards(2)
    job = Job(tmp_path / "run", to=urls(pairs))
    pin = pairs[0].shadow.pin()
    job.train(6)
    for pair in pairs:
        wait_for(pair.shadow, 6)
    until(lambda: pairs[1].shadow.status()["applied_step"] == 5)
    assert (pin.status()["applied"], pin.status()["complete"]) == (0, 6)
    monkeypatch.setattr(settings, "SHADOW_ALIGN_SECONDS", 0)
    pin.status()
    until(lambda: pairs[0].shadow.status()["applied_step"] == 5)
    with pytest.raises(UsageError, match="has step 5, not step 3"):
        pin.snapshot(3)
    pin.close()
    job.recorder.close()


def test_shards_follow_a_log_and_a_restarted_job(tmp_path: Path, pairs: list[Pair]) -> None:
    """From files; the state continues into another epoch of the same layout without a new base."""
    run = start(tmp_path, streams=2)
    run.save(0)
    run.train(3)
    pairs += shards(2, None, tmp_path)
    run.train(4)
    for pair in pairs:
        wait_for(pair.shadow, 7)
    before = ucp.open(urls(pairs))
    assert_same(state_of(before.index), run.history[7])
    from ucp.log.epoch_manifest import ParentEpoch

    run.epoch = 1
    run.open_epoch(ParentEpoch(0, 7))
    run.train(2)
    for pair in pairs:
        wait_for(pair.shadow, 9)
        assert pair.shadow.status()["epoch"] == 1
    opened = ucp.open(urls(pairs))
    assert_same(state_of(opened.index), run.history[9])
    assert_same(state_of(before.index), run.history[7])  # a checkpoint of the previous epoch stays as it was


def test_a_missing_shard_is_refused(tmp_path: Path, pairs: list[Pair]) -> None:
    pairs += shards(3)
    for wrong, message in (
        ([0], r"shard 2/3, 3/3 is missing"),
        ([0, 2], r"shard 2/3 is missing"),
        ([], "twice, or no shadow"),
    ):
        with pytest.raises(UsageError, match=message):
            Job(tmp_path / f"run{len(wrong)}", to=[pairs[number].url for number in wrong])
    assert all(pair.shadow.status()["condition"] == "loading" for pair in pairs)  # none of them was taken by that run
    job = Job(tmp_path / "run", to=urls(pairs))
    job.train(1)
    for pair in pairs:
        wait_for(pair.shadow, 1)
    with pytest.raises(UsageError, match=r"shard 2/3, 3/3 is missing"):
        ucp.open(pairs[0].url)
    with pytest.raises(UsageError, match=r"shard 3/3 is missing"):
        ucp.open(urls(pairs[:2]))
    with pytest.raises(UsageError, match=r"twice"):
        ucp.open(urls([*pairs, pairs[0]]))
    job.recorder.close()
    pairs.append(Pair())
    with pytest.raises(UsageError, match=r"do not belong together"):
        Job(tmp_path / "mixed", to=[pairs[0].url, pairs[-1].url])


def test_digests_prove_shards_of_whole_tensors(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard without partial tensors can be proven; the checkpoint is proven if all shards are."""
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 1 << 20)
    pairs += shards(2)
    job = Job(tmp_path / "run", to=urls(pairs))
    job.train(4)
    job.recorder.close()
    for pair in pairs:
        wait_for(pair.shadow, 4)
    details: Any = {}
    end = time.monotonic() + 120
    while details.get("proven_step") != 4:
        assert time.monotonic() < end, details
        with contextlib.suppress(InconsistentError):
            details = ucp.open(urls(pairs)).index.details["replay"]
    assert details["exact"]


@given(st.lists(st.lists(st.integers(1, 900), max_size=5), min_size=1, max_size=4), st.integers(1, 6))
def test_shards_cover_every_element_once(numels: list[list[int]], count: int) -> None:
    """For any tensors; and no shard has more than its part plus a chunk and a fifth."""
    streams = [
        StreamSchema(number, Rank(0, 0, number), [OptimizerTensor(n, 0, "float32", "float32", ()) for n in tensors])
        for number, tensors in enumerate(numels)
    ]
    manifest = EpochManifest("run", 0, 0, Mesh(dp=len(streams)), KernelFingerprint("x"), "", [], [], streams)
    total = sum(map(sum, numels))
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number in range(count):
        mine = stream_shards(manifest, WorkShard(number, count))
        size = 0
        for schema in streams:
            for index, tensor in enumerate(schema.tensors):
                begin, end = mine[schema.stream].of_tensor(index, tensor.numel)
                if begin < end:
                    held.setdefault((schema.stream, index), []).append((begin, end))
                    size += end - begin
        assert size <= total / count * 1.2 + settings.LOG_BLOCK_ELEMENTS
    for schema in streams:
        for index, tensor in enumerate(schema.tensors):
            pieces = held[schema.stream, index]
            assert pieces[0][0] == 0
            assert pieces[-1][1] == tensor.numel
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
