"""The page: a template, its styles and scripts, and the facts, put together into one file that needs no other.

One report from start to finish: a checkpoint in, a page out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import ucp.checks as checks
from ucp.checks.verify_report import Report
from ucp.compare.atom_pass import AtomGroup, ReadFailure, run_pass
from ucp.core.checkpoint import Checkpoint
from ucp.core.findings import Level
from ucp.engine.pool import Progress
from ucp.errors import StorageError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.reports.atom_statistics import AtomStatistics, measurable
from ucp.reports.page_data import page_data, shown_kinds
from ucp.storage.local import SourceFiles
from ucp.storage.paths import local_path, parse_path

# In this order, inside one function: later ones use what earlier ones define.
SCRIPTS: Final = (
    "core.js",
    "model.js",
    "overview.js",
    "mesh.js",
    "map.js",
    "sizes.js",
    "table.js",
    "detail.js",
    "main.js",
)


def html_page(facts: dict[str, Any], title: str) -> str:
    """The HTML text. Names in `facts` may be hostile: they are data, and never reach the page as markup."""
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();"
    style = _asset("page.css")
    # What is embedded runs, and nothing else does: no network, no inline handlers, no injected script.
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    parts = {
        "TITLE": escape(title),
        "POLICY": escape(policy),
        "STYLE": style,
        "SCRIPT": script,
        "FACTS": embedded(facts),
    }
    # Split first and fill in after, so that a name that looks like a mark stays a name.
    pieces = _asset("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(facts: dict[str, Any]) -> str:
    """JSON that can stand inside a `script` element: no character of it can end the element or open a comment."""
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def _asset(name: str) -> str:
    return (files("ucp.reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What goes on the page. `level` is how deep the checks look; `sample` is in elements of each state."""

    level: Level = Level.DEFAULT
    statistics: bool = True
    sample: int | None = None
    reading: ReadOptions | None = None


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A page that was written."""

    path: Path
    nbytes: int
    parameters: int
    report: Report


def write_report(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ReportOptions | None = None,
    *,
    version: str = "",
    jobs: int = 2,
    progress: Progress | None = None,
) -> WrittenReport:
    """Write the page about the checkpoint at `source` to `target`.

    A checkpoint that cannot be opened still makes a page, of what the checks say about it.
    """
    options = options or ReportOptions()
    path, out = parse_path(source), local_path(target, "a page goes")
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
    measured: dict[tuple[str, str], AtomStatistics | UcpError] = {}
    if checkpoint is not None and options.statistics:
        measured = measure(checkpoint, jobs=jobs, sample=options.sample, progress=progress)
    said = page_data(checkpoint, report, measured, source=str(path), version=version, sample=options.sample)
    text = html_page(said, f"{path.resolve().name} · ucp report")
    _write(out, text)
    return WrittenReport(out, len(text.encode()), len(checkpoint.parameters) if checkpoint else 0, report)


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
) -> dict[tuple[str, str], AtomStatistics | UcpError]:
    """Statistics of every state; where one cannot be read, why."""
    wanted = [key for key in shown_kinds(checkpoint) if measurable(checkpoint.parameters[key[0]].atoms[key[1]].dtype)]
    atoms = [checkpoint.parameters[name].atoms[kind] for name, kind in wanted]
    with SourceFiles(checkpoint.root) as files:
        done = run_pass(
            [AtomGroup(((files, atom),)) for atom in atoms],
            lambda number: AtomStatistics(atoms[number].dtype),
            jobs=jobs,
            sample=sample,
            progress=progress,
            keep_going=True,
        )
    return {
        key: found.error if isinstance(found, ReadFailure) else found for key, found in zip(wanted, done, strict=True)
    }


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
