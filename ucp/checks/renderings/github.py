"""Workflow commands of GitHub Actions: findings become annotations of the run."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Final

from ucp.checks.findings import Finding
from ucp.checks.renderings import counted, verdict
from ucp.checks.verify_report import Report

_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}
_SHOWN: Final = 10  # annotations of one check; GitHub shows ten of a kind and step


def render(report: Report) -> str:
    """Annotations, most important first, then the verdict."""
    lines: list[str] = []
    printed: Counter[str] = Counter()
    for finding in counted(report):
        printed[finding.check] += 1
        if printed[finding.check] <= _SHOWN:
            lines.append(_annotation(report.root or report.source, finding))
    lines += [f"… {count - _SHOWN} more of {check}" for check, count in printed.items() if count > _SHOWN]
    lines.append(f"{report.source}: {verdict(report)}")
    return "".join(f"{line}\n" for line in lines)


def _annotation(root: str, finding: Finding) -> str:
    properties = {"title": f"ucp verify: {finding.check}"}
    if finding.file:  # GitHub looks for it from where the command was run
        properties = {"file": str(PurePath(root, finding.file)), **properties}
    listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    message = finding.message + (f"\n→ {finding.hint}" if finding.hint else "")
    return f"::{_COMMANDS[finding.severity]} {listed}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
