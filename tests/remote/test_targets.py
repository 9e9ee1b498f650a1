"""Checkpoints written to object stores appear whole or not at all, and interrupted uploads resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.paths import FIXTURES
from tests.remote.conftest import upload
from tests.remote.troubled_proxy import Proxy
from tests.remote.uploads import SOURCE, here, seen, there
from ucp import settings
from ucp.cli.main import run
from ucp.core.target import OutputFile, Target
from ucp.engine.upload import upload_groups
from ucp.errors import InconsistentError, IntegrityError, StorageError, UsageError
from ucp.settings import GIB, KIB, MIB
from ucp.storage.object_store import ObjectStore, upload_part_bytes
from ucp.storage.paths import parse_path

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few files are made and sent at a time, as of a checkpoint that is larger than the spool."""
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 64 * KIB)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    "to, store", [("atoms", "memory"), ("deepspeed", "bucket"), ("safetensors", "bucket"), ("dcp", "memory")]
)
def test_a_store_gets_the_same_bytes_as_a_disk(
    to: str, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"{request.getfixturevalue(store)}/some/out"
    ucp.convert(SOURCE, tmp_path / "out", to=to)
    ucp.convert(SOURCE, url, to=to)
    assert seen(url) == here(tmp_path / "out")
    assert [name for name in there(url) if name.startswith(".ucp-")] == [".ucp-complete.json"]
    assert ucp.diff(url, tmp_path / "out").same
    assert ucp.verify(url, "deep").ok


def test_from_one_store_to_another(memory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = upload(SOURCE, f"{memory}/a")
    assert run(["convert", source, f"{memory}/b/out", "--to", "deepspeed", "--dp", "3", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    ucp.convert(SOURCE, tmp_path / "out", to="deepspeed", dp=3)
    assert seen(f"{memory}/b/out") == here(tmp_path / "out")
    assert told["target"] == f"{memory}/b/out"
    assert told["files"] == len(here(tmp_path / "out"))


def test_large_files_go_in_parts(tmp_path: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "weights").mkdir()
    save_file({"w": np.arange(3 * MIB, dtype=np.float32)}, tmp_path / "weights" / "model.safetensors")
    monkeypatch.setattr(settings, "REMOTE_PART_BYTES", 5 * MIB)  # the least that S3 takes
    ucp.convert(tmp_path / "weights", f"{bucket}/out", to="safetensors")
    parts = [request for request in proxy.requests if request.method == "PUT" and "partNumber" in request.path]
    assert len(parts) == 3
    assert ucp.diff(f"{bucket}/out", tmp_path / "weights").same


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let only `count` files be sent."""
    left = iter(range(count))
    real = ObjectStore.upload

    def some(self: ObjectStore, file: Path, key: str, streams: int) -> Any:
        if next(left, None) is None:
            raise error
        return real(self, file, key, streams)

    monkeypatch.setattr(ObjectStore, "upload", some)


@pytest.fixture
def interrupted(memory: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target that a full store or an interrupt has left unfinished."""
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 64 * KIB)
    with monkeypatch.context() as patch:
        fail_after(patch, 3, StorageError("no more"))
        with pytest.raises(StorageError, match="no more") as failure:
            ucp.convert(SOURCE, f"{memory}/run/out", jobs=1)
    assert "with --resume" in str(failure.value)
    return f"{memory}/run/out"


def test_an_unfinished_upload_is_not_a_checkpoint(interrupted: str) -> None:
    assert len(seen(interrupted)) >= 1
    with pytest.raises(InconsistentError, match="half-done") as failure:
        ucp.open(interrupted)
    assert "--resume" in str(failure.value)
    assert list(parse_path(interrupted).iterdir()) == []
    assert list(parse_path(interrupted).parent.rglob("*")) == []
    report = ucp.verify(interrupted)
    assert not report.ok


def test_a_second_run_sends_what_is_missing(interrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = seen(interrupted)
    with pytest.raises(UsageError, match="partial output is here") as failure:
        ucp.convert(SOURCE, interrupted)
    assert "--resume" in str(failure.value)
    sent: list[str] = []
    real = ObjectStore.upload
    monkeypatch.setattr(
        ObjectStore, "upload", lambda self, file, key, n: (sent.append(key), real(self, file, key, n))[1]
    )
    ucp.convert(SOURCE, interrupted, resume=True)
    ucp.convert(SOURCE, tmp_path / "out")
    assert seen(interrupted) == here(tmp_path / "out")
    assert sent
    assert not {f"{interrupted}/{name}" for name in before} & set(sent)
    with pytest.raises(UsageError, match="already exists"):
        ucp.convert(SOURCE, interrupted)
    ucp.convert(SOURCE, interrupted, resume=True)  # it is complete already


def test_objects_that_were_changed_are_sent_again(interrupted: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    name = next(iter(seen(interrupted)))
    fs.pipe_file(f"{interrupted}/{name}", bytes(len(fs.cat_file(f"{interrupted}/{name}"))))
    ucp.convert(SOURCE, interrupted, resume=True)
    ucp.convert(SOURCE, tmp_path / "out")
    assert seen(interrupted) == here(tmp_path / "out")


def test_only_the_same_conversion_resumes_an_upload(interrupted: str) -> None:
    with pytest.raises(UsageError, match="belongs to another source"):
        ucp.convert(FIXTURES / "z1_fp16_dp2", interrupted, resume=True)
    ucp.convert(FIXTURES / "z1_fp16_dp2", interrupted, restart=True)
    assert ucp.diff(interrupted, FIXTURES / "z1_fp16_dp2").same


def test_one_of_two_writers_is_stopped(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 64 * KIB)
    real, url = ObjectStore.upload, f"{memory}/out"

    def other_begins(self: ObjectStore, file: Path, key: str, streams: int) -> Any:
        monkeypatch.setattr(ObjectStore, "upload", real)
        ucp.convert(SOURCE, url, resume=True, jobs=1)
        return real(self, file, key, streams)

    monkeypatch.setattr(ObjectStore, "upload", other_begins)
    with pytest.raises(UsageError, match="another process is writing it"):
        ucp.convert(SOURCE, url, jobs=1)
    assert ucp.diff(url, SOURCE, only="weights").same


def test_a_source_that_turns_out_damaged_leaves_nothing_behind(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 64 * KIB)
    with monkeypatch.context() as patch:
        fail_after(patch, 3, IntegrityError("what was read is no checkpoint"))
        with pytest.raises(IntegrityError, match="no checkpoint"):
            ucp.convert(SOURCE, f"{memory}/out", jobs=1)
    assert there(f"{memory}/out") == {}
    ucp.convert(SOURCE, f"{memory}/out")


def test_large_files_wait_for_room(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ucp.convert(SOURCE, tmp_path / "out", to="deepspeed")
    largest = max(len(data) for data in here(tmp_path / "out").values())
    monkeypatch.setattr(settings, "SPACE_RESERVE_BYTES", 0)
    monkeypatch.setattr("ucp.engine.upload.free_bytes", lambda _: largest)
    kept: list[int] = []
    real = ObjectStore.upload

    def measured(self: ObjectStore, file: Path, key: str, streams: int) -> Any:
        spool = next(parent for parent in file.parents if parent.name.startswith("ucp-spool-"))
        kept.append(sum(path.stat().st_size for path in spool.rglob("*") if path.is_file()))
        return real(self, file, key, streams)

    monkeypatch.setattr(ObjectStore, "upload", measured)
    ucp.convert(SOURCE, f"{memory}/out", to="deepspeed")
    assert 0 < max(kept) <= largest
    assert seen(f"{memory}/out") == here(tmp_path / "out")


def test_shards_are_written_anywhere_and_finished(memory: str, tmp_path: Path) -> None:
    url = f"{memory}/out"
    ucp.convert(SOURCE, url, shard=(2, 2))
    with pytest.raises(UsageError, match="shard 1/2 was not started"):
        ucp.convert(SOURCE, url, finish=True)
    with pytest.raises(InconsistentError, match="half-done"):
        ucp.open(url)
    with pytest.raises(UsageError, match="written in 2 shard"):
        ucp.convert(SOURCE, url, shard=(1, 3))
    ucp.convert(SOURCE, url, shard=(1, 2))
    ucp.convert(SOURCE, url, finish=True)
    ucp.convert(SOURCE, tmp_path / "out")
    assert seen(url) == here(tmp_path / "out")


def test_a_folder_with_other_objects_is_refused(memory: str) -> None:
    url = upload(SOURCE, memory)
    with pytest.raises(UsageError, match="already exists"):
        ucp.convert(SOURCE, url)
    assert seen(url) == here(SOURCE)


def test_marker_files_are_uploaded_last(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_upload, real_put = ObjectStore.upload, ObjectStore.put
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 1)
    monkeypatch.setattr(
        ObjectStore, "upload", lambda self, file, key, n: (order.append(key), real_upload(self, file, key, n))[1]
    )
    monkeypatch.setattr(ObjectStore, "put", lambda self, key, data: (order.append(key), real_put(self, key, data))[1])
    ucp.convert(SOURCE, f"{memory}/out", to="deepspeed")
    names = [key.removeprefix(f"{memory}/out/") for key in order]
    assert names[0].startswith(".ucp-journal-1-of-1/")
    assert [name for name in names if ".ucp-" not in name][-1] == "latest"
    assert names[-1] == ".ucp-complete.json"
    order.clear()
    ucp.convert(SOURCE, f"{memory}/atoms")
    assert [key.rpartition("/")[2] for key in order[-2:]] == ["ucp.json", ".ucp-complete.json"]


def test_groups_have_a_limit_or_one_file() -> None:
    target = Target(tuple(OutputFile(f"f{n}", size) for n, size in enumerate((3, 3, 9, 1, 1))))
    assert list(upload_groups(target, range(5), 6)) == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("size", [0, 1, 5 * GIB, 160 * GIB, 5000 * GIB])
def test_an_upload_has_at_most_ten_thousand_parts(size: int) -> None:
    part = upload_part_bytes(size)
    assert part % (256 * KIB) == 0
    assert size <= 10_000 * part
    assert part <= 5 * GIB


def test_nothing_is_linked_into_a_store(memory: str) -> None:
    with pytest.raises(UsageError, match="--link points at local files"):
        ucp.convert(SOURCE, f"{memory}/out", link=True)


def test_a_damaged_completion_marker_is_reported(memory: str) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"{memory}/out/.ucp-complete.json", b"no JSON")
    with pytest.raises(IntegrityError, match=r"\.ucp-complete\.json: not an upload journal"):
        ucp.convert(SOURCE, f"{memory}/out", resume=True)
