"""Patterns of names: text with `{layer}`, `{expert}`, `{layer+2}` for numbers, and `{layers+3}` for a known one.

Tables of names: TOML that says, parameter by parameter, what two frameworks call it and how it lies in each.

    sides = ["hf", "megatron"]

    [[map]]
    hf = ["model.layers.{layer}.self_attn.q_proj.weight", "…k_proj.weight", "…v_proj.weight"]
    megatron = { name = "decoder.layers.{layer}.self_attention.linear_qkv.weight", grouped = true }
    parts = "qkv"     # q, k, v in the proportions of the model's heads; or proportions: [1, 1]
    cut = "rows"      # over tensor-parallel ranks: rows, columns, vocab, or not at all

Several names are parts apart; one name is the parts one above the other, or `grouped`: by query group, the group's rows
of every part. `transposed` tensors are [in, out]. A number that one side's names say and the other's do not counts
along that one's first axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import parse_toml, places, read_toml
from ucp.core.rules import compile_pattern
from ucp.errors import UsageError

_PLACE: Final = re.compile(r"\{([a-z]+)(?:\+(\d+))?\}")
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")  # alone between dots
_N: Final = "N"
NUMBERED: Final = ("layer", "expert")  # what a name may count
LAYERS: Final = "layers"  # the model's number of layers


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A name with places for numbers."""

    text: str

    @property
    def places(self) -> frozenset[str]:
        """The numbers that a name of this pattern says."""
        return _places(self.text)

    def regex(self, layers: int | None) -> re.Pattern[str] | None:
        """What finds names of this pattern; None where it needs the number of layers and that is unknown."""
        return _regex(self.text, layers)

    def outline(self) -> str | None:
        """What `outline` makes of every name of this pattern; None where that depends on the name."""
        text = _PLACE.sub("0", self.text)
        return outline(text) if outline(text).count(_N) == _count(self.text) else None

    def read(self, name: str, layers: int | None) -> dict[str, int] | None:
        """The numbers in a name of this pattern; None for any other name."""
        regex = _regex(self.text, layers)
        found = regex.match(name) if regex is not None else None
        if found is None:
            return None
        shifts = _shifts(self.text)
        numbers = {key: int(text) - shifts[key] for key, text in found.groupdict().items()}
        return numbers if min(numbers.values(), default=0) >= 0 else None

    def write(self, numbers: Mapping[str, int], layers: int | None) -> str:
        """The name with these numbers."""

        def fill(place: re.Match[str]) -> str:
            value = layers if place[1] == LAYERS else numbers[place[1]]
            if value is None:
                raise UsageError(f"{self.text}: the number of layers is not known", hint="name it with --model-config")
            return str(value + int(place[2] or 0))

        return _PLACE.sub(fill, self.text)


def outline(name: str) -> str:
    """A name without its numbers: names of one pattern have the same."""
    return _NUMBER.sub(_N, name)


@cache
def _places(text: str) -> frozenset[str]:
    return frozenset(_shifts(text))


@cache
def _shifts(text: str) -> dict[str, int]:
    return {place[1]: int(place[2] or 0) for place in _PLACE.finditer(text) if place[1] != LAYERS}


def _count(text: str) -> int:
    """Numbers that stand alone between dots, in any name of a pattern."""
    return len(_PLACE.findall(text)) + len(_NUMBER.findall(_PLACE.sub("x", text)))


@cache
def _regex(text: str, layers: int | None) -> re.Pattern[str] | None:
    parts: list[str] = []
    at = 0
    for place in _PLACE.finditer(text):
        if place[1] == LAYERS and layers is None:
            return None
        parts.append(re.escape(text[at : place.start()]))
        parts.append(str((layers or 0) + int(place[2] or 0)) if place[1] == LAYERS else rf"(?P<{place[1]}>\d+)")
        at = place.end()
    return re.compile("".join(parts) + re.escape(text[at:]) + "$")


def parse_pattern(text: object, place: str) -> NamePattern:
    """A pattern from a table; `place` names the table and line in messages."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place}: {text!r} is not a name")
    found = [match[1] for match in _PLACE.finditer(text)]
    rest = _PLACE.sub("", text)
    unknown = [name for name in found if name not in (*NUMBERED, LAYERS)]
    if unknown or "{" in rest or "}" in rest or len(set(found)) != len(found):
        raise UsageError(
            f"{place}: {text!r} is not a pattern of names",
            hint="numbers are written {layer}, {expert}, {layer+2} or {layers+2}, each once",
        )
    return NamePattern(text)


CUTS: Final = ("whole", "rows", "columns", "vocab")
WORDS: Final = ("qkv", "gated")
CONDITIONS: Final = ("gated", "moe", "tied")
_KEYS: Final = frozenset({"parts", "cut", "when"})


@dataclass(frozen=True, slots=True)
class TableSide:
    """How one framework has a parameter: under one name, or its parts under several."""

    names: tuple[NamePattern, ...]
    grouped: bool = False
    transposed: bool = False

    @property
    def places(self) -> frozenset[str]:
        return self.names[0].places


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One parameter (or one of each layer or expert) on both sides."""

    sides: Mapping[str, TableSide]
    parts: str | tuple[int, ...] | None = None
    cut: str = "whole"
    when: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NameTable:
    """A table of names. `when` says of which models it speaks; a `secondary` one is read but never chosen to write."""

    name: str
    sides: tuple[str, str]
    entries: tuple[TableEntry, ...]
    when: Mapping[str, bool] = field(default_factory=dict)
    computed: tuple[re.Pattern[str], ...] = ()  # names of buffers that the model computes itself
    secondary: bool = False

    def other(self, side: str) -> str:
        """The side across from this one."""
        return self.sides[1] if side == self.sides[0] else self.sides[0]


