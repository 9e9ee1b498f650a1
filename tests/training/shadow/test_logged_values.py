"""Values that are logged as they are also reach shadows: buffers, and states of optimizers without kernel."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import ucp
from tests.training.shadow.follower import held, until, wait_for
from tests.training.shadow.jobs import Pair
from tests.training.state_jobs import NormedNet, StateJob, assert_same, unreplayable_optimizers
from ucp import settings
from ucp.core.checkpoint import Checkpoint, Rank
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.engine.work_shard import WorkShard
from ucp.errors import UcpError, UsageError
from ucp.log.codecs import EncodedBlock, Encoding
from ucp.log.frames import BadBytesError, FrameHeader, FrameType, checksum
from ucp.log.payloads import pack_table, table_bytes
from ucp.log.segment_writer import build_table
from ucp.log.stream_schema import FIRST_KINDS, LogBlock, OptimizerTensor, StreamSchema, shaped_kind
from ucp.training.shadow.protocol import ShadowAddress
from ucp.training.shadow.shadow import Shadow
from ucp.training.shadow.step_assembler import BlockTables
from ucp.views import OpenCheckpoint

torch = pytest.importorskip("torch")

WAYS = {
    "tail": None,
    "tcp": ShadowAddress("127.0.0.1", 0),
    "shm": ShadowAddress("", 0, None, "shm"),
    "gloo": ShadowAddress("127.0.0.1", 0, None, "gloo"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split tiny tensors into several blocks and chunks, and reconnect at once."""
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 32)
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(settings, "SHADOW_HEARTBEAT_SECONDS", 0.02)


class Job(StateJob):
    """A job whose recorder is closed at the end of the test."""

    made: ClassVar[list[StateJob]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)


@pytest.fixture(autouse=True)
def _closed(_no_thread_stays: None) -> Iterator[None]:
    yield
    while Job.made:
        Job.made.pop().recorder.close()


def makers() -> dict[str, Any]:
    return {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), **unreplayable_optimizers()}


def state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every state of every parameter, and every buffer."""
    return {
        f"{name}|{kind}": torch.as_tensor(parameter.read(kind, as_torch=True)).clone()
        for name, parameter in OpenCheckpoint(checkpoint).parameters.items()
        for kind in parameter.kinds
    }


def without_log(shadow: Shadow) -> None:
    """Remove the log, so that everything arrives over the connection."""
    assert shadow.follower is not None
    shadow.follower.run = None
    for feed in shadow.follower.feeds.values():
        feed.tail = None


@pytest.mark.parametrize(
    "name, way",
    [(name, way) for name in ("adamw", "adafactor") for way in WAYS]
    + [(name, "tcp") for name in ("rmsprop", "nadam", "asgd")],
)
def test_every_step_equals_that_of_the_job(tmp_path: Path, pairs: list[Pair], name: str, way: str) -> None:
    """A batch norm, a buffer that is replaced, parameters without gradient: all equal the job's after every step."""
    address = WAYS[way]
    if address is None:
        job = Job(tmp_path, makers()[name], model=NormedNet())
        pairs.append(Pair(None, tmp_path))
    else:
        if way == "shm":
            address = ShadowAddress(f"test-{secrets.token_hex(8)}", 0, None, "shm")
        pairs.append(Pair(address=address))
        job = Job(tmp_path, makers()[name], model=NormedNet(), to=pairs[0].url)
        without_log(pairs[0].shadow)
        hello = job.recorder._sink._sinks[0]._hello
        hello["run"] = None  # nor with the names of states
    for step in range(1, 6):
        job.train(1)
        job.recorder.flush()
        wait_for(pairs[0].shadow, step)
        assert_same(state_of(held(pairs[0].shadow)), job.history[step])
    job.recorder.close()
    until(lambda: pairs[0].shadow.status()["proven_step"] == 5)
    found = held(pairs[0].shadow)
    assert found.details["replay"]["exact"]
    assert not [note for note in found.notes if note.id == "buffers"]


