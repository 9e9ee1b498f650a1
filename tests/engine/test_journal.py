"""The journal of a run: what is recorded, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp import settings
from ucp.engine.journal import Journal, OutputBusyError
from ucp.engine.worker import WrittenRange

PART = [WrittenRange(0, 0, 64, "00")]


def begun(path: Path) -> Journal:
    journal = Journal(path, OutputBusyError("busy"))
    journal.begin("run")
    return journal


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_lines_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "JOURNAL_SECONDS", 3600.0)
    journal = begun(tmp_path / "journal")
    journal.record(PART)
    assert lines(tmp_path / "journal") == 0, "a short run leaves nothing that the disk must have before it can go"
    monkeypatch.setattr(settings, "JOURNAL_SECONDS", 0.0)
    journal.record(PART)
    assert lines(tmp_path / "journal") == 3
    journal.close()


@pytest.mark.parametrize("end", ["keep", "finish"])
def test_recorded_tasks_are_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(settings, "JOURNAL_SECONDS", 3600.0)
    journal = begun(tmp_path / "journal")
    journal.record(PART)
    getattr(journal, end)()
    journal.close()
    again = Journal(tmp_path / "journal", OutputBusyError("busy"))
    assert again.has_entries
    assert again.load("run") == [PART]
    again.close()


def test_an_empty_journal_starts_over(tmp_path: Path) -> None:
    begun(tmp_path / "journal").close()
    again = Journal(tmp_path / "journal", OutputBusyError("busy"))
    assert not again.has_entries
    again.close()
