"""Click parameters made from the declarations in `ucp.options`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ucp.formats.registry import TARGETS, all_formats
from ucp.options import Option, declared, parse_size

F = TypeVar("F", bound=Callable[..., Any])


class _NonEmptyPath(click.Path):
    """A path. An empty one, from an unset shell variable, does not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path (is a shell variable not set?)", param, ctx)
        return super().convert(value, param, ctx)


# Whether a path can be read is reported by the code that reads it, with a hint and an exit code.
PATH = _NonEmptyPath(path_type=Path, readable=False)
FILE = _NonEmptyPath(path_type=Path, readable=False, dir_okay=False)
FOLDER = _NonEmptyPath(path_type=Path, readable=False, file_okay=False)


class _FormatName(click.Choice[str]):
    """A format that can be written: those of this package, and those that other packages register."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in TARGETS and any(entry.name == value and entry.write is not None for entry in all_formats()):
            return value
        return super().convert(value, param, ctx)


def parse_bytes(text: str | int) -> int:
    """A number of bytes: `512M`, `2G`, `1048576`."""
    found = parse_size(str(text))
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size; write 512M, 2G or a number of bytes")
    return found


def parse_shard(text: str) -> tuple[int, int]:
    """Number and count of a shard: `1/4` to `4/4`."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(count)):
        raise click.BadParameter(f"{text!r} is not a shard such as 1/4")
    return int(number), int(count)


def _parse_integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,5,11") from None


_TYPES: dict[str, Any] = {
    "text": str,
    "format": _FormatName(TARGETS),
    "size": parse_bytes,
    "path": PATH,
    "file": FILE,
    "folder": FOLDER,
    "patterns": str,
    "integers": _parse_integers,
    "shard": parse_shard,
}

source_argument = click.argument("src", type=PATH)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def add_options(*groups: type, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Add the options of these `TypedDict`s of `ucp.options` to a command."""

    def add(function: F) -> F:
        options = {name: option for group in groups for name, option in declared(group).items() if name not in without}
        for name, option in reversed(options.items()):
            function = click_option(name, option)(function)
        return function

    return add


def click_option(name: str, option: Option) -> Callable[[F], F]:
    """The click option for a declaration."""
    spelling = "--" + name.replace("_", "-")
    text = option.help + (f" [default: {option.show}]" if option.show else "")
    if option.kind == "flag":
        if option.default:
            return click.option(f"{spelling}/--no-{spelling[2:]}", default=True, show_default=True, help=text)
        return click.option(spelling, is_flag=True, help=text)
    value_type = _TYPES.get(option.kind)
    if option.choices:
        value_type = click.Choice(option.choices)
    elif option.kind in ("integer", "number"):
        value_range = click.IntRange if option.kind == "integer" else click.FloatRange
        value_type = value_range(option.minimum, option.maximum)
    spellings = [spelling, f"-{option.short}"] if option.short else [spelling]
    return click.option(
        *spellings,
        type=value_type,
        default=None if option.kind == "patterns" else option.default,
        multiple=option.kind == "patterns",
        metavar=option.metavar,
        help=text,
    )
