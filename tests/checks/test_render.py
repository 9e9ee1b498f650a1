"""The formats of a report that CI services read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import ucp
from tests.checks.atom_folder import ATOM, write
from tests.checks.sharded_checkpoint import flip
from ucp.checks import verify_report
from ucp.checks.catalogue import CHECKS
from ucp.checks.render import FORMATS, render, verdict
from ucp.checks.verify_report import Policy, Report, make_policy
from ucp.cli import verify as cli
from ucp.cli.main import run
from ucp.core.checkpoint import Rank
from ucp.core.findings import Finding, Level
from ucp.options import VerifyOptions, declared

DAMAGE = Finding(
    "zip-crc", "error", "f.pt, member a/data/0: checksum 1", "f.pt", Rank(tp=1), "p", "exp_avg", (64, 128), "restore", 4
)
ODD = Finding("finite", "warning", "100% of, p: are\nNaN \x00", "a,b:c", parameter="p", kind="master")
TOLD = Finding("notes", "note", "read so")


def report_of(*findings: Finding, level: Level = Level.DEEP, policy: Policy | None = None) -> Report:
    checks = [check.id for check in CHECKS if check.level <= level]
    report = Report("run/ckpt", level, checks, policy=policy or Policy())
    report.add(findings)
    report.sort()
    return report


@pytest.fixture
def atoms(tmp_path: Path) -> Path:
    """A folder of atoms with one flipped bit."""
    folder = write(tmp_path, link=False)
    flip(folder / ATOM, 4096)
    return folder


def test_the_command_offers_every_format() -> None:
    assert cli.FORMATS == FORMATS
    assert declared(VerifyOptions)["fail_on"].choices == verify_report.FAIL_ON


def test_github_annotations_are_escaped() -> None:
    lines = render(report_of(DAMAGE, ODD, TOLD), "github").splitlines()
    assert lines == [
        "::error file=run/ckpt/f.pt,title=ucp verify%3A zip-crc::f.pt, member a/data/0: checksum 1%0A→ restore",
        "::warning file=run/ckpt/a%2Cb%3Ac,title=ucp verify%3A finite::100%25 of, p: are\\nNaN \\x00",
        "::notice title=ucp verify%3A notes::read so",
        "run/ckpt: NOT ok (1 error, 1 warning, 1 note)",
    ]


def test_github_shows_ten_of_a_check() -> None:
    many = [Finding("replicas", "error", f"number {i}") for i in range(12)]
    lines = render(report_of(*many), "github").splitlines()
    assert sum(line.startswith("::error") for line in lines) == 10
    assert "… 2 more of replicas" in lines


def test_junit_has_one_case_per_check() -> None:
    root = ElementTree.fromstring(render(report_of(DAMAGE, ODD, TOLD), "junit"))
    suite = root.find("testsuite")
    assert suite is not None
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("run/ckpt", str(len(CHECKS)), "1")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == [check.id for check in CHECKS]
    failure = cases["zip-crc"].find("failure")
    assert failure is not None
    assert failure.get("message") == DAMAGE.message
    assert "→ restore" in (failure.text or "")
    assert cases["finite"].find("failure") is None
    assert "100% of" in (cases["finite"].findtext("system-out") or "")
    assert len(cases["coverage"]) == 0


def test_junit_skips_what_did_not_run() -> None:
    root = ElementTree.fromstring(render(report_of(level=Level.QUICK), "junit"))
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert cases["zip-crc"].find("skipped") is not None
    assert cases["coverage"].find("skipped") is None
    assert root.get("skipped") == str(sum(check.level > Level.QUICK for check in CHECKS))


def sarif(report: Report) -> dict[str, Any]:
    (only,) = json.loads(render(report, "sarif"))["runs"]
    assert isinstance(only, dict)
    return only


def test_sarif_has_locations() -> None:
    result = sarif(report_of(DAMAGE, TOLD))["results"][0]
    assert (result["ruleId"], result["level"]) == ("zip-crc", "error")
    assert CHECKS[result["ruleIndex"]].id == "zip-crc"
    (place,) = result["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "run/ckpt/f.pt"
    assert place["physicalLocation"]["region"] == {"startLine": 1, "byteOffset": 64, "byteLength": 64}
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "p|exp_avg"
    assert result["partialFingerprints"] == {"ucp/v1": DAMAGE.fingerprint}


def test_sarif_gives_every_result_a_location() -> None:
    """Code scanning refuses the whole file otherwise."""
    for result in sarif(report_of(DAMAGE, ODD, TOLD))["results"]:
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"]["uri"]
        assert place["physicalLocation"]["region"]["startLine"] == 1


def test_sarif_suppresses_what_is_excused() -> None:
    results = sarif(report_of(DAMAGE, ODD, policy=Policy(allow=frozenset({"zip-crc"}))))["results"]
    assert ["suppressions" in result for result in results] == [True, False]


@pytest.mark.parametrize(
    "fail_on, exit_code", [("error", 0), ("warning", 1), ("note", 1), ("never", 0)], ids=lambda value: str(value)
)
def test_fail_on_is_the_least_severity_that_fails(fail_on: str, exit_code: int) -> None:
    report = report_of(ODD, TOLD, policy=make_policy(fail_on))
    assert (report.exit_code, report.ok) == (exit_code, exit_code == 0)


def test_fail_on_never_lets_errors_pass() -> None:
    assert report_of(DAMAGE, policy=make_policy("never")).exit_code == 0


def test_an_allowed_check_does_not_count() -> None:
    report = report_of(DAMAGE, ODD, policy=make_policy("warning", ["zip-crc"]))
    assert report.exit_code == 1  # that of the warning, not 4
    assert report.counts == {"error": 0, "warning": 1, "note": 0}
    assert report.excused == {"allowed": 1, "baseline": 0}
    assert verdict(report) == "NOT ok (1 warning; 1 allowed)"
    assert "zip-crc" not in render(report, "text")
    assert [f["excused"] for f in report.to_json()["findings"]] == ["allowed", None]


def test_a_baseline_excuses_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(render(report_of(DAMAGE, TOLD), "json"))
    known = make_policy(baseline=before)
    moved = Finding("zip-crc", "error", "other words", "f.pt", Rank(tp=1), "p", "exp_avg", (0, 1), None, 4)
    assert report_of(moved, policy=known).exit_code == 0
    assert report_of(DAMAGE, policy=known).excused == {"allowed": 0, "baseline": 1}
    elsewhere = Finding("zip-crc", "error", DAMAGE.message, "g.pt", Rank(tp=1), "p", "exp_avg", None, None, 4)
    assert report_of(elsewhere, policy=known).exit_code == 4


def test_fingerprints_hold_for_the_next_step_and_distinguish_members() -> None:
    def damaged(folder: str, member: str = "data/1") -> str:
        return Finding("zip-crc", "error", "m", f"{folder}/mp_rank_00.pt", subject=member).fingerprint

    assert damaged("global_step3") == damaged("global_step400") == damaged("global_step5000")
    assert damaged("global_step3") != damaged("iter_0000003")
    assert damaged("global_step3") != damaged("global_step3", "data/2")
    assert damaged("out/checkpoint-3/global_step3") == damaged("out/checkpoint-9/global_step9")
    assert Finding("notes", "note", "a").fingerprint != Finding("notes", "note", "b").fingerprint
    assert Finding("notes", "note", "a", "x").fingerprint == Finding("notes", "note", "b", "x").fingerprint


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"findings": [{}]}', "\xff"])
def test_a_file_that_is_not_a_baseline_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, atoms: Path
) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(text.encode("latin-1"))
    assert run(["verify", str(atoms), "--baseline", str(path)]) == 2
    assert "is not a report of `ucp verify`" in capfd.readouterr().err
    assert run(["verify", str(atoms), "--baseline", str(tmp_path / "gone")]) == 5


def test_the_command_line_takes_a_policy(tmp_path: Path, atoms: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(atoms), "--deep", "--allow", "manifest-checksums"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "ok (1 allowed)" in err
    assert run(["verify", str(atoms), "--deep", "--fail-on", "never"]) == 0
    assert "manifest-checksums" in capfd.readouterr().out
    baseline = tmp_path / "baseline.json"
    assert run(["verify", str(atoms), "--deep", "--format", "json", "-o", str(baseline)]) == 4
    assert json.loads(capfd.readouterr().out) == json.loads(baseline.read_bytes())
    assert run(["verify", str(atoms), "--deep", "--baseline", str(baseline)]) == 0
    flip(atoms / ATOM, 4096 + 8)
    assert run(["verify", str(atoms), "--deep", "--baseline", str(baseline)]) == 0  # the same part of the same file
    flip(atoms / "extras/extras.json", 2, 1)
    assert run(["verify", str(atoms), "--deep", "--baseline", str(baseline)]) == 4


def test_files_are_written_by_their_suffix(tmp_path: Path, atoms: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("r.json", "r.sarif", "r.xml", "r.txt", "plain")
    options = [option for name in names for option in ("-o", str(tmp_path / name))]
    assert run(["verify", str(atoms), "--deep", "--format", "github", *options]) == 4
    texts = {name: (tmp_path / name).read_text() for name in names}
    assert json.loads(texts["r.json"])["schema"] == 1
    assert json.loads(texts["r.sarif"])["version"] == "2.1.0"
    assert ElementTree.fromstring(texts["r.xml"]).tag == "testsuites"
    assert texts["r.txt"].startswith("error: manifest-checksums")
    assert texts["plain"].startswith("::error ")  # the format that --format names
    assert capfd.readouterr().out == texts["r.txt"]
    assert run(["verify", str(atoms), "--deep", "--format", "github", "-o", str(tmp_path / "r.json")]) == 4
    assert capfd.readouterr().out == texts["plain"]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_printed_whole(atoms: Path, capfd: pytest.CaptureFixture[str], form: str) -> None:
    assert run(["verify", str(atoms), "--deep", "--format", form]) == 4
    out, _ = capfd.readouterr()
    assert "manifest-checksums" in out
    assert out.endswith("\n")


def test_unknown_checks_and_contradictions_are_refused(atoms: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(atoms), "--allow", "zip-crcs"]) == 2
    assert "the checks are: " in capfd.readouterr().err
    assert run(["verify", str(atoms), "--json", "--format", "sarif"]) == 2
    assert run(["verify", str(atoms), "--format", "json", "-o", str(atoms / "no/such/file")]) == 5
    assert "does not exist" in capfd.readouterr().err


def test_the_library_verifies_too(atoms: Path) -> None:
    assert ucp.verify(atoms).ok
    report = ucp.verify(atoms, "deep")
    assert (report.ok, report.exit_code) == (False, 4)
    assert ucp.verify(atoms, "deep", allow=["manifest-checksums"]).ok
