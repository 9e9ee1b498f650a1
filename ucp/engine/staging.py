"""Staging: output appears whole or not at all, and a killed run goes on where it was.

Work goes to `.<name>.ucp-partial` beside the target. Its journal has one line a finished part with the digests of
what was written. Resuming reads journalled ranges back and believes only those whose digest still fits, so it does not
matter what a crash did to the page cache. The last act is a rename.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ucp import tunables
from ucp.engine.plan import Extent, Part
from ucp.engine.stream import Written
from ucp.errors import StorageError, UsageError
from ucp.files.local import allocate
from ucp.model.target import Digests, OutputFile, Target

JOURNAL = "journal.jsonl"
OUTPUT = "output"


def staging_folder(target: Path) -> Path:
    """Where the unfinished form of `target` lives."""
    return target.parent / f".{target.name}.ucp-partial"


class Staging:
    """An output folder under construction. Use as a context manager; `publish` makes it appear."""

    def __init__(self, path: Path, target: Target, fingerprint: str, *, resume: bool, restart: bool) -> None:
        """`fingerprint` identifies target and source: a journal of another one is never continued."""
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.folder = staging_folder(path)
        self.output = self.folder / OUTPUT
        self._journal: int | None = None
        self.finished: dict[tuple[tuple[int, int, int], ...], list[Written]] = {}
        if not path.parent.is_dir():
            raise StorageError(f"{path.parent}: no such folder", hint="make it first, or choose another target")
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
        if self.folder.exists() and restart:
            self._take_lock(create=False)
            self.discard()
        if self.folder.exists() and not resume:
            raise UsageError(
                f"{self.folder}: a half-done output of an earlier run is here",
                hint="add --resume to go on where it stopped, or --restart to throw it away and begin again",
            )
        try:
            self._begin()
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be made: {error.strerror}") from error

    def _begin(self) -> None:
        fresh = not (self.folder / JOURNAL).exists()
        self.output.mkdir(parents=True, exist_ok=True)
        self._take_lock(create=True)
        try:
            if fresh:
                _check_space(self.path.parent, self.target.nbytes)
                self._append({"ucp": "journal", "version": 1, "fingerprint": self.fingerprint})
            else:
                self._load_journal()
                _check_space(self.path.parent, self.target.nbytes - self.finished_bytes)
            for file in self.target.files:
                _allocate(self.output / file.path, file.size)
        except BaseException:
            if fresh:
                self.discard()
            self.close()
            raise

    def _take_lock(self, *, create: bool) -> None:
        """One process a target: the lock goes with the process, however it ends."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_APPEND | (os.O_CREAT if create else 0)
        try:
            self._journal = os.open(self.folder / JOURNAL, flags, 0o644)
        except FileNotFoundError:
            return  # killed before it had a journal: nobody holds it
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._journal)
            self._journal = None
            raise UsageError(
                f"{self.path}: another process is writing it now", hint="wait for it, or choose another target"
            ) from None

    def _append(self, record: dict[str, Any]) -> None:
        assert self._journal is not None
        os.write(self._journal, (json.dumps(record, separators=(",", ":")) + "\n").encode())

    def _load_journal(self) -> None:
        data = (self.folder / JOURNAL).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        assert self._journal is not None
        os.ftruncate(self._journal, len(whole))  # a line torn by the kill must not swallow the next one
        records = list(_records(whole.splitlines()))
        if not records or records[0].get("fingerprint") != self.fingerprint:
            raise UsageError(
                f"{self.folder}: the half-done output belongs to another source, target or version",
                hint="add --restart instead of --resume to throw it away and begin again",
            )
        for record in records[1:]:
            written = [Written(*entry) for entry in record["written"]]
            self.finished[tuple((w.file, w.offset, w.nbytes) for w in written)] = written

    @property
    def finished_bytes(self) -> int:
        """Bytes that the journal says are on disk."""
        return sum(w.nbytes for w in self.written())

    def remaining(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts that are not yet on disk, journalled ones being read back and checked."""
        for part in parts:
            key = tuple((e.file, e.offset, e.nbytes) for e in part.extents)
            written = self.finished.get(key)
            if written is None or not all(map(self._intact, part.extents, written)):
                self.finished.pop(key, None)
                yield part

    def _intact(self, extent: Extent, written: Written) -> bool:
        if extent.data is not None and xxhash.xxh3_128_hexdigest(extent.data) != written.digest:
            return False
        path = self.output / self.target.files[written.file].path
        return digest_range(path, written.offset, written.nbytes) == written.digest

    def written(self) -> Iterator[Written]:
        """Everything that is on disk, in no particular order."""
        for written in self.finished.values():
            yield from written

    def record(self, written: list[Written]) -> None:
        """Journal a finished part."""
        self.finished[tuple((w.file, w.offset, w.nbytes) for w in written)] = written
        self._append({"written": [_entry(w) for w in written]})

    def digests(self) -> Digests:
        """For each file of the target, what was written: `(offset, nbytes, digest)` in order of offset."""
        table: list[list[tuple[int, int, str]]] = [[] for _ in self.target.files]
        for w in self.written():
            table[w.file].append((w.offset, w.nbytes, w.digest))
        for entries in table:
            entries.sort()
        return table

    def publish(self, last: OutputFile | None, *, durable: bool) -> None:
        """Write `last` (the manifest), then let the folder appear under its name."""
        try:
            if last is not None:
                path = self.output / last.path
                _allocate(path, last.size)
                path.write_bytes(b"".join(literal.data for literal in last.literals))
            if durable:
                _sync_tree(self.output)
            os.rename(self.output, self.path)
            if durable:
                _sync(self.path.parent)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be published: {error.strerror}") from error
        self.discard()

    def discard(self) -> None:
        """Remove the staging folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock; what was done stays for --resume."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


def _entry(written: Written) -> list[int | str]:
    """A journal entry; `Written(*entry)` reads it."""
    entry: list[int | str] = [written.file, written.offset, written.nbytes, written.digest]
    return entry if written.crc is None else [*entry, written.crc]


def digest_range(path: Path, offset: int, nbytes: int) -> str | None:
    """XXH3-128 (hex) of a byte range; None where the file is shorter or not there."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(max(nbytes, 1), tunables.SLAB_BYTES)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while nbytes:
                got = file.readinto(block[: min(nbytes, len(block))])
                if not got:
                    return None
                digest.update(block[:got])
                nbytes -= got
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Journal records up to the first torn line."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + tunables.SPACE_RESERVE_BYTES > free:
        raise StorageError(
            f"{folder}: {needed:,} bytes are needed and {free:,} are free",
            hint="free some space, choose a target on another file system, or use --link, which copies nothing",
        )


def _allocate(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        allocate(fd, size)
    except OSError as error:
        raise StorageError(f"{path}: cannot get {size:,} bytes: {error.strerror}") from error
    finally:
        os.close(fd)


def _sync_tree(folder: Path) -> None:
    for base, _, files in os.walk(folder):
        for name in files:
            _sync(Path(base) / name)
        _sync(Path(base))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
