"""Output into a local folder: it appears whole or not at all, and a killed run resumes where it stopped.

Files are written to `.<name>.ucp-partial` next to the target. A journal there has one line per finished task with the
digests of what was written. Resuming reads those ranges back and trusts only those whose digest still matches, so it
does not matter what a crash did to the page cache. The last step is a rename.

Several processes may share the work: each has its own journal and writes whole files, and one of them publishes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from ucp import settings
from ucp.containers.crc32 import Crc32
from ucp.core.target import Digests, OutputFile, Target
from ucp.engine.copy_tasks import CopyTask, OutputRange, task_queues
from ucp.engine.destination import Destination, ManifestBuilder, ShardFailure, ShardProgress
from ucp.engine.journal import Journal, JournalRecord, OutputBusyError, is_locked, journal_name, journalled_shards
from ucp.engine.pool import Meter
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget, WrittenRange, run_copy_tasks, trailer_tasks
from ucp.errors import StorageError, UsageError, format_bytes, storage_errors
from ucp.storage.local import (
    SourceFiles,
    check_own_folder,
    free_bytes,
    make_file,
    remove_tree,
    sync,
    sync_tree,
    write_all,
)
from ucp.storage.paths import OWN_PREFIX, list_files


def staging_folder(path: Path) -> Path:
    """Where the unfinished form of the target `path` is; names of journals and notes in it start with `OWN_PREFIX`."""
    return path.parent / f".{path.name}.ucp-partial"


class StagingFolder(Destination):
    """An output folder under construction, as one process sees it.

    It sends no heartbeats: a process is alive as long as its journal is locked.
    """

    def __init__(self, path: Path, target: Target, fingerprint: str, shard: WorkShard = UNSHARDED) -> None:
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.shard = shard
        self.folder = staging_folder(path)
        self.location = str(self.folder)
        self.poll_seconds = settings.LIVENESS_SECONDS / 5
        self.files = shard.files(target)
        self._journal: Journal | None = None
        self._finished: dict[tuple[tuple[int, int, int], ...], list[WrittenRange]] = {}  # tasks, by their ranges

    # The transaction ------------------------------------------------------------------------------------------------

    def was_published(self, *, durable: bool) -> bool:
        journals = [
            self.path / journal_name(shard)
            for shard in (UNSHARDED, *journalled_shards(self.path))
            if (self.path / journal_name(shard)).exists()
        ]
        if not journals or any(
            is_locked(journal) or not JournalRecord.belongs(journal.read_bytes(), self.fingerprint)
            for journal in journals
        ):
            return False
        self._remove_own_files(durable)
        return True

    def begin(self, *, resume: bool, restart: bool) -> None:
        check_destination(self.path)
        with storage_errors(self.folder, "cannot be created"):
            if os.path.lexists(self.folder):
                check_own_folder(self.folder)
                self._check_partial_output(resume, restart)
            self._open(restart)

    def _check_partial_output(self, resume: bool, restart: bool) -> None:
        """Refuse partial output that this run must not continue. A shard always continues its own."""
        others = journalled_shards(self.folder)
        if self.shard.is_whole:
            if restart:
                discard_partial_output(self.path)
            elif is_locked(self.folder / journal_name(UNSHARDED)):
                raise busy_error(self.path)
            elif others or not resume:
                option = f"--shard N/{others[0].count} and --finish" if others else "--resume"
                raise UsageError(
                    f"{self.folder}: partial output of an earlier run is here"
                    + (f", written in {others[0].count} shards" if others else ""),
                    hint=f"add {option} to continue where it stopped, or --restart to discard it and start over",
                )
        elif (self.folder / journal_name(UNSHARDED)).exists() or any(o.count != self.shard.count for o in others):
            how = f"in {others[0].count} shards" if others else "by one process"
            raise UsageError(
                f"{self.folder}: partial output is here that was written {how}",
                hint="continue it as it was started, or remove that folder to start over",
            )

    def _open(self, restart: bool) -> None:
        is_new = not self.folder.exists()
        try:
            self.folder.mkdir(exist_ok=True)
            busy = busy_error(self.path, self.shard)
            journal = self._journal = Journal(self.folder / journal_name(self.shard), busy)
            check_destination(self.path)  # again: from now on no other process can publish it
            if journal.has_entries and not restart:
                for written in journal.load(self.fingerprint):
                    self._add_finished(written)
            else:
                journal.begin(self.fingerprint)
            own = [self.target.files[number] for number in sorted(self.files)]
            _check_space(self.path.parent, sum(map(_blocks_of, own)) - self.finished_bytes)
            for file in own:
                make_file(self.folder / file.path, file.size)
        except BaseException as error:
            if is_new and self.shard.is_whole and (self._journal is not None or isinstance(error, OSError)):
                self.discard()
            self.close()
            raise

    @property
    def finished_bytes(self) -> int:
        return sum(w.nbytes for w in self.written())

    def write(self, source: SourceFiles, budget: WorkerBudget, meter: Meter) -> None:
        count = settings.PLAN_RANGES_PER_WORKER * max(1, budget.jobs)
        queues = [self.remaining(queue) for queue in task_queues(self.target, count, self.files)]
        # Processes would each verify what is resumed: threads do it once.
        first = budget.in_threads() if self._finished else budget
        run_copy_tasks(queues, source, self.folder, self.target.files, first, self.record, meter)
        trailers = self.remaining(trailer_tasks(self.target, list(self.written()), self.files))
        run_copy_tasks([trailers], source, self.folder, self.target.files, budget.in_threads(), self.record, meter)

    def remaining(self, tasks: Iterable[CopyTask]) -> Iterator[CopyTask]:
        """The tasks that are not on disk yet; finished ones are read back and verified."""
        for task in tasks:
            key = tuple((r.file, r.offset, r.nbytes) for r in task.ranges)
            written = self._finished.get(key)
            if written is None or not all(map(self._is_intact, task.ranges, written)):
                self._finished.pop(key, None)
                yield task

    def _is_intact(self, wanted: OutputRange, written: WrittenRange) -> bool:
        new = xxhash.xxh3_128 if written.crc is None else Crc32
        if wanted.data is not None:
            digest = new()
            digest.update(wanted.data)
            if digest.hexdigest() != written.digest:
                return False
        path = self.folder / self.target.files[written.file].path
        return digest_range(path, written.offset, written.nbytes, new()) == written.digest

    def written(self) -> Iterator[WrittenRange]:
        """Everything that is on disk, in no particular order."""
        for written in self._finished.values():
            yield from written

    def _add_finished(self, written: list[WrittenRange]) -> None:
        self._finished[tuple((w.file, w.offset, w.nbytes) for w in written)] = written

    def record(self, written: list[WrittenRange]) -> None:
        """Record a finished task in the journal."""
        assert self._journal is not None
        self._add_finished(written)
        self._journal.record(written)

    def end_shard(self, *, durable: bool) -> None:
        assert self._journal is not None
        if durable:
            for number in self.files:
                sync(self.folder / self.target.files[number].path)
        self._journal.finish()
        self.close()

    def collect_shards(self) -> None:
        check_destination(self.path)
        shards = journalled_shards(self.folder)
        if not shards:
            raise no_shards_error(self.folder)
        problems: list[str] = []
        for shard in (WorkShard(number, shards[0].count) for number in range(shards[0].count)):
            journal = self.folder / journal_name(shard)
            try:
                record = JournalRecord.parse(journal.read_bytes(), self.fingerprint, journal)
            except FileNotFoundError:
                problems.append(f"{shard} was not started")
                continue
            if not record.done:
                problems.append(f"{shard} " + ("is still running" if is_locked(journal) else "did not finish"))
            for task in record.tasks:
                for written in task:  # a range that was written again is in the journal twice
                    self._finished[((written.file, written.offset, written.nbytes),)] = [written]
        if problems:
            raise incomplete_shards_error(self.path, problems)
        for file, ranges in zip(self.target.files, digests_of(self.target, self.written()), strict=True):
            if sum(nbytes for _, nbytes, _ in ranges) != file.size or not (self.folder / file.path).is_file():
                raise StorageError(
                    f"{self.folder / file.path}: not all of it was written",
                    hint="do all machines see the same folder? Remove it and run the shards again",
                )

    def commit(self, manifest: ManifestBuilder, *, durable: bool) -> None:
        """Write the manifest into the staging folder, then rename that folder to the target's name.

        Journals are removed after the rename: on file systems that free blocks synchronously, removing a folder with
        them would wait until everything written before has reached the disk.
        """
        last = manifest(digests_of(self.target, self.written()))
        known = {file.path for file in self.target.files}
        with storage_errors(self.path, "cannot be published"):
            if last is not None:
                known.add(last.path)
                _write_file(self.folder / last.path, b"".join(literal.data for literal in last.literals))
            # A run that was killed while it discarded other output may have left files.
            for name, _ in list_files(self.folder):
                if name not in known and not name.startswith(OWN_PREFIX):
                    (self.folder / name).unlink()
            if durable:
                sync_tree(self.folder)
            os.rename(self.folder, self.path)
            self._remove_own_files(durable)
        self.close()

    def _remove_own_files(self, durable: bool) -> None:
        """Remove journals and notes from published output, which is complete even if that fails."""
        for own in self.path.glob(f"{OWN_PREFIX}*"):
            with suppress(OSError):
                own.unlink()
        if durable:
            sync(self.path.parent)

    def keep(self) -> None:
        if self._journal is not None:
            self._journal.keep()
        self.close()

    def has_partial_output(self) -> bool:
        return self.folder.exists()

    def discard(self) -> None:
        if self.shard.is_whole:
            remove_tree(self.folder)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # Other processes ------------------------------------------------------------------------------------------------

    def started_shards(self, *, restart: bool) -> list[WorkShard]:
        check_destination(self.path)
        if restart:
            discard_partial_output(self.path)
        shards = journalled_shards(self.folder)
        if any(is_locked(self.folder / journal_name(shard)) for shard in shards):
            raise busy_error(self.path)
        return shards

    def shard_progress(self, shard: WorkShard) -> ShardProgress:
        journal = self.folder / journal_name(shard)
        try:
            data = journal.read_bytes()
        except FileNotFoundError:
            return ShardProgress(False, 0)
        if b"\n" not in data:
            return ShardProgress(False, 0)
        record = JournalRecord.parse(data, self.fingerprint, journal)
        return ShardProgress(record.done, record.nbytes)

    def heartbeat(self, shard: WorkShard) -> object:
        return time.monotonic() if is_locked(self.folder / journal_name(shard)) else None

    def prepare_launch(self) -> None:
        self._failure_note(self.shard).unlink(missing_ok=True)

    def report_failure(self, text: str) -> None:
        note = self._failure_note(self.shard)
        if self.folder.is_dir():
            temporary = note.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({"error": text}))
            temporary.rename(note)

    def failure(self, shard: WorkShard) -> ShardFailure | None:
        note = self._failure_note(shard)
        try:
            return ShardFailure(note.stat().st_mtime_ns, str(json.loads(note.read_text())["error"]))
        except (OSError, ValueError, KeyError):
            return None

    def _failure_note(self, shard: WorkShard) -> Path:
        return self.folder / f"{OWN_PREFIX}failed-{shard.label}.json"


def check_destination(path: Path) -> None:
    """Refuse a target that already exists, or whose parent folder does not."""
    if not path.parent.is_dir():
        raise StorageError(f"{path.parent}: no such folder", hint="create it first, or choose another target")
    if os.path.lexists(path):
        raise already_exists_error(path)


def discard_partial_output(path: Path) -> None:
    """Remove what earlier runs have left of the target `path`; refused while a process is writing it."""
    folder = staging_folder(path)
    if not folder.exists():
        return
    if any(is_locked(folder / journal_name(shard)) for shard in journalled_shards(folder)):
        raise busy_error(path)
    lock = Journal(folder / journal_name(UNSHARDED), busy_error(path))  # no process starts while it is removed
    remove_tree(folder)
    lock.close()


def already_exists_error(path: Path) -> UsageError:
    return UsageError(f"{path}: already exists", hint="choose another target, or remove it first")


def no_shards_error(path: Path) -> UsageError:
    hint = "write the shards first, with --shard 1/N to --shard N/N"
    return UsageError(f"{path}: no shard of this target is here", hint=hint)


def incomplete_shards_error(path: Path, problems: Iterable[str]) -> UsageError:
    hint = "run these shards (again: finished work is kept), then --finish"
    return UsageError(f"{path}: {'; '.join(problems)}", hint=hint)


def busy_error(path: Path, shard: WorkShard = UNSHARDED) -> OutputBusyError:
    """Another process is writing `path`, or this shard of it."""
    which = "" if shard.is_whole else f"{shard}: "
    return OutputBusyError(
        f"{path}: {which}another process is writing it", hint="wait for that process, or choose another target"
    )


def digests_of(target: Target, written: Iterable[WrittenRange]) -> Digests:
    """For each file of the target, what was written: `(offset, nbytes, digest)` in order of offset."""
    table: list[list[tuple[int, int, str]]] = [[] for _ in target.files]
    for w in written:
        table[w.file].append((w.offset, w.nbytes, w.digest))
    for entries in table:
        entries.sort()
    return table


def digest_range(path: Path, offset: int, nbytes: int, digest: xxhash.xxh3_128 | Crc32) -> str | None:
    """The digest (hex) of a byte range; None if the file is missing or shorter."""
    if not path.exists():
        return None
    block = memoryview(bytearray(min(max(nbytes, 1), settings.SLAB_BYTES)))
    with storage_errors(path, "cannot read what an earlier run has written"), path.open("rb", buffering=0) as file:
        file.seek(offset)
        while nbytes:
            count = file.readinto(block[: min(nbytes, len(block))])
            if not count:
                return None
            digest.update(block[:count])
            nbytes -= count
    return digest.hexdigest()


def _blocks_of(file: OutputFile) -> int:
    """Bytes that a file occupies: whole blocks."""
    return -(-file.size // 4096) * 4096


def _check_space(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    reserve = min(settings.SPACE_RESERVE_BYTES, int(needed * settings.SPACE_RESERVE_SHARE))
    if needed + reserve > free:
        raise StorageError(
            f"{folder}: not enough space ({format_bytes(needed)} needed, and {format_bytes(reserve)} in reserve;"
            f" {format_bytes(free)} free)",
            hint="free some space, or choose a target on another file system (ucp convert --link copies nothing)",
        )


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, 0, data)
    finally:
        os.close(fd)
