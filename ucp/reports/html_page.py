"""Write the HTML page of a checkpoint: one file with its data, style and scripts, which needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ucp.checks.runner import verify
from ucp.checks.verify_report import Report
from ucp.compare.atom_pass import AtomGroup, ReadFailure, run_pass
from ucp.compare.comparison import CompareOptions, Comparison, compare
from ucp.core.checkpoint import Checkpoint
from ucp.core.findings import Level
from ucp.engine.pool import Progress
from ucp.errors import StorageError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.reports.atom_statistics import AtomStatistics, measurable
from ucp.reports.page_data import measured_states, page_data
from ucp.storage.local import SourceFiles
from ucp.storage.paths import local_path, parse_path

# Concatenated into one function in this order: each may use what earlier ones define.
SCRIPTS: Final = (
    "core.js",
    "model.js",
    "table.js",
    "overview.js",
    "mesh.js",
    "map.js",
    "sizes.js",
    "compare.js",
    "detail.js",
    "main.js",
)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the page contains. `level` is that of the checks; `sample` limits the elements read per state.

    `compare` is the path of another checkpoint to compare with, and `tag_b` its step folder.
    """

    level: Level = Level.DEFAULT
    statistics: bool = True
    sample: int | None = None
    reading: ReadOptions = field(default_factory=ReadOptions)
    compare: str | os.PathLike[str] | None = None
    tag_b: str | None = None


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A page that was written, the report of its checks, and the comparison with another checkpoint.

    `lost` are the files of the checkpoint that cannot be read; `damaged` is the number of parameters with elements that
    are in no other file.
    """

    path: Path
    nbytes: int
    parameters: int
    report: Report
    comparison: Comparison | None = None
    lost: tuple[str, ...] = ()
    damaged: int = 0


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

    If files of the checkpoint are missing or damaged, the page shows what the others hold, and what was lost. If
    nothing can be read, it contains the findings of the checks.
    """
    options = options or ReportOptions()
    path, out = parse_path(source), local_path(target, "a page goes")
    _check_target(out)
    reading = options.reading
    other: Checkpoint | None = None
    if options.compare is not None:
        other = open_checkpoint(parse_path(options.compare), replace(reading, tag=options.tag_b))
    checkpoint, is_damaged = _open(path, reading)
    checked = path if is_damaged or checkpoint is None else checkpoint
    report = verify(checked, options.level, options=reading, jobs=jobs, progress=progress)
    measured: dict[tuple[str, str], AtomStatistics | UcpError] = {}
    comparison: Comparison | None = None
    if checkpoint is not None and options.statistics:
        measured = measure(checkpoint, jobs=jobs, sample=options.sample, progress=progress)
    remarks = []
    if other is not None and checkpoint is not None and not is_damaged:
        comparison = compare(checkpoint, other, CompareOptions(updates=True), jobs=jobs, progress=progress)
    elif other is not None:
        remarks.append(f"not compared with {other.root}: files of this checkpoint are damaged")
    data = page_data(
        checkpoint,
        report,
        measured,
        source=str(path),
        version=version,
        sample=options.sample,
        comparison=comparison,
        remarks=remarks,
    )
    title = path.resolve().name if other is None else f"{path.resolve().name} and {other.root.name}"
    text = html_page(data, f"{title} · ucp report")
    _write(out, text)
    return WrittenReport(
        out,
        len(text.encode()),
        len(checkpoint.parameters) if checkpoint is not None else 0,
        report,
        comparison,
        tuple(checkpoint.lost) if checkpoint is not None else (),
        len({state[0] for state in data["lost"]["states"]}) if data.get("lost") else 0,
    )


def _open(path: Path, reading: ReadOptions) -> tuple[Checkpoint | None, bool]:
    """The index of the checkpoint, and whether it is damaged: then it is of the files that can be read, or None."""
    try:
        return open_checkpoint(path, reading), False
    except UsageError:
        raise
    except UcpError:
        if not path.exists():
            raise
    try:
        survivors = open_checkpoint(path, replace(reading, tolerant=True))
    except UcpError:
        return None, True
    return (survivors if survivors.parameters else None), True


def _check_target(out: Path) -> None:
    """Raise errors that can be detected before any work is done."""
    try:
        is_folder = out.is_dir()
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error.strerror}") from error
    if is_folder:
        raise UsageError(f"{out}: is a folder", hint="name the page: -o report.html")


def measure(
    checkpoint: Checkpoint, *, jobs: int, sample: int | None = None, progress: Progress | None = None
) -> dict[tuple[str, str], AtomStatistics | UcpError]:
    """Statistics of every state, or the error if it cannot be read."""
    keys = [key for key in measured_states(checkpoint) if measurable(checkpoint.parameters[key[0]].atoms[key[1]].dtype)]
    atoms = [checkpoint.parameters[name].atoms[kind] for name, kind in keys]
    with SourceFiles(checkpoint.root) as source_files:
        results = run_pass(
            [AtomGroup(((source_files, atom),)) for atom in atoms],
            lambda number: AtomStatistics(atoms[number].dtype),
            jobs=jobs,
            sample=sample,
            progress=progress,
            keep_going=True,
        )
    return {
        key: result.error if isinstance(result, ReadFailure) else result
        for key, result in zip(keys, results, strict=True)
    }


def html_page(data: dict[str, Any], title: str) -> str:
    """The page as text. Names in `data` may be hostile: they are embedded as data, and never become markup."""
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();"
    style = _asset("page.css")
    # Only the embedded script may run: no network, no inline handlers, no injected script.
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    contents = {
        "TITLE": escape(title),
        "POLICY": escape(policy),
        "STYLE": style,
        "SCRIPT": script,
        "FACTS": embedded(data),
    }
    # Split before filling in, so that a name that looks like a placeholder is not replaced.
    pieces = _asset("page.html").split("%%")
    return "".join(contents[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(data: dict[str, Any]) -> str:
    """JSON for a `script` element: none of its characters can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def _asset(name: str) -> str:
    return (files("ucp.reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(path: Path, text: str) -> None:
    """Write next to the target and rename, so that the page appears complete or not at all. Pipes and devices are
    written directly."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