@pytest.mark.parametrize("name", ["adamw", "nadam"])
def test_a_snapshot_of_logged_values_does_not_change(tmp_path: Path, pairs: list[Pair], name: str) -> None:
    pairs.append(Pair())
    job = Job(tmp_path, makers()[name], model=NormedNet(), to=pairs[0].url)
    job.train(3)
    wait_for(pairs[0].shadow, 3)
    old = held(pairs[0].shadow)
    job.train(4)
    wait_for(pairs[0].shadow, 7)
    assert_same(state_of(old), job.history[3])
    ucp.convert(pairs[0].url, tmp_path / "out", jobs=1)
    assert_same(state_of(ucp.open(tmp_path / "out").index), job.history[7])
    job.recorder.close()


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_late_shadow_and_a_restarted_job(tmp_path: Path, pairs: list[Pair], name: str) -> None:
    """From the middle of a log, and into the next epoch with the current state."""
    job = Job(tmp_path, makers()[name], model=NormedNet())
    job.train(3)
    job.recorder.flush()
    pairs.append(Pair(None, tmp_path))
    wait_for(pairs[0].shadow, 3)
    job.train(2)
    job.recorder.close()
    wait_for(pairs[0].shadow, 5)
    job.recorder = ucp.record(tmp_path, job.model, job.optimizer, base=None, step=5, to=pairs[0].url)
    until(lambda: pairs[0].shadow.status()["epoch"] == 1)
    assert_same(state_of(held(pairs[0].shadow)), job.history[5])
    job.train(2)
    wait_for(pairs[0].shadow, 7)
    assert_same(state_of(held(pairs[0].shadow)), job.history[7])
    job.recorder.close()


def test_states_without_a_log(tmp_path: Path, pairs: list[Pair]) -> None:
    """Only the shadow has the states; a job that restarts from them continues where it was."""
    beginning = Job(tmp_path / "made", makers()["rmsprop"], model=NormedNet())
    beginning.recorder.close()
    base = tmp_path / "made" / "base" / "base-000000" / "atoms"
    pairs.append(Pair())
    job = beginning
    job.recorder = ucp.record(None, job.model, job.optimizer, to=pairs[0].url, base=str(base))
    job.train(3)
    wait_for(pairs[0].shadow, 3)
    assert_same(state_of(held(pairs[0].shadow)), job.history[3])
    job.recorder.close()
    until(lambda: pairs[0].shadow.status()["feeds"] == 0)
    job.recorder = ucp.record(None, job.model, job.optimizer, to=pairs[0].url, base=None, step=3)
    job.train(2)
    wait_for(pairs[0].shadow, 5)
    assert pairs[0].shadow.status()["epoch"] == 1
    assert_same(state_of(held(pairs[0].shadow)), job.history[5])
    job.recorder.close()


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_shards_of_logged_values(tmp_path: Path, pairs: list[Pair], name: str) -> None:
    """Each gets its part of the states, and all get small ones. Together they are the state of the job."""
    pairs += [Pair(shard=WorkShard(number, 2)) for number in range(2)]
    whole = Pair()
    pairs.append(whole)
    job = Job(tmp_path, makers()[name], model=NormedNet(), to=[pair.url for pair in pairs[:2]])
    other = Job(tmp_path / "other", makers()[name], model=NormedNet(), to=whole.url)
    for pair in pairs[:2]:
        without_log(pair.shadow)
    for step in range(1, 4):
        job.train(1)
        other.train(1)
        for pair in pairs:
            wait_for(pair.shadow, step)
        opened = ucp.open(",".join(pair.url for pair in pairs[:2]))
        assert_same(state_of(opened.index), job.history[step])
        del opened
    job.recorder.close()
    other.recorder.close()
    most = other.recorder.stats()["shadow"]["bytes"]
    assert all(one["bytes"] < most for one in job.recorder.stats()["shadow"]["shadows"].values())


