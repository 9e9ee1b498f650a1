"""Tables of names: TOML files that list, parameter by parameter, the names and the layout in two frameworks.

    sides = ["hf", "megatron"]

    [[map]]
    hf = ["model.layers.{layer}.self_attn.q_proj.weight", "…k_proj.weight", "…v_proj.weight"]
    megatron = { name = "decoder.layers.{layer}.self_attention.linear_qkv.weight", grouped = true }
    ratio = "qkv"     # q, k, v in proportion to the model's heads; or ratio = [1, 1], or parts = [4096, 1024, 1024]
    cut = "split"     # over tensor-parallel ranks, as in a rule file: replicated (default), split or vocab
    dim = 0           # of the matrix [out, in]

A side with several names has one tensor per part. A side with one name has the parts one above the other or, if
`grouped`, the rows of every part for one query group after the other. `transposed` tensors are [in, out]. If one side's
names contain `{expert}` and the other's do not, the other side has all experts in one tensor, along its first axis.

A table may extend a packaged one (`extends = "llama"`). Its entries replace those with the same name on the second
side; new entries go to the end, or `before` another entry; `without` lists entries to leave out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import parse_toml, places, read_toml
from ucp.core.rules import REPLICATED, Rule, compile_pattern
from ucp.errors import ImpossibleError, UsageError, first_few
from ucp.formats.sharded.rule_files import parse_rule
from ucp.formats.translate.model_config import ModelConfig

COUNTERS: Final = ("layer", "expert")  # what the numbers in a name count
LAYERS: Final = "layers"  # in a pattern: the number of layers of the model
CONDITIONS: Final = ("gated", "moe", "tied")
_PLACEHOLDER: Final = re.compile(r"\{([a-z]+)(?:\+(\d+))?\}")
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")  # alone between dots
_RATIOS: Final = {"qkv": 3, "gated": 2}  # named ratios, and how many parts they have
_RULE_KEYS: Final = frozenset({"cut", "dim", "parts", "ratio", "count"})
_KEYS: Final = frozenset({*_RULE_KEYS, "when", "before"})
# `cut` in tables written before rule files and tables had one grammar.
_OLD_CUTS: Final[dict[str, dict[str, Any]]] = {
    "rows": {"cut": "split", "dim": 0},
    "columns": {"cut": "split", "dim": 1},
    "whole": {"cut": "replicated"},
}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A parameter name with placeholders for numbers: `{layer}`, `{expert}`, `{layer+2}`, `{layers+3}`."""

    text: str

    @property
    def counters(self) -> frozenset[str]:
        """What the numbers in a name of this pattern count."""
        return frozenset(_offsets(self.text))

    def regex(self, layers: int | None) -> re.Pattern[str] | None:
        """A regular expression for names of this pattern; None if it needs the unknown number of layers."""
        return _regex(self.text, layers)

    def outline(self) -> str | None:
        """The `outline` that all names of this pattern have; None if they differ."""
        text = outline(_PLACEHOLDER.sub("0", self.text))
        numbers = len(_PLACEHOLDER.findall(self.text)) + len(_NUMBER.findall(_PLACEHOLDER.sub("x", self.text)))
        return text if text.count("N") == numbers else None

    def read(self, name: str, layers: int | None) -> dict[str, int] | None:
        """The numbers in a name of this pattern; None for any other name."""
        regex = _regex(self.text, layers)
        found = regex.match(name) if regex is not None else None
        if found is None:
            return None
        offsets = _offsets(self.text)
        numbers = {key: int(text) - offsets[key] for key, text in found.groupdict().items()}
        return numbers if min(numbers.values(), default=0) >= 0 else None

    def write(self, numbers: Mapping[str, int], layers: int | None) -> str:
        """The name with these numbers."""

        def fill(place: re.Match[str]) -> str:
            value = layers if place[1] == LAYERS else numbers[place[1]]
            if value is None:
                raise ImpossibleError(
                    f"{self.text}: the number of layers is unknown", hint="give the model's config with --model-config"
                )
            return str(value + int(place[2] or 0))

        return _PLACEHOLDER.sub(fill, self.text)


def outline(name: str) -> str:
    """A name with every number between dots replaced by N; equal for all names of one pattern."""
    return _NUMBER.sub("N", name)


