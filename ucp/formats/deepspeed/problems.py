"""Collects everything that is wrong before it is reported, so that a person sees the whole damage at once."""

from __future__ import annotations

from typing import Final

from ucp.errors import InconsistentError

SHOWN: Final = 20  # further problems are counted only


class Problems:
    """A list of findings, each one line that names file, rank and parameter."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Remember a finding; the same text counts once."""
        self._texts[text] = None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def raise_any(self, hint: str) -> None:
        """Raise one error that lists what was found, if anything was."""
        if not self._texts:
            return
        texts = list(self._texts)
        lines = texts[:SHOWN]
        if len(texts) > SHOWN:
            lines.append(f"… and {len(texts) - SHOWN} more")
        if len(lines) == 1:
            raise InconsistentError(f"{self.where}: {lines[0]}", hint=hint)
        raise InconsistentError(f"{self.where}: {len(texts)} problems:\n    " + "\n    ".join(lines), hint=hint)
