"""JUnit XML: one test case a check, as GitLab, Jenkins, Azure and others show test results."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

from ucp.checks.catalogue import CHECKS, Check
from ucp.checks.findings import Finding
from ucp.checks.renderings import counted
from ucp.checks.verify_report import Report

_FORBIDDEN: Final = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")  # by XML, even escaped


def render(report: Report) -> str:
    """Checks that did not run at this level are skipped; findings that do not fail are in a case's `system-out`."""
    findings: dict[str, list[Finding]] = {}
    for finding in counted(report):
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
    suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(report.source), **totals})
    for check in CHECKS:
        case = ElementTree.SubElement(suite, "testcase", classname="ucp.verify", name=check.id, time="0")
        if check.id not in ran:
            ElementTree.SubElement(case, "skipped", message=_why_skipped(report, check))
            continue
        failures = failed.get(check.id, [])
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            failure = ElementTree.SubElement(case, "failure", type=check.id, message=_clean(failures[0].message) + more)
            failure.text = _listed(failures)
        others = [finding for finding in findings.get(check.id, []) if finding not in failures]
        if others:
            ElementTree.SubElement(case, "system-out").text = _listed(others)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _why_skipped(report: Report, check: Check) -> str:
    if check.level > report.level:
        return f"runs at level {check.level.title} and deeper"
    return "runs with --log" if check.of_logs else "the checkpoint could not be opened"


def _listed(findings: list[Finding]) -> str:
    return "\n".join(_clean(f"{f}\n  → {f.hint}" if f.hint else str(f)) for f in findings)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
