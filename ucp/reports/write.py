"""One report from start to finish: a checkpoint in, a page out."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ucp.checks as checks
from ucp.checks import Level, Report
from ucp.compare.passes import Bundle, Failure
from ucp.compare.passes import run as run_pass
from ucp.engine.convert import Progress
from ucp.errors import StorageError, UcpError, UsageError
from ucp.files.local import SourceFiles
from ucp.files.paths import as_path, local_path
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.model.checkpoint import Checkpoint
from ucp.reports.facts import facts, shown_kinds
from ucp.reports.page import page
from ucp.reports.statistics import Statistics, measurable


@dataclass(frozen=True, slots=True)
class Options:
    """What goes on the page. `level` is how deep the checks look; `sample` is in elements of each state."""

    level: Level = Level.DEFAULT
    statistics: bool = True
    sample: int | None = None
    reading: ReadOptions | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A page that was written."""

    path: Path
    nbytes: int
    parameters: int
    report: Report


def write_report(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    *,
    version: str = "",
    jobs: int = 2,
    progress: Progress | None = None,
) -> Written:
    """Write the page about the checkpoint at `source` to `target`.

    A checkpoint that cannot be opened still makes a page, of what the checks say about it.
    """
    options = options or Options()
    path, out = as_path(source), local_path(target, "a page goes")
    _check_target(out)
    reading = options.reading or ReadOptions()
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(path, reading)
    except UsageError:
        raise
    except UcpError:
        if not path.exists():
            raise
    report = checks.verify(checkpoint or path, options.level, options=reading, jobs=jobs, progress=progress)
    measured: dict[tuple[str, str], Statistics | UcpError] = {}
    if checkpoint is not None and options.statistics:
        measured = measure(checkpoint, jobs=jobs, sample=options.sample, progress=progress)
    said = facts(checkpoint, report, measured, source=str(path), version=version, sample=options.sample)
    text = page(said, f"{path.resolve().name} · ucp report")
    _write(out, text)
    return Written(out, len(text.encode()), len(checkpoint.parameters) if checkpoint else 0, report)


def _check_target(out: Path) -> None:
    """Raise what can be known before any work."""
    try:
        is_folder = out.is_dir()
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error.strerror}") from error
    if is_folder:
        raise UsageError(f"{out}: is a folder", hint="name the page: -o report.html")


def measure(
    checkpoint: Checkpoint, *, jobs: int, sample: int | None = None, progress: Progress | None = None
) -> dict[tuple[str, str], Statistics | UcpError]:
    """Statistics of every state; where one cannot be read, why."""
    wanted = [key for key in shown_kinds(checkpoint) if measurable(checkpoint.parameters[key[0]].atoms[key[1]].dtype)]
    atoms = [checkpoint.parameters[name].atoms[kind] for name, kind in wanted]
    with SourceFiles(checkpoint.root) as files:
        done = run_pass(
            [Bundle(((files, atom),)) for atom in atoms],
            lambda number: Statistics(atoms[number].dtype),
            jobs=jobs,
            sample=sample,
            progress=progress,
            keep_going=True,
        )
    return {key: found.error if isinstance(found, Failure) else found for key, found in zip(wanted, done, strict=True)}


def _write(path: Path, text: str) -> None:
    """Write beside the target and rename: a page appears whole or not at all. A pipe or device stays what it is."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
