"""The place of a target: where its unfinished form is, and what may stand in its way.

The last act: what was written is looked over, gets its manifest, and appears under its name.

Staging: output appears whole or not at all, and a killed run goes on where it was.

Work goes to `.<name>.ucp-partial` beside the target. A journal there has one line a finished part with the digests of
what was written. Resuming reads journalled ranges back and believes only those whose digest still fits, so it does not
matter what a crash did to the page cache. The last act is a rename.

Several processes may share the work: each has a journal of its own and writes whole files; one of them publishes.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from ucp import settings
from ucp.containers.crc32 import Crc32
from ucp.core.target import Digests, OutputFile, Target
from ucp.engine.journal import Journal, JournalRecord, OutputBusyError, is_locked
from ucp.engine.plan import CopyTask, OutputRange
from ucp.engine.work_shard import UNSHARDED, WorkShard, journalled_shards
from ucp.engine.worker import WrittenRange
from ucp.errors import StorageError, UsageError
from ucp.storage.local import free_bytes, make_file, remove_tree, sync, write_all
from ucp.storage.paths import OWN_PREFIX


def staging_folder(target: Path) -> Path:
    """Where the unfinished form of `target` lives: its files, and journals, whose names begin with `OUR_NOTES`."""
    return target.parent / f".{target.name}.ucp-partial"


def busy_error(path: Path, share: WorkShard = UNSHARDED) -> OutputBusyError:
    """What is said where another process writes `path`, or this share of it."""
    whose = "" if share.is_whole else f"{share}: "
    return OutputBusyError(
        f"{path}: {whose}another process is writing it now", hint="wait for it, or choose another target"
    )


def discard_partial_output(path: Path) -> None:
    """Remove what an earlier run has left of `path`, in one piece or in parts; refused while a process is at it."""
    folder = staging_folder(path)
    if not folder.exists():
        return
    if any(is_locked(folder / share.journal) for share in journalled_shards(folder)):
        raise busy_error(path)
    held = Journal(folder / UNSHARDED.journal, busy_error(path))  # so that nobody begins while it goes
    remove_tree(folder)
    held.close()


def check_destination(path: Path) -> None:
    """Refuse a target that is there already, or that has no folder to be in."""
    if not path.parent.is_dir():
        raise StorageError(f"{path.parent}: no such folder", hint="make it first, or choose another target")
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")


def collect_shards(path: Path, target: Target, fingerprint: str) -> Digests:
    """What the shares of a conversion have written together; refused where something is missing."""
    check_destination(path)
    folder = staging_folder(path)
    shares = journalled_shards(folder)
    if not shares:
        raise UsageError(
            f"{folder}: no part of this target is here", hint="write the parts first, with --part 1/N to --part N/N"
        )
    count = shares[0].count
    written: dict[tuple[int, int, int], WrittenRange] = {}  # what was written again is in a journal twice
    lacking: list[str] = []
    for share in (WorkShard(number, count) for number in range(count)):
        journal = folder / share.journal
        try:
            record = JournalRecord.parse(journal.read_bytes(), fingerprint, journal)
        except FileNotFoundError:
            lacking.append(f"{share} was not begun")
            continue
        if not record.done:
            lacking.append(f"{share} " + ("is at work" if is_locked(journal) else "did not end"))
        written.update(((w.file, w.offset, w.nbytes), w) for part in record.parts for w in part)
    if lacking:
        raise UsageError(
            f"{path}: {'; '.join(lacking)}", hint="run these parts (again: what they have done is kept), then --finish"
        )
    digests = digests_of(target, written.values())
    for file, ranges in zip(target.files, digests, strict=True):
        if sum(nbytes for _, nbytes, _ in ranges) != file.size or not (folder / file.path).is_file():
            raise StorageError(
                f"{folder / file.path}: not all of it was written",
                hint="do all machines see the same folder? Remove it and run the parts again",
            )
    return digests


def digests_of(target: Target, written: Iterable[WrittenRange]) -> Digests:
    """For each file of the target, what was written: `(offset, nbytes, digest)` in order of offset."""
    table: list[list[tuple[int, int, str]]] = [[] for _ in target.files]
    for w in written:
        table[w.file].append((w.offset, w.nbytes, w.digest))
    for entries in table:
        entries.sort()
    return table


def publish(path: Path, target: Target, last: OutputFile | None, *, durable: bool) -> None:
    """Write `last` (the manifest) into the staging folder of `path`, then let that folder appear under its name.

    Journals come along and go last: where blocks of a disk are given back at once, to remove a folder of their own
    would take as long as all that was written before takes to reach the disk.
    """
    folder = staging_folder(path)
    try:
        if last is not None:
            _write_whole(folder / last.path, b"".join(literal.data for literal in last.literals))
        _remove_strays(folder, {file.path for file in (*target.files, *(() if last is None else (last,)))})
        if durable:
            _sync_tree(folder)
        os.rename(folder, path)
        _remove_own_files(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be published: {error.strerror}") from error


def was_published(path: Path, fingerprint: str, *, durable: bool) -> bool:
    """Whether an earlier run let the output appear, and was killed before it had put its things away. Does that now."""
    journals = [
        path / share.journal for share in (UNSHARDED, *journalled_shards(path)) if (path / share.journal).exists()
    ]
    if not journals or not all(_is_abandoned(journal, fingerprint) for journal in journals):
        return False
    _remove_own_files(path)
    if durable:
        sync(path.parent)
    return True


def _is_abandoned(journal: Path, fingerprint: str) -> bool:
    """Is it of this run, and of a process that is gone?"""
    return not is_locked(journal) and JournalRecord.belongs(journal.read_bytes(), fingerprint)


def _remove_own_files(path: Path) -> None:
    """Remove our own files from an output that has appeared. It is whole, whatever becomes of them."""
    for own in path.glob(f"{OWN_PREFIX}*"):
        with suppress(OSError):
            own.unlink()


def _remove_strays(folder: Path, known: Container[str]) -> None:
    """Remove files that are no part of the output: a run that was killed while it threw them away left them."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base) / name
            relative = path.relative_to(folder).as_posix()
            if relative not in known and not relative.startswith(OWN_PREFIX):
                path.unlink()


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, 0, data)
    finally:
        os.close(fd)


