"""Helpers for findings that a test expects."""

from __future__ import annotations

from ucp.checks.verify_report import Report
from ucp.core.findings import Finding


def only(report: Report, check: str) -> Finding:
    """The one finding, which is of this check."""
    assert [finding.check for finding in report.findings] == [check], [str(f) for f in report.findings]
    return report.findings[0]
