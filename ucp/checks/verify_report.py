"""What a finding leads to: which severities fail, which checks are allowed to fail, what is known from before.

The report: everything that a run of checks found, and what that leads to.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ucp.checks.catalogue import BY_ID
from ucp.checks.findings import SEVERITIES, Finding, Level, Severity
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UnsafeError, UsageError

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


SCHEMA: Final = 1  # of the JSON report; raised when a field changes its meaning or goes away

# Which failure a report with several of them ends with: damaged bytes explain most of what else is wrong.
_GRAVEST_FIRST: Final = tuple(
    kind.exit_code for kind in (IntegrityError, UnsafeError, StorageError, NotUnderstoodError, InconsistentError)
)


@dataclass(slots=True)
class Report:
    """Everything that a run of checks found, most important first."""

    source: str
    level: Level
    checks: Sequence[str]  # ids of the checks that ran, most important first
    format: str | None = None  # None: the checkpoint could not be opened
    root: str | None = None  # the folder that files of findings are relative to; None: the source
    findings: list[Finding] = field(default_factory=list)
    parameters: int = 0
    atoms: int = 0
    files: int = 0
    bytes_read: int = 0  # of tensors and archives, beyond what the index took
    seconds: float = 0.0  # what it took
    policy: Policy = field(default_factory=Policy)

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings in; the same one counts once."""
        known = set(self.findings)
        for finding in findings:
            if finding not in known:
                known.add(finding)
                self.findings.append(finding)

    def sort(self) -> None:
        """Errors first, then by the importance of the check, then by parameter and file."""
        order = {check: position for position, check in enumerate(self.checks)}
        self.findings.sort(
            key=lambda f: (
                SEVERITIES.index(f.severity),
                order.get(f.check, len(order)),
                f.parameter or "",
                f.kind or "",
                f.file or "",
                f.message,
            )
        )

    @property
    def counts(self) -> dict[Severity, int]:
        """Number of findings of each severity that are not excused."""
        counted = Counter(f.severity for f in self.findings if self.policy.excuse(f) is None)
        return {severity: counted[severity] for severity in SEVERITIES}

    @property
    def excused(self) -> dict[Excuse, int]:
        """Number of findings that do not count, by the reason."""
        counted = Counter(self.policy.excuse(finding) for finding in self.findings)
        return {"allowed": counted["allowed"], "baseline": counted["baseline"]}

    @property
    def ok(self) -> bool:
        """Nothing that the policy fails on; there may be lesser findings."""
        return not any(map(self.policy.fails, self.findings))

    @property
    def exit_code(self) -> int:
        """0 if nothing fails, else that of the gravest failure."""
        codes = {finding.exit_code for finding in self.findings if self.policy.fails(finding)}
        return next((code for code in _GRAVEST_FIRST if code in codes), InconsistentError.exit_code) if codes else 0

    def to_json(self) -> dict[str, Any]:
        """The report for scripts; `schema` says which form it has."""
        found = Counter(finding.check for finding in self.findings)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "root": self.root or self.source,
            "format": self.format,
            "level": self.level.title,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "policy": self.policy.to_json(),
            "counts": self.counts,
            "excused": self.excused,
            "checked": {
                "parameters": self.parameters,
                "atoms": self.atoms,
                "files": self.files,
                "bytes_read": self.bytes_read,
            },
            "checks": [{"id": check, "findings": found[check]} for check in self.checks],
            "findings": [{**finding.to_json(), "excused": self.policy.excuse(finding)} for finding in self.findings],
        }
