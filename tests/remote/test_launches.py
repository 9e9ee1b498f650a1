"""Processes of one launch that write to an object store together."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.remote.uploads import SOURCE, here, seen, there
from ucp import settings
from ucp.api import plan
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, StorageError, UsageError
from ucp.storage.object_store import ObjectStore

pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REMOTE_LIVENESS_SECONDS", 0.02)
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 16 * settings.KIB)
    monkeypatch.setattr(settings, "MISSING_PROCESS_SECONDS", 600.0)  # the machine may be busy


def launch(url: str, count: int) -> list[BaseException | None]:
    """Write a target with `count` processes of a launch, which are threads here; returns how each of them ended."""
    ended: list[BaseException | None] = [None] * count

    def work(number: int) -> None:
        try:
            plan(SOURCE, url).run(shard=WorkShard(number, count), in_launch=True, jobs=1)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            ended[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return ended


def test_a_launch_writes_what_one_process_writes(memory: str, tmp_path: Path) -> None:
    assert launch(f"{memory}/out", 3) == [None, None, None]
    ucp.convert(SOURCE, tmp_path / "out")
    assert seen(f"{memory}/out") == here(tmp_path / "out")
    assert [name for name in there(f"{memory}/out") if name.startswith(".ucp-")] == [".ucp-complete.json"]
    for error in launch(f"{memory}/out", 2):
        assert isinstance(error, UsageError)
        assert "already exists" in str(error)


def test_a_failure_ends_all_processes_and_the_next_launch_continues(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{memory}/out"
    target = plan(SOURCE, url).target
    second = sorted(WorkShard(1, 2).files(target))
    victim = target.files[second[len(second) // 2]].path
    real = ObjectStore.upload

    def fails(self: ObjectStore, file: Path, key: str, streams: int) -> Any:
        if key.endswith(victim):
            raise StorageError("the wire is cut")
        return real(self, file, key, streams)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", fails)
        first, other = launch(url, 2)
    assert "the wire is cut" in str(other)
    assert "shard 2/2 failed: the wire is cut" in str(first)
    with pytest.raises(InconsistentError, match="half-done"):
        ucp.open(url)
    assert launch(url, 2) == [None, None]
    ucp.convert(SOURCE, tmp_path / "out")
    assert seen(url) == here(tmp_path / "out")


def test_a_process_that_never_starts_is_reported(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MISSING_PROCESS_SECONDS", 0.2)
    with pytest.raises(StorageError, match="shard 2/2 is not done, and no process works on it") as failure:
        plan(SOURCE, f"{memory}/out").run(shard=WorkShard(0, 2), in_launch=True, jobs=1)
    assert "--shard 2/2, then --finish" in str(failure.value)
    ucp.convert(SOURCE, f"{memory}/out", shard=(2, 2))
    ucp.convert(SOURCE, f"{memory}/out", finish=True)
    assert ucp.diff(f"{memory}/out", SOURCE, only="weights").same
