"""The user's rules for a live job."""

from __future__ import annotations

from pathlib import Path

from ucp.formats.rulefiles import load_preset, load_rules
from ucp.model.rules import RuleBook


def rule_book(rules: str | Path | None, preset: str | None) -> RuleBook | None:
    """Rules of a file, then of a preset; None where the user gave neither."""
    if rules is None and preset is None:
        return None
    book = RuleBook()
    if rules is not None:
        book.rules.extend(load_rules(Path(rules)).rules)
    if preset is not None:
        book.rules.extend(load_preset(preset).rules)
    return book
