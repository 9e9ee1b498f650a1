"""A log on a system that fails once, at every kind of call: what was reported as durable is there, and nothing else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.faults.injection import CALLS, REAL, Injector, points
from tests.log.small_logs import begin, contents, expected, put, small_manifest
from ucp import settings
from ucp.errors import StorageError, UcpError
from ucp.log.epoch_manifest import ParentEpoch
from ucp.log.reader import Log

STEPS = 6


def write(run: Path, injector: Injector) -> int:
    """Write a few steps on the system of `injector`; returns the last durable one."""
    writer = begin(run, slots=2)
    injector.install()
    try:
        for step in range(1, STEPS + 1):
            put(writer, step)
    except StorageError:
        pass  # reported, and nothing more is durable
    finally:
        with contextlib.suppress(StorageError):
            writer.close()
        restore()
    return writer.durable_step


def restore() -> None:
    for name in CALLS:
        setattr(os, name, REAL[name])


@pytest.mark.parametrize("kind", ["short", "EIO", "ENOSPC"])
def test_one_fault_loses_nothing_that_was_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(settings, "LOG_SEGMENT_BYTES", 3000)
    recorded = Injector()
    assert write(tmp_path / "recorded", recorded) == STEPS
    tried = points(recorded.calls, kind)
    assert tried
    for at in tried:
        run = tmp_path / str(at)
        durable = write(run, Injector(kind, at))
        log = Log.open(run)
        assert log.recoverable_step >= max(durable, 0), recorded.calls[at]
        assert contents(log) == expected(range(1, log.recoverable_step + 1)), recorded.calls[at]
        if kind == "short":
            assert durable == STEPS


def killed(run: Path, injector: Injector) -> int:
    """The same in a child that the fault ends; returns the last step that was reported as durable."""
    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            injector.install()
            writer = begin(run, slots=2)
            for step in range(1, STEPS + 1):
                put(writer, step)
                REAL["write"](telling, bytes([max(0, writer.durable_step)]))
            writer.close()
            REAL["write"](telling, bytes([writer.durable_step]))
        os._exit(0)
    os.close(telling)
    os.waitpid(pid, 0)
    with os.fdopen(told, "rb") as heard:
        return max(heard.read(), default=0)


def go_on(run: Path) -> None:
    """Write the rest of the steps in a new epoch, as a job does that restarts from the log."""
    with Log.open(run, "inspect") as log:
        last = log.recoverable_step
    writer = begin(run, small_manifest(epoch=1, start=last, parent=ParentEpoch(0, last)), durable_step=last)
    for step in range(last + 1, STEPS + 2):
        put(writer, step)
    writer.close()


@pytest.mark.parametrize("kind", ["late", "lost", "power"])
def test_a_disk_with_late_or_lost_syncs_or_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What a disk falsely reported as written may be missing, but no step is changed."""
    monkeypatch.setattr(settings, "LOG_SEGMENT_BYTES", 3000)
    recorded = Injector()
    recorded.install()
    try:
        writer = begin(tmp_path / "recorded", slots=2)
        for step in range(1, STEPS + 1):
            put(writer, step)
        writer.close()
    finally:
        restore()
    tried = points(recorded.calls, kind)
    assert tried
    reached = set()
    for at in tried:
        run, call = tmp_path / str(at), recorded.calls[at]
        durable = killed(run, Injector(kind, at))
        if not (run / "log" / "epoch-000000" / "manifest.json").exists():
            continue  # nothing was started
        if kind == "lost" and not any((run / "log" / "epoch-000000" / "manifest.json").read_bytes()):
            with pytest.raises(UcpError, match=r"manifest\.json"):
                Log.open(run, "inspect")
            continue
        with Log.open(run, "inspect") as log:
            found = log.recoverable_step
            assert found >= (durable if kind != "lost" else 0), call
            assert contents(log, found) == expected(range(1, found + 1)), call
        reached.add(found)
        if kind == "lost":
            go_on(run)
            with Log.open(run) as log:
                assert contents(log) == expected(range(1, STEPS + 2)), call
    assert reached == {STEPS} if kind == "late" else len(reached) > 2, "and something was lost"