@cache
def _offsets(text: str) -> dict[str, int]:
    """What the placeholders of a pattern count, and from which number on."""
    return {place[1]: int(place[2] or 0) for place in _PLACEHOLDER.finditer(text) if place[1] != LAYERS}


@cache
def _regex(text: str, layers: int | None) -> re.Pattern[str] | None:
    pieces: list[str] = []
    end = 0
    for place in _PLACEHOLDER.finditer(text):
        if place[1] == LAYERS and layers is None:
            return None
        pieces.append(re.escape(text[end : place.start()]))
        pieces.append(str((layers or 0) + int(place[2] or 0)) if place[1] == LAYERS else rf"(?P<{place[1]}>\d+)")
        end = place.end()
    return re.compile("".join(pieces) + re.escape(text[end:]) + "$")


@dataclass(frozen=True, slots=True)
class TableSide:
    """How one framework stores a parameter: under one name, or its parts under several."""

    names: tuple[NamePattern, ...]
    grouped: bool = False
    transposed: bool = False

    @property
    def counters(self) -> frozenset[str]:
        return self.names[0].counters


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One parameter (or one of each layer or expert) on both sides."""

    sides: Mapping[str, TableSide]
    rule: Rule = REPLICATED  # `dim` is of the matrix [out, in], `ratio` or `parts` are along its rows
    ratio: str | None = None  # a named ratio, which depends on the model
    when: Mapping[str, bool] = field(default_factory=dict)
    before: str | None = None


@dataclass(frozen=True, slots=True)
class NameTable:
    """A table of names.

    `when` restricts it to some models. A `secondary` table is used for reading, and for writing only if the user names
    it.
    """

    name: str
    sides: tuple[str, str]
    entries: tuple[TableEntry, ...]
    when: Mapping[str, bool] = field(default_factory=dict)
    computed: tuple[re.Pattern[str], ...] = ()  # names of buffers that the model computes itself
    secondary: bool = False
    about: str = ""

    def other(self, side: str) -> str:
        """The opposite side."""
        return self.sides[1] if side == self.sides[0] else self.sides[0]


def packaged_tables() -> list[NameTable]:
    """The tables that come with ucp, sorted by name."""
    return [load_packaged_table(name) for name in table_names()]


def table_names() -> list[str]:
    """Names of the packaged tables, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


@cache
def load_packaged_table(name: str) -> NameTable:
    return parse_table((_folder() / f"{name}.toml").read_bytes(), f"table {name}", name)


def load_table(path: Path) -> NameTable:
    """The table in a user's file."""
    return parse_table(read_toml(path, "table of names"), str(path), path.name)


def _folder() -> Any:
    return resources.files("ucp") / "data" / "names"


def parse_table(data: bytes, where: str, name: str) -> NameTable:
    """The table in the bytes of a TOML file; `where` names the file in messages."""
    text, document = parse_toml(data, where, "table of names")
    unknown = document.keys() - {"about", "extends", "without", "sides", "when", "computed", "secondary", "map"}
    entries = document.get("map", [])
    if unknown or not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        found = ", ".join(sorted(unknown)) or "map"
        raise UsageError(f"{where}: unexpected or missing {found!r}", hint="a table of names is a list of [[map]]")
    base = _base(document, where)
    sides = document.get("sides", list(base.sides) if base else None)
    if not isinstance(sides, list) or len(sides) != 2 or not all(isinstance(side, str) and side for side in sides):
        raise UsageError(f'{where}: sides must name two frameworks, for example sides = ["hf", "megatron"]')
    two = (sides[0], sides[1])
    own = [
        _parse_entry(entry, two, place)
        for entry, place in zip(entries, places(text, "map", len(entries), where), strict=True)
    ]
    return NameTable(
        name,
        two,
        tuple(own if base is None else _extended(base, own, document.get("without", []), where)),
        base.when if base and "when" not in document else _conditions(document.get("when", {}), where),
        base.computed if base and "computed" not in document else _computed(document.get("computed", []), where),
        document.get("secondary") is True,
        str(document.get("about", "")),
    )


def _base(document: dict[str, Any], where: str) -> NameTable | None:
    """The packaged table that this one extends."""
    if "extends" not in document:
        return None
    name = document["extends"]
    if name not in table_names():
        raise UsageError(f"{where}: extends = {name!r}", hint=f"packaged tables are {', '.join(table_names())}")
    base = load_packaged_table(name)
    if document.get("sides", list(base.sides)) != list(base.sides):
        raise UsageError(f"{where}: sides must be those of the extended table {name}: {list(base.sides)}")
    return base


