"""Run the checks that a format adds, and explain with its help why a checkpoint cannot be opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from ucp.checks.tasks import CheckContext, CheckTask, failure_finding
from ucp.core.findings import Finding, Level
from ucp.engine.pool import Meter
from ucp.errors import UcpError
from ucp.formats.registry import FileCheck, ReadOptions, checks_of_format, recognizing_format
from ucp.settings import MIB
from ucp.storage.local import SourceFiles

_SMALL_MEMBER: Final = 1 * MIB  # members up to this size, which include the pickles, are read at any level


def run_check(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """The findings of the checkpoint's format, and a task for every header that it checks."""
    hooks = checks_of_format(context.checkpoint.format)
    yield from hooks.quick(context.checkpoint, list(context.atoms()))
    if context.level >= Level.DEFAULT:
        for check in hooks.file_checks(context.checkpoint):
            yield CheckTask(check.check, 0, partial(_run_file_check, check), check.parameter)


def _run_file_check(check: FileCheck, _: Meter) -> Iterable[Finding]:
    return check.run()


def diagnose(
    path: Path, options: ReadOptions, level: Level, files: SourceFiles, error: UcpError
) -> Iterator[Finding | CheckTask]:
    """Explain why the checkpoint cannot be opened: missing or changed files, damaged archives."""
    try:
        entry = recognizing_format(path)
        if entry is None:
            return
        hooks = checks_of_format(entry.name)
        yield from hooks.unreadable(path, options.tag)
        archives = list(hooks.torch_files(path, options.tag))
    except (UcpError, OSError):
        return  # reported as the reason why it cannot be opened
    if not archives:
        return
    # A pickle that makes no sense is most often damaged: its CRC shows that.
    from ucp.checks.deep_state import DeepState  # imports numpy
    from ucp.checks.scan import scan_tasks
    from ucp.checks.spans import ChecksumSpan, FileMap, TorchArchive, torch_spans

    found: list[Finding | ChecksumSpan | TorchArchive] = []
    for file in archives:
        name = file.relative_to(files.root).as_posix()
        try:
            for item in torch_spans(files.root, name, FileMap(None)):
                if level is Level.DEEP or (isinstance(item, ChecksumSpan) and item.nbytes <= _SMALL_MEMBER):
                    found.append(item)
        except UcpError as other:
            if other.what != error.what:
                found.append(failure_finding("zip-crc", other))
    yield from scan_tasks(files, DeepState(), found)
