"""What a person says to the library, checked where it is said.

A command line has its own checks of values. In Python nothing stands between a slip of the pen (`only="weight"`,
`include="*.bias"`, `tp=0`) and a conversion that does something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, get_args

from ucp.errors import UsageError

_UNITS: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(text: str) -> int | None:
    """A number of bytes: `512M`, `2G`, `1048576`. None where it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def byte_count(name: str, value: int | str) -> int:
    """The bytes that the argument `name` means: a number, or a size as the command line takes it."""
    found = parse_size(value) if isinstance(value, str) else value
    if found is None:
        raise UsageError(f"{name}={value!r} is not a size", hint="write 512M, 2G or a number of bytes")
    return found


def as_strings(value: str | Sequence[str]) -> tuple[str, ...]:
    """Several words, or one that stands for itself: a string is no list of its letters."""
    return (value,) if isinstance(value, str) else tuple(value)


def check_choices(**said: tuple[Any, Any]) -> None:
    """Refuse a value that its `Literal` does not have: argument → (value, Literal). None says nothing."""
    for name, (value, literal) in said.items():
        if value is not None and value not in get_args(literal):
            known = ", ".join(map(repr, get_args(literal)))
            raise UsageError(f"{name}={value!r} means nothing", hint=f"choose one of: {known}")


def check_counts(**said: int | None) -> None:
    """Refuse a count below one."""
    for name, value in said.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: there must be at least one")


def as_integers(name: str, value: Sequence[Any]) -> tuple[int, ...]:
    """Several whole numbers."""
    if not all(isinstance(each, int) for each in value):
        raise UsageError(f"{name}={value!r} is not a list of numbers", hint=f"write {name}=[0, 5, 11]")
    return tuple(value)