def _extended(base: NameTable, own: Sequence[TableEntry], without: Any, where: str) -> list[TableEntry]:
    """The entries of the extended table, changed as the extending one asks for."""

    def key(entry: TableEntry) -> str:
        return entry.sides[base.sides[1]].names[0].text

    keys = [key(entry) for entry in base.entries]
    if not isinstance(without, list) or any(name not in keys for name in without):
        raise UsageError(f"{where}: without must list names of {base.sides[1]!r} in table {base.name}")
    made = [entry for entry in base.entries if key(entry) not in without]
    for entry in own:
        keys = [key(other) for other in made]
        if key(entry) in keys:
            made[keys.index(key(entry))] = entry
        elif entry.before is None:
            made.append(entry)
        elif entry.before in keys:
            made.insert(keys.index(entry.before), entry)
        else:
            raise UsageError(f"{where}: before = {entry.before!r} is not in the table")
    return made


def _parse_entry(entry: dict[str, Any], sides: tuple[str, str], place: str) -> TableEntry:
    unknown = entry.keys() - _KEYS - set(sides)
    if unknown or not all(side in entry for side in sides):
        raise UsageError(
            f"{place}: a map needs {sides[0]!r} and {sides[1]!r}, and may have {', '.join(sorted(_KEYS))}",
            hint=f"found {', '.join(sorted(entry))}",
        )
    made = {side: _parse_side(entry[side], f"{place}, {side}") for side in sides}
    rule, ratio = _parse_rule(_modern(entry), place)
    count = _RATIOS[ratio] if ratio else len(rule.ratio or rule.parts or (1,))
    for side in made.values():
        if len(side.names) not in (1, count) or (side.grouped and (len(side.names) > 1 or ratio != "qkv")):
            raise UsageError(
                f"{place}: {len(side.names)} names for {count} parts, or grouped without q, k and v",
                hint='give one name, or one name per part; grouped needs ratio = "qkv" and one name',
            )
    counters = [side.counters for side in made.values()]
    if (counters[0] ^ counters[1]) - {"expert"}:
        raise UsageError(f"{place}: both sides must count {{layer}}; only experts may be an axis of a tensor")
    before = entry.get("before")
    if not isinstance(before, str | None):
        raise UsageError(f"{place}: before = {before!r} is not a name")
    return TableEntry(made, rule, ratio, _conditions(entry.get("when", {}), place), before)


def _modern(entry: dict[str, Any]) -> dict[str, Any]:
    """The keys of a rule in an entry, translated if it is in the old grammar, whose `parts` were proportions."""
    rule = {key: value for key, value in entry.items() if key in _RULE_KEYS}
    cut = rule.get("cut", "whole")
    if (isinstance(cut, str) and cut in _OLD_CUTS) or isinstance(rule.get("parts"), str):
        rule |= _OLD_CUTS.get(cut, {})
        if "parts" in rule and "ratio" not in rule:
            rule["ratio"] = rule.pop("parts")
    return rule


def _parse_rule(rule: dict[str, Any], place: str) -> tuple[Rule, str | None]:
    """The rule, and the name of its ratio if that depends on the model."""
    named = rule.get("ratio") if isinstance(rule.get("ratio"), str) else None
    if named is not None:
        del rule["ratio"]
    if (named is not None and named not in _RATIOS) or (isinstance(rule.get("ratio"), list) and len(rule["ratio"]) < 2):
        raise UsageError(
            f"{place}: ratio = {named or rule['ratio']!r}", hint='a ratio is "qkv", "gated" or a list such as [1, 1]'
        )
    if named is not None and rule.keys() & {"parts", "count"}:
        raise UsageError(f"{place}: ratio cannot be combined with parts or count")
    # A replicated tensor may consist of parts too, which is of no use in a rule file.
    parts: dict[str, Any] = {}
    if rule["cut"] != "split":
        parts = {key: rule.pop(key) for key in ("parts", "ratio", "count") if key in rule}
    parsed = parse_rule(rule, place)
    if parts:
        split = parse_rule({"cut": "split", **parts}, place)
        parsed = Rule(parsed.cut, parsed.dim, split.parts, split.ratio)
    if parsed.cut == "average" or parsed.dim not in ((0, 1) if parsed.cut == "split" else (0,)):
        raise UsageError(
            f"{place}: {parsed} is not supported in a table of names",
            hint="cut is replicated, split (with dim 0 or 1 of the matrix [out, in]) or vocab",
        )
    return parsed, named


