"""Rule files: TOML with the tensor-parallel rules of parameters, from a user or from a packaged preset.

    [[rule]]
    match = '(.*\\.)?qkv_proj\\.weight$'   # regular expression, anchored at the start of the name
    cut = "split"                          # replicated | split | vocab | average
    dim = 0                                # split and vocab; negative counts from the last
    ratio = [4, 1, 1]                      # or parts = [4096, 1024, 1024], or count = 3

The first rule whose `match` matches a name applies to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

from ucp import settings
from ucp.containers.config_files import parse_toml, places, read_toml
from ucp.core.rules import Cut, Rule, RuleBook
from ucp.errors import UsageError

_FORM: Final = "a rule file is a list of [[rule]] tables"

# Keys that a rule may have besides `match` and `cut`, by cut.
_KEYS: Final[dict[str, frozenset[str]]] = {
    "replicated": frozenset(),
    "average": frozenset(),
    "split": frozenset({"dim", "parts", "ratio", "count", "widths"}),
    "vocab": frozenset({"dim", "true_size"}),
}


def load_rule_book(rules: str | os.PathLike[str] | None, preset: str | None) -> RuleBook | None:
    """Return the user's rules: those of a file, then those of a preset; None without either."""
    books = [load_rules(Path(rules))] if rules is not None else []
    if preset is not None:
        books.append(load_preset(preset))
    return RuleBook([rule for book in books for rule in book.rules]) if books else None


def load_rules(path: Path) -> RuleBook:
    """Return the rules of a user's TOML file."""
    return parse_rules(read_toml(path, "rule file"), str(path), f"file: {path.name}")


def load_preset(name: str) -> RuleBook:
    """Return the rules of a packaged preset."""
    if name not in preset_names():
        raise UsageError(f"unknown preset {name!r}", hint=f"choose one of: {', '.join(preset_names())}")
    return parse_rules((_presets() / f"{name}.toml").read_bytes(), f"preset {name}", f"preset: {name}", optional=True)


def preset_names() -> list[str]:
    """Return the names of the packaged presets, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def preset_abouts() -> dict[str, str]:
    """Return the first line of every packaged preset: which models it is for."""
    found = (
        (name, parse_toml((_presets() / f"{name}.toml").read_bytes(), name, "preset")[1]) for name in preset_names()
    )
    return {name: str(document.get("about", "")) for name, document in found}


def parse_rules(data: bytes, where: str, origin: str, *, optional: bool = False) -> RuleBook:
    """Return the rules in the bytes of a TOML file; `where` names the file in messages, `origin` in reports.

    A rule that matches no parameter is noted, unless it is `optional`.
    """
    text, document = parse_toml(data, where, "rule file")
    unknown = document.keys() - {"rule", "about"}
    entries = document.get("rule", [])
    if unknown or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        found = ", ".join(sorted(unknown)) or "rule"
        raise UsageError(f"{where}: unexpected {found!r} at the top level", hint=_FORM)
    if not entries:
        raise UsageError(f"{where}: contains no rules", hint=_FORM)
    book = RuleBook()
    for entry, place in zip(entries, places(text, "rule", len(entries), where), strict=True):
        book.add(_match(entry, place), parse_rule(entry, place), origin, optional=optional)
    return book


def format_rule(name: str, rule: Rule) -> str:
    """Return the entry of a rule file that applies this rule to this parameter, for hints."""
    fields = [f"match = '^{re.escape(name)}$'", f'cut = "{rule.cut}"']
    if rule.cut in ("split", "vocab"):
        fields.append(f"dim = {rule.dim}")
    fields += [f"{key} = {list(value)}" for key, value in (("parts", rule.parts), ("ratio", rule.ratio)) if value]
    if rule.true_size is not None:
        fields.append(f"true_size = {rule.true_size}")
    return "[[rule]]\n" + "\n".join(fields)


def _presets() -> Any:
    return resources.files("ucp") / "data" / "rules"


def _match(entry: dict[str, Any], place: str) -> str:
    pattern = entry.get("match")
    if not isinstance(pattern, str) or not pattern:
        raise UsageError(f"{place}: a rule needs match = 'regular expression'")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{place}: match = {pattern!r} is not a regular expression: {error}") from None
    return pattern


def parse_rule(entry: Mapping[str, Any], place: str) -> Rule:
    """The rule in one table of a rule file or of a table of names; `place` names file and line in messages."""
    cut = entry.get("cut")
    if not isinstance(cut, str) or cut not in _KEYS:
        raise UsageError(f"{place}: cut = {cut!r}", hint=f"cut is one of: {', '.join(_KEYS)}")
    unknown = entry.keys() - _KEYS[cut] - {"match", "cut"}
    if unknown:
        allowed = ", ".join(sorted(_KEYS[cut])) or "no further keys"
        raise UsageError(f"{place}: cut = {cut!r} takes {allowed}, found {', '.join(sorted(unknown))}")
    if len(entry.keys() & {"parts", "ratio", "count"}) > 1:
        raise UsageError(f"{place}: parts, ratio and count are alternatives: give one of them")
    if "widths" in entry and "parts" not in entry:
        raise UsageError(f"{place}: widths needs parts")
    count = _number(entry, "count", place, 1, 1024)
    rule = Rule(
        cast(Cut, cut),
        dim=_number(entry, "dim", place, -settings.MAX_DIMENSIONS, settings.MAX_DIMENSIONS - 1) or 0,
        parts=_sizes(entry, "parts", place),
        ratio=_sizes(entry, "ratio", place) or ((1,) * count if count else None),
        widths=_widths(entry, place),
        true_size=_number(entry, "true_size", place, 1, 2**62),
    )
    if rule.widths and rule.parts and [sum(row) for row in rule.widths] != list(rule.parts):
        raise UsageError(f"{place}: every row of widths must add up to its part of {list(rule.parts)}")
    return rule


def _number(entry: Mapping[str, Any], key: str, place: str, low: int, high: int) -> int | None:
    if key not in entry:
        return None
    value = entry[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{place}: {key} = {value!r}, but it must be a whole number from {low} to {high}")
    return value


def _sizes(entry: Mapping[str, Any], key: str, place: str) -> tuple[int, ...] | None:
    if key not in entry:
        return None
    return _row(entry[key], f"{place}: {key} = {entry[key]!r}, but it must be a list of sizes", low=1)


def _widths(entry: Mapping[str, Any], place: str) -> tuple[tuple[int, ...], ...] | None:
    if "widths" not in entry:
        return None
    message = f"{place}: widths must be one list per part, with the size on each tensor-parallel rank"
    rows = entry["widths"]
    if not isinstance(rows, list) or not rows:
        raise UsageError(message)
    return tuple(_row(row, message, low=0) for row in rows)


def _row(value: Any, message: str, low: int) -> tuple[int, ...]:
    """Return a list of sizes of at least `low`; raise `message` for any other value."""
    if not isinstance(value, list) or not value or not all(type(n) is int and low <= n < 2**62 for n in value):
        raise UsageError(message)
    return tuple(value)
