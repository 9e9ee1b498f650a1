"""The journal of one process: a line a finished part, and a lock that goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ucp import settings
from ucp.engine.worker import WrittenRange
from ucp.errors import StorageError, UsageError


class OutputBusyError(UsageError):
    """Another process writes this target, or this part of it, now."""


class Journal:
    """An open journal, locked. `taken` tells whether it holds anything yet.

    Lines are written together, once in a while: a kill costs the work of that while. A run that is over sooner never
    writes any, and an empty file is gone at once: blocks of one that has some may have to wait for the disk (see
    `publish`).
    """

    def __init__(self, path: Path, busy: OutputBusyError) -> None:
        """Open or make it; `busy` is raised where another process holds it."""
        self.path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND | os.O_CREAT, 0o644)
        if not (_lock(self._fd) and _is_same_file(self._fd, path)):  # whoever had it may have removed it just now
            self.close()
            raise busy
        self.taken = bool(_whole_lines(path.read_bytes()))  # else it was killed before it had said anything
        self._pending: list[bytes] = []  # lines that are not written yet
        self._written_at = time.monotonic()

    def begin(self, fingerprint: str) -> None:
        """Begin anew, with the first line."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        self._append({"ucp": "journal", "version": 1, "fingerprint": fingerprint})

    def load(self, fingerprint: str) -> list[list[WrittenRange]]:
        """What an earlier process finished, part by part; what its end tore, or the machine's, is cut off."""
        whole = _whole_lines(self.path.read_bytes())
        assert self._fd is not None
        os.ftruncate(self._fd, len(whole))  # no one reads on behind a torn line
        return JournalRecord.parse(whole, fingerprint, self.path).parts

    def record(self, written: Sequence[WrittenRange]) -> None:
        """Note a finished part."""
        self._append({"written": [_entry(w) for w in written]})

    def finish(self) -> None:
        """Note that this process has done all that it had to do."""
        self._append({"done": True})
        self._write()

    def keep(self) -> None:
        """Write down what is known, as far as the system lets us: what it does not will be done again."""
        try:
            self._write()
        except StorageError:
            self._pending.clear()

    def close(self) -> None:
        """Let go of the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, record: dict[str, Any]) -> None:
        self._pending.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if time.monotonic() - self._written_at >= settings.JOURNAL_SECONDS:
            self._write()

    def _write(self) -> None:
        assert self._fd is not None
        lines = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while lines:
                lines = lines[os.write(self._fd, lines) :]
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._written_at = time.monotonic()


class JournalRecord:
    """What a journal says: the finished parts, and whether its process did all of its work."""

    def __init__(self, parts: list[list[WrittenRange]], done: bool) -> None:
        self.parts = parts
        self.done = done

    @classmethod
    def parse(cls, data: bytes, fingerprint: str, path: Path) -> JournalRecord:
        """Read a journal's lines up to the first torn one; one of another run is refused."""
        records = list(_records(data.splitlines()))
        if not records or records[0].get("fingerprint") != fingerprint:
            raise UsageError(
                f"{path.parent}: the half-done output belongs to another source, target or version",
                hint="add --restart instead of --resume to throw it away and begin again",
            )
        parts = [[WrittenRange(*entry) for entry in record["written"]] for record in records[1:] if "written" in record]
        return cls(parts, bool(records[-1].get("done")))

    @staticmethod
    def belongs(data: bytes, fingerprint: str) -> bool:
        """Whether a journal is of this run. One that a crash has left empty may be."""
        first = next(_records(data.splitlines()), None)
        return first is None or first.get("fingerprint") == fingerprint

    @property
    def nbytes(self) -> int:
        return sum(written.nbytes for part in self.parts for written in part)


def is_locked(path: Path) -> bool:
    """Whether a live process holds this journal."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _whole_lines(data: bytes) -> bytes:
    """The lines of a journal up to the first that is not whole."""
    lines = data.split(b"\n")[:-1]
    count = sum(1 for _ in _records(lines))
    return b"".join(line + b"\n" for line in lines[:count])


def _entry(written: WrittenRange) -> list[int | str]:
    """A journal entry; `Written(*entry)` reads it."""
    entry: list[int | str] = [written.file, written.offset, written.nbytes, written.digest]
    return entry if written.crc is None else [*entry, written.crc]


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