def _parse_side(value: Any, place: str) -> TableSide:
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        options = {key: item for key, item in value.items() if key != "name"}
        value = value.get("name")
    if options.keys() - {"grouped", "transposed"} or not all(isinstance(item, bool) for item in options.values()):
        raise UsageError(f"{place}: besides a name there may be grouped = true and transposed = true")
    names = tuple(parse_pattern(name, place) for name in (value if isinstance(value, list) else [value]))
    if not names or any(name.counters != names[0].counters for name in names):
        raise UsageError(f"{place}: the names of all parts must contain the same numbers")
    return TableSide(names, **options)


def parse_pattern(text: object, place: str) -> NamePattern:
    """A pattern of a table; `place` names the file and line in messages."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place}: {text!r} is not a name")
    found = [match[1] for match in _PLACEHOLDER.finditer(text)]
    rest = _PLACEHOLDER.sub("", text)
    unknown = [name for name in found if name not in (*COUNTERS, LAYERS)]
    if unknown or "{" in rest or "}" in rest or len(set(found)) != len(found):
        raise UsageError(
            f"{place}: {text!r} is not a valid pattern of names",
            hint="write numbers as {layer}, {expert}, {layer+2} or {layers+2}, each once",
        )
    return NamePattern(text)


def _conditions(value: Any, place: str) -> dict[str, bool]:
    if (
        not isinstance(value, dict)
        or value.keys() - set(CONDITIONS)
        or not all(type(v) is bool for v in value.values())
    ):
        raise UsageError(f"{place}: when = {value!r}", hint=f"conditions are {', '.join(CONDITIONS)} = true or false")
    return dict(value)


def _computed(value: Any, place: str) -> tuple[re.Pattern[str], ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UsageError(f"{place}: computed must be a list of regular expressions")
    try:
        return tuple(compile_pattern(text, place) for text in value)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{place}: computed = {value!r}: {error}") from None


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


def unknown_names_error(match: TableMatch, target: str) -> ImpossibleError:
    """The error for names that are in no entry of the closest table: one line for a name in all layers."""
    patterns = [pattern.text for _, entry in match.entries for pattern in entry.sides[match.side].names]
    lines = []
    for name, count in Counter(outline(name) for name in match.unknown).items():
        close = closest_patterns(name, patterns)
        times = f" (× {count})" if count > 1 else ""
        lines.append(f"\n  {name}{times}" + (f"   closest: {', '.join(close)}" if close else ""))
    return ImpossibleError(
        f"{len(match.unknown)} of {len(match.unknown) + len(match.found)} parameters have no name in {target!r}"
        f" (table {match.table.name}, side {match.side}):{''.join(lines)}",
        hint="leave them out with --exclude, or write a table of your own and give it with --names FILE",
    )


def unknown_model_error(matches: Sequence[TableMatch], names: Sequence[str], target: str) -> ImpossibleError:
    """The error for a model that no table is close to: two lines, with the family whose names are most similar."""
    outlines = list(dict.fromkeys(map(outline, names)))

    def similarity(match: TableMatch) -> tuple[int, float]:
        patterns = {re.sub(r"\{[^}]*\}", "N", p.text) for _, e in match.entries for p in e.sides[match.side].names}
        return len(match.found), sum(
            max(SequenceMatcher(None, pattern, name).ratio() for pattern in patterns) for name in outlines
        )

    closest = max((match for match in matches if not match.table.secondary), key=similarity)
    family = f"{closest.table.name} ({closest.table.about.partition(':')[0]})"
    return ImpossibleError(
        f"--names {target}: no packaged table knows this model ({first_few(outlines)}); the closest is"
        f" {family}, with {len(closest.found)} of {len(names)} names",
        hint="`ucp names` lists the models; write a table for this one and give it with --names FILE (docs/names.md)",
    )


def closest_patterns(name: str, patterns: Sequence[str]) -> list[str]:
    """The two patterns that are most similar to a name."""
    plain = {re.sub(r"\{[^}]*\}", "N", pattern): pattern for pattern in patterns}
    return [plain[text] for text in get_close_matches(name, list(plain), 2, 0.6)]
