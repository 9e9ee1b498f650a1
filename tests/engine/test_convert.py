"""A conversion moves every element from any layout to any other, survives kills, and appears whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conversions import StopAfter, checkpoint, nothing_last, one_file_per_rank, options
from tests.engine.shards import DTYPES, Cut, cuts, pick, regions, shapes, values_of, write_shards
from tests.trees import contents
from ucp import settings
from ucp.core.checkpoint import Checkpoint
from ucp.core.dtypes import FLOAT32
from ucp.core.rules import Rule
from ucp.core.strided_runs import StridedSpan
from ucp.core.target import Digests, LiteralBytes, OutputFile, Target
from ucp.engine.convert import RunOptions, run
from ucp.engine.pool import Progress
from ucp.engine.staging import staging_folder
from ucp.engine.worker import WorkerBudget
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.read.verbatim import ViewCache


@given(data=st.data())
def test_any_layout_to_any_other_layout(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    dtype = data.draw(st.sampled_from(DTYPES))
    source, wanted = data.draw(cuts(shape)), data.draw(cuts(shape))
    values = values_of(shape, dtype)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(settings, "SLAB_BYTES", data.draw(st.integers(1, 128)))
        patch.setattr(settings, "COPY_TASK_BYTES", data.draw(st.integers(1, 512)))
        patch.setattr(settings, "LONG_RUN_BYTES", data.draw(st.sampled_from([1, 8, 1024])))
        patch.setattr(settings, "CACHED_VIEWS", data.draw(st.sampled_from([1, 8, 1024])))
        patch.setattr(settings, "SPACE_RESERVE_BYTES", 0)
        folder = Path(name)
        atom = write_shards(folder, values, dtype, source)
        digests: list[Digests] = []
        run(
            one_file_per_rank(atom, wanted),
            checkpoint(folder, [atom]),
            folder / "out",
            options(data.draw(st.integers(1, 3))),
            lambda d: digests.append(d),
            Progress(),
        )
        for number, region in enumerate(regions(wanted, shape)):
            written = (folder / "out" / f"{number}/shard").read_bytes()
            assert written == f"rank {number}:".encode() + pick(values, region).tobytes()
            position = 0
            for offset, nbytes, digest in digests[0][number]:
                assert offset == position, "digested ranges tile the file"
                assert digest == xxhash.xxh3_128_hexdigest(written[offset : offset + nbytes])
                position += nbytes
            assert position == len(written)


def test_slabs_of_a_sliced_tensor_share_their_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLAB_BYTES", 1000), ("LONG_RUN_BYTES", 1)):
        monkeypatch.setattr(settings, name, value)
    asked: list[StridedSpan] = []
    monkeypatch.setattr(ViewCache, "of", lambda views, runs, of=ViewCache.of: asked.append(runs) or of(views, runs))
    values = values_of((199, 24), FLOAT32)  # 96 bytes per row, 10 rows per slab, and 9 left over
    atom = write_shards(tmp_path, values, FLOAT32, Cut(Rule("split", dim=1), 2, ()))
    wanted = Cut(Rule("split", dim=1), 4, ())
    run(
        one_file_per_rank(atom, wanted),
        checkpoint(tmp_path, [atom]),
        tmp_path / "out",
        options(),
        nothing_last,
        Progress(),
    )
    for number, region in enumerate(regions(wanted, atom.shape)):
        written = (tmp_path / "out" / f"{number}/shard").read_bytes()
        assert written.endswith(pick(values, region).tobytes())
    assert len(asked) == 20 * (2 + 4)
    assert len(set(asked)) == 2 * (2 + 4), "two heights of slabs, two sources, four targets"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Checkpoint, Path]:
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 256)
    monkeypatch.setattr(settings, "SLAB_BYTES", 64)
    values = values_of((64, 16), FLOAT32)
    atom = write_shards(tmp_path, values, FLOAT32, Cut(Rule("split", dim=1), 2, (500,)))
    return one_file_per_rank(atom, Cut(Rule("split", dim=0), 2, ())), checkpoint(tmp_path, [atom]), tmp_path / "out"


def test_resume_writes_only_what_is_missing(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), nothing_last, StopAfter(2000, KeyboardInterrupt()))
    assert not path.exists()
    with pytest.raises(UsageError, match="partial output"):
        run(target, source, path, options(), nothing_last, Progress())
    journal = staging_folder(path) / ".ucp-journal.jsonl"
    done = len(journal.read_bytes().splitlines()) - 1
    assert done > 3
    journal.write_bytes(journal.read_bytes() + b'{"written": [[0, 0,')  # torn by a kill
    seen = Counting()
    run(target, source, path, options(resume=True), nothing_last, seen)
    assert seen.calls < seen.total // 64, "finished parts are not written again"
    assert not staging_folder(path).exists()
    run(target, source, path.with_name("fresh"), options(), nothing_last, Progress())
    assert contents(path) == contents(path.with_name("fresh"))


class Counting(Progress):
    def __init__(self) -> None:
        self.total = self.calls = 0

    def start(self, total: int) -> None:
        self.total = total

    def advance(self, nbytes: int) -> None:
        del nbytes
        self.calls += 1


def test_resume_rewrites_a_damaged_task(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), nothing_last, StopAfter(2000, KeyboardInterrupt()))
    half = staging_folder(path) / "0/shard"
    damaged = bytearray(half.read_bytes())
    damaged[20] ^= 1
    half.write_bytes(damaged)
    run(target, source, path, options(resume=True), nothing_last, Progress())
    run(target, source, path.with_name("fresh"), options(), nothing_last, Progress())
    assert contents(path) == contents(path.with_name("fresh"))


def test_resume_refuses_a_changed_source(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), nothing_last, StopAfter(2000, KeyboardInterrupt()))
    os.utime(source.root / next(iter(source.sizes)), ns=(1, 1))
    with pytest.raises(UsageError, match="another source"):
        run(target, source, path, options(resume=True), nothing_last, Progress())
    run(target, source, path, options(restart=True), nothing_last, Progress())
    assert path.exists()
    assert not staging_folder(path).exists()


def test_a_bad_source_leaves_nothing_behind(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    last = source.root / list(source.sizes)[-1]
    last.write_bytes(last.read_bytes()[:40])
    before = set(os.listdir(path.parent))
    for jobs in (1, 2):
        with pytest.raises(IntegrityError):
            run(target, source, path, options(jobs), nothing_last, Progress())
        assert set(os.listdir(path.parent)) == before


def test_a_full_disk_keeps_finished_work(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    error = StorageError("no space left")
    with pytest.raises(StorageError, match="--resume"):
        run(target, source, path, options(), nothing_last, StopAfter(2000, error))
    run(target, source, path, options(resume=True), nothing_last, Progress())
    assert path.exists()


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_worker_without_memory_fails_the_run(
    job: tuple[Target, Checkpoint, Path], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    target, source, path = job

    def no_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("ucp.engine.worker.mmap.mmap", no_memory)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        run(target, source, path, options(jobs), nothing_last, Progress())
    assert not path.exists()


def test_missing_space_is_reported_before_any_work(
    job: tuple[Target, Checkpoint, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, path = job
    monkeypatch.setattr(settings, "SPACE_RESERVE_BYTES", 1 << 60)
    monkeypatch.setattr(settings, "SPACE_RESERVE_SHARE", 1e12)
    with pytest.raises(StorageError, match="not enough space"):
        run(target, source, path, options(), nothing_last, Progress())
    assert not path.exists()
    assert not staging_folder(path).exists()


def test_an_existing_target_is_never_touched(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    path.mkdir()
    (path / "precious").write_text("x")
    with pytest.raises(UsageError, match="already exists"):
        run(target, source, path, options(restart=True), nothing_last, Progress())
    assert contents(path) == {"precious": b"x"}


def test_a_second_run_of_the_same_target_is_refused(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    refused: list[str] = []

    class Meanwhile(Progress):
        def advance(self, nbytes: int) -> None:
            if not refused and nbytes:
                with pytest.raises(UsageError) as caught:
                    run(target, source, path, options(resume=True), nothing_last, Progress())
                refused.append(str(caught.value))

    run(target, source, path, options(), nothing_last, Meanwhile())
    assert "another process is writing it" in refused[0]
    assert path.exists()


def test_the_last_file_sees_every_digest(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job

    def last(digests: Digests) -> OutputFile:
        data = json.dumps([list(d) for d in digests]).encode()
        return OutputFile("manifest.json", len(data), (LiteralBytes(0, data),))

    run(target, source, path, options(2, durable=True), last, Progress())
    assert len(json.loads((path / "manifest.json").read_bytes())) == len(target.files)


def test_slabs_shrink_to_the_memory_budget() -> None:
    assert WorkerBudget(4, 12_000).slab_bytes == 1000
    assert WorkerBudget(1, 1 << 40).slab_bytes == settings.SLAB_BYTES


def test_threads_and_slabs_do_not_change_a_byte(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    run(target, source, path, options(3), nothing_last, Progress())
    run(target, source, path.with_name("again"), RunOptions(WorkerBudget(1, 30)), nothing_last, Progress())
    assert contents(path) == contents(path.with_name("again"))
    assert np.frombuffer((path / "0/shard").read_bytes()[7:], np.float32).size == 512
