"""Recording to a disk that is full, fails or is read-only: errors, what is kept, and how recording continues."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ucp
from ucp import settings
from ucp.errors import StorageError
from ucp.log.base_folders import list_bases
from ucp.log.reader import Log

torch = pytest.importorskip("torch")

SIDE = 64  # a step's gradients are 16 KiB
FULL = ("pwritev", "pwrite", "posix_fallocate", "fsync", "fdatasync", "mkdir")


class Job:
    """A job with a recorder, and its weights after every step."""

    def __init__(self, run: Path, **options: Any) -> None:
        torch.manual_seed(5)
        self.net = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.weights = [self.net.weight.detach().clone()]
        self.recorder = ucp.record(run, self.net, self.optimizer, slots=4, **options)

    def step(self) -> None:
        self.net.weight.grad = torch.randn(SIDE, SIDE)
        try:
            self.optimizer.step()
        finally:
            self.weights.append(self.net.weight.detach().clone())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def last_step_then_continue(run: Path, job: Job) -> int:
    """The last step of the log, which equals the job's; recording continues from there."""
    with Log.open(run, "inspect") as log:
        last = log.recoverable_step
    again = torch.nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    ucp.load_into(run, again, optimizer, log=run, step=last)
    assert torch.equal(again.weight, job.weights[last])
    with ucp.record(run, again, optimizer, base=None) as recorder:
        again.weight.grad = torch.ones(SIDE, SIDE)
        optimizer.step()
        assert recorder.flush() == last + 1
    with Log.open(run) as log:
        assert log.recoverable_step == last + 1
    return last


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of files of this process."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_recording_works_with_less_space_than_is_reserved_at_once(tmp_path: Path) -> None:
    """Space is reserved in large blocks; if there is less, the space for one step is enough."""
    job = Job(tmp_path)
    with files_of_at_most(settings.LOG_RESERVE_BYTES // 8):
        job.train(12)
        job.recorder.close()
    assert last_step_then_continue(tmp_path, job) == 12


@pytest.mark.parametrize("on_error", ["raise", "stop"])
def test_a_full_disk_with_a_file_size_limit(tmp_path: Path, on_error: str) -> None:
    job = Job(tmp_path, on_error=on_error)
    job.train(3)
    job.recorder.flush()
    with files_of_at_most(12 << 10):  # less than a step: the second try, into another file, fails too
        raised = None
        try:
            job.train(40)
        except StorageError as error:
            raised = error
        error = job.recorder.error
        assert error is not None
        assert (raised is error) == (on_error == "raise")
        assert ".ugl: the log cannot be written: File too large" in str(error)
        assert "make room and start recording again" in str(error)
        job.train(2)  # training itself continues
        job.recorder.close()
    assert job.recorder.durable_step >= 3
    assert last_step_then_continue(tmp_path, job) >= 3


def test_a_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with files_of_at_most(100 << 10):
        job.train(12)
        job.recorder.close()
    assert job.recorder.stats()["rewrites"] > 0
    assert last_step_then_continue(tmp_path, job) == 12


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("on_error", ["raise", "stop"])
def test_a_disk_that_fails_permanently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, on_error: str
) -> None:
    job = Job(tmp_path, on_error=on_error)
    job.train(3)
    job.recorder.flush()
    with failing(monkeypatch, number):
        raised = None
        try:
            job.train(20)
        except StorageError as error:
            raised = error
        error = job.recorder.error
        assert error is not None
        assert (raised is error) == (on_error == "raise")
        assert f"the log cannot be written: {os.strerror(number)}" in str(error)
        assert "check the disk" in str(error)
        job.recorder.close()
    assert job.recorder.durable_step >= 3
    assert last_step_then_continue(tmp_path, job) >= 3


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Every write of this process fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        for name in FULL:
            patched.setattr(os, name, fail)
        yield


def test_a_failure_at_close_is_not_raised_with_on_error_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for on_error in ("raise", "stop"):
        job = Job(tmp_path / on_error, on_error=on_error)
        job.train(3)
        job.recorder.flush()
        with failing(monkeypatch, errno.ENOSPC):
            job.train(1)
            if on_error == "raise":
                with pytest.raises(StorageError, match="No space left"):
                    job.recorder.close()
            else:
                job.recorder.close()
        assert "No space left" in str(job.recorder.error)
        assert last_step_then_continue(tmp_path / on_error, job) >= 3


def step_for_a_minute(job: Job) -> None:
    """Train until the recording has ended."""
    until = time.monotonic() + 60
    while job.recorder.error is None and time.monotonic() < until:
        job.step()
        time.sleep(0.005)


def test_a_failed_base_is_reported_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the background is raised at the next step, not at the next base."""
    from ucp.training.recording import base_saver

    job = Job(tmp_path)
    job.train(2)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(base_saver, "write_base", fail)
        job.recorder.base()
        with pytest.raises(StorageError, match=r"base-000001: the base of step 2 cannot be saved: No space left"):
            step_for_a_minute(job)
    assert [base.number for base in list_bases(tmp_path)] == [0]
    assert last_step_then_continue(tmp_path, job) >= 2


def test_the_error_of_the_first_base_names_the_space_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SPACE_RESERVE_BYTES", 1 << 60)
    monkeypatch.setattr(settings, "SPACE_RESERVE_SHARE", 1e12)
    with pytest.raises(StorageError, match=r"base of step 0 cannot be saved: .* needed, and .* in reserve"):
        Job(tmp_path)


def test_an_old_segment_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, base_every=2, keep_bases=1, on_error="stop")

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fail)
        step_for_a_minute(job)
    assert "the log cannot be written: Permission denied" in str(job.recorder.error)
    assert last_step_then_continue(tmp_path, job) >= 2
