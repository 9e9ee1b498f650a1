"""What an unfinished folder in an object store says of itself: notes beside its objects, and a mark when it is whole.

Nothing can be renamed there, so objects are put where they belong, and notes say that they do not count yet. Each
process has some: the first tells what is being written and by whom, each of the others which objects it has put there
with what digests. The mark is put when everything else is; then the notes go. A folder with notes and without the mark
is half-done, and readers do not see into it. A folder with neither was put there by somebody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from ucp.engine.shares import Share
from ucp.engine.worker import Written
from ucp.errors import IntegrityError, UsageError
from ucp.files.paths import COMPLETE, JOURNAL, RemotePath
from ucp.files.remote import Found

BEGINNING: Final = "000000.json"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file of the target that is in the store: what was written into it, and what the store says of the object."""

    file: int
    size: int
    stamp: int
    written: tuple[Written, ...]


def folder_of(share: Share) -> str:
    """Name of the folder that has the notes of a share."""
    return f"{JOURNAL}{share.number + 1}-of-{share.count}"


class Notes:
    """The notes of one share of a target. Only the process that wrote the first one last may write more."""

    def __init__(self, path: RemotePath, share: Share) -> None:
        self._share = share
        self._path = path
        self._folder = path / folder_of(share)
        self._count = 0
        self._owner = ""

    def begin(self, fingerprint: str) -> None:
        """Say that this process writes the share from now on. Notes of an earlier one stay, and count."""
        self._owner = uuid4().hex
        store = self._path.store
        self._count = len(_notes_of(store.everything(self._path.key), self._share))
        told = {"ucp": "upload", "version": 1, "fingerprint": fingerprint, "owner": self._owner}
        store.put((self._folder / BEGINNING).key, _json(told))
        self._count = max(1, self._count)
        self.check_owner()

    def check_owner(self) -> None:
        """Refuse to go on where another process has begun with the same share since."""
        told = _read(self._folder / BEGINNING)
        if told is None or told.get("owner") != self._owner:
            raise UsageError(
                f"{self._path}: another process writes it now, or has removed it", hint="let one of the two end"
            )

    def record(self, uploaded: Iterable[Uploaded], *, done: bool = False) -> None:
        """Note files that are in the store; with `done`, that the share is."""
        self.check_owner()
        told = {"files": [_entry(one) for one in uploaded], "done": done}
        self._path.store.put((self._folder / f"{self._count:06}.json").key, _json(told))
        self._count += 1


@dataclass(frozen=True, slots=True)
class Read:
    """What the notes of a share say."""

    files: dict[int, Uploaded]
    done: bool


def read_notes(path: RemotePath, found: Mapping[str, Found], share: Share, fingerprint: str) -> Read:
    """The notes of a share among what was `found`; those of another run are refused."""
    names = _notes_of(found, share)
    if not names:  # a process that was launched to write it did not come so far
        return Read({}, False)
    told = [_read(path / name) for name in names]
    if told[0] is None or told[0].get("fingerprint") != fingerprint:
        raise UsageError(
            f"{path}: the half-done output belongs to another source, target or version",
            hint="add --restart instead of --resume to throw it away and begin again",
        )
    files: dict[int, Uploaded] = {}
    for note in told[1:]:
        for file, size, stamp, written in (note or {}).get("files", ()):
            files[file] = Uploaded(file, size, stamp, tuple(Written(*entry) for entry in written))
    return Read(files, any(bool(note and note.get("done")) for note in told[1:]))


def found_shares(found: Iterable[str]) -> list[Share]:
    """The shares that have notes, in order."""
    names = {name.partition("/")[0].removeprefix(JOURNAL) for name in found if name.startswith(JOURNAL)}
    numbers = sorted((int(count), int(number)) for number, _, count in (name.partition("-of-") for name in names))
    return [Share(number - 1, count) for count, number in numbers]


def put_mark(path: RemotePath, fingerprint: str, sizes: Mapping[str, int]) -> None:
    """Say that the folder is whole."""
    told = {"ucp": "complete", "version": 1, "fingerprint": fingerprint, "files": dict(sizes)}
    path.store.put((path / COMPLETE).key, _json(told))


def marked_by(path: RemotePath) -> str | None:
    """Fingerprint of the run that has made the folder whole, where one has."""
    told = _read(path / COMPLETE)
    return None if told is None else str(told.get("fingerprint"))


def _notes_of(found: Iterable[str], share: Share) -> list[str]:
    """Names of the notes of a share, in order; what else is beside them is of a launch."""
    notes = [name for name in found if name.startswith(folder_of(share) + "/")]
    return sorted(name for name in notes if name.rpartition("/")[2].removesuffix(".json").isdigit())


def _entry(one: Uploaded) -> list[Any]:
    return [one.file, one.size, one.stamp, [[w.file, w.offset, w.nbytes, w.digest, w.crc] for w in one.written]]


def _json(told: Any) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def _read(path: RemotePath) -> dict[str, Any] | None:
    data = path.store.get(path.key)
    if data is None:
        return None
    try:
        told = json.loads(data)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise IntegrityError(f"{path}: is no note of ucp's", hint="remove the half-done output, and begin again")
    return told
