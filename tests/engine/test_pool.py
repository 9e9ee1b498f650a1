"""The worker pool with processes: the same bytes as from threads, and nothing is left behind after a failure."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ucp
from tests.engine.forking import wait_until_gone, workers
from tests.trees import contents
from ucp.engine.pool import PipeChannel, WorkerProcess, WorkerProcesses, can_fork
from ucp.engine.staging import staging_folder
from ucp.errors import StorageError

FIXTURE = "z1_bf16_dp2"


def convert(what: str, src: Path, dst: Path, project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.forking", what, str(src), str(dst)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        start_new_session=True,  # a process group of its own, which may be interrupted
    )


@pytest.mark.parametrize("fixture", [FIXTURE, "z1_bf16_tp2_dp2", "z3_fp32_dp3"])
def test_the_same_bytes_as_from_threads(project: Path, tmp_path: Path, fixture: str) -> None:
    done = convert("nothing", project / "fixtures" / fixture, tmp_path / "forked", project)
    assert "forked 3" in done.stdout, done.stderr
    ucp.convert(project / "fixtures" / fixture, tmp_path / "threads", jobs=2)
    assert contents(tmp_path / "forked") == contents(tmp_path / "threads")


@pytest.mark.parametrize(
    "what, told",
    [
        ("kill a worker", "ended StorageError a worker process"),
        ("interrupt", "ended KeyboardInterrupt"),
    ],
)
def test_finished_work_is_kept(project: Path, tmp_path: Path, what: str, told: str) -> None:
    source = project / "fixtures" / FIXTURE
    done = convert(what, source, tmp_path / "out", project)
    assert told in done.stdout, done.stderr
    wait_until_gone(workers(done.stdout))
    assert not (tmp_path / "out").exists()
    assert staging_folder(tmp_path / "out").exists()
    again = convert("resume", source, tmp_path / "out", project)
    assert "forked" in again.stdout, again.stderr
    ucp.convert(source, tmp_path / "threads")
    assert contents(tmp_path / "out") == contents(tmp_path / "threads")


def test_workers_end_with_their_parent(project: Path, tmp_path: Path) -> None:
    done = convert("kill all", project / "fixtures" / FIXTURE, tmp_path / "out", project)
    assert done.returncode < 0
    found = workers(done.stdout)
    assert len(found) >= 1
    wait_until_gone(found)


def test_the_error_of_a_worker_is_raised(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "fixtures" / FIXTURE, tmp_path / "source")
    done = convert("break the source", tmp_path / "source", tmp_path / "out", project)
    assert "ended IntegrityError" in done.stdout, done.stderr
    assert "ends at byte" in done.stdout
    assert not (tmp_path / "out").exists()
    assert not staging_folder(tmp_path / "out").exists()


def test_a_bug_shows_the_traceback_of_the_worker(project: Path, tmp_path: Path) -> None:
    done = convert("break a worker", project / "fixtures" / FIXTURE, tmp_path / "out", project)
    assert "ended RuntimeError" in done.stdout, done.stderr
    assert "ZeroDivisionError" in done.stdout
    assert "forking.py" in done.stdout
    assert not staging_folder(tmp_path / "out").exists()


def test_a_failed_fork_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    with (
        pytest.raises(StorageError, match="worker process 1 cannot be started"),
        WorkerProcesses(lambda _: None) as forks,
    ):
        forks.start(lambda _: None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_is_killed_while_it_waits_is_reported() -> None:
    near, far = PipeChannel.pair()
    far.close()
    with pytest.raises(StorageError, match="a worker process"):
        WorkerProcess(1, 0, near).answer([1, 2, 3])
    near.close()


def test_a_process_with_threads_is_not_forked() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not can_fork()
    finally:
        ended.set()
        thread.join()