def packaged_tables() -> list[NameTable]:
    """The tables that come with ucp, sorted by name."""
    return [load_packaged_table(name) for name in table_names()]


def table_names() -> list[str]:
    """Names of the packaged tables, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def load_packaged_table(name: str) -> NameTable:
    return parse_table((_folder() / f"{name}.toml").read_bytes(), f"table {name}", name)


def load_table(path: Path) -> NameTable:
    """The table in a file of the user's."""
    return parse_table(read_toml(path, "table of names"), str(path), path.name)


def parse_table(data: bytes, where: str, name: str) -> NameTable:
    """The table in the bytes of a TOML file; `where` names it in messages."""
    text, document = parse_toml(data, where, "table of names")
    unknown = document.keys() - {"about", "sides", "when", "computed", "secondary", "map"}
    entries = document.get("map", [])
    if unknown or not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        found = ", ".join(sorted(unknown)) or "map"
        raise UsageError(f"{where}: unexpected or missing {found!r}", hint="a table of names is a list of [[map]]")
    sides = document.get("sides")
    if not isinstance(sides, list) or len(sides) != 2 or not all(isinstance(side, str) and side for side in sides):
        raise UsageError(f'{where}: sides must name two frameworks: sides = ["hf", "megatron"]')
    two = (sides[0], sides[1])
    made = [
        _entry(entry, two, place)
        for entry, place in zip(entries, places(text, "map", len(entries), where), strict=True)
    ]
    return NameTable(
        name,
        two,
        tuple(made),
        _when(document.get("when", {}), where),
        tuple(_computed(document.get("computed", []), where)),
        document.get("secondary") is True,
    )


def _entry(entry: dict[str, Any], sides: tuple[str, str], place: str) -> TableEntry:
    unknown = entry.keys() - _KEYS - set(sides)
    if unknown or not all(side in entry for side in sides):
        raise UsageError(
            f"{place}: a map needs {sides[0]!r} and {sides[1]!r}, and may have {', '.join(sorted(_KEYS))}",
            hint=f"found {', '.join(sorted(entry))}",
        )
    parts = _parts(entry.get("parts"), place)
    made = {side: _side(entry[side], f"{place}, {side}") for side in sides}
    cut = entry.get("cut", "whole")
    if cut not in CUTS:
        raise UsageError(f"{place}: cut = {cut!r}", hint=f"cut is one of: {', '.join(CUTS)}")
    count = 3 if parts == "qkv" else 2 if parts == "gated" else len(parts) if parts is not None else 1
    for side in made.values():
        if len(side.names) not in (1, count) or (side.grouped and (len(side.names) > 1 or parts != "qkv")):
            raise UsageError(
                f"{place}: {len(side.names)} names for {count} parts, or a grouping of what is not q, k and v",
                hint='name every part, or give one name; grouped needs parts = "qkv" and one name',
            )
    places = [side.places for side in made.values()]
    if (places[0] ^ places[1]) - {"expert"}:
        raise UsageError(f"{place}: both sides must count {{layer}}; only experts may be an axis of one side's tensor")
    return TableEntry(made, parts, cut, _when(entry.get("when", {}), place))


def _side(value: Any, place: str) -> TableSide:
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        options = {key: item for key, item in value.items() if key != "name"}
        value = value.get("name")
    if options.keys() - {"grouped", "transposed"} or not all(isinstance(item, bool) for item in options.values()):
        raise UsageError(f"{place}: besides a name there may be grouped = true and transposed = true")
    listed = value if isinstance(value, list) else [value]
    names = tuple(parse_pattern(name, place) for name in listed)
    if not names or any(name.places != names[0].places for name in names):
        raise UsageError(f"{place}: parts of one parameter have names with the same numbers")
    return TableSide(names, **options)


def _parts(value: Any, place: str) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) and value in WORDS:
        return value
    if isinstance(value, list) and len(value) > 1 and all(type(n) is int and 0 < n < 2**31 for n in value):
        return tuple(value)
    raise UsageError(f"{place}: parts = {value!r}", hint='parts are "qkv", "gated", or a list of proportions')


def _when(value: Any, place: str) -> dict[str, bool]:
    if (
        not isinstance(value, dict)
        or value.keys() - set(CONDITIONS)
        or not all(type(v) is bool for v in value.values())
    ):
        raise UsageError(f"{place}: when = {value!r}", hint=f"conditions are {', '.join(CONDITIONS)} = true or false")
    return dict(value)


def _computed(value: Any, place: str) -> list[re.Pattern[str]]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UsageError(f"{place}: computed must be a list of regular expressions")
    try:
        return [compile_pattern(text, place) for text in value]
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{place}: computed = {value!r}: {error}") from None


def _folder() -> Any:
    return resources.files("ucp") / "names" / "presets"
