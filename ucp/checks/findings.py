"""Findings: what a check has to say, and the report that collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Literal

from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UnsafeError
from ucp.model.checkpoint import Fragment
from ucp.model.layout import Rank

SCHEMA: Final = 1  # of the JSON report; raised when a field changes its meaning or goes away

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

# Which failure a report with several of them ends with: damaged bytes explain most of what else is wrong.
_GRAVEST_FIRST: Final = tuple(
    kind.exit_code for kind in (IntegrityError, UnsafeError, StorageError, NotUnderstoodError, InconsistentError)
)


class Level(IntEnum):
    """How much is read: the index alone, what copies and masters need, or every byte once."""

    QUICK = 0
    DEFAULT = 1
    DEEP = 2

    @property
    def title(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth knowing, and where. `byte_range` is half-open, in bytes of `file`."""

    check: str
    severity: Severity
    message: str
    file: str | None = None
    rank: Rank | None = None
    parameter: str | None = None
    kind: str | None = None
    byte_range: tuple[int, int] | None = None
    hint: str | None = None
    exit_code: int = InconsistentError.exit_code

    def to_json(self) -> dict[str, Any]:
        """Every field, those that do not apply as null."""
        rank = self.rank
        return {
            "check": self.check,
            "severity": self.severity,
            "message": self.message,
            "file": self.file,
            "rank": None if rank is None else {"pp": rank.pp, "tp": rank.tp, "dp": rank.dp, "ep": rank.ep},
            "parameter": self.parameter,
            "kind": self.kind,
            "byte_range": None if self.byte_range is None else list(self.byte_range),
            "hint": self.hint,
        }

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.message}"


def place(fragment: Fragment) -> str:
    """Rank and file of a fragment, for messages."""
    return f"{fragment.rank} ({fragment.file or 'manifest'})"


@dataclass(slots=True)
class Report:
    """Everything that a run of checks found, most important first."""

    source: str
    level: Level
    checks: Sequence[str]  # ids of the checks that ran, most important first
    format: str | None = None
    findings: list[Finding] = field(default_factory=list)
    parameters: int = 0
    atoms: int = 0
    files: int = 0
    bytes_read: int = 0  # of tensors and archives, beyond what the index took

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
        """Number of findings of each severity."""
        counted = Counter(finding.severity for finding in self.findings)
        return {severity: counted[severity] for severity in SEVERITIES}

    @property
    def ok(self) -> bool:
        """No error; there may be warnings and notes."""
        return self.counts["error"] == 0

    @property
    def exit_code(self) -> int:
        """0 without errors, else that of the gravest one."""
        codes = {finding.exit_code for finding in self.findings if finding.severity == "error"}
        return next((code for code in _GRAVEST_FIRST if code in codes), InconsistentError.exit_code) if codes else 0

    def to_json(self) -> dict[str, Any]:
        """The report for scripts; `schema` says which form it has."""
        found = Counter(finding.check for finding in self.findings)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "format": self.format,
            "level": self.level.title,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "counts": self.counts,
            "checked": {
                "parameters": self.parameters,
                "atoms": self.atoms,
                "files": self.files,
                "bytes_read": self.bytes_read,
            },
            "checks": [{"id": check, "findings": found[check]} for check in self.checks],
            "findings": [finding.to_json() for finding in self.findings],
        }
