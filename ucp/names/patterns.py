"""Patterns of names: text with `{layer}`, `{expert}`, `{layer+2}` for numbers, and `{layers+3}` for a known one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ucp.errors import UsageError

_PLACE: Final = re.compile(r"\{([a-z]+)(?:\+(\d+))?\}")
NUMBERS: Final = ("layer", "expert")  # what a name may count
LAYERS: Final = "layers"  # the model's number of layers


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with places for numbers."""

    text: str

    @property
    def places(self) -> frozenset[str]:
        """The numbers that a name of this pattern says."""
        return frozenset(place[1] for place in _PLACE.finditer(self.text) if place[1] != LAYERS)

    @property
    def needs_layers(self) -> bool:
        return any(place[1] == LAYERS for place in _PLACE.finditer(self.text))

    def regex(self, layers: int | None) -> re.Pattern[str] | None:
        """What finds names of this pattern; None where it needs the number of layers and that is unknown."""
        if self.needs_layers and layers is None:
            return None
        parts: list[str] = []
        at = 0
        for place in _PLACE.finditer(self.text):
            parts.append(re.escape(self.text[at : place.start()]))
            parts.append(str((layers or 0) + int(place[2] or 0)) if place[1] == LAYERS else rf"(?P<{place[1]}>\d+)")
            at = place.end()
        return re.compile("".join(parts) + re.escape(self.text[at:]) + "$")

    def read(self, name: str, layers: int | None) -> dict[str, int] | None:
        """The numbers in a name of this pattern; None for any other name."""
        regex = self.regex(layers)
        found = regex.match(name) if regex is not None else None
        if found is None:
            return None
        numbers = {key: int(found[key]) - self._shift(key) for key in found.groupdict()}
        return numbers if min(numbers.values(), default=0) >= 0 else None

    def write(self, numbers: Mapping[str, int], layers: int | None) -> str:
        """The name with these numbers."""

        def fill(place: re.Match[str]) -> str:
            value = layers if place[1] == LAYERS else numbers[place[1]]
            if value is None:
                raise UsageError(f"{self.text}: the number of layers is not known", hint="name it with --model-config")
            return str(value + int(place[2] or 0))

        return _PLACE.sub(fill, self.text)

    def _shift(self, key: str) -> int:
        return next(int(place[2] or 0) for place in _PLACE.finditer(self.text) if place[1] == key)


def parse_pattern(text: object, place: str) -> Pattern:
    """A pattern from a table; `place` names the table and line in messages."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place}: {text!r} is no name")
    found = [match[1] for match in _PLACE.finditer(text)]
    rest = _PLACE.sub("", text)
    unknown = [name for name in found if name not in (*NUMBERS, LAYERS)]
    if unknown or "{" in rest or "}" in rest or len(set(found)) != len(found):
        raise UsageError(
            f"{place}: {text!r} is no pattern of names",
            hint="numbers are written {layer}, {expert}, {layer+2} or {layers+2}, each once",
        )
    return Pattern(text)
