"""Replay in worker processes: the same bytes as in threads, and nothing is replayed twice."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ucp
from tests.replay.logged_job import Run, assert_same, start, state_of
from tests.trees import contents
from ucp import settings
from ucp.engine.worker import CopyWork, WorkerBudget
from ucp.log.epoch_manifest import ParentEpoch
from ucp.storage.local import SourceFiles

BLOCK = 40_000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", BLOCK)


def convert(project: Path, run: Run, base: Path, dst: Path) -> subprocess.CompletedProcess[str]:
    chosen = {"LOG_BLOCK_ELEMENTS": BLOCK, "REPLAY_CACHE_BYTES": 1, "COMPUTED_BATCH_BYTES": 1}
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.replay.convert_in_workers"),
            *map(str, (base, run.folder, run.step, dst)),
            *(f"{name}={value}" for name, value in chosen.items()),
        ],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def sync(run: Run) -> None:
    for writer in run.writers:
        writer.sync()


def replays(output: str) -> Counter[str]:
    """How often each chunk was replayed; all of them in forks."""
    words = [line.split() for line in output.splitlines() if line.startswith("replayed ")]
    assert {where for _, where, _ in words} == {"fork"}
    return Counter(what for _, _, what in words)


def test_the_same_bytes_as_from_threads_and_nothing_is_replayed_twice(project: Path, tmp_path: Path) -> None:
    """Blocks are large enough for torch to update them in threads, which the parent has and forks do not.

    The layout changes between steps: computed files on top of computed files, and every worker has its own of both.
    """
    run = start(tmp_path / "run", large=20_000)
    base = run.save(0)
    run.train(2)
    sync(run)
    run.epoch, run.streams = 1, 2
    run.open_epoch(ParentEpoch(0, 2))
    run.train(1)
    sync(run)
    done = convert(project, run, base, tmp_path / "forked")
    found = replays(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(found) == 2 * sum(-(-p.numel() // BLOCK) for _, p in run.named()) == 2 * (6 + 2)
    assert set(found.values()) == {1}
    assert_same(state_of(ucp.open(tmp_path / "forked").index), run.history[3])
    ucp.convert(base, tmp_path / "threads", log=run.folder, step=3, jobs=2)
    assert contents(tmp_path / "forked") == contents(tmp_path / "threads")


class Connected:
    """Computed files that are read over a connection."""

    identity = "connected"

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        raise NotImplementedError


def test_connections_are_not_shared(tmp_path: Path) -> None:
    source = SourceFiles(tmp_path, computed=Connected())
    assert not CopyWork(source, tmp_path, (), WorkerBudget(2, 1 << 20)).prepare_fork()
