"""Options that several commands share."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from ucp.core.checkpoint import Checkpoint, Note
from ucp.errors import StorageError
from ucp.options import parse_size

F = TypeVar("F", bound=Callable[..., Any])


class _NonEmptyPath(click.Path):
    """A path. An empty one, which an unset variable of the shell gives, does not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path (is a variable of your shell not set?)", param, ctx)
        return super().convert(value, param, ctx)


# Whether a path can be read is for its reader to say, who knows what to do and the exit code.
PATH = _NonEmptyPath(path_type=Path, readable=False)
FILE = _NonEmptyPath(path_type=Path, readable=False, dir_okay=False)
FOLDER = _NonEmptyPath(path_type=Path, readable=False, file_okay=False)

_NOTES_OF_A_KIND = 5


def parse_bytes(text: str | int) -> int:
    """A number of bytes: `512M`, `2G`, `1048576`."""
    found = parse_size(str(text))
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size; write 512M, 2G or a number of bytes")
    return found


def source_argument(function: F) -> F:
    """SRC: any checkpoint that ucp reads."""
    return click.argument("src", type=PATH)(function)


def reading_options(function: F) -> F:
    """How the source is to be read: --tag, --rules, --preset."""
    for option in reversed(
        (
            click.option("--tag", help="Step folder inside the save folder. [default: the one that `latest` names]"),
            click.option(
                "--rules",
                type=FILE,
                help="TOML file of rules that say how parameters are cut over tensor-parallel ranks.",
            ),
            click.option("--preset", help="Named set of rules that comes with ucp, for example `llama`."),
        )
    ):
        function = option(function)
    return function


def log_options(function: F) -> F:
    """Which state of a logged run is meant: --log, --step, --exact."""
    for option in reversed(
        (
            click.option(
                "--log",
                type=FOLDER,
                metavar="DIR",
                help="Log of the run, to replay on SRC up to --step. SRC may be the run's folder itself.",
            ),
            click.option("--step", metavar="N|latest", help="Step of the log. [default: latest]"),
            click.option("--exact", is_flag=True, help="Refuse a state that may differ from the job's own in any bit."),
        )
    ):
        function = option(function)
    return function


def limit_torch_threads(*checkpoints: Checkpoint) -> None:
    """Replay in as many threads as there are workers, instead of in as many for every worker."""
    if any(checkpoint.computed is not None for checkpoint in checkpoints):
        import torch

        torch.set_num_threads(1)


def selection_options(verb: str) -> Callable[[F], F]:
    """Which states and which parameters: --only, --include, --exclude."""

    def add(function: F) -> F:
        for option in reversed(
            (
                click.option("--only", type=click.Choice(["weights", "optimizer"]), help=f"{verb} only these states."),
                click.option(
                    "--include",
                    multiple=True,
                    metavar="PATTERN",
                    help=f"{verb} only parameters that match this shell pattern. Repeatable.",
                ),
                click.option(
                    "--exclude",
                    multiple=True,
                    metavar="PATTERN",
                    help="Leave out parameters that match this shell pattern. Repeatable.",
                ),
            )
        ):
            function = option(function)
        return function

    return add


def naming_options(function: F) -> F:
    """Under which names parameters are to be seen: --names, --model-config."""
    for option in reversed(
        (
            click.option(
                "--names",
                metavar="NAMES",
                help="Rename, split and fuse parameters as hf, megatron, megatron-deepspeed, a table that comes with"
                " ucp, or a TOML file says.",
            ),
            click.option(
                "--model-config",
                type=FILE,
                metavar="FILE",
                help="JSON file with what the checkpoint does not say about its model: a config.json, or Megatron's"
                " arguments.",
            ),
        )
    ):
        function = option(function)
    return function


def echo_notes(notes: Iterable[Note]) -> None:
    """Tell on stderr what a person should know; of many notes of one kind, the first few."""
    seen: Counter[str] = Counter()
    for note in notes:
        seen[note.id] += 1
        if seen[note.id] <= _NOTES_OF_A_KIND:
            click.echo(f"note: {note.text}", err=True)
    for kind, count in seen.items():
        if count > _NOTES_OF_A_KIND:
            click.echo(f"note: … and {count - _NOTES_OF_A_KIND} more of this kind ({kind}); --json lists all", err=True)


def check_parent_folder(path: Path, what: str) -> None:
    """Refuse a file to write in a folder that is not there, before the work whose result it is to hold."""
    if not path.parent.is_dir():
        raise StorageError(f"{path}: {what} cannot be written: there is no folder {path.parent}", hint="make it first")


def stderr_is_terminal() -> bool:
    """Whether stderr is a terminal. (A job that closed it has no such file at all.)"""
    stderr: TextIO | None = sys.stderr
    return stderr is not None and stderr.isatty()


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(count: float) -> str:
    """A size for people, in powers of 1,024."""
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
