"""Look up the names of a checkpoint in a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from ucp.errors import UsageError
from ucp.formats.translate.model_config import ModelConfig
from ucp.names.name_tables import NamePattern, NameTable, TableEntry, outline


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Where a name is in a table: entry, position among the side's names, and the numbers in the name."""

    entry: int
    position: int
    numbers: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class TableMatch:
    """The names of a checkpoint looked up on one side of a table."""

    table: NameTable
    side: str
    model: ModelConfig
    found: dict[str, NameMatch] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.unknown and bool(self.found)

    @property
    def entries(self) -> list[tuple[int, TableEntry]]:
        """The entries that apply to this model, with their numbers."""
        return [(i, entry) for i, entry in enumerate(self.table.entries) if self.model.allows(entry.when)]


def match_names(table: NameTable, side: str, names: Iterable[str], model: ModelConfig) -> TableMatch:
    """Look up every name on one side of a table."""
    made = TableMatch(table, side, model)
    by_outline: dict[str, list[tuple[int, int, NamePattern]]] = {}  # most names fit one pattern only
    for i, entry in made.entries:
        for position, pattern in enumerate(entry.sides[side].names):
            if pattern.regex(model.layers) is not None:
                by_outline.setdefault(pattern.outline() or "", []).append((i, position, pattern))
    for name in names:
        candidates = (*by_outline.get(outline(name), ()), *by_outline.get("", ()))
        for i, position, pattern in sorted(candidates, key=lambda candidate: candidate[:2]):
            numbers = pattern.read(name, model.layers)
            if numbers is not None:
                made.found[name] = NameMatch(i, position, tuple(sorted(numbers.items())))
                break
        else:
            is_computed = any(pattern.match(name) for pattern in table.computed)
            (made.computed if is_computed else made.unknown).append(name)
    return made


def unknown_names_error(match: TableMatch, target: str) -> UsageError:
    """The error for names that are in no entry of the closest table: one line for a name in all layers."""
    patterns = [pattern.text for _, entry in match.entries for pattern in entry.sides[match.side].names]
    lines = []
    for name, count in Counter(outline(name) for name in match.unknown).items():
        close = closest_patterns(name, patterns)
        times = f" (× {count})" if count > 1 else ""
        lines.append(f"\n  {name}{times}" + (f"   closest: {', '.join(close)}" if close else ""))
    return UsageError(
        f"{len(match.unknown)} of {len(match.unknown) + len(match.found)} parameters have no name in {target!r}"
        f" (table {match.table.name}, side {match.side}):{''.join(lines)}",
        hint="leave them out with --exclude, or write a table of your own and give it with --names FILE",
    )


def closest_patterns(name: str, patterns: Sequence[str]) -> list[str]:
    """The two patterns that are most similar to a name."""
    plain = {re.sub(r"\{[^}]*\}", "N", pattern): pattern for pattern in patterns}
    return [plain[text] for text in get_close_matches(name, list(plain), 2, 0.6)]
