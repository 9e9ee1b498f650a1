"""Shared by all commands: click parameters from `ucp.options`, tables, sizes and notes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from ucp.core.checkpoint import Checkpoint, Note
from ucp.errors import StorageError
from ucp.formats.registry import TARGETS, all_formats
from ucp.options import Option, declared, parse_size

_MAX_NOTES_PER_KIND = 5


def echo_notes(notes: Iterable[Note]) -> None:
    """Print notes to stderr; of many notes of one kind, only the first few."""
    seen: Counter[str] = Counter()
    for note in notes:
        seen[note.id] += 1
        if seen[note.id] <= _MAX_NOTES_PER_KIND:
            click.echo(f"note: {note.text}", err=True)
    for kind, count in seen.items():
        if count > _MAX_NOTES_PER_KIND:
            more = count - _MAX_NOTES_PER_KIND
            click.echo(f"note: … and {more} more of this kind ({kind}); --json lists all", err=True)


def check_parent_folder(path: Path, what: str) -> None:
    """Refuse to write a file into a folder that does not exist, before the work whose result it will contain."""
    if not path.parent.is_dir():
        raise StorageError(
            f"{path}: {what} cannot be written: folder {path.parent} does not exist", hint="create it first"
        )


def limit_torch_threads(*checkpoints: Checkpoint) -> None:
    """Replay with one torch thread per worker, because every worker has its own."""
    if any(checkpoint.computed is not None for checkpoint in checkpoints):
        import torch

        torch.set_num_threads(1)


def stderr_is_terminal() -> bool:
    stderr: TextIO | None = sys.stderr  # None in a process that was started without
    return stderr is not None and stderr.isatty()


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(count: float) -> str:
    """A size in powers of 1,024: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_table(rows: list[list[str]], header: list[str]) -> str:
    """Columns of text, each as wide as its widest cell; the last one is not padded."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


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