def _sync_tree(folder: Path) -> None:
    for base, _, files in os.walk(folder):
        for name in files:
            sync(Path(base) / name)
        sync(Path(base))


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
        share: WorkShard = UNSHARDED,
    ) -> None:
        """`fingerprint` identifies target and source: a journal of another one is never continued."""
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.share = share
        self.folder = staging_folder(path)
        self.files = share.files(target)
        self._journal: Journal | None = None
        self.finished: dict[tuple[tuple[int, int, int], ...], list[WrittenRange]] = {}
        check_destination(path)
        try:
            self._check_half_done(resume, restart)
            self._begin(restart)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be made: {error.strerror}") from error

    def _check_half_done(self, resume: bool, restart: bool) -> None:
        """What is here already must be ours to go on with. A share always goes on: its neighbours may be at work."""
        if not self.folder.exists():
            return
        others = journalled_shards(self.folder)
        if self.share.is_whole:
            if restart:
                discard_partial_output(self.path)
            elif is_locked(self.folder / UNSHARDED.journal):
                raise busy_error(self.path)
            elif others or not resume:
                on = f"--part N/{others[0].count} and --finish" if others else "--resume"
                raise UsageError(
                    f"{self.folder}: a half-done output of an earlier run is here"
                    + (f", made in {others[0].count} parts" if others else ""),
                    hint=f"add {on} to go on where it stopped, or --restart to throw it away and begin again",
                )
        elif (self.folder / UNSHARDED.journal).exists() or any(other.count != self.share.count for other in others):
            how = f"in {others[0].count} parts" if others else "in one piece"
            raise UsageError(
                f"{self.folder}: a half-done output is here that was made {how}",
                hint="go on with it as it was begun, or remove that folder to begin again",
            )

    def _begin(self, restart: bool) -> None:
        made = not self.folder.exists()
        try:
            self.folder.mkdir(exist_ok=True)
            journal = self._journal = Journal(self.folder / self.share.journal, busy_error(self.path, self.share))
            check_destination(self.path)  # again: now no one else can publish it
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

    def remaining(self, parts: Iterable[CopyTask]) -> Iterator[CopyTask]:
        """The parts that are not yet on disk, journalled ones being read back and checked."""
        for part in parts:
            key = tuple((e.file, e.offset, e.nbytes) for e in part.extents)
            written = self.finished.get(key)
            if written is None or not all(map(self._intact, part.extents, written)):
                self.finished.pop(key, None)
                yield part

    def _intact(self, extent: OutputRange, written: WrittenRange) -> bool:
        new = xxhash.xxh3_128 if written.crc is None else Crc32
        if extent.data is not None:
            digest = new()
            digest.update(extent.data)
            if digest.hexdigest() != written.digest:
                return False
        path = self.folder / self.target.files[written.file].path
        return digest_range(path, written.offset, written.nbytes, new()) == written.digest

    def written(self) -> Iterator[WrittenRange]:
        """Everything that is on disk, in no particular order."""
        for written in self.finished.values():
            yield from written

    def _finished(self, written: list[WrittenRange]) -> None:
        self.finished[tuple((w.file, w.offset, w.nbytes) for w in written)] = written

    def record(self, written: list[WrittenRange]) -> None:
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
    block = memoryview(bytearray(min(max(nbytes, 1), settings.SLAB_BYTES)))
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
    if needed + settings.SPACE_RESERVE_BYTES > free:
        raise StorageError(
            f"{folder}: {needed:,} bytes are needed, and {settings.SPACE_RESERVE_BYTES:,} to spare; {free:,} are free",
            hint="free some space, or choose a target on another file system (ucp convert --link copies nothing)",
        )
