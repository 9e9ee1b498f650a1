"""The writer's thread: batches, back-pressure, rotation, retention, failing disks, and being killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.log.small_logs import begin, contents, expected, put, record, segments, small_manifest, write_log
from ucp import settings
from ucp.core.checkpoint import Rank
from ucp.core.region import Region
from ucp.errors import StorageError, UsageError
from ucp.log import segment_writer
from ucp.log.epoch_manifest import ParentEpoch, write_manifest
from ucp.log.frames import FrameType
from ucp.log.maintenance import apply_cuts, plan_compact, plan_truncate, remove_empty_epochs, resume_stream
from ucp.log.payloads import StateDigest, pack_digests
from ucp.log.reader import Log, epoch_folder, stream_folder
from ucp.log.stream_schema import LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.log.writer import StreamWriter


def test_steps_are_written_and_become_durable(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    for step in range(1, 11):
        put(writer, step, skipped=step == 4)
    assert writer.flush() == 10
    writer.append(FrameType.DIGEST, 10, pack_digests([StateDigest(0, "master", "ab" * 16)]))
    writer.close()
    with Log.open(tmp_path, "strict") as log:
        assert contents(log) == expected(range(1, 11), skipped=(4,))
        stream = log.epochs[0].streams[0]
        assert stream.scan.ended
        assert stream.digests()[10][0].value == "ab" * 16
    assert writer.stats.steps == 10
    assert writer.stats.bytes > 0


def test_a_step_becomes_durable_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOG_BATCH_SECONDS", 0.05)
    writer = begin(tmp_path, slots=4)
    put(writer, 1)
    deadline = time.monotonic() + 10
    while writer.durable_step < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer.durable_step == 1
    writer.close()


def test_several_steps_share_a_sync(tmp_path: Path) -> None:
    writer = begin(tmp_path, slots=8)
    for step in range(1, 17):
        put(writer, step)
    writer.close()
    assert writer.durable_step == 16
    assert writer.stats.syncs <= 4


def test_the_training_loop_waits_while_all_slots_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    real = os.fdatasync

    def slow(fd: int) -> None:
        held.wait(10)
        real(fd)

    monkeypatch.setattr(segment_writer.os, "fdatasync", slow)
    writer = begin(tmp_path, slots=2)
    put(writer, 1)
    put(writer, 2)
    assert writer.stats.stalls == 0
    threading.Timer(0.1, held.set).start()
    put(writer, 3)
    assert writer.stats.stalls == 1
    assert writer.stats.stall_seconds > 0.05
    writer.close()
    assert contents(Log.open(tmp_path, "strict")) == expected(range(1, 4))


def test_segments_rotate_and_old_ones_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOG_SEGMENT_BYTES", 6000)
    writer = begin(tmp_path)
    for step in range(1, 13):
        put(writer, step)
    writer.flush()
    count = len(segments(tmp_path))
    assert count > 3
    writer.rotate()
    writer.drop_segments_upto(7)
    writer.flush()
    put(writer, 13)
    writer.close()
    with Log.open(tmp_path, "strict") as log:
        steps = log.epochs[0].steps
        assert 1 < steps.start <= 8
        assert steps.stop == 14
        assert writer.stats.dropped_segments > 1
        one = next(iter(log.epochs[0].streams[0].scan.steps.values()))
        begin_of_one = min(ref.header.offset for ref in one.grads) - 64 - 128
        assert writer.stats.bytes == 13 * (one.commit.header.end - begin_of_one)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_what_a_failed_write_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    writer = begin(tmp_path, slots=4)
    put(writer, 1)
    writer.flush()
    real = getattr(os, call)
    left = [1]

    def failing(*args: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return real(*args)

    monkeypatch.setattr(segment_writer.os, call, failing)
    for step in range(2, 8):
        put(writer, step)
    writer.close()
    assert writer.stats.rewrites == 1
    assert len(segments(tmp_path)) == 2
    assert contents(Log.open(tmp_path, "strict")) == expected(range(1, 8))


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "fsync"])
def test_a_disk_that_keeps_failing_closes_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writer = begin(tmp_path, slots=2)
    put(writer, 1)
    assert writer.flush() == 1

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_writer.os, call, full)
    if call == "fsync":  # of a segment that is full
        monkeypatch.setattr(settings, "LOG_SEGMENT_BYTES", 1)

    def go_on() -> None:
        for step in range(2, 10):
            put(writer, step)
            time.sleep(0.02)

    with pytest.raises(StorageError, match="No space left"):
        go_on()
    end = time.monotonic() + 60
    while writer._batches.seconds_until_sync() is not None:  # it once took a whole core
        assert time.monotonic() < end, "a thread that has failed holds nothing, and so waits"
        time.sleep(0.01)
    with pytest.raises(StorageError, match="No space left"):
        writer.close()
    assert writer.durable_step == 1
    monkeypatch.undo()
    found = contents(Log.open(tmp_path))  # what was written and not acknowledged may be there
    assert {1: found[1]} == expected(range(1, 2))


def test_an_epoch_continues_after_its_torn_end(tmp_path: Path) -> None:
    manifest = write_log(tmp_path, range(1, 6), end=False)
    [path] = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-100] + bytes(5000))
    log = Log.open(tmp_path)
    assert log.recoverable_step == 4
    next_lsn = resume_stream(log.epochs[0], log.epochs[0].streams[0])
    writer = begin(tmp_path, manifest, next_lsn=next_lsn, durable_step=4)
    for step in range(5, 8):
        put(writer, step)
    writer.close()
    assert contents(Log.open(tmp_path, "strict")) == expected(range(1, 8))


def test_a_closed_epoch_can_continue(tmp_path: Path) -> None:
    manifest = write_log(tmp_path, range(1, 4))
    log = Log.open(tmp_path)
    next_lsn = resume_stream(log.epochs[0], log.epochs[0].streams[0])
    writer = begin(tmp_path, manifest, next_lsn=next_lsn, durable_step=3)
    put(writer, 4)
    writer.close()
    log = Log.open(tmp_path, "strict")
    assert contents(log) == expected(range(1, 5))
    assert log.epochs[0].streams[0].digests().keys() == {3}


def test_streams_are_cut_to_the_same_step(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 8), small_manifest(2), per_segment=2)
    epoch = Log.open(tmp_path).epochs[0]
    cuts = plan_truncate(epoch, 5)
    apply_cuts(cuts, save_tails=True)
    log = Log.open(tmp_path, "strict")
    assert contents(log) == expected(range(1, 6), 2)
    assert sum(cut.size - cut.keep for cut in cuts) == sum(p.stat().st_size for p in tmp_path.rglob("*.tail"))
    with pytest.raises(UsageError, match="step 6 is not complete"):
        plan_truncate(log.epochs[0], 6)


def test_compacting_drops_what_a_base_replaces(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 8), small_manifest(), per_segment=2)
    write_log(tmp_path, range(6, 12), small_manifest(2, epoch=1, start=5, parent=ParentEpoch(0, 5)), per_segment=2)
    log = Log.open(tmp_path)
    apply_cuts(plan_compact(log, 3))
    log = Log.open(tmp_path, "strict")
    assert [(s.epoch.number, s.first, s.last) for s in log.spans()] == [(0, 3, 5), (1, 6, 11)]
    apply_cuts(plan_compact(log, 8))
    assert remove_empty_epochs(log) == [tmp_path / "log" / "epoch-000000"]
    log = Log.open(tmp_path, "strict")
    assert [(s.epoch.number, s.first, s.last) for s in log.spans()] == [(1, 8, 11)]


@pytest.mark.parametrize("compress, most", [(False, 2.02), (True, 1.45)])
def test_bytes_per_parameter_and_step(tmp_path: Path, compress: bool, most: float) -> None:
    """Gradients like those of a real step: normal, of a size that differs from row to row, in bfloat16."""
    numel = 1_000_003
    manifest = small_manifest()
    tensor = OptimizerTensor(numel, 0, "float32", "bfloat16", ("w",))
    schema = StreamSchema(0, Rank(), [tensor], list(cut_blocks(0, 0, [(0, Region.all_of((numel,)), 0)])))
    manifest.streams, manifest.parameters = [schema], [LoggedParameter("w", (numel,), "bfloat16", 0)]
    folder = epoch_folder(tmp_path / "log", 0)
    write_manifest(folder, manifest)
    writer = StreamWriter(stream_folder(folder, 0), 0, schema, compress=compress)
    random = np.random.default_rng(0)
    for step in range(1, 4):
        slot = writer.acquire()
        slot.step, slot.record = step, record(step)
        for block, array in enumerate(slot.arrays):
            rows = np.exp(random.normal(size=(len(array) + 255) // 256)).repeat(256)[: len(array)]
            values = (random.normal(size=len(array)) * rows * 1e-3).astype(np.float32)
            array[:] = values.view("<u4") >> 16
            slot.present.append(block)
        writer.submit(slot)
    writer.close()
    assert writer.stats.bytes / 3 / numel <= most
    assert Log.open(tmp_path, "strict").recoverable_step == 3


def test_a_program_that_does_not_close_loses_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.log.small_logs import begin, put\n"
        "writer = begin(Path(sys.argv[1]), slots=8)\n"
        "for step in range(1, 6): put(writer, step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log = Log.open(tmp_path, "strict")
    assert contents(log) == expected(range(1, 6))
    assert log.epochs[0].streams[0].scan.ended


def test_a_killed_writer_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    """A real process with a real writer, killed at 100 random moments (see killed_writer.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.log.killed_writer", str(tmp_path), "100"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] == 100
    assert told["steps"] > 100, "the writers must have got somewhere before they were killed"
    assert np.all(np.array(told["recovered"]) >= np.array(told["durable"]))
