"""Run the checks: open the checkpoint, collect findings and reading tasks, run the tasks, build one report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Final, cast

from ucp import settings
from ucp.checks.catalogue import CHECKS, Check, checks_of
from ucp.checks.tasks import CheckContext, CheckTask, run_tasks
from ucp.checks.verify_report import Policy, Report
from ucp.core.checkpoint import Checkpoint, Rank
from ucp.core.findings import Finding, Level
from ucp.engine.pool import Meter, Progress
from ucp.errors import UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path

# Checks that can report on a checkpoint that cannot be opened.
_WITHOUT_INDEX: Final = ("source-unchanged", "manifest-files", "zip-crc", "zip-structure", "readable", "grid")


def verify(
    source: str | os.PathLike[str] | Checkpoint,
    level: Level | str = Level.DEFAULT,
    *,
    options: ReadOptions | None = None,
    jobs: int = 2,
    progress: Progress | None = None,
    policy: Policy | None = None,
    processes: bool = False,
) -> Report:
    """Check a checkpoint, given by path or already indexed. Problems are in the report; they are not raised.

    `level` is `quick` (the index only), `default` (also replicas, steps and masters) or `deep` (every byte once).
    `policy` decides which findings fail. With `processes`, `jobs` forked processes do the reading if this process has
    no other threads. Raises only `UsageError`, and `StorageError` if a forked process is killed: neither is a
    statement about the checkpoint.
    """
    start = time.monotonic()
    level = Level.parse(level)
    checks = checks_of(level)
    options = options or ReadOptions()
    path = source.root if isinstance(source, Checkpoint) else parse_path(source)
    report = Report(str(path), level, [check.id for check in checks], policy=policy or Policy())
    progress = progress or Progress()
    try:
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(path, options)
    except UsageError:
        raise
    except UcpError as error:
        _report_unreadable(report, error, path, checks, options, jobs, progress)
    else:
        _report_checks(report, checkpoint, checks, jobs, progress, processes)
    report.seconds = time.monotonic() - start
    return report


def _report_checks(
    report: Report, checkpoint: Checkpoint, checks: Sequence[Check], jobs: int, progress: Progress, processes: bool
) -> None:
    report.format = checkpoint.format
    report.root = str(checkpoint.root)
    report.parameters = len(checkpoint.parameters)
    report.atoms = sum(len(parameter.atoms) for parameter in checkpoint.parameters.values())
    report.files = len(checkpoint.sizes)
    # Coverage first: it marks atoms that cannot be located, which no other check may read. The scan last: it reads the
    # bytes that no other check has read.
    order = {"atom_coverage": 0, "scan": 2}
    modules = sorted({check.module for check in checks if check.module}, key=lambda name: (order.get(name, 1), name))
    with ThreadFiles(checkpoint.root, jobs) as files:
        context = CheckContext(checkpoint, files, report.level)
        if report.level is Level.DEEP:
            from ucp.checks.deep_state import DeepState  # imports numpy, which --quick does without

            deep = DeepState()
            context = replace(context, deep=deep, shared=[deep.checksums, deep.values])
        items: list[Finding | CheckTask] = []
        for module in modules:
            items += import_module(f"ucp.checks.{module}").run_check(context)
        for note in checkpoint.notes:
            check = "slice-mappings" if note.id.startswith("slice-mappings") else "notes"
            items.append(Finding(check, "warning" if note.id == "newer-step" else "note", note.text))
        _run_items(report, items, jobs, progress, context if processes else None)


def _report_unreadable(
    report: Report,
    error: UcpError,
    path: Path,
    checks: Sequence[Check],
    options: ReadOptions,
    jobs: int,
    progress: Progress,
) -> None:
    """Report why a checkpoint cannot be opened, and what else is wrong with its files."""
    from ucp.checks.format_hooks import diagnose

    # CRCs of small members are compared at every level: a pickle that cannot be parsed may be a damaged one.
    report.checks = [c.id for c in CHECKS if c.id == "zip-crc" or (c in checks and c.id in _WITHOUT_INDEX)]
    # Nothing is excused, because the other checks cannot run: with `--allow grid` a missing rank would pass.
    report.policy = Policy(report.policy.fail_on)
    folder = path.parent
    with suppress(OSError):
        folder = path if path.is_dir() else folder
    with SourceFiles(folder) as files:
        report.root = str(files.root)
        _run_items(report, diagnose(path, options, report.level, files, error), jobs, progress)
    # One finding per problem that the reader lists, except for files that are already reported as missing.
    missing = [PurePosixPath(one.file).name for one in report.findings if one.check == "grid" and one.file]
    for problem in error.problems:
        if not any(name in problem.text for name in missing):
            message = error.what if len(error.problems) == 1 and problem.file is None else problem.text
            where = (problem.file, cast("Rank | None", problem.rank))
            report.add([Finding(problem.check, "error", message, *where, hint=error.hint, exit_code=error.exit_code)])
    report.sort()


def _run_items(
    report: Report,
    items: Iterable[Finding | CheckTask],
    jobs: int,
    progress: Progress,
    forked: CheckContext | None = None,
) -> None:
    """Run the tasks among `items`, and add their findings and all others to the report."""
    findings: list[Finding] = []
    tasks: list[CheckTask] = []
    for item in items:
        if isinstance(item, CheckTask):
            tasks.append(item)
        else:
            findings.append(item)
    meter = Meter(progress.advance)
    progress.start(sum(task.nbytes for task in tasks))
    try:
        findings += run_tasks(tasks, jobs, meter, forked)
    finally:
        progress.finish()
    report.add(findings)
    report.bytes_read = meter.nbytes
    report.sort()


class ThreadFiles(SourceFiles):
    """`SourceFiles` with separate file descriptors in each of at most `jobs` threads.

    The kernel's read-ahead is per open file: threads that share a descriptor disturb each other's.
    """

    def __init__(self, root: Path, jobs: int) -> None:
        super().__init__(root)
        self._max_open = max(4, settings.MAX_OPEN_FILES // max(1, jobs))
        self._of_thread = threading.local()
        self._all: list[SourceFiles] = []

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        if self.is_remote:  # connections are shared by all threads
            super().read_into(file, offset, target)
            return
        files: SourceFiles | None = getattr(self._of_thread, "files", None)
        if files is None:
            files = self._of_thread.files = SourceFiles(self.root, self._max_open)
            self._all.append(files)
        files.read_into(file, offset, target)

    def close(self) -> None:
        for files in self._all:
            files.close()
