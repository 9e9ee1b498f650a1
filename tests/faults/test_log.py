"""A log on a system that fails once, at every kind of call: what was said to be durable is there, and nothing else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.faults.injection import CALLS, REAL, Injector, points
from tests.log.test_reader import contents, expected
from tests.log.test_writer import begin, put
from ucp import tunables
from ucp.errors import StorageError
from ucp.log.reader import Log

STEPS = 6


def write(run: Path, injector: Injector) -> int:
    """Write a few steps on the system of `injector`; gives the last durable one."""
    writer = begin(run, slots=2)
    injector.install()
    try:
        for step in range(1, STEPS + 1):
            put(writer, step)
    except StorageError:
        pass  # said, and nothing more is durable
    finally:
        with contextlib.suppress(StorageError):
            writer.close()
        for name in CALLS:
            setattr(os, name, REAL[name])
    return writer.durable_step


@pytest.mark.parametrize("kind", ["short", "EIO", "ENOSPC"])
def test_one_fault_loses_nothing_that_was_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tunables, "LOG_SEGMENT_BYTES", 3000)
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
