"""Processes of one launch that write shares of one target: they see each other through the staging folder alone.

Each has a journal there, which says how far it is and by its lock whether it lives. One that fails leaves a note, which
stops the others with its message. The first one waits for all and publishes.

Processes of one launch that write shares of one target into an object store, and see each other through notes there.

Each puts a sign of life beside its notes now and then; one that fails leaves its last words, which stop the others. The
first one waits for all and makes the folder whole. Clocks are not compared: a sign counts when it is another one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ucp import settings
from ucp.engine.convert import Progress
from ucp.engine.journal import JournalRecord, is_locked
from ucp.engine.staging import staging_folder
from ucp.engine.upload import FIRST_ENTRY, journal_folder, read_upload_journal
from ucp.engine.work_shard import WorkShard
from ucp.errors import StorageError, UcpError, UsageError
from ucp.storage.object_store import ObjectStore
from ucp.storage.paths import COMPLETION_MARKER, RemotePath


class PeerFailedError(StorageError):
    """Another process of the launch has failed, or is gone."""


class FolderCoordinator(Progress):
    """One process of a launch. As a progress it passes on what all have done, and looks out for failures."""

    def __init__(self, path: Path, share: WorkShard, total: int, shown: Progress) -> None:
        """`total` bytes are written by all together; `shown` hears of them in the first process."""
        self.share = share
        self._folder = staging_folder(path)
        self._total = total
        self._shown = shown
        self._others = [WorkShard(n, share.count) for n in range(share.count) if n != share.number]
        self._seen = dict.fromkeys(self._others, 0)  # bytes that were passed on
        self._missing_since: dict[WorkShard, float] = {}
        self._next_look = 0.0
        self._note(share).unlink(missing_ok=True)  # of an earlier launch, as those of the others may be
        self._old = {other: _modified_at(self._note(other)) for other in self._others}

    @property
    def leads(self) -> bool:
        """Whether this process waits for the others and publishes."""
        return self.share.number == 0

    def start(self, total: int) -> None:
        del total
        if self.leads:
            self._shown.start(self._total)

    def advance(self, nbytes: int) -> None:
        if self.leads:
            self._shown.advance(nbytes)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + settings.LIVENESS_SECONDS
            self._look()

    def close(self) -> None:
        """No more is to be shown."""
        self._shown.finish()

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless they told us."""
        if isinstance(error, PeerFailedError) or not self._folder.is_dir():
            return
        text = str(error) if isinstance(error, UcpError) else f"{type(error).__name__}: {error}"
        note = self._note(self.share)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"error": text}))
        temporary.rename(note)

    def wait(self, fingerprint: str) -> None:
        """Return when every other process has done its share; raise when one will not."""
        left = self._others
        while left := [share for share in left if not self._is_done(share, fingerprint)]:
            self._look()
            time.sleep(settings.LIVENESS_SECONDS / 5)

    def _is_done(self, share: WorkShard, fingerprint: str) -> bool:
        journal = self._folder / share.journal
        record = _read_journal(journal, fingerprint)
        done = record is not None and record.done
        nbytes = 0 if record is None else record.nbytes
        if self.leads:
            self._shown.advance(max(0, nbytes - self._seen[share]))
            self._seen[share] = max(nbytes, self._seen[share])
        if done or is_locked(journal):
            self._missing_since.pop(share, None)
        else:
            since = self._missing_since.setdefault(share, time.monotonic())
            if time.monotonic() - since > settings.MISSING_PROCESS_SECONDS:
                said = self._said(share)
                raise PeerFailedError(
                    f"{share} failed: {said}" if said else f"{share} is not done, and no process works on it",
                    hint=f"run it with --part {share.number + 1}/{share.count}, then --finish; or launch all again,"
                    " which keeps what was done",
                )
        return done

    def _look(self) -> None:
        """Has another process of this launch failed?"""
        for share in self._others:
            if _modified_at(self._note(share)) != self._old[share] and (said := self._said(share)):
                raise PeerFailedError(f"{share} failed: {said}", hint="put that right and launch again")

    def _said(self, share: WorkShard) -> str | None:
        """The last words of a process, of this launch or of an earlier one."""
        try:
            return str(json.loads(self._note(share).read_text())["error"])
        except (OSError, ValueError, KeyError):
            return None

    def _note(self, share: WorkShard) -> Path:
        return self._folder / share.failure


