"""Findings: what a check has to say."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal

from ucp.core.checkpoint import Fragment
from ucp.core.mesh import Rank
from ucp.errors import InconsistentError

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

# A baseline of one step must hold for the next: the number in a step folder's name is no part of a finding's identity.
_STEP_FOLDER: Final = re.compile(r"(?<![^/])(global_step|iter_|step[-_]?|checkpoint-|epoch=)[0-9][^/]*(?=/)")


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
    """One thing that is wrong or worth knowing, and where. `byte_range` is half-open, in bytes of `file`.

    `subject` tells findings apart that agree in everything else but their words: the member of an archive, a key.
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

    @property
    def fingerprint(self) -> str:
        """The same for the same trouble in the same place, at another step and with other numbers in the message."""
        file = _STEP_FOLDER.sub(r"\1*", self.file) if self.file else None
        where = [file, None if self.rank is None else str(self.rank), self.parameter, self.kind, self.subject]
        identity = [self.check, self.severity, *where] if any(where) else [self.check, self.severity, self.message]
        return hashlib.sha256("\0".join(part or "" for part in identity).encode()).hexdigest()[:16]

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
            "subject": self.subject,
            "hint": self.hint,
            "fingerprint": self.fingerprint,
        }

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.message}"


def place(fragment: Fragment) -> str:
    """Rank and file of a fragment, for messages."""
    return f"{fragment.rank} ({fragment.file or 'manifest'})"
