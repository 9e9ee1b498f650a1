"""Staging: output appears whole or not at all, and a killed run goes on where it was.

Work goes to `.<name>.ucp-partial` beside the target. A journal there has one line a finished part with the digests of
what was written. Resuming reads journalled ranges back and believes only those whose digest still fits, so it does not
matter what a crash did to the page cache. The last act is a rename.

Several processes may share the work: each has a journal of its own and writes whole files; one of them publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from ucp import tunables
from ucp.engine.journal import Journal, is_held
from ucp.engine.place import busy, check_place, discard_half_done, staging_folder
from ucp.engine.plan import Extent, Part
from ucp.engine.publishing import digests_of, publish
from ucp.engine.shares import WHOLE, Share, found_shares
from ucp.engine.worker import Written
from ucp.errors import StorageError, UsageError
from ucp.files.crc import Crc32
from ucp.files.local import free_bytes, make_file, remove_tree, sync
from ucp.model.target import Digests, OutputFile, Target


class Staging:
    """An output folder under construction, as one process sees it. `publish` makes it appear."""

    def __init__(
        self,
        path: Path,
        target: Target,
        fingerprint: str,
        *,
        resume: bool,
        restart: bool,
        share: Share = WHOLE,
    ) -> None:
        """`fingerprint` identifies target and source: a journal of another one is never continued."""
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.share = share
        self.folder = staging_folder(path)
        self.files = share.files(target)
        self._journal: Journal | None = None
        self.finished: dict[tuple[tuple[int, int, int], ...], list[Written]] = {}
        check_place(path)
        try:
            self._check_half_done(resume, restart)
            self._begin(restart)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be made: {error.strerror}") from error

    def _check_half_done(self, resume: bool, restart: bool) -> None:
        """What is here already must be ours to go on with. A share always goes on: its neighbours may be at work."""
        if not self.folder.exists():
            return
        others = found_shares(self.folder)
        if self.share.is_whole:
            if restart:
                discard_half_done(self.path)
            elif is_held(self.folder / WHOLE.journal):
                raise busy(self.path)
            elif others or not resume:
                on = f"--part N/{others[0].count} and --finish" if others else "--resume"
                raise UsageError(
                    f"{self.folder}: a half-done output of an earlier run is here"
                    + (f", made in {others[0].count} parts" if others else ""),
                    hint=f"add {on} to go on where it stopped, or --restart to throw it away and begin again",
                )
        elif (self.folder / WHOLE.journal).exists() or any(other.count != self.share.count for other in others):
            how = f"in {others[0].count} parts" if others else "in one piece"
            raise UsageError(
                f"{self.folder}: a half-done output is here that was made {how}",
                hint="go on with it as it was begun, or remove that folder to begin again",
            )

    def _begin(self, restart: bool) -> None:
        made = not self.folder.exists()
        try:
            self.folder.mkdir(exist_ok=True)
            journal = self._journal = Journal(self.folder / self.share.journal, busy(self.path, self.share))
            check_place(self.path)  # again: now no one else can publish it
            if journal.taken and not restart:
                for written in journal.load(self.fingerprint):
                    self._finished(written)
            else:
                journal.begin(self.fingerprint)
            own = [file for number, file in enumerate(self.target.files) if number in self.files]
            _check_space(self.path.parent, sum(file.size for file in own) - self.finished_bytes)
            for file in own:
                make_file(self.folder / file.path, file.size)
        except BaseException as error:
            if made and self.share.is_whole and (self._journal is not None or isinstance(error, OSError)):
                self.discard()
            self.close()
            raise

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
        new = xxhash.xxh3_128 if written.crc is None else Crc32
        if extent.data is not None:
            digest = new()
            digest.update(extent.data)
            if digest.hexdigest() != written.digest:
                return False
        path = self.folder / self.target.files[written.file].path
        return digest_range(path, written.offset, written.nbytes, new()) == written.digest

    def written(self) -> Iterator[Written]:
        """Everything that is on disk, in no particular order."""
        for written in self.finished.values():
            yield from written

    def _finished(self, written: list[Written]) -> None:
        self.finished[tuple((w.file, w.offset, w.nbytes) for w in written)] = written

    def record(self, written: list[Written]) -> None:
        """Journal a finished part."""
        assert self._journal is not None
        self._finished(written)
        self._journal.record(written)

    def end_share(self, *, durable: bool) -> None:
        """All files of this share are written: say so, and let go."""
        assert self._journal is not None
        if durable:
            for number in self.files:
                sync(self.folder / self.target.files[number].path)
        self._journal.finish()
        self.close()

    def digests(self) -> Digests:
        """For each file of the target, what was written: `(offset, nbytes, digest)` in order of offset."""
        return digests_of(self.target, self.written())

    def publish(self, last: OutputFile | None, *, durable: bool) -> None:
        """Write `last` (the manifest), then let the folder appear under its name."""
        publish(self.path, self.target, last, durable=durable)
        self.close()

    def discard(self) -> None:
        """Remove the staging folder. A share leaves it to the others."""
        if self.share.is_whole:
            remove_tree(self.folder)
        self.close()

    def leave(self) -> None:
        """Let go; what was done stays for --resume."""
        if self._journal is not None:
            self._journal.keep()
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def digest_range(path: Path, offset: int, nbytes: int, digest: xxhash.xxh3_128 | Crc32) -> str | None:
    """The digest (hex) of a byte range; None where the file is shorter or not there."""
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
    except OSError as error:
        raise StorageError(f"{path}: cannot read what an earlier run has written: {error.strerror}") from error
    return digest.hexdigest()


def _check_space(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if needed + tunables.SPACE_RESERVE_BYTES > free:
        raise StorageError(
            f"{folder}: {needed:,} bytes are needed, and {tunables.SPACE_RESERVE_BYTES:,} to spare; {free:,} are free",
            hint="free some space, or choose a target on another file system (ucp convert --link copies nothing)",
        )
