"""The journal of one process: a line a finished part, and a lock that goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ucp.engine.stream import Written
from ucp.errors import UsageError


class Journal:
    """An open journal, locked. `taken` tells whether it holds anything yet."""

    def __init__(self, path: Path, busy: UsageError) -> None:
        """Open or make it; `busy` is raised where another process holds it."""
        self.path = path
        self.taken = path.exists() and b"\n" in path.read_bytes()  # else it was killed before it had said anything
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND | os.O_CREAT, 0o644)
        if not _lock(self._fd):
            self.close()
            raise busy

    def begin(self, fingerprint: str) -> None:
        """Write the first line."""
        self._append({"ucp": "journal", "version": 1, "fingerprint": fingerprint})

    def load(self, fingerprint: str) -> list[list[Written]]:
        """What an earlier process finished, part by part; a line that its end tore is cut off."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        assert self._fd is not None
        os.ftruncate(self._fd, len(whole))  # a torn line must not swallow the next one
        return Record.parse(whole, fingerprint, self.path).parts

    def record(self, written: Sequence[Written]) -> None:
        """Note a finished part."""
        self._append({"written": [_entry(w) for w in written]})

    def finish(self) -> None:
        """Note that this process has done all that it had to do."""
        self._append({"done": True})

    def close(self) -> None:
        """Let go of the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, record: dict[str, Any]) -> None:
        assert self._fd is not None
        os.write(self._fd, (json.dumps(record, separators=(",", ":")) + "\n").encode())


class Record:
    """What a journal says: the finished parts, and whether its process did all of its work."""

    def __init__(self, parts: list[list[Written]], done: bool) -> None:
        self.parts = parts
        self.done = done

    @classmethod
    def parse(cls, data: bytes, fingerprint: str, path: Path) -> Record:
        """Read a journal's lines up to the first torn one; one of another run is refused."""
        records = list(_records(data.splitlines()))
        if not records or records[0].get("fingerprint") != fingerprint:
            raise UsageError(
                f"{path.parent}: the half-done output belongs to another source, target or version",
                hint="add --restart instead of --resume to throw it away and begin again",
            )
        parts = [[Written(*entry) for entry in record["written"]] for record in records[1:] if "written" in record]
        return cls(parts, bool(records[-1].get("done")))

    @property
    def nbytes(self) -> int:
        return sum(written.nbytes for part in self.parts for written in part)


def is_held(path: Path) -> bool:
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


def _entry(written: Written) -> list[int | str]:
    """A journal entry; `Written(*entry)` reads it."""
    entry: list[int | str] = [written.file, written.offset, written.nbytes, written.digest]
    return entry if written.crc is None else [*entry, written.crc]


def _records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
