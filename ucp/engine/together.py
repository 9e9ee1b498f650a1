"""Processes of one launch that write shares of one target: they see each other through the staging folder alone.

Each has a journal there, which says how far it is and by its lock whether it lives. One that fails leaves a note, which
stops the others with its message. The first one waits for all and publishes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ucp import tunables
from ucp.engine.convert import Progress
from ucp.engine.journal import Record, is_held
from ucp.engine.place import staging_folder
from ucp.engine.shares import Share
from ucp.errors import StorageError, UcpError


class OtherFailedError(StorageError):
    """Another process of the launch has failed, or is gone."""


class Together(Progress):
    """One process of a launch. As a progress it passes on what all have done, and looks out for failures."""

    def __init__(self, path: Path, share: Share, total: int, shown: Progress) -> None:
        """`total` bytes are written by all together; `shown` hears of them in the first process."""
        self.share = share
        self._folder = staging_folder(path)
        self._total = total
        self._shown = shown
        self._others = [Share(n, share.count) for n in range(share.count) if n != share.number]
        self._seen = dict.fromkeys(self._others, 0)  # bytes that were passed on
        self._missing_since: dict[Share, float] = {}
        self._next_look = 0.0
        self._note(share).unlink(missing_ok=True)  # of an earlier launch, as those of the others may be
        self._old = {other: _time(self._note(other)) for other in self._others}

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
            self._next_look = time.monotonic() + tunables.LOOK_AT_OTHERS_SECONDS
            self._look()

    def close(self) -> None:
        """No more is to be shown."""
        self._shown.finish()

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless they told us."""
        if isinstance(error, OtherFailedError) or not self._folder.is_dir():
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
            time.sleep(tunables.LOOK_AT_OTHERS_SECONDS / 5)

    def _is_done(self, share: Share, fingerprint: str) -> bool:
        journal = self._folder / share.journal
        record = _read(journal, fingerprint)
        done = record is not None and record.done
        nbytes = 0 if record is None else record.nbytes
        if self.leads:
            self._shown.advance(max(0, nbytes - self._seen[share]))
            self._seen[share] = max(nbytes, self._seen[share])
        if done or is_held(journal):
            self._missing_since.pop(share, None)
        else:
            since = self._missing_since.setdefault(share, time.monotonic())
            if time.monotonic() - since > tunables.MISSING_PROCESS_SECONDS:
                said = self._said(share)
                raise OtherFailedError(
                    f"{share} failed: {said}" if said else f"{share} is not done, and no process works on it",
                    hint=f"run it with --part {share.number + 1}/{share.count}, then --finish; or launch all again,"
                    " which keeps what was done",
                )
        return done

    def _look(self) -> None:
        """Has another process of this launch failed?"""
        for share in self._others:
            if _time(self._note(share)) != self._old[share] and (said := self._said(share)):
                raise OtherFailedError(f"{share} failed: {said}", hint="put that right and launch again")

    def _said(self, share: Share) -> str | None:
        """The last words of a process, of this launch or of an earlier one."""
        try:
            return str(json.loads(self._note(share).read_text())["error"])
        except (OSError, ValueError, KeyError):
            return None

    def _note(self, share: Share) -> Path:
        return self._folder / share.failure


def _read(journal: Path, fingerprint: str) -> Record | None:
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return None
    return Record.parse(data, fingerprint, journal) if b"\n" in data else None


def _time(path: Path) -> int | None:
    """When a file was written, by the clock of its file system; None where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
