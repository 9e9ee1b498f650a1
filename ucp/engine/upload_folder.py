"""A folder of an object store under construction: what is there already, what counts, and the last act."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from ucp.engine.publishing import digests_of
from ucp.engine.shares import WHOLE, Share
from ucp.engine.upload_notes import Notes, Uploaded, found_shares, marked_by, put_mark, read_notes
from ucp.errors import StorageError, UsageError
from ucp.files.paths import COMPLETE, JOURNAL, RemotePath
from ucp.files.remote import Found
from ucp.model.target import Digests, OutputFile, Target

Last = Callable[[Digests], "OutputFile | None"]
"""Gets all digests, gives the file that is written last."""


class Upload:
    """A folder of an object store under construction, as one process sees it."""

    def __init__(self, path: RemotePath, target: Target, fingerprint: str, share: Share) -> None:
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.share = share
        self.files = share.files(target)
        self.notes = Notes(path, share)
        self.done: dict[int, Uploaded] = {}
        self._gathered = False

    def begin(self, *, resume: bool, restart: bool) -> None:
        """Take the place; what is there already must be ours to go on with, or to throw away."""
        found = self._everything()
        shares = _shares(self.path, found)
        if shares and self.share.is_whole and not restart and (not resume or shares != [WHOLE]):
            on = "--resume" if shares == [WHOLE] else f"--part N/{shares[0].count} and --finish"
            raise UsageError(
                f"{self.path}: a half-done output is here, or another process is writing it now",
                hint=f"add {on} to go on where it stopped, or --restart to throw it away and begin again",
            )
        if any(other.count != self.share.count for other in shares) and not restart:
            raise UsageError(
                f"{self.path}: a half-done output is here that was made in {shares[0].count} part(s)",
                hint="go on with it as it was begun, or remove that folder to begin again",
            )
        if restart and shares:
            _remove(self.path, found)
        elif self.share in shares:
            self._take_up(found, self.share)
        self.notes.begin(self.fingerprint)

    def _take_up(self, found: dict[str, Found], share: Share) -> bool:
        """Believe notes of objects that are as they were when the notes were made. Gives whether the share is done."""
        told = read_notes(self.path, found, share, self.fingerprint)
        for number, one in told.files.items():
            there = found.get(self.target.files[number].path)
            if there is not None and (there.size, there.stamp) == (one.size, one.stamp):
                self.done[number] = one
        return told.done

    def gather(self) -> None:
        """Take what all shares have written together; refused where something is missing."""
        found = self._everything()
        shares = found_shares(found)
        if not shares:
            raise UsageError(
                f"{self.path}: no part of this target is here", hint="write the parts first, --part 1/N to --part N/N"
            )
        count = shares[0].count
        lacking = []
        for share in (Share(number, count) for number in range(count)):
            if share not in shares:
                lacking.append(f"{share} was not begun")
            elif not self._take_up(found, share):
                lacking.append(f"{share} did not end")
        missing = [file.path for number, file in enumerate(self.target.files) if number not in self.done]
        if not lacking and missing:
            lacking.append(f"{missing[0]} is not there" + (f", nor are {len(missing) - 1} more" * (len(missing) > 1)))
        if lacking:
            raise UsageError(
                f"{self.path}: {'; '.join(lacking)}",
                hint="run these parts (again: what they have done is kept), then --finish",
            )
        self._gathered = True

    def publish(self, last: Last) -> None:
        """Put the manifest there, remove what does not belong, and mark the folder as whole."""
        if not self._gathered:
            self.notes.check_owner()
        sizes = {file.path: file.size for file in self.target.files}
        written = (w for one in self.done.values() for w in one.written)
        manifest = last(digests_of(self.target, written))
        if manifest is not None:
            data = b"".join(literal.data for literal in manifest.literals)
            self.path.store.put((self.path / manifest.path).key, data)
            sizes[manifest.path] = len(data)
        found = self._everything()
        ours = {name for name in found if name.startswith(JOURNAL)}
        for name, size in sizes.items():
            if name not in found or found[name].size != size:
                raise StorageError(f"{self.path / name}: was written, but is not there as it was")
        _remove(self.path, found.keys() - ours - sizes.keys())
        put_mark(self.path, self.fingerprint, sizes)
        _remove(self.path, ours)

    def was_published(self) -> bool:
        """Whether an earlier run has made the folder whole, and was killed before it had put its notes away."""
        if marked_by(self.path) != self.fingerprint:
            return False
        _remove(self.path, (name for name in self._everything() if name.startswith(JOURNAL)))
        return True

    def _everything(self) -> dict[str, Found]:
        return self.path.store.everything(self.path.key)

    def discard(self) -> None:
        """Remove what was begun, as far as the store lets us. A share leaves it to the others."""
        if self.share.is_whole:
            with suppress(StorageError):
                _remove(self.path, self._everything())


def shares_in(path: RemotePath, *, restart: bool) -> list[Share]:
    """Shares of a target that were begun there; with `restart` they are thrown away."""
    found = path.store.everything(path.key)
    shares = _shares(path, found)
    if restart and shares:
        _remove(path, found)
        return []
    return shares


def _shares(path: RemotePath, found: dict[str, Found]) -> list[Share]:
    """Shares that have notes among what was found; a folder that has something else is refused."""
    shares = found_shares(found)
    if COMPLETE in found or (found and not shares):
        raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
    return shares


def _remove(path: RemotePath, names: Iterable[str]) -> None:
    """Remove objects, notes last: what is left half-way is still known to be half-done."""
    path.store.remove((path / name).key for name in sorted(names, key=_notes_last))


def _notes_last(name: str) -> tuple[bool, str]:
    return name.startswith(JOURNAL), name
