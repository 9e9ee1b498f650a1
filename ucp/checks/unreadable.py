"""A checkpoint that cannot be indexed: what can be said about it all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ucp.checks.deep_state import DeepState
from ucp.checks.findings import Finding, Level
from ucp.checks.manifests import compare_folder
from ucp.checks.rank_grid import missing
from ucp.checks.scan import scan_tasks
from ucp.checks.spans import ChecksumSpan, FileMap, TorchArchive, torch_spans
from ucp.checks.tasks import CheckTask, failure_finding
from ucp.errors import UcpError
from ucp.formats import atoms
from ucp.formats.deepspeed import folder as deepspeed_folder
from ucp.formats.deepspeed import universal_folder
from ucp.formats.megatron import folder as megatron_folder
from ucp.formats.registry import ReadOptions
from ucp.formats.store.generations import is_store
from ucp.settings import MIB
from ucp.storage.local import SourceFiles

_SMALL = 1 * MIB  # members up to this size are worth a look at any level: the pickles are among them


def diagnose(
    path: Path, options: ReadOptions, level: Level, files: SourceFiles, error: UcpError
) -> Iterator[Finding | CheckTask]:
    """Missing rank files, missing or changed files of a manifest, and damaged archives."""
    try:
        yield from _diagnose(path, options, level, files, error)
    except OSError:
        return  # what keeps us from reading it kept the reader, who has said so


def _diagnose(
    path: Path, options: ReadOptions, level: Level, files: SourceFiles, error: UcpError
) -> Iterator[Finding | CheckTask]:
    if atoms.recognises(path):
        try:
            yield from compare_folder(path)
        except UcpError:
            return  # the manifest itself cannot be read, which was said
        return
    if is_store(path):
        return  # one file, whose neighbours are others' affair
    yield from missing(path, options.tag)
    try:
        suspects = _archives(path, options.tag)
    except UcpError:
        return  # nothing says which files are meant
    yield from _damaged_archives(files, suspects, level, error)


def _archives(path: Path, tag: str | None) -> list[Path]:
    """The torch files of the checkpoint that is meant: none of other steps beside it, none of a folder without one."""
    if universal_folder.recognises(path):
        return sorted(universal_folder.find(path, tag).rglob("*.pt"))
    if deepspeed_folder.recognises(path):
        beside = path.parent if path.is_file() else path
        if deepspeed_folder.is_step_folder(beside):
            return sorted(beside.glob("*.pt"))
        place = deepspeed_folder.find(path, tag)
        return sorted({*place.root.glob("*.pt"), *place.step.glob("*.pt")})
    place_of_megatron = megatron_folder.find(path, tag)
    return [] if place_of_megatron is None else sorted(place_of_megatron.root.rglob("*.pt"))


def _damaged_archives(
    files: SourceFiles, suspects: Sequence[Path], level: Level, known: UcpError
) -> Iterator[Finding | CheckTask]:
    """A pickle that makes no sense is most often a pickle whose bytes were changed: its CRC tells."""
    folder = files.root
    nothing = FileMap(None)
    found: list[Finding | ChecksumSpan | TorchArchive] = []
    for file in suspects:
        name = file.relative_to(folder).as_posix()
        try:
            for item in torch_spans(folder, name, nothing):
                if level is Level.DEEP or (isinstance(item, ChecksumSpan) and item.nbytes <= _SMALL):
                    found.append(item)
        except UcpError as error:
            if error.what != known.what:
                found.append(failure_finding("zip-crc", error))
    yield from scan_tasks(files, DeepState(), found)
