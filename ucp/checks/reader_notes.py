"""What the reader had to say: its notes as findings."""

from __future__ import annotations

from collections.abc import Iterator

from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext


def look(context: CheckContext) -> Iterator[Finding]:
    """One finding a note. Slice mappings have a check of their own, because they are a check of the source's."""
    for note in context.checkpoint.notes:
        yield Finding("slice-mappings" if note.id.startswith("slice-mappings") else "notes", "note", note.text)
