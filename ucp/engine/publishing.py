"""The last act: what was written is looked over, gets its manifest, and appears under its name."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

from ucp.engine.journal import Record, is_held
from ucp.engine.place import check_place, staging_folder
from ucp.engine.shares import WHOLE, Share, found_shares
from ucp.engine.worker import Written
from ucp.errors import StorageError, UsageError
from ucp.files.local import sync, write_all
from ucp.files.paths import OUR_NOTES
from ucp.model.target import Digests, OutputFile, Target


def gather(path: Path, target: Target, fingerprint: str) -> Digests:
    """What the shares of a conversion have written together; refused where something is missing."""
    check_place(path)
    folder = staging_folder(path)
    shares = found_shares(folder)
    if not shares:
        raise UsageError(
            f"{folder}: no part of this target is here", hint="write the parts first, with --part 1/N to --part N/N"
        )
    count = shares[0].count
    written: dict[tuple[int, int, int], Written] = {}  # what was written again is in a journal twice
    lacking: list[str] = []
    for share in (Share(number, count) for number in range(count)):
        journal = folder / share.journal
        try:
            record = Record.parse(journal.read_bytes(), fingerprint, journal)
        except FileNotFoundError:
            lacking.append(f"{share} was not begun")
            continue
        if not record.done:
            lacking.append(f"{share} " + ("is at work" if is_held(journal) else "did not end"))
        written.update(((w.file, w.offset, w.nbytes), w) for part in record.parts for w in part)
    if lacking:
        raise UsageError(
            f"{path}: {'; '.join(lacking)}", hint="run these parts (again: what they have done is kept), then --finish"
        )
    digests = digests_of(target, written.values())
    for file, ranges in zip(target.files, digests, strict=True):
        if sum(nbytes for _, nbytes, _ in ranges) != file.size or not (folder / file.path).is_file():
            raise StorageError(
                f"{folder / file.path}: not all of it was written",
                hint="do all machines see the same folder? Remove it and run the parts again",
            )
    return digests


def digests_of(target: Target, written: Iterable[Written]) -> Digests:
    """For each file of the target, what was written: `(offset, nbytes, digest)` in order of offset."""
    table: list[list[tuple[int, int, str]]] = [[] for _ in target.files]
    for w in written:
        table[w.file].append((w.offset, w.nbytes, w.digest))
    for entries in table:
        entries.sort()
    return table


def publish(path: Path, target: Target, last: OutputFile | None, *, durable: bool) -> None:
    """Write `last` (the manifest) into the staging folder of `path`, then let that folder appear under its name.

    Journals come along and go last: where blocks of a disk are given back at once, to remove a folder of their own
    would take as long as all that was written before takes to reach the disk.
    """
    folder = staging_folder(path)
    try:
        if last is not None:
            _write_whole(folder / last.path, b"".join(literal.data for literal in last.literals))
        _remove_strays(folder, {file.path for file in (*target.files, *(() if last is None else (last,)))})
        if durable:
            _sync_tree(folder)
        os.rename(folder, path)
        _put_away(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be published: {error.strerror}") from error


def was_published(path: Path, fingerprint: str, *, durable: bool) -> bool:
    """Whether an earlier run let the output appear, and was killed before it had put its things away. Does that now."""
    journals = [path / share.journal for share in (WHOLE, *found_shares(path)) if (path / share.journal).exists()]
    if not journals or not all(_was_left(journal, fingerprint) for journal in journals):
        return False
    _put_away(path)
    if durable:
        sync(path.parent)
    return True


def _was_left(journal: Path, fingerprint: str) -> bool:
    """Is it of this run, and of a process that is gone?"""
    return not is_held(journal) and Record.belongs(journal.read_bytes(), fingerprint)


def _put_away(path: Path) -> None:
    """Remove our own files from an output that has appeared. It is whole, whatever becomes of them."""
    for own in path.glob(f"{OUR_NOTES}*"):
        with suppress(OSError):
            own.unlink()


def _remove_strays(folder: Path, known: Container[str]) -> None:
    """Remove files that are no part of the output: a run that was killed while it threw them away left them."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base) / name
            relative = path.relative_to(folder).as_posix()
            if relative not in known and not relative.startswith(OUR_NOTES):
                path.unlink()


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, 0, data)
    finally:
        os.close(fd)


def _sync_tree(folder: Path) -> None:
    for base, _, files in os.walk(folder):
        for name in files:
            sync(Path(base) / name)
        sync(Path(base))
