"""The report and its command: order, exit codes, JSON, streams, documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.checks.atom_folder import ATOM, write
from tests.checks.sharded_checkpoint import flip, make
from ucp.checks.catalogue import CHECKS
from ucp.checks.runner import verify
from ucp.checks.verify_report import Report
from ucp.cli.main import run
from ucp.core.findings import Finding, Level


def report_of(*findings: Finding) -> Report:
    report = Report("somewhere", Level.DEEP, [check.id for check in CHECKS])
    report.add(findings)
    report.sort()
    return report


def test_findings_come_most_important_first() -> None:
    note = Finding("zip-crc", "note", "n")
    minor = Finding("replicas", "error", "b", parameter="b")
    first = Finding("replicas", "error", "a", parameter="a")
    major = Finding("coverage", "error", "c")
    warning = Finding("coverage", "warning", "w")
    assert report_of(note, minor, warning, first, major).findings == [major, first, minor, warning, note]


def test_the_same_finding_counts_once() -> None:
    finding = Finding("replicas", "error", "a")
    assert report_of(finding, finding).counts == {"error": 1, "warning": 0, "note": 0}


@pytest.mark.parametrize(
    "codes, expected", [([], 0), ([1], 1), ([1, 4], 4), ([4, 6], 4), ([3, 1], 3), ([5, 3], 5), ([6, 5], 6)]
)
def test_the_most_severe_error_decides_the_exit_code(codes: list[int], expected: int) -> None:
    errors = [Finding("readable", "error", str(code), exit_code=code) for code in codes]
    assert report_of(*errors, Finding("finite", "warning", "w", exit_code=4)).exit_code == expected


def test_every_check_is_documented_at_its_level(project: Path) -> None:
    row = r"^\| `([a-z-]+)` \| (quick|default|deep)(, with `--log`)? \| \S"
    rows = re.findall(row, (project / "docs/checks.md").read_text(), re.M)
    assert [(name, level, bool(log)) for name, level, log in rows] == [
        (check.id, check.level.title, check.of_logs) for check in CHECKS
    ]


def test_an_intact_source_prints_nothing_but_ok(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(write(tmp_path, link=False))]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert ": ok; " in err
    assert "2 parameters, 10 atoms" in err


def test_findings_go_to_stdout_with_their_hint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    atoms = write(tmp_path, link=False)
    (atoms / ATOM).unlink()
    assert run(["verify", str(atoms), "--quick"]) == 4
    out, err = capfd.readouterr()
    first, hint = out.splitlines()
    assert first.startswith(f"error: manifest-files: {ATOM}: is missing")
    assert hint.startswith("  → ")
    assert "NOT ok (1 error)" in err


def test_json_has_every_field(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    atoms = write(tmp_path, link=False)
    flip(atoms / ATOM, 4096)
    assert run(["verify", str(atoms), "--deep", "--json", "--jobs", "1"]) == 4
    out, _ = capfd.readouterr()
    report = json.loads(out)
    assert report["schema"] == 1
    assert (report["ok"], report["exit_code"], report["level"], report["format"]) == (False, 4, "deep", "atoms")
    assert [check["id"] for check in report["checks"]] == [check.id for check in CHECKS if not check.of_logs]
    finding = report["findings"][0]
    assert (finding["check"], finding["severity"], finding["file"]) == ("manifest-checksums", "error", ATOM)
    assert finding.keys() == {
        *("check", "severity", "message", "file", "rank", "parameter", "kind", "byte_range", "subject", "hint"),
        *("fingerprint", "excused"),
    }
    assert report["checked"]["parameters"] == 2


def test_the_json_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "made")
    for file in sorted(checkpoint.root.glob("*.tp1.*"))[:4]:
        flip(file, 17)
    reports = [verify(checkpoint, "deep", jobs=jobs).to_json() for jobs in (1, 4, 4)]
    assert reports[0]["counts"]["error"] > 0
    assert reports[0] == reports[1] == reports[2]


def test_quick_and_deep_exclude_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path), "--quick", "--deep"]) == 2
    assert "exclude each other" in capfd.readouterr().err


def test_long_lists_are_cut_in_text_and_whole_in_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucp.checks.render._MAX_LINES", 1)
    atoms = write(tmp_path, link=False)
    for path in (atoms / "atoms").iterdir():
        path.unlink()
    assert run(["verify", str(atoms), "--quick"]) == 4
    assert "… 1 more of manifest-files (--format json has all)" in capfd.readouterr().out
    assert run(["verify", str(atoms), "--quick", "--json"]) == 4
    assert len(json.loads(capfd.readouterr().out)["findings"]) == 2


def test_progress_counts_the_bytes_that_are_read(tmp_path: Path) -> None:
    class Counting:
        total = done = 0
        finished = False

        def start(self, total: int) -> None:
            self.total = total

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

        def finish(self) -> None:
            self.finished = True

    progress = Counting()
    report = verify(make(tmp_path / "made"), progress=progress)
    assert progress.finished
    assert progress.total == progress.done == report.bytes_read > 0
