"""SARIF 2.1.0: what code-scanning services and editors read."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote

from ucp.checks.catalogue import BY_ID, CHECKS, Check
from ucp.checks.findings import Finding
from ucp.checks.verify_report import Report
from ucp.version import VERSION

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_SUPPRESSED: Final = {"allowed": "allowed by --allow", "baseline": "known from the baseline"}


def render(report: Report) -> str:
    """One run with a rule a check. Excused findings are there as suppressed results."""
    run = {
        "tool": {"driver": {"name": "ucp verify", "semanticVersion": VERSION, "rules": [_rule(c) for c in CHECKS]}},
        "invocations": [
            {"executionSuccessful": True, "exitCode": report.exit_code, "properties": {"level": report.level.title}}
        ],
        "results": [_result(report, finding) for finding in report.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "shortDescription": {"text": check.meaning},
        "properties": {"level": check.level.title},
    }


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    text = finding.message + (f"\n{finding.hint}" if finding.hint else "")
    result: dict[str, Any] = {
        "ruleId": finding.check,
        "ruleIndex": CHECKS.index(BY_ID[finding.check]),
        "level": finding.severity,
        "message": {"text": text},
        "locations": [_location(report, finding)],
        "partialFingerprints": {"ucp/v1": finding.fingerprint},
    }
    excuse = report.policy.excuse(finding)
    if excuse is not None:
        result["suppressions"] = [{"kind": "external", "justification": _SUPPRESSED[excuse]}]
    return result


def _location(report: Report, finding: Finding) -> dict[str, Any]:
    # Code scanning accepts no result without a line; in a binary file the byte range is what says where.
    region: dict[str, Any] = {"startLine": 1}
    if finding.byte_range is not None:
        start, stop = finding.byte_range
        region |= {"byteOffset": start, "byteLength": stop - start}
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(report.root or report.source, finding.file)},
            "region": region,
        }
    }
    if finding.parameter is not None:
        name = finding.parameter if finding.kind is None else f"{finding.parameter}|{finding.kind}"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "parameter"}]
    return location


def _uri(root: str, file: str | None) -> str:
    """Relative to where the command was run, as services resolve it; absolute where the source was given so."""
    path = PurePath(root, file) if file else PurePath(root)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
