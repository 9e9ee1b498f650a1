"""A report as text, in the form that a person, a script or a CI service reads. One module a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Final, cast

from ucp.checks.findings import Finding
from ucp.checks.verify_report import Report

FORMATS: Final = ("text", "json", "junit", "sarif", "github")


def render(report: Report, form: str) -> str:
    """The report in one of `FORMATS`; ends with a line break unless it is empty."""
    if form == "json":
        return json.dumps(report.to_json()) + "\n"
    return cast(str, import_module(f"ucp.checks.renderings.{form}").render(report))


def counted(report: Report) -> Iterator[Finding]:
    """The findings that are not excused, most important first."""
    return (finding for finding in report.findings if report.policy.excuse(finding) is None)


def verdict(report: Report) -> str:
    """`ok (2 warnings; 1 allowed)`."""
    told = [f"{count} {severity}{'s'[: count != 1]}" for severity, count in report.counts.items() if count]
    excuses = {"allowed": "allowed", "baseline": "known from the baseline"}
    hidden = [f"{count} {excuses[excuse]}" for excuse, count in report.excused.items() if count]
    parts = [part for part in (", ".join(told), ", ".join(hidden)) if part]
    return ("ok" if report.ok else "NOT ok") + (f" ({'; '.join(parts)})" if parts else "")
