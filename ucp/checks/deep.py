"""What the checks of a deep pass share, so that every byte is read once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ucp.checks.ledger import Ledger
from ucp.checks.tallies import Tallies


@dataclass(slots=True)
class Deep:
    """`elsewhere` has (parameter, kind) of the atoms that are read by a check of its own and need no scan."""

    ledger: Ledger = field(default_factory=Ledger)
    tallies: Tallies = field(default_factory=Tallies)
    elsewhere: set[tuple[str, str]] = field(default_factory=set)
