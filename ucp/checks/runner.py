"""Runs the checks: opens the checkpoint, asks every check, carries out the reading, collects one report.

Files that every thread opens for itself: the kernel reads ahead for each reader of a file on its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol, cast

from ucp import settings
from ucp.checks.catalogue import CHECKS, checks_of
from ucp.checks.findings import Finding, Level
from ucp.checks.tasks import CheckContext, CheckTask, ReadMeter, run_tasks
from ucp.checks.verify_report import Policy, Report
from ucp.core.checkpoint import Checkpoint
from ucp.errors import UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path

if TYPE_CHECKING:
    from ucp.checks.task_processes import CheckProcesses


# What can be said about a checkpoint that cannot be opened.
_WITHOUT_INDEX: Final = ("source-unchanged", "manifest-files", "zip-crc", "zip-structure", "readable", "grid")


class ReadProgress(Protocol):
    """Where a run reports bytes to."""

    def start(self, total: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish(self) -> None: ...


class _NoProgress:
    def start(self, total: int) -> None:
        del total

    def advance(self, nbytes: int) -> None:
        del nbytes

    def finish(self) -> None:
        pass


def verify(
    source: str | os.PathLike[str] | Checkpoint,
    level: Level | str = Level.DEFAULT,
    *,
    options: ReadOptions | None = None,
    jobs: int = 2,
    progress: ReadProgress | None = None,
    policy: Policy | None = None,
    processes: bool = False,
) -> Report:
    """Check a checkpoint, by path or already indexed. What is wrong with it is in the report, not raised.

    `level` is `quick` (the index alone), `default` (also copies, steps, masters) or `deep` (every byte once).
    `policy` says what of it fails. With `processes` the reading is done by `jobs` forks of this process, where it has
    no other threads. Raises `UsageError` only, and `StorageError` where a fork is killed: neither says anything about
    the checkpoint.
    """
    began = time.monotonic()
    level = _level(level)
    checks = checks_of(level)
    options = options or ReadOptions()
    path = source.root if isinstance(source, Checkpoint) else parse_path(source)
    report = Report(str(path), level, [check.id for check in checks], policy=policy or Policy())
    meter_to = progress or _NoProgress()
    try:
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(path, options)
    except UsageError:
        raise
    except UcpError as error:
        from ucp.checks.unreadable import diagnose

        # The CRCs of small members are looked at whatever the level: a pickle that makes no sense may be a damaged one.
        report.checks = [c.id for c in CHECKS if c.id == "zip-crc" or (c in checks and c.id in _WITHOUT_INDEX)]
        # No other check can look: what keeps it shut is not excused, or a lost rank would pass for what is allowed.
        report.policy = Policy(report.policy.fail_on)
        with SourceFiles(_folder(path)) as files:
            report.root = str(files.root)
            _carry_out(report, diagnose(path, options, level, files, error), jobs, meter_to)
        report.add(_unreadable(error, report.findings))
        report.sort()
        report.seconds = time.monotonic() - began
        return report
    report.format = checkpoint.format
    report.root = str(checkpoint.root)
    report.parameters = len(checkpoint.parameters)
    report.atoms = sum(len(parameter.atoms) for parameter in checkpoint.parameters.values())
    report.files = len(checkpoint.sizes)
    with ThreadFiles(checkpoint.root, jobs) as files:
        context = _context(checkpoint, files, level)
        # Coverage looks at every fragment: what cannot be located then, no other check may touch. The scan comes last,
        # because it reads what the others leave.
        modules = sorted({check.module for check in checks if check.module}, key=_turn)
        items = [item for module in modules for item in _look(module, context)]
        _carry_out(report, items, jobs, meter_to, _forking(context) if processes else None)
    report.seconds = time.monotonic() - began
    return report


def _folder(path: Path) -> Path:
    """Where the files of a checkpoint lie that could not be opened, perhaps because nothing is to be known of it."""
    try:
        return path if path.is_dir() else path.parent
    except OSError:
        return path.parent


def _context(checkpoint: Checkpoint, files: SourceFiles, level: Level) -> CheckContext:
    if level is not Level.DEEP:
        return CheckContext(checkpoint, files, level)
    from ucp.checks.deep_state import DeepState  # a quick look does without numpy

    deep = DeepState()
    return CheckContext(checkpoint, files, level, deep=deep, shared=[deep.ledger, deep.tallies])


def _forking(context: CheckContext) -> CheckProcesses | None:
    from ucp.checks import task_processes

    return (
        task_processes.CheckProcesses(context.files, context.shared)
        if task_processes.is_possible(context.files)
        else None
    )


def _turn(module: str) -> tuple[int, str]:
    return {"atom_coverage": 0, "scan": 2}.get(module, 1), module


def _level(level: Level | str) -> Level:
    if isinstance(level, Level):
        return level
    try:
        return Level[level.upper()]
    except KeyError:
        known = ", ".join(known.title for known in Level)
        raise UsageError(f"{level!r} is not a level of verification", hint=f"choose one of: {known}") from None


def _look(module: str, context: CheckContext) -> Iterator[Finding | CheckTask]:
    """A check's module has one function `look(context)` that gives findings and tasks."""
    return cast("Iterator[Finding | CheckTask]", import_module(f"ucp.checks.{module}").look(context))


def _carry_out(
    report: Report,
    items: Iterable[Finding | CheckTask],
    jobs: int,
    progress: ReadProgress,
    forking: CheckProcesses | None = None,
) -> None:
    findings: list[Finding] = []
    tasks: list[CheckTask] = []
    for item in items:
        if isinstance(item, CheckTask):
            tasks.append(item)
        else:
            findings.append(item)
    meter = ReadMeter(progress.advance)
    progress.start(sum(task.nbytes for task in tasks))
    try:
        findings += run_tasks(tasks, jobs, meter, forking)
    finally:
        progress.finish()
    report.add(findings)
    report.bytes_read = meter.bytes_read
    report.sort()


def _unreadable(error: UcpError, known: Sequence[Finding]) -> Iterator[Finding]:
    """Why there is no index: one finding a problem that the reader lists, without files already known to be missing."""
    missing = [PurePosixPath(finding.file).name for finding in known if finding.check == "grid" and finding.file]
    head, *lines = error.what.split("\n    ")
    for what in lines or [head]:
        if not any(name in what for name in missing):
            yield Finding("readable", "error", what, hint=error.hint, exit_code=error.exit_code)


class ThreadFiles(SourceFiles):
    """Like `SourceFiles`, with descriptors of its own in each of at most `jobs` threads."""

    def __init__(self, root: Path, jobs: int) -> None:
        super().__init__(root)
        self._share = max(4, settings.MAX_OPEN_FILES // max(1, jobs))
        self._mine = threading.local()
        self._all: list[SourceFiles] = []
        self._new = threading.Lock()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        if self._remote is not None:  # which all threads share
            super().read_into(file, offset, target)
            return
        files: SourceFiles | None = getattr(self._mine, "files", None)
        if files is None:
            files = self._mine.files = SourceFiles(self.root, self._share)
            with self._new:
                self._all.append(files)
        files.read_into(file, offset, target)

    def close(self) -> None:
        for files in self._all:
            files.close()
