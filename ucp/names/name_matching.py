"""Which entries of a table the names of a checkpoint belong to, and which names belong to none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from ucp.errors import UsageError
from ucp.formats.translate.model_config import ModelConfig
from ucp.names.name_tables import NamePattern, NameTable, TableEntry, outline

_CLOSE: Final = 2


@dataclass(frozen=True, slots=True)
class NameMatch:
    """A name's place in a table: entry, position among the side's names, and the numbers that it says."""

    entry: int
    position: int
    numbers: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class TableMatch:
    """A table read from one side: where each name is, and what the table does not know."""

    table: NameTable
    side: str
    facts: ModelConfig
    found: dict[str, NameMatch] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.unknown and bool(self.found)

    @property
    def entries(self) -> list[tuple[int, TableEntry]]:
        """The entries that hold for this model."""
        return [(i, entry) for i, entry in enumerate(self.table.entries) if self.facts.fits(entry.when)]


def match_names(table: NameTable, side: str, names: Iterable[str], facts: ModelConfig) -> TableMatch:
    """Look every name up on one side of a table."""
    made = TableMatch(table, side, facts)
    patterns = [
        (i, position, pattern)
        for i, entry in made.entries
        for position, pattern in enumerate(entry.sides[side].names)
        if pattern.regex(facts.layers) is not None
    ]
    alike: dict[str, list[tuple[int, int, NamePattern]]] = {}  # most names can be of one pattern only
    for candidate in patterns:
        alike.setdefault(candidate[2].outline() or "", []).append(candidate)
    for name in names:
        for i, position, pattern in sorted((*alike.get(outline(name), ()), *alike.get("", ())), key=lambda c: c[:2]):
            numbers = pattern.read(name, facts.layers)
            if numbers is not None:
                made.found[name] = NameMatch(i, position, tuple(sorted(numbers.items())))
                break
        else:
            known = any(pattern.match(name) for pattern in table.computed)
            (made.computed if known else made.unknown).append(name)
    return made


def unknown_names_error(match: TableMatch, target: str) -> UsageError:
    """What to say of names that no entry of the nearest table knows: all of them, one line for all layers."""
    kinds = Counter(outline(name) for name in match.unknown)
    patterns = [pattern.text for _, entry in match.entries for pattern in entry.sides[match.side].names]
    lines = []
    for kind, count in kinds.items():
        close = closest_patterns(kind, patterns)
        often = f" (× {count})" if count > 1 else ""
        lines.append(f"\n  {kind}{often}" + (f"   closest: {', '.join(close)}" if close else ""))
    return UsageError(
        f"{len(match.unknown)} of {len(match.unknown) + len(match.found)} parameters have no name in {target!r}"
        f" (table {match.table.name}, side {match.side}):{''.join(lines)}",
        hint="leave them out with --exclude, or write a table of your own and give it with --names FILE",
    )


def closest_patterns(name: str, patterns: Sequence[str]) -> list[str]:
    """The patterns that look most like a name."""
    plain = {re.sub(r"\{[^}]*\}", "N", pattern): pattern for pattern in patterns}
    return [plain[text] for text in get_close_matches(name, list(plain), _CLOSE, 0.6)]