def test_state_names_that_are_known_only_from_the_log(tmp_path: Path, pairs: list[Pair]) -> None:
    """The job connected before its optimizer had created states; their names are only in the log."""
    pairs.append(Pair())
    job = Job(tmp_path, makers()["adafactor"], model=NormedNet(), to=pairs[0].url)
    follower = pairs[0].shadow.follower
    assert follower is not None
    assert follower.lacks_state_kinds
    sinks = job.recorder._sink
    assert sinks is not None
    sinks._sinks[0].offer = lambda *_: None  # type: ignore[method-assign]
    pairs[0].server.disconnect_all()
    job.train(3)
    job.recorder.flush()
    wait_for(pairs[0].shadow, 3)
    assert not follower.lacks_state_kinds
    assert_same(state_of(held(pairs[0].shadow)), job.history[3])
    job.recorder.close()


def test_interrupted_connections(tmp_path: Path, pairs: list[Pair]) -> None:
    """Before the names of states are sent, and repeatedly."""
    pairs.append(Pair())
    job = Job(tmp_path, makers()["nadam"], model=NormedNet(), to=pairs[0].url)
    for step in range(1, 9):
        pairs[0].server.disconnect_all()
        job.train(1)
        if step % 3 == 0:
            wait_for(pairs[0].shadow, step)
            assert_same(state_of(held(pairs[0].shadow)), job.history[step])
    wait_for(pairs[0].shadow, 8)
    assert_same(state_of(held(pairs[0].shadow)), job.history[8])
    job.recorder.close()


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_a_base_that_was_spread_over_several_steps(
    tmp_path: Path, pairs: list[Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log brings its parts to one step, and the shadow continues from there. Without a log it is refused."""
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    model = NormedNet()
    del model.phase  # a snapshot cannot be spread over steps in which tensors are replaced
    job = Job(tmp_path / "run", makers()[name], model=model)
    job.train(2)
    with ucp.snapshot(tmp_path / "spread", job.model, job.optimizer, spread=3, busy="wait") as snapshots:
        job.train(2)
        snapshots.take()
        job.train(2)
        snapshots.wait()
    base = snapshots.latest
    job.recorder.flush()
    with pytest.raises(UsageError, match="spread over steps 4 to 6"):
        ucp.open(base)
    with pytest.raises(UsageError, match="spread over steps 4 to 6"):
        Shadow(base, wait_for_job=True).start()
    pairs.append(Pair(base, tmp_path / "run"))
    for step in range(6, 9):
        job.recorder.flush()
        wait_for(pairs[0].shadow, step)
        found = state_of(held(pairs[0].shadow))
        assert_same(found, job.history[step])
        job.train(1)
    found = pairs[0].shadow.status()
    assert found["base"] == str(base)
    opened = ucp.open(pairs[0].url)
    assert opened.index.steps == {}
    job.recorder.close()


def test_a_difference_to_another_step_is_not_applied(tmp_path: Path, pairs: list[Pair]) -> None:
    """The shadow keeps its step, reports the reason, and starts again when the job reconnects."""
    pairs.append(Pair())
    job = Job(tmp_path, makers()["rmsprop"], model=NormedNet(), to=pairs[0].url)
    job.train(3)
    wait_for(pairs[0].shadow, 3)
    follower = pairs[0].shadow.follower
    assert follower is not None
    follower.state.tensors[0].full_at = 4  # as if something had been taken that the job does not know of
    kept = held(pairs[0].shadow)
    job.train(1)
    until(lambda: any("as a difference to step 3" in note for note in pairs[0].notes))
    assert_same(state_of(kept), job.history[3])

    def is_live() -> bool:
        job.train(1)  # a connection that is gone is found out when something is sent
        return pairs[0].shadow.status()["condition"] == "live"

    until(is_live)
    job.recorder.close()
    wait_for(pairs[0].shadow, len(job.history) - 1)
    assert_same(state_of(held(pairs[0].shadow)), job.history[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Tables that lie


def made_table(frame: FrameType, *blocks: EncodedBlock) -> tuple[FrameHeader, memoryview]:
    table, parts = build_table(blocks)
    head = pack_table(table, 0)
    payload = memoryview(b"".join([head, *parts]))
    total = checksum(memoryview(head)[: table_bytes(len(table))])
    return FrameHeader(frame, 0, 0, 0, 0, 1, len(payload), total, 4096), payload


def entry(block: int, state: int, count: int, encoding: Encoding = Encoding.RAW) -> EncodedBlock:
    data = np.zeros(count * 4 if encoding == Encoding.RAW else 0, np.uint8)
    return EncodedBlock(block, encoding, FLOAT32, count, data, state)


def test_tables_are_compared_with_the_schema() -> None:
    region = Region.all_of((10,))
    tensor = OptimizerTensor(10, 0, "float32", "float32", ("w",))
    schema = StreamSchema(
        0, Rank(), [tensor], [LogBlock(0, 0, region, 0, 0, 10)], [LogBlock(0, 0, Region.all_of((4,)), -1, 0, 4)]
    )
    kinds = [*FIRST_KINDS, "square_avg", shaped_kind("row", (3,))]
    tables = BlockTables(schema, kinds)
    fine = made_table(FrameType.FULL, entry(0, 1, 10), entry(0, 2, 4), entry(0, 3, 10), entry(0, 4, 3))
    assert [block.state for block in tables.read(*fine).found] == [1, 2, 3, 4]
    assert fine[0].length <= tables.payload_limit(FrameType.FULL)
    wrong = [
        (FrameType.FULL, [entry(0, 5, 10)], "state 5 has no name"),
        (FrameType.FULL, [entry(1, 3, 10)], "block 1 is not in the stream"),
        (FrameType.FULL, [entry(1, 2, 4)], "block 1 is not in the stream"),
        (FrameType.FULL, [entry(0, 2, 10)], "block 0 with 10 elements"),
        (FrameType.FULL, [entry(0, 4, 10)], "block 0 with 10 elements"),
        (FrameType.FULL, [entry(0, 3, 10), entry(0, 3, 10)], "twice"),
        (FrameType.FULL, [entry(0, 3, 10, Encoding.UNCHANGED)], "is not allowed in a FULL"),
        (FrameType.DIFF, [entry(0, 3, 10)], "is not allowed in a DIFF"),
        (FrameType.GRAD, [entry(0, 0, 10, Encoding.UNCHANGED)], "is not allowed in a GRAD"),
        (FrameType.GRAD, [entry(0, 0, 9)], "block 0 with 9 elements"),
    ]
    for frame, blocks, message in wrong:
        with pytest.raises(BadBytesError, match=message):
            tables.read(*made_table(frame, *blocks))
    unknown = BlockTables(schema)
    with pytest.raises(BadBytesError, match="state 3 has no name"):
        unknown.read(*fine)
    unknown.set_kinds(kinds)
    assert len(unknown.read(*fine).found) == 4


def test_a_manifest_that_needs_too_much_memory_is_refused(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factored state cannot be larger than the parameters of the job."""
    from ucp.log.epoch_manifest import EpochManifest
    from ucp.training.recording import epoch_start

    pairs.append(Pair())
    real = epoch_start.all_gather

    def larger(value: Any) -> Any:
        gathered = real(value)
        if isinstance(gathered[0], EpochManifest):
            gathered[0].state_kinds = [*FIRST_KINDS, shaped_kind("row", (1 << 40,))]
        return gathered

    monkeypatch.setattr(epoch_start, "all_gather", larger)
    with pytest.raises(UcpError, match="more elements than any parameter"):
        Job(tmp_path, makers()["rmsprop"], model=NormedNet(), to=pairs[0].url)
