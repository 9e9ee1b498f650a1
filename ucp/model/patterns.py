"""Regular expressions that checkpoints bring along: compiled only where matching a name cannot take for ever.

Python's matcher goes back over every way in which repeats can share out a text. A repeat inside a repeat has
exponentially many (`(\\w+\\.?)+!`), several in a row a power of the text's length. No pattern for names of parameters
needs either.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from ucp.errors import UnsafeError

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

_MOST_REPEATS: Final = 6
_LONGEST: Final = 10_000  # characters
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT")


def compile_pattern(text: str, origin: str) -> re.Pattern[str]:
    """Compile `text`; `origin` names where it is from. Raises `re.error` where it is no regular expression."""
    if len(text) > _LONGEST:
        raise _refused(text, origin, f"has {len(text)} characters")
    pattern = re.compile(text)
    repeats = list(_repeats(parser.parse(text), inside=False))
    if any(inside for inside in repeats):
        raise _refused(text, origin, "repeats what has repeats or choices in it")
    if len(repeats) > _MOST_REPEATS:
        raise _refused(text, origin, f"has {len(repeats)} repeats, the limit is {_MOST_REPEATS}")
    return pattern


def _refused(text: str, origin: str, why: str) -> UnsafeError:
    shown = text if len(text) <= 100 else text[:100] + "…"
    return UnsafeError(
        f"{origin}: the pattern {shown!r} {why}: matching it may take for ever",
        hint="write it without, or give rules of your own with --rules",
    )


def _repeats(tree: Any, *, inside: bool) -> Iterator[bool]:
    """For every repeat of open length, and every choice inside of one: whether it is inside of another."""
    for code, argument in tree:
        name = str(code)
        if name in _REPEATS:
            least, most, what = argument
            is_open = int(most) > 1 and most != least
            if is_open:
                yield inside
            yield from _repeats(what, inside=inside or is_open)
            continue
        if name == "BRANCH" and inside:
            yield True
        yield from _inner(argument, inside=inside)


def _inner(argument: Any, *, inside: bool) -> Iterator[bool]:
    """The repeats of whatever an operator of the parsed expression holds: groups, choices, assertions."""
    if isinstance(argument, parser.SubPattern):
        yield from _repeats(argument, inside=inside)
    elif isinstance(argument, (list, tuple)):
        for value in argument:
            yield from _inner(value, inside=inside)
