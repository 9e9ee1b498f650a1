"""Render a report for people, scripts and CI services."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

from ucp.checks.catalogue import BY_ID, CHECKS, Check
from ucp.checks.verify_report import Report
from ucp.core.findings import Finding
from ucp.errors import escaped
from ucp.version import VERSION

FORMATS: Final = ("text", "json", "junit", "sarif", "github")

_MAX_LINES: Final = 50  # findings of one check printed as text; JSON has all of them
_MAX_ANNOTATIONS: Final = 10  # per check; GitHub shows ten per step and severity
_GITHUB_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")  # not allowed even if escaped
_SARIF_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_EXCUSES: Final = {"allowed": "allowed", "baseline": "known from the baseline"}
_SUPPRESSIONS: Final = {"allowed": "allowed by --allow", "baseline": "known from the baseline"}


def render(report: Report, form: str) -> str:
    """The report in one of `FORMATS`; ends with a line break unless it is empty."""
    if form == "json":
        return json.dumps(report.to_json()) + "\n"
    return {"text": _text, "junit": _junit, "sarif": _sarif, "github": _github}[form](report)


def verdict(report: Report) -> str:
    """A summary such as `ok (2 warnings; 1 allowed)`."""
    counted = [f"{count} {severity}{'s'[: count != 1]}" for severity, count in report.counts.items() if count]
    excused = [f"{count} {_EXCUSES[excuse]}" for excuse, count in report.excused.items() if count]
    parts = [part for part in (", ".join(counted), ", ".join(excused)) if part]
    return ("ok" if report.ok else "NOT ok") + (f" ({'; '.join(parts)})" if parts else "")


def _counted(report: Report) -> Iterator[Finding]:
    """Findings that are not excused, most important first."""
    return (finding for finding in report.findings if report.policy.excuse(finding) is None)


def _limited(report: Report, limit: int) -> tuple[list[Finding], dict[str, int]]:
    """At most `limit` findings per check, and how many of each check are left out."""
    seen: Counter[str] = Counter()
    shown: list[Finding] = []
    for finding in _counted(report):
        seen[finding.check] += 1
        if seen[finding.check] <= limit:
            shown.append(finding)
    return shown, {check: count - limit for check, count in seen.items() if count > limit}


def _text(report: Report) -> str:
    """One line per finding, with its hint on the next line."""
    shown, left_out = _limited(report, _MAX_LINES)
    lines: list[str] = []
    for finding in shown:
        lines += [str(finding), f"  → {finding.hint}"] if finding.hint else [str(finding)]
    lines += [f"… {count} more of {check} (--format json has all)" for check, count in left_out.items()]
    return "".join(f"{line}\n" for line in lines)


def _github(report: Report) -> str:
    """Workflow commands of GitHub Actions, which become annotations of the run; then the verdict."""
    shown, left_out = _limited(report, _MAX_ANNOTATIONS)
    lines = [_annotation(report.root or report.source, finding) for finding in shown]
    lines += [f"… {count} more of {check}" for check, count in left_out.items()]
    lines.append(f"{report.source}: {verdict(report)}")
    return "".join(f"{line}\n" for line in lines)


def _annotation(root: str, finding: Finding) -> str:
    properties = {"title": f"ucp verify: {finding.check}"}
    if finding.file:  # GitHub resolves it relative to the working directory of the command
        properties = {"file": str(PurePath(root, finding.file)), **properties}
    joined = ",".join(
        f"{key}={_github_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in properties.items()
    )
    message = finding.message + (f"\n→ {finding.hint}" if finding.hint else "")
    return f"::{_GITHUB_COMMANDS[finding.severity]} {joined}::{_github_escaped(message)}"


def _github_escaped(text: str) -> str:
    return escaped(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _junit(report: Report) -> str:
    """JUnit XML with one test case per check, as GitLab, Jenkins and Azure display it.

    Checks that did not run are skipped; findings that do not fail the run are in the `system-out` of a test case.
    """
    from xml.etree import ElementTree

    findings: dict[str, list[Finding]] = {}
    for finding in _counted(report):
        findings.setdefault(finding.check, []).append(finding)
    failed = {check: [f for f in found if report.policy.fails(f)] for check, found in findings.items()}
    ran = set(report.checks)
    totals = {
        "tests": str(len(CHECKS)),
        "failures": str(sum(map(bool, failed.values()))),
        "errors": "0",
        "skipped": str(sum(check.id not in ran for check in CHECKS)),
        "time": f"{report.seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "ucp verify", **totals})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml_text(report.source), **totals})
    for check in CHECKS:
        case = ElementTree.SubElement(suite, "testcase", classname="ucp.verify", name=check.id, time="0")
        if check.id not in ran:
            ElementTree.SubElement(case, "skipped", message=_skip_reason(report, check))
            continue
        failures = failed.get(check.id, [])
        if failures:
            message = _xml_text(failures[0].message)
            if len(failures) > 1:
                message += f" (and {len(failures) - 1} more)"
            ElementTree.SubElement(case, "failure", type=check.id, message=message).text = _xml_lines(failures)
        others = [finding for finding in findings.get(check.id, []) if finding not in failures]
        if others:
            ElementTree.SubElement(case, "system-out").text = _xml_lines(others)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _skip_reason(report: Report, check: Check) -> str:
    if check.level > report.level:
        return f"runs at level {check.level.title} and deeper"
    return "runs with --log" if check.of_logs else "the checkpoint could not be opened"


def _xml_lines(findings: list[Finding]) -> str:
    return "\n".join(_xml_text(f"{f}\n  → {f.hint}" if f.hint else str(f)) for f in findings)


def _xml_text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _sarif(report: Report) -> str:
    """SARIF 2.1.0, for code-scanning services and editors: one rule per check, excused findings as suppressed."""
    rules = [
        {"id": check.id, "shortDescription": {"text": check.meaning}, "properties": {"level": check.level.title}}
        for check in CHECKS
    ]
    run = {
        "tool": {"driver": {"name": "ucp verify", "semanticVersion": VERSION, "rules": rules}},
        "invocations": [
            {"executionSuccessful": True, "exitCode": report.exit_code, "properties": {"level": report.level.title}}
        ],
        "results": [_sarif_result(report, finding) for finding in report.findings],
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _sarif_result(report: Report, finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.check,
        "ruleIndex": CHECKS.index(BY_ID[finding.check]),
        "level": finding.severity,
        "message": {"text": finding.message + (f"\n{finding.hint}" if finding.hint else "")},
        "locations": [_sarif_location(report, finding)],
        "partialFingerprints": {"ucp/v1": finding.fingerprint},
    }
    excuse = report.policy.excuse(finding)
    if excuse is not None:
        result["suppressions"] = [{"kind": "external", "justification": _SUPPRESSIONS[excuse]}]
    return result


def _sarif_location(report: Report, finding: Finding) -> dict[str, Any]:
    from urllib.parse import quote

    # Relative to the working directory, as services resolve it, unless the source was given as an absolute path.
    path = PurePath(report.root or report.source, finding.file or "")
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    # Code scanning rejects results without a line number; in a binary file the byte range is the location.
    region: dict[str, Any] = {"startLine": 1}
    if finding.byte_range is not None:
        start, stop = finding.byte_range
        region |= {"byteOffset": start, "byteLength": stop - start}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
    if finding.parameter is not None:
        name = finding.parameter if finding.kind is None else f"{finding.parameter}|{finding.kind}"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "parameter"}]
    return location
