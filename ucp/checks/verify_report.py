"""The report of a verification, and the policy that decides which findings fail it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ucp.checks.catalogue import BY_ID
from ucp.core.findings import SEVERITIES, FailOn, Finding, Level, Severity
from ucp.core.notebook import html_table
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UnsafeError, UsageError

FAIL_ON: Final[tuple[FailOn, ...]] = (*SEVERITIES, "never")

Excuse = Literal["allowed", "baseline"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which findings fail a run: those of severity `fail_on` or higher.

    Findings of a check in `allow`, and those whose fingerprint is in `baseline`, are excused.
    """

    fail_on: FailOn = "error"
    allow: frozenset[str] = frozenset()
    baseline: frozenset[str] = frozenset()

    def excuse(self, finding: Finding) -> Excuse | None:
        """Why a finding is excused; None if it counts."""
        if finding.check in self.allow:
            return "allowed"
        return "baseline" if self.baseline and finding.fingerprint in self.baseline else None

    def fails(self, finding: Finding) -> bool:
        """Whether this finding fails the run."""
        if self.fail_on == "never" or self.excuse(finding) is not None:
            return False
        return SEVERITIES.index(finding.severity) <= SEVERITIES.index(self.fail_on)

    def to_json(self) -> dict[str, Any]:
        return {"fail_on": self.fail_on, "allow": sorted(self.allow), "baseline": len(self.baseline)}


def make_policy(
    fail_on: str = "error", allow: Iterable[str] = (), baseline: str | os.PathLike[str] | None = None
) -> Policy:
    """Build a policy from user input; `baseline` is the path of an earlier report in JSON."""
    known = next((severity for severity in FAIL_ON if severity == fail_on), None)
    if known is None:
        raise UsageError(f"{fail_on!r} is not a severity to fail on", hint=f"choose one of: {', '.join(FAIL_ON)}")
    checks = frozenset(allow)
    for check in sorted(checks - BY_ID.keys()):
        raise UsageError(f"{check!r} is not a check", hint=f"the checks are: {', '.join(BY_ID)}")
    return Policy(known, checks, frozenset() if baseline is None else read_baseline(Path(baseline)))


def read_baseline(path: Path) -> frozenset[str]:
    """Fingerprints of all findings of a JSON report."""
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

# A report with several kinds of failure exits with the first of these: damaged bytes explain most other problems.
_MOST_SEVERE_FIRST: Final = tuple(
    kind.exit_code for kind in (IntegrityError, UnsafeError, StorageError, NotUnderstoodError, InconsistentError)
)


@dataclass(slots=True)
class Report:
    """The result of one verification; findings are sorted by importance."""

    source: str
    level: Level
    checks: Sequence[str]  # ids of the checks that ran, most important first
    format: str | None = None  # None: the checkpoint could not be opened
    root: str | None = None  # folder that the files of findings are relative to; None: the source
    findings: list[Finding] = field(default_factory=list)
    parameters: int = 0
    atoms: int = 0
    files: int = 0
    bytes_read: int = 0  # of tensors and archives, not counting what indexing read
    seconds: float = 0.0  # duration
    policy: Policy = field(default_factory=Policy)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, without duplicates."""
        known = set(self.findings)
        for finding in findings:
            if finding not in known:
                known.add(finding)
                self.findings.append(finding)

    def sort(self) -> None:
        """Sort findings: errors first, then by importance of the check, then by parameter and file."""
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
        """Number of findings per severity, not counting excused ones."""
        counted = Counter(f.severity for f in self.findings if self.policy.excuse(f) is None)
        return {severity: counted[severity] for severity in SEVERITIES}

    @property
    def excused(self) -> dict[Excuse, int]:
        """Number of excused findings, by reason."""
        counted = Counter(self.policy.excuse(finding) for finding in self.findings)
        return {"allowed": counted["allowed"], "baseline": counted["baseline"]}

    @property
    def ok(self) -> bool:
        """True if no finding fails the run under the policy."""
        return not any(map(self.policy.fails, self.findings))

    @property
    def exit_code(self) -> int:
        """0 if nothing fails, else the code of the most severe failure."""
        codes = {finding.exit_code for finding in self.findings if self.policy.fails(finding)}
        return next((code for code in _MOST_SEVERE_FIRST if code in codes), InconsistentError.exit_code) if codes else 0

    def _repr_html_(self) -> str:
        title = f"{self.source}: {'ok' if self.ok else 'failed'}; {len(self.checks)} checks ({self.level.title}) of"
        rows = ((f.severity, f.check, f.message, f.rank or "", f.hint or "") for f in self.findings)
        header = ("severity", "check", "finding", "rank", "what to do")
        return html_table(f"{title} {self.parameters} parameters", header, rows, len(self.findings))

    def to_json(self) -> dict[str, Any]:
        """The report for scripts; `schema` is the version of its fields."""
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
