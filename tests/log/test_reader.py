"""A log is read as it was written; damaged, cut or misplaced bytes are never read as anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.log.small_logs import contents, expected, record, segments, small_manifest, write_log
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UcpError, UsageError
from ucp.log.epoch_manifest import EpochManifest, ParentEpoch, read_manifest
from ucp.log.frames import FrameHeader, SegmentHeader
from ucp.log.reader import Log
from ucp.log.stream_recovery import scan_stream


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("check", ["all", "tail"])
def test_a_log_reads_as_it_was_written(tmp_path: Path, check: str, compress: bool) -> None:
    write_log(tmp_path, range(1, 8), small_manifest(2), skipped=(3,), per_segment=2, compress=compress)
    with Log.open(tmp_path, "strict", check=check) as log:  # type: ignore[arg-type]
        assert contents(log) == expected(range(1, 8), 2, (3,))
        stream = log.epochs[0].streams[1]
        assert stream.record(3).pack() == record(3, skipped=True).pack()  # NaN is not equal to itself
        assert stream.aux(5) == {"s": 5}
        assert stream.digests()[7][0].kind == "master"
        assert stream.scan.ended
        assert stream.blocks(2) == [0, 1]
    assert len(segments(tmp_path)) == 4


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    manifest = write_log(tmp_path, range(1, 2), small_manifest(3, epoch=4, start=9, parent=ParentEpoch(2, 9)))
    assert read_manifest(tmp_path / "log" / "epoch-000004") == manifest
    assert [b.region.numel for b in manifest.streams[2].blocks] == [16, 4]


def test_the_log_folder_and_an_epoch_can_be_given(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 3))
    for path in (tmp_path, tmp_path / "log", tmp_path / "log" / "epoch-000000"):
        assert Log.open(path).recoverable_step == 2
    with pytest.raises(NotUnderstoodError, match="contains no log"):
        Log.open(tmp_path / "log" / "epoch-000000" / "stream-00000")


def test_the_last_step_is_the_last_one_complete_in_all_streams(tmp_path: Path) -> None:
    manifest = write_log(tmp_path, range(1, 6), small_manifest(2), per_segment=1)
    segments(tmp_path, 1)[-1].unlink()  # digest and end
    segments(tmp_path, 1)[-1].unlink()  # step 5
    log = Log.open(tmp_path)
    assert log.recoverable_step == 4
    assert contents(log) == expected(range(1, 5), 2)
    with pytest.raises(UsageError, match="last complete step: 4"):
        log.spans(5)
    shutil.rmtree(tmp_path / "log" / "epoch-000000" / "stream-00001")
    with pytest.raises(InconsistentError, match="streams 1 of 2 have no files"):
        Log.open(tmp_path)
    assert Log.open(tmp_path, "inspect").recoverable_step == manifest.start


def test_a_newer_epoch_replaces_steps_after_its_start(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 8), small_manifest())
    write_log(tmp_path, range(5, 7), small_manifest(2, epoch=1, start=4, parent=ParentEpoch(0, 4)))
    log = Log.open(tmp_path)
    assert [(s.epoch.number, s.first, s.last) for s in log.spans()] == [(0, 1, 4), (1, 5, 6)]
    assert [(s.epoch.number, s.first, s.last) for s in log.spans(3)] == [(0, 1, 3)]
    assert contents(log) == {**expected(range(1, 5)), **expected(range(5, 7), 2)}
    with pytest.raises(UsageError, match="last complete step: 6"):
        log.spans(7)


def test_old_segments_may_be_missing_but_not_one_in_between(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 8), per_segment=2)
    segments(tmp_path)[0].unlink()
    log = Log.open(tmp_path, "strict")
    assert [(s.first, s.last) for s in log.spans()] == [(3, 7)]
    segments(tmp_path)[1].unlink()
    assert Log.open(tmp_path).recoverable_step == 4
    with pytest.raises(IntegrityError, match="frames are missing"):
        Log.open(tmp_path, "strict")


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def opened_prefix(run: Path, whole: dict[int, dict[tuple[int, int], bytes]]) -> tuple[int, bool]:
    """(number of complete steps, whether a defect was reported); fails if anything was read that was not written."""
    log = Log.open(run)
    found = contents(log) if log.epochs[0].steps else {}
    assert found == {step: whole[step] for step in list(whole)[: len(found)]}
    return len(found), bool(log.epochs[0].defects)


@pytest.mark.parametrize("flipped", [1 << bit if bit < 8 else 0xFF for bit in range(9)])
@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path: Path, flipped: int) -> None:
    manifest = write_log(tmp_path, range(1, 4), per_segment=2)
    whole = expected(range(1, 4))
    schema = manifest.streams[0]
    folder = tmp_path / "log" / "epoch-000000" / "stream-00000"
    for path in segments(tmp_path):
        good = path.read_bytes()
        for at in [*range(128), *range(4000, len(good))]:
            bad = bytearray(good)
            bad[at] ^= flipped
            path.write_bytes(bad)
            scan = scan_stream(folder, 0, schema)
            assert scan.defects, f"byte {at} of {path.name}"
            if at % 41 == 0:
                steps, reported = opened_prefix(tmp_path, whole)
                assert reported
                assert steps < 3 or path == segments(tmp_path)[-1]
        path.write_bytes(good)
    assert opened_prefix(tmp_path, whole) == (3, False)


def test_every_cut_leaves_a_prefix_of_whole_steps(tmp_path: Path) -> None:
    manifest = write_log(tmp_path, range(1, 4))
    [path] = segments(tmp_path)
    good = path.read_bytes()
    whole = expected(range(1, 4))
    ends = [ref.commit.header.end for ref in Log.open(tmp_path).epochs[0].streams[0].scan.steps.values()]
    folder = path.parent
    for cut in range(4096, len(good)):
        path.write_bytes(good[:cut])
        scan = scan_stream(folder, 0, manifest.streams[0])
        assert len(scan.steps) == sum(end <= cut for end in ends)
        if cut % 97 == 0:
            assert opened_prefix(tmp_path, whole)[0] == sum(end <= cut for end in ends)
        if cut % 13 == 0:
            path.write_bytes(good[:cut] + bytes(len(good) - cut))  # zeros where the rest was to be
            assert len(scan_stream(folder, 0, manifest.streams[0]).steps) <= sum(end <= cut + 64 for end in ends)


def test_a_flipped_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 2))
    path = tmp_path / "log" / "epoch-000000" / "manifest.json"
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x20 if at % 2 else 1
        path.write_bytes(bad)
        with pytest.raises(UcpError, match=r"damaged|not valid JSON|format|manifest"):
            Log.open(tmp_path)


def test_duplicated_or_stale_frames_are_not_read(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 4), end=False)
    write_log(tmp_path / "other", range(1, 6), end=False)
    [path], [other] = segments(tmp_path), segments(tmp_path / "other")
    good, old = path.read_bytes(), other.read_bytes()
    whole = expected(range(1, 4))
    for stale in (good[4096:], old[4096:], old[len(good) :]):  # duplicated, and bytes of a file used before
        path.write_bytes(good + stale)
        assert opened_prefix(tmp_path, whole) == (3, True)
    path.write_bytes(good + old[len(good) :])
    defect = Log.open(tmp_path).epochs[0].defects[0]
    assert defect.kind == "torn"
    assert defect.offset == len(good)


def test_a_torn_end_is_distinguished_from_damage(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 5), end=False)
    [path] = segments(tmp_path)
    good = path.read_bytes()
    scan = Log.open(tmp_path).epochs[0].streams[0].scan
    for step, kind in ((2, "damaged"), (4, "torn")):
        at = scan.steps[step].grads[0].header.offset
        for where in (at + 3, at + 64 + 1, at + 64 + 150):  # header, table, block
            bad = bytearray(good)
            bad[where] ^= 1
            path.write_bytes(bad)
            found = Log.open(tmp_path).epochs[0]
            assert (found.recoverable_step, found.defects[0].kind, found.defects[0].offset) == (step - 1, kind, at)


def test_a_file_that_was_just_being_created_is_a_torn_end(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 4), end=False)
    [path] = segments(tmp_path)
    scan = Log.open(tmp_path).epochs[0].streams[0].scan
    for begun in (b"", bytes(8192), path.read_bytes()[:4000]):
        (path.parent / f"{scan.next_lsn:012d}.ugl").write_bytes(begun)
        epoch = Log.open(tmp_path).epochs[0]
        assert epoch.recoverable_step == 3
        assert [defect.kind for defect in epoch.defects] == ["torn"]


def test_a_block_damaged_after_opening_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 4))
    [path] = segments(tmp_path)
    grad = Log.open(tmp_path).epochs[0].streams[0].scan.steps[1].grads[0].header
    bad = bytearray(path.read_bytes())
    bad[grad.end - 60] ^= 1
    path.write_bytes(bad)
    log = Log.open(tmp_path, check="tail")
    assert log.recoverable_step == 3
    stream = log.epochs[0].streams[0]
    assert stream.read_block(1, 0) is not None
    with pytest.raises(IntegrityError, match="checksum of block 3 is wrong"):
        stream.read_block(1, 3)


def test_headers_survive_a_round_trip() -> None:
    header = SegmentHeader(3, 2, 77, 12345, b"x" * 16, 99)
    assert SegmentHeader.unpack(header.pack()) == header
    frame = FrameHeader(1, 2, 3, 4, 5, 6, 7, 8, 9)  # type: ignore[arg-type]
    assert FrameHeader.unpack(frame.pack(12345), 12345) == frame
    assert np.iinfo(np.uint64).max > header.salt


def test_epochs_of_different_runs_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 3))
    other: EpochManifest = small_manifest(epoch=1, start=2, parent=ParentEpoch(0, 2))
    other.run = "another"
    write_log(tmp_path, range(3, 5), other)
    with pytest.raises(InconsistentError, match="2 different runs"):
        Log.open(tmp_path)
