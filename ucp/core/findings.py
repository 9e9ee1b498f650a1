"""Findings: the problems and remarks that checks report."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal

from ucp.core.checkpoint import Atom, Fragment, Rank
from ucp.errors import InconsistentError, UsageError, escaped

Severity = Literal["error", "warning", "note"]
FailOn = Literal["error", "warning", "note", "never"]
LevelName = Literal["quick", "default", "deep"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

# A baseline of one step must apply to the next, so fingerprints leave out the number in the name of a step folder.
_STEP_FOLDER: Final = re.compile(r"(?<![^/])(global_step|iter_|step[-_]?|checkpoint-|epoch=)[0-9][^/]*(?=/)")


class Level(IntEnum):
    """How much `verify` reads: the index only, also what comparing replicas and masters takes, or every byte once."""

    QUICK = 0
    DEFAULT = 1
    DEEP = 2

    @property
    def title(self) -> str:
        return self.name.lower()

    @staticmethod
    def parse(level: Level | str) -> Level:
        """A level, or the one with this title."""
        known = {one.title: one for one in Level}
        if isinstance(level, str) and level.lower() not in known:
            hint = f"choose one of: {', '.join(known)}"
            raise UsageError(f"{level!r} is not a level of verification", hint=hint)
        return known[level.lower()] if isinstance(level, str) else level


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem or remark, and its location. `byte_range` is half-open, in bytes of `file`.

    `subject` distinguishes findings whose other fields are equal apart from the message: an archive member, a key.
    """

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
    subject: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escaped(self.message))

    @property
    def fingerprint(self) -> str:
        """Identity of a problem: unchanged at other steps and when only the numbers in the message change."""
        file = _STEP_FOLDER.sub(r"\1*", self.file) if self.file else None
        location = [file, None if self.rank is None else str(self.rank), self.parameter, self.kind, self.subject]
        identity = [self.check, self.severity, *(location if any(location) else [self.message])]
        return hashlib.sha256("\0".join(part or "" for part in identity).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """All fields; those that do not apply are null."""
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
            "subject": self.subject,
            "hint": self.hint,
            "fingerprint": self.fingerprint,
        }

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.message}"


def location_of(fragment: Fragment | None, atom: Atom) -> tuple[str | None, Rank | None, str, str]:
    """The fields of a finding from `file` to `kind`, for an atom and one of its fragments."""
    return fragment and fragment.file, fragment and fragment.rank, atom.name, atom.kind


def describe_fragment(fragment: Fragment) -> str:
    """Rank and file of a fragment, for messages."""
    return f"{fragment.rank} ({fragment.file or 'manifest'})"
