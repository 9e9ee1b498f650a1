"""Shared by all commands: printing, tables, notes, signals, and click parameters from `ucp.options`."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO, TypeVar

import click

from ucp.core.checkpoint import Checkpoint, Note
from ucp.errors import StorageError, escaped
from ucp.formats.registry import TARGETS, all_formats, target_hint
from ucp.options import GROUPS, Option, declared, parse_size

_MAX_NOTES_PER_KIND: Final = 5
_COLUMN_WIDTH: Final = 24  # to which a column may shrink before others are left out
_MIN_COLUMN_WIDTH: Final = 6
_STYLES: Final = r"[\n\t]|\x1b\[[0-9;]*m"  # line breaks, and what click.style makes
_CI_COMMAND: Final = r"(?m)^(?=::|##\[)"  # a line that GitHub Actions or Azure Pipelines would obey
_COLOURS: Final = {"error": "red", "warning": "yellow", "note": "cyan"}


# Printing -------------------------------------------------------------------------------------------------------------


def echo(text: str = "", *, err: bool = False, nl: bool = True, obeyed: bool = False) -> None:
    """Print to stdout, or to stderr with `err`; styles appear on terminals only, other control characters spelled out.

    A line that a CI service would take for a command gets a backslash, unless it is to be `obeyed`. If the reader has
    closed the pipe (`ucp inspect … | head`), the rest of the output is dropped, and the command continues: its exit
    code does not depend on who reads.
    """
    is_plain = bool(os.environ.get("NO_COLOR")) or is_dumb_terminal()
    text = escaped(text, _STYLES)
    if not obeyed:
        text = re.sub(_CI_COMMAND, r"\\", text)
    try:
        click.echo(text, err=err, nl=nl, color=False if is_plain else None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())


def with_colours(text: str) -> str:
    """Lines that start with a severity (`error: …`, `warning: …`, `note: …`), with that word in its colour."""
    return re.sub(r"(?m)^(error|warning|note):", lambda found: click.style(found[0], fg=_COLOURS[found[1]]), text)


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None in a process that was started without it


def is_dumb_terminal() -> bool:
    """Whether the terminal, such as the shell of an editor, supports neither colours nor moving the cursor."""
    return os.environ.get("TERM") == "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is. None for a pipe or a file, whose lines may have any length."""
    if not is_terminal(sys.stdout):
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def echo_notes(notes: Iterable[Note]) -> None:
    """Print notes to stderr; of many notes of one kind, only the first few."""
    seen: Counter[str] = Counter()
    for note in notes:
        seen[note.id] += 1
        if seen[note.id] <= _MAX_NOTES_PER_KIND:
            echo(with_colours(f"note: {note.text}"), err=True)
    for kind, count in seen.items():
        if count > _MAX_NOTES_PER_KIND:
            more = count - _MAX_NOTES_PER_KIND
            echo(with_colours(f"note: … and {more} more of this kind ({kind}); --json lists all"), err=True)


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


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_seconds(seconds: float) -> str:
    """A duration: `6 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


# Tables ---------------------------------------------------------------------------------------------------------------


def format_table(rows: list[list[str]], header: list[str], expendable: Sequence[str] = ()) -> str:
    """Columns of text, each as wide as its widest cell.

    On a terminal that is too narrow, the `expendable` columns are left out as far as necessary, in this order, and
    cells of the others are continued on the next lines.
    """
    rows = [[escaped(cell) for cell in row] for row in rows]
    limit = terminal_width()
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    kept, left_out = list(range(len(header))), list[str]()
    if limit is not None and _total(widths) > limit:
        for name in expendable:
            if _total([min(widths[i], _COLUMN_WIDTH) for i in kept]) <= limit:
                break
            kept.remove(header.index(name))
            left_out.append(name)
        widths = _shrink(widths, kept, limit)
    lines = [
        "  ".join(part.ljust(widths[i]) for i, part in zip(kept, parts, strict=True)).rstrip()
        for row in [header, *rows]
        for parts in _continued([row[i] for i in kept], [widths[i] for i in kept])
    ]
    lines[0] = click.style(lines[0], bold=True)
    if left_out:
        lines.append(format_text(f"(no space for {', '.join(left_out)}: widen the terminal, or use --json)"))
    return "\n".join(lines)


def format_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Two columns, names and values; long values are continued on the next lines of a terminal."""
    facts = [(name, escaped(value, "\n")) for name, value in facts]
    margin = max(len(name) for name, _ in facts) + 2
    limit = terminal_width()
    width = sys.maxsize if limit is None else max(limit - margin, _COLUMN_WIDTH)
    return "\n".join(f"{name.ljust(margin)}" + f"\n{' ' * margin}".join(_wrap(value, width)) for name, value in facts)


def format_text(text: str) -> str:
    """A text, broken between words at the width of the terminal."""
    limit = terminal_width()
    text = escaped(text, "\n")
    return text if limit is None else "\n".join(_wrap(text, limit))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _shrink(widths: list[int], kept: list[int], limit: int) -> list[int]:
    """Widths that fit: the widest columns are reduced first."""
    widths = list(widths)
    while _total([widths[i] for i in kept]) > limit:
        widest = max(kept, key=lambda i: widths[i])
        if widths[widest] <= _MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
    return widths


def _continued(cells: list[str], widths: list[int]) -> Iterator[list[str]]:
    """The lines of one row."""
    wrapped = [_wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, wrapped))):
        yield [lines[number] if number < len(lines) else "" for lines in wrapped]


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; words that are too long are broken after a separator of names and paths."""
    lines = [""]
    for word in re.findall(r" *[^ ]+", text):
        if len(lines[-1] + word) <= width:
            lines[-1] += word
            continue
        is_long = len(word) > width
        for piece in re.findall(rf"[^./_]{{0,{width - 1}}}[./_]?", word.lstrip()) if is_long else [word.lstrip()]:
            if lines[-1] and (len(lines[-1] + piece) > width or not is_long):
                lines.append("")
            lines[-1] += piece
    return lines


# Signals --------------------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: Slurm, Kubernetes and `kill` send it before they kill a process."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, so that what is unfinished can be kept, and the user be told."""

    def interrupt(*_: object) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Parameters -----------------------------------------------------------------------------------------------------------

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
        if value not in TARGETS:
            self.fail(f"{value!r} is not a format to write.\n  → {target_hint(str(value))}", param, ctx)
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
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print neither progress nor a summary.")


class GroupedCommand(click.Command):
    """A command whose options are listed by topic, in the groups of `ucp.options`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        records = {param.name: record for param in options if (record := param.get_help_record(ctx))}
        for title, names in GROUPS.items():
            if own := [records.pop(name) for name in names if name in records]:
                with formatter.section(title):
                    formatter.write_dl(own)
        with formatter.section("Run"):
            formatter.write_dl(list(records.values()))


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
        metavar=option.metavar or ("N" if option.kind == "integer" else None),
        help=text,
    )
