"""Patterns of names: text with `{layer}`, `{expert}`, `{layer+2}` for numbers, and `{layers+3}` for a known one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from ucp.errors import UsageError

_PLACE: Final = re.compile(r"\{([a-z]+)(?:\+(\d+))?\}")
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")  # alone between dots
_N: Final = "N"
NUMBERS: Final = ("layer", "expert")  # what a name may count
LAYERS: Final = "layers"  # the model's number of layers


@dataclass(frozen=True, slots=True)
class Pattern:
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


def parse_pattern(text: object, place: str) -> Pattern:
    """A pattern from a table; `place` names the table and line in messages."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place}: {text!r} is not a name")
    found = [match[1] for match in _PLACE.finditer(text)]
    rest = _PLACE.sub("", text)
    unknown = [name for name in found if name not in (*NUMBERS, LAYERS)]
    if unknown or "{" in rest or "}" in rest or len(set(found)) != len(found):
        raise UsageError(
            f"{place}: {text!r} is not a pattern of names",
            hint="numbers are written {layer}, {expert}, {layer+2} or {layers+2}, each once",
        )
    return Pattern(text)
