"""What commands print: notes, tables, sizes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import click

from ucp.core.checkpoint import Checkpoint, Note
from ucp.errors import StorageError

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