def _read_journal(journal: Path, fingerprint: str) -> JournalRecord | None:
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return None
    return JournalRecord.parse(data, fingerprint, journal) if b"\n" in data else None


def _modified_at(path: Path) -> int | None:
    """When a file was written, by the clock of its file system; None where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


ALIVE = "alive.json"
FAILED = "failed.json"


class StoreCoordinator(Progress):
    """One process of a launch. As a progress it passes on what is done here, and stops when another has failed."""

    def __init__(self, path: RemotePath, share: WorkShard, shown: Progress) -> None:
        self.share = share
        self._path = path
        self._shown = shown
        self._others = [WorkShard(number, share.count) for number in range(share.count) if number != share.number]
        if self._store.get((path / COMPLETION_MARKER).key) is not None:
            raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
        self._own(FAILED, None)
        self._old = {other: self._stamp(other, FAILED) for other in self._others}  # of an earlier launch
        self._signs: dict[WorkShard, tuple[int | None, float]] = {}  # the last sign of life, and when it was new to us
        self._stop = threading.Event()
        self._failure: PeerFailedError | None = None
        self._thread = threading.Thread(target=self._live, name="ucp-alive", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this process waits for the others and publishes."""
        return self.share.number == 0

    def start(self, total: int) -> None:
        if self.leads:
            self._shown.start(total)

    def advance(self, nbytes: int) -> None:
        if self.leads:
            self._shown.advance(nbytes)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Give no more signs of life."""
        self._stop.set()
        self._thread.join()
        with suppress(StorageError):
            self._own(ALIVE, None)
        self._shown.finish()

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless they told us."""
        if not isinstance(error, PeerFailedError):
            text = str(error) if isinstance(error, UcpError) else f"{type(error).__name__}: {error}"
            with suppress(StorageError):
                self._own(FAILED, {"error": text})

    def wait(self, fingerprint: str) -> None:
        """Return when every other process has done its share; raise when one will not."""
        left = self._others
        while left := [share for share in left if not self._is_done(share, fingerprint)]:
            if self._failure is not None:
                raise self._failure
            self._stop.wait(settings.REMOTE_LIVENESS_SECONDS)

    def _live(self) -> None:
        """Give signs of life, and look for the last words of others, until told to stop."""
        count = 0
        while True:
            with suppress(UcpError, ValueError):  # the next one may arrive
                self._own(ALIVE, {"count": count})
                for other in self._others:
                    if self._stamp(other, FAILED) != self._old[other] and (said := self._said(other)):
                        self._failure = PeerFailedError(
                            f"{other} failed: {said}", hint="put that right and launch again"
                        )
            count += 1
            if self._stop.wait(settings.REMOTE_LIVENESS_SECONDS):
                return

    def _is_done(self, share: WorkShard, fingerprint: str) -> bool:
        folder = journal_folder(share)
        found = {f"{folder}/{name}": one for name, one in self._store.everything((self._path / folder).key).items()}
        begun = any(name.endswith(f"/{FIRST_ENTRY}") for name in found)
        if begun and read_upload_journal(self._path, found, share, fingerprint).done:
            return True
        sign = found[f"{folder}/{ALIVE}"].stamp if f"{folder}/{ALIVE}" in found else None
        last, since = self._signs.setdefault(share, (sign, time.monotonic()))
        if sign != last:
            self._signs[share] = sign, time.monotonic()
        elif time.monotonic() - since > settings.MISSING_PROCESS_SECONDS:
            raise PeerFailedError(
                f"{share} is not done, and no process works on it",
                hint=f"run it with --part {share.number + 1}/{share.count}, then --finish; or launch all again,"
                " which keeps what was done",
            )
        return False

    @property
    def _store(self) -> ObjectStore:
        return self._path.store

    def _own(self, name: str, told: object) -> None:
        """Write a note of this process's own, or remove it."""
        key = (self._path / journal_folder(self.share) / name).key
        if told is None:
            self._store.remove([key])
        else:
            self._store.put(key, json.dumps(told).encode())

    def _stamp(self, share: WorkShard, name: str) -> int | None:
        found = self._store.everything((self._path / journal_folder(share)).key).get(name)
        return None if found is None else found.stamp

    def _said(self, share: WorkShard) -> str | None:
        data = self._store.get((self._path / journal_folder(share) / FAILED).key)
        return None if data is None else str(json.loads(data).get("error"))
