"""What a finding leads to: which severities fail, which checks are allowed to fail, what is known from before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ucp.checks.findings import SEVERITIES, Finding
from ucp.checks.registry import BY_ID
from ucp.errors import StorageError, UsageError

FailOn = Literal["error", "warning", "note", "never"]
FAIL_ON: Final[tuple[FailOn, ...]] = (*SEVERITIES, "never")

Excuse = Literal["allowed", "baseline"]


@dataclass(frozen=True, slots=True)
class Policy:
    """`fail_on` is the least severity that fails a run; a finding of a check in `allow`, or one whose fingerprint is in
    `baseline`, never does."""

    fail_on: FailOn = "error"
    allow: frozenset[str] = frozenset()
    baseline: frozenset[str] = frozenset()

    def excuse(self, finding: Finding) -> Excuse | None:
        """Why a finding does not count, if it does not."""
        if finding.check in self.allow:
            return "allowed"
        return "baseline" if self.baseline and finding.fingerprint in self.baseline else None

    def fails(self, finding: Finding) -> bool:
        """Does this finding fail the run?"""
        if self.fail_on == "never" or self.excuse(finding) is not None:
            return False
        return SEVERITIES.index(finding.severity) <= SEVERITIES.index(self.fail_on)

    def to_json(self) -> dict[str, Any]:
        return {"fail_on": self.fail_on, "allow": sorted(self.allow), "baseline": len(self.baseline)}


def make_policy(
    fail_on: str = "error", allow: Iterable[str] = (), baseline: str | os.PathLike[str] | None = None
) -> Policy:
    """A policy from what a user says; `baseline` is the path of an earlier report as JSON."""
    known = next((severity for severity in FAIL_ON if severity == fail_on), None)
    if known is None:
        raise UsageError(f"{fail_on!r} is not a severity to fail on", hint=f"choose one of: {', '.join(FAIL_ON)}")
    checks = frozenset(allow)
    for check in sorted(checks - BY_ID.keys()):
        raise UsageError(f"{check!r} is not a check", hint=f"the checks are: {', '.join(BY_ID)}")
    return Policy(known, checks, frozenset() if baseline is None else read_baseline(Path(baseline)))


def read_baseline(path: Path) -> frozenset[str]:
    """The fingerprints of all findings of a report."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise StorageError(f"{path}: the baseline cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    try:
        return frozenset(str(finding["fingerprint"]) for finding in json.loads(text)["findings"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{path}: is not a report of `ucp verify`", hint="make one with `ucp verify SRC -o baseline.json`"
        ) from None
