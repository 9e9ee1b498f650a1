"""Forms that must agree: the same findings however the work is split, each byte read once, and exact rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checks.expected_findings import only
from tests.checks.sharded_checkpoint import flip, make
from tests.paths import FIXTURES
from ucp import settings
from ucp.api import convert
from ucp.checks.agreement import common_intervals, cover_runs
from ucp.checks.deep_state import ChecksumCoverage, ReadRecorder
from ucp.checks.raw_values import ReadBlock, RoundingComparison, all_valid
from ucp.checks.runner import verify
from ucp.checks.spans import ChecksumSpan
from ucp.containers.crc32 import crc32
from ucp.core.box import whole
from ucp.core.checkpoint import Fragment
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ucp.core.region import Region

# Zeros, halfway cases of both parities, the edges of overflow, infinities, NaN that an addition would carry over.
EDGES = [0, 0x8000, 0x18000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
EDGES += [0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF]
BITS = st.one_of(st.sampled_from([edge | sign for edge in EDGES for sign in (0, 1 << 31)]), st.integers(0, 2**32 - 1))


@given(st.lists(st.tuples(BITS, st.sampled_from([0, 0, 0, 1, 0x8000])), min_size=1, max_size=40))
def test_rounding_is_bit_for_bit_that_of_torch(cases: list[tuple[int, int]]) -> None:
    masters = np.array([bits for bits, _ in cases], np.uint32).view(np.float32)
    right = torch.from_numpy(masters.copy()).bfloat16()
    saved = right.view(torch.int16).numpy().view(np.uint16) ^ np.array([flip for _, flip in cases], np.uint16)
    kept = torch.from_numpy(saved.copy().view(np.int16)).view(torch.bfloat16)
    differ = ~((kept.view(torch.int16) == right.view(torch.int16)) | (kept.isnan() & right.isnan())).numpy()
    finite = all_valid(masters.view(np.uint32), FLOAT32, False)
    assert finite == bool(np.isfinite(masters).all())
    found = RoundingComparison(FLOAT32, BFLOAT16, 64).mismatches(masters, saved, finite)
    assert list(found) == list(np.flatnonzero(differ))


def test_rounding_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucp.checks.raw_values._ROUNDED_AT_ONCE", 7)
    masters = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    saved = torch.from_numpy(masters).bfloat16().view(torch.int16).numpy().view(np.uint16).copy()
    saved[[0, 6, 7, 999]] ^= 1
    assert list(RoundingComparison(FLOAT32, BFLOAT16, 1000).mismatches(masters, saved, True)) == [0, 6, 7, 999]


def test_rounding_to_half_precision() -> None:
    masters = np.array([1.0, 65519.9, 65520.0, 1e-8, -0.0], np.float32)
    with np.errstate(over="ignore"):
        saved = masters.astype(np.float16)
    assert not RoundingComparison(FLOAT32, FLOAT16, 5).mismatches(masters, saved, True).size
    saved[3] = 1
    assert list(RoundingComparison(FLOAT32, FLOAT16, 5).mismatches(masters, saved, True)) == [3]


@pytest.mark.parametrize("slab, part", [(1 << 20, 1 << 26), (16, 64), (4, 4), (1 << 20, 10)])
def test_findings_do_not_depend_on_how_the_work_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int, part: int
) -> None:
    checkpoint = make(tmp_path)
    flip(tmp_path / "norm.weight.exp_avg.tp1.1", 16 + 4 * 2)
    flip(tmp_path / "norm.weight.weight.tp1.0", 16)
    flip(tmp_path / "layer.weight.master.tp0.3", 16 + 2)
    flip(tmp_path / "layer.weight.master.tp0.0", 16 + 2)
    expected = {
        level: [str(finding) for finding in verify(checkpoint, level).findings] for level in ("default", "deep")
    }
    monkeypatch.setattr(settings, "SLAB_BYTES", slab)
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", part)
    for level, findings in expected.items():
        assert len(findings) == 3
        assert [str(finding) for finding in verify(checkpoint, level, jobs=3).findings] == findings


def test_a_master_that_is_split_in_another_way_is_compared(tmp_path: Path) -> None:
    """The weight of the norm whole, its master in two boxes."""
    checkpoint = make(tmp_path)
    atoms = checkpoint.parameters["norm.weight"].atoms
    fragments = []
    for fragment in atoms["master"].fragments:
        (piece,) = fragment.region.pieces()
        fragments.append(fragment._replace(region=Region.of((piece.box,))))
    for kind, atom in atoms.items():
        atoms[kind] = replace(atom, replicas=())
    atoms["master"] = replace(atoms["master"], fragments=tuple(fragments))
    for level in ("default", "deep"):
        assert verify(checkpoint, level).findings == []
    flip(tmp_path / "norm.weight.master.tp0.1", 16 + 4 + 2)
    for level in ("default", "deep"):
        assert "1 of 10 elements" in only(verify(checkpoint, level), "master-matches-weight").message


@pytest.mark.parametrize(
    "name", ["z1_bf16_tp2_dp2", "z1_fp16_dp2", "pp2_z1_bf16_tied_dp2", "z3_bf16_frozen_subgroups_dp2"]
)
def test_every_byte_of_a_real_checkpoint_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(path.stat().st_size for path in FIXTURES.joinpath(name).rglob("*.pt"))
    for slab, part in ((1 << 20, 1 << 26), (256, 1000)):
        monkeypatch.setattr(settings, "SLAB_BYTES", slab)
        monkeypatch.setattr(settings, "COPY_TASK_BYTES", part)
        # Steps are tensors of one number: they are read to compare them, and for their CRC.
        assert 0 <= verify(FIXTURES / name, "deep").bytes_read - total < 500


def test_every_byte_of_atoms_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(FIXTURES / "z1_bf16_dp2", tmp_path / "atoms")
    listed = [path for path in (tmp_path / "atoms").rglob("*") if path.is_file() and path.name != "ucp.json"]
    total = sum(path.stat().st_size for path in listed)
    for slab in (1 << 20, 64):
        monkeypatch.setattr(settings, "SLAB_BYTES", slab)
        assert verify(tmp_path / "atoms", "deep", jobs=3).bytes_read - total in range(500)


def test_common_intervals_follow_the_runs_of_the_first_cover(tmp_path: Path) -> None:
    atom = make(tmp_path).parameters["layer.weight"].atoms["exp_avg"]
    file = Fragment(Region.all_of((6, 4)), "f", 0, FLOAT32)
    one = cover_runs(replace(atom, fragments=(file,)), 0)
    parts = [file._replace(region=file.region.cut(a, b)) for a, b in ((3, 9), (9, 20))]
    other = cover_runs(replace(atom, fragments=tuple(parts)), 0)
    assert one is not None
    assert other is not None
    boxes = (whole((6, 4)),)
    found = list(common_intervals([one.runs[boxes], other.runs[boxes]], (1, 22), 8))
    assert [(start, stop, runs[1] is not None) for start, stop, runs in found] == [
        (1, 3, False),
        (3, 9, True),
        (9, 17, True),
        (17, 20, True),
        (20, 22, False),
    ]


@given(st.binary(min_size=1, max_size=60), st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), max_size=6))
def test_a_checksum_is_right_in_whatever_order_bytes_are_read(data: bytes, reads: list[tuple[int, int]]) -> None:
    start = 5  # of the span in its file
    coverage = ChecksumCoverage()
    checksum = coverage.add(ChecksumSpan("zip-crc", "f", start, start + len(data), "t", "00000001", None))
    coverage.seal()
    file = bytes(start) + data + bytes(30)
    for at, length in reads:
        recorder = ReadRecorder(coverage)
        recorder.record("f", at, memoryview(file[at : at + length]))
        recorder.record("elsewhere", at, memoryview(file[at : at + length]))
        recorder.close()
    recorder = ReadRecorder(coverage)
    for at, stop in list(checksum.unread()):
        recorder.record("f", at, memoryview(file[at:stop]))
    recorder.close()
    assert list(checksum.unread()) == []
    assert checksum.value() == f"{crc32(data, 0):08x}"


@pytest.mark.parametrize("offset", [0, 1, 63, 64, 4100])
def test_a_block_is_aligned_like_its_bytes_in_the_file(offset: int) -> None:
    block = ReadBlock(0, 100)
    for _ in range(2):
        memory = block.for_range(offset, 100)
        assert memory.size == 100
        assert (memory.ctypes.data - offset) % 64 == 0
