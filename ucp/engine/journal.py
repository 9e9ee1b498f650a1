"""The journal of one process in a staging folder: one line per finished task, and a lock.

The lock is released with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.engine.work_shard import WorkShard
from ucp.engine.worker import WrittenRange
from ucp.errors import StorageError, UsageError, storage_errors
from ucp.storage.paths import OWN_PREFIX

_NAME: Final = re.compile(rf"{re.escape(OWN_PREFIX)}journal-(\d+)-of-(\d+)\.jsonl")


class OutputBusyError(UsageError):
    """Another process is writing this target, or this shard of it."""


def journal_name(shard: WorkShard) -> str:
    """Name of a shard's journal in the staging folder."""
    return OWN_PREFIX + ("journal.jsonl" if shard.is_whole else f"journal-{shard.label}.jsonl")


def journalled_shards(folder: Path) -> list[WorkShard]:
    """The shards of a sharded conversion that have a journal in a staging folder, in order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob(f"{OWN_PREFIX}journal-*.jsonl"))
    shards = (WorkShard(int(match[1]) - 1, int(match[2])) for match in matches if match)
    return sorted(shards, key=lambda shard: (shard.count, shard.number))


class Journal:
    """An open, locked journal. `has_entries` is whether an earlier process has written to it.

    Lines are buffered and written about once per second: a kill costs the work of that time. A run that is shorter than
    that writes no line, and removing the empty file is instant: removing one with blocks may have to wait for the disk
    (see `publish`).
    """

    def __init__(self, path: Path, busy: OutputBusyError) -> None:
        """Open or create the journal; raises `busy` if another process has locked it."""
        self.path = path
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND | os.O_CREAT, 0o644)
            is_owner = _lock(self._fd) and os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:  # another process has just published or removed the folder, or removed the journal
            is_owner = False
        if not is_owner:
            self.close()
            raise busy
        self.has_entries = bool(_complete_lines(path.read_bytes()))
        self._pending: list[bytes] = []  # lines that are not written yet
        self._written_at = time.monotonic()

    def begin(self, fingerprint: str) -> None:
        """Start over with an empty journal and its first line."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        self._append({"ucp": "journal", "version": 1, "fingerprint": fingerprint})

    def load(self, fingerprint: str) -> list[list[WrittenRange]]:
        """The tasks that an earlier process finished; an incomplete last line is cut off."""
        complete = _complete_lines(self.path.read_bytes())
        assert self._fd is not None
        os.ftruncate(self._fd, len(complete))  # new lines must not follow an incomplete one
        return JournalRecord.parse(complete, fingerprint, self.path).tasks

    def record(self, written: Sequence[WrittenRange]) -> None:
        """Record a finished task."""
        entries = [[w.file, w.offset, w.nbytes, w.digest, *(() if w.crc is None else (w.crc,))] for w in written]
        self._append({"written": entries})

    def finish(self) -> None:
        """Record that this process has done all its work."""
        self._append({"done": True})
        self._flush()

    def keep(self) -> None:
        """Write the buffered lines if possible: what cannot be recorded will be done again."""
        try:
            self._flush()
        except StorageError:
            self._pending.clear()

    def close(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, record: dict[str, Any]) -> None:
        self._pending.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if time.monotonic() - self._written_at >= settings.JOURNAL_SECONDS:
            self._flush()

    def _flush(self) -> None:
        assert self._fd is not None
        lines = memoryview(b"".join(self._pending))
        self._pending.clear()
        with storage_errors(self.path, "cannot be written"):
            while lines:
                lines = lines[os.write(self._fd, lines) :]
        self._written_at = time.monotonic()


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The contents of a journal: the finished tasks, and whether its process did all its work."""

    tasks: list[list[WrittenRange]]
    done: bool

    @staticmethod
    def parse(data: bytes, fingerprint: str, path: Path) -> JournalRecord:
        """Parse the lines up to the first incomplete one; the journal of another conversion is refused."""
        records = list(_records(data.splitlines()))
        if not records or records[0].get("fingerprint") != fingerprint:
            raise other_conversion_error(path.parent)
        tasks = [[WrittenRange(*entry) for entry in record["written"]] for record in records[1:] if "written" in record]
        return JournalRecord(tasks, bool(records[-1].get("done")))

    @staticmethod
    def belongs(data: bytes, fingerprint: str) -> bool:
        """Whether a journal is of this conversion. One that a crash has left empty may be."""
        first = next(_records(data.splitlines()), None)
        return first is None or first.get("fingerprint") == fingerprint

    @property
    def nbytes(self) -> int:
        return sum(written.nbytes for task in self.tasks for written in task)


def other_conversion_error(path: Path) -> UsageError:
    """The partial output at `path` cannot be resumed by this conversion."""
    return UsageError(
        f"{path}: the partial output belongs to another source, target or version",
        hint="add --restart instead of --resume to discard it and start over",
    )


def is_locked(path: Path) -> bool:
    """Whether a live process has locked this journal."""
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


def _complete_lines(data: bytes) -> bytes:
    """The lines of a journal up to the first that is incomplete."""
    lines = data.split(b"\n")[:-1]
    count = sum(1 for _ in _records(lines))
    return b"".join(line + b"\n" for line in lines[:count])


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
