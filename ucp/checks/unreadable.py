"""A checkpoint that cannot be indexed: what can be said about it all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ucp.checks.deep import Deep
from ucp.checks.filemap import FileMap
from ucp.checks.findings import Finding, Level
from ucp.checks.grid import missing
from ucp.checks.manifests import compare_folder
from ucp.checks.scan import tasks_of
from ucp.checks.spans import Archive, Span, torch_spans
from ucp.checks.tasks import Task, failure
from ucp.errors import UcpError
from ucp.files.local import SourceFiles
from ucp.formats.atoms import reader as atoms
from ucp.formats.registry import ReadOptions
from ucp.store.survey import is_store
from ucp.tunables import MIB

_SMALL = 1 * MIB  # members up to this size are worth a look at any level: the pickles are among them


def diagnose(
    path: Path, options: ReadOptions, level: Level, files: SourceFiles, error: UcpError
) -> Iterator[Finding | Task]:
    """Missing rank files, missing or changed files of a manifest, and damaged archives."""
    if atoms.recognises(path):
        try:
            yield from compare_folder(path)
        except UcpError:
            return  # the manifest itself cannot be read, which was said
        return
    if is_store(path):
        return  # one file, whose neighbours are others' affair
    yield from missing(path, options.tag)
    yield from _damaged_archives(files, level, error)


def _damaged_archives(files: SourceFiles, level: Level, known: UcpError) -> Iterator[Finding | Task]:
    """A pickle that makes no sense is most often a pickle whose bytes were changed: its CRC tells."""
    folder = files.root
    nothing = FileMap(None)
    found: list[Finding | Span | Archive] = []
    for file in sorted(folder.rglob("*.pt")):
        name = file.relative_to(folder).as_posix()
        try:
            for item in torch_spans(folder, name, nothing):
                if level is Level.DEEP or (isinstance(item, Span) and item.nbytes <= _SMALL):
                    found.append(item)
        except UcpError as error:
            if error.what != known.what:
                found.append(failure("zip-crc", error))
    yield from tasks_of(files, Deep(), found)
