"""What the shares of a target have done so far, as someone sees it who writes none of them: a driver of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ucp.engine.journal import Record, is_held
from ucp.engine.place import busy, check_place, discard_half_done, staging_folder
from ucp.engine.shares import Share, found_shares
from ucp.errors import UsageError
from ucp.files.paths import RemotePath
from ucp.model.target import Target


class Begun(Protocol):
    """The place where a target is being made."""

    where: str  # for people: where the work of shares is kept

    def shares(self, *, restart: bool) -> list[Share]:
        """Shares that were begun; with `restart` they are thrown away. Refused where something else is in the way."""

    def nbytes(self, share: Share) -> int:
        """Bytes that a share says are written."""


def begun(path: Path, target: Target, fingerprint: str) -> Begun:
    """The place for a target at `path`, a folder or one of an object store."""
    if isinstance(path, RemotePath):
        return _InAStore(path, target, fingerprint)
    return _InAFolder(path, fingerprint)


class _InAFolder:
    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._folder = staging_folder(path)
        self.where = str(self._folder)

    def shares(self, *, restart: bool) -> list[Share]:
        check_place(self._path)
        if restart:
            discard_half_done(self._path)
        found = found_shares(self._folder)
        if any(is_held(self._folder / share.journal) for share in found):
            raise busy(self._path)
        return found

    def nbytes(self, share: Share) -> int:
        journal = self._folder / share.journal
        try:
            return Record.parse(journal.read_bytes(), self._fingerprint, journal).nbytes
        except (OSError, UsageError):  # not begun yet
            return 0


class _InAStore:
    def __init__(self, path: RemotePath, target: Target, fingerprint: str) -> None:
        self._path = path
        self._target = target
        self._fingerprint = fingerprint
        self.where = str(path)

    def shares(self, *, restart: bool) -> list[Share]:
        from ucp.engine.upload_folder import shares_in

        return shares_in(self._path, restart=restart)

    def nbytes(self, share: Share) -> int:
        from ucp.engine.upload_notes import read_notes

        try:
            told = read_notes(self._path, self._path.store.everything(self._path.key), share, self._fingerprint)
        except UsageError:
            return 0
        return sum(one.size for one in told.files.values())
