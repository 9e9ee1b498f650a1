"""Output into an object store: files are made on this machine, a few at a time, and uploaded whole.

Objects are written front to back and files are not, so a file is made in a spool folder first; while some files are
being uploaded, the next ones are made. Small files of known bytes, such as `latest`, are uploaded after the tensors,
the manifest after everything else, and the completion marker last.

Nothing can be renamed in an object store, so objects are written to their final names, and a journal next to them marks
them as unfinished. Each shard has a folder of journal entries, which are objects as well: the first names the
conversion and the process that writes it, each of the others lists uploaded files with their digests. When everything
is uploaded the completion marker is written, and then the journals are removed. Readers ignore a folder that has a
journal and no marker; a folder that has neither was not written by ucp. Only the process that last wrote the first
entry of a shard's journal may write more.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from ucp import settings
from ucp.core.target import Target
from ucp.engine.copy_tasks import CopyTask, task_queues
from ucp.engine.destination import Destination, ManifestBuilder, ShardFailure, ShardProgress
from ucp.engine.journal import OutputBusyError, other_conversion_error
from ucp.engine.pool import Meter
from ucp.engine.staging import already_exists_error, digests_of, incomplete_shards_error, no_shards_error
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget, WrittenRange, run_copy_tasks, trailer_tasks
from ucp.errors import IntegrityError, StorageError, UsageError, format_bytes
from ucp.storage.local import SourceFiles, free_bytes, make_file, remove_tree
from ucp.storage.object_store import ObjectInfo
from ucp.storage.paths import COMPLETION_MARKER, UPLOAD_JOURNAL, RemotePath

_FIRST_ENTRY: Final = "000000.json"
_ALIVE: Final = "alive.json"
_FAILED: Final = "failed.json"
_UPLOADS: Final = 8  # files that are uploaded at once, in two streams of parts each; fewer files have more streams


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file of the target that is in the store: what was written into it, and the store's stamp of the object."""

    file: int
    size: int
    stamp: int
    written: tuple[WrittenRange, ...]


class StoreDestination(Destination):
    """A folder of an object store under construction, as one process sees it.

    Every upload is recorded as soon as it is complete, so `keep` has nothing to do.
    """

    def __init__(self, path: RemotePath, target: Target, fingerprint: str, shard: WorkShard = UNSHARDED) -> None:
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.shard = shard
        self.location = str(path)
        self.poll_seconds = settings.REMOTE_LIVENESS_SECONDS
        self.files = shard.files(target)
        self._own_folder = path / _journal_folder(shard)
        self._uploaded: dict[int, UploadedFile] = {}
        self._owner = ""  # identifies this process in the first entry of its journal; empty before `begin`
        self._entries = 0  # of its journal
        self._heartbeats = 0

    # The transaction ------------------------------------------------------------------------------------------------

    def was_published(self, *, durable: bool) -> bool:
        del durable
        marker = _read_entry(self.path / COMPLETION_MARKER)
        if marker is None or marker.get("fingerprint") != self.fingerprint:
            return False
        self._remove(name for name in self._objects() if name.startswith(UPLOAD_JOURNAL))
        return True

    def begin(self, *, resume: bool, restart: bool) -> None:
        objects = self._objects()
        shards = self._shards_among(objects)
        if shards and self.shard.is_whole and not restart and (not resume or shards != [UNSHARDED]):
            option = "--resume" if shards == [UNSHARDED] else f"--shard N/{shards[0].count} and --finish"
            raise UsageError(
                f"{self.path}: partial output is here, or another process is writing it",
                hint=f"add {option} to continue where it stopped, or --restart to discard it and start over",
            )
        if any(other.count != self.shard.count for other in shards) and not restart:
            raise UsageError(
                f"{self.path}: partial output is here that was written in {shards[0].count} shard(s)",
                hint="continue it as it was started, or remove that folder to start over",
            )
        if restart and shards:
            self._remove(objects)
        elif self.shard in shards:
            self._load(objects, self.shard)
        # Entries of an earlier owner stay valid.
        self._entries = max(1, len(_journal_entries(self._objects(), self.shard)))
        self._owner = uuid4().hex
        self._put_note(
            _FIRST_ENTRY, {"ucp": "upload", "version": 1, "fingerprint": self.fingerprint, "owner": self._owner}
        )
        self._check_owner()

    def _check_owner(self) -> None:
        """Refuse to continue if another process has started with the same shard since."""
        first = _read_entry(self._own_folder / _FIRST_ENTRY)
        if first is None or first.get("owner") != self._owner:
            raise OutputBusyError(
                f"{self.path}: another process is writing it, or has removed it", hint="stop one of the two"
            )

    def _record(self, uploaded: Iterable[UploadedFile], *, done: bool = False) -> None:
        """Record files that are in the store; with `done`, that the shard is complete."""
        self._check_owner()
        files = [
            [one.file, one.size, one.stamp, [[w.file, w.offset, w.nbytes, w.digest, w.crc] for w in one.written]]
            for one in uploaded
        ]
        self._put_note(f"{self._entries:06}.json", {"files": files, "done": done})
        self._entries += 1

    @property
    def finished_bytes(self) -> int:
        return sum(one.size for one in self._uploaded.values())

    def _load(self, objects: Mapping[str, ObjectInfo], shard: WorkShard) -> bool:
        """Load the uploads of a shard whose objects are still unchanged; returns whether the shard is done."""
        record = read_upload_journal(self.path, objects, shard, self.fingerprint)
        for number, one in record.files.items():
            info = objects.get(self.target.files[number].path)
            if info is not None and (info.size, info.stamp) == (one.size, one.stamp):
                self._uploaded[number] = one
        return record.done

    def write(self, source: SourceFiles, budget: WorkerBudget, meter: Meter) -> None:
        target = self.target
        left = [number for number in self.files if number not in self._uploaded]
        spool = Path(tempfile.mkdtemp(prefix="ucp-spool-"))
        uploads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="ucp-upload")
        pending: list[Future[UploadedFile]] = []
        pending_bytes = 0
        try:
            largest = max((target.files[number].size for number in left), default=0)
            reserve = min(settings.SPACE_RESERVE_BYTES, int(largest * settings.SPACE_RESERVE_SHARE))
            capacity = free_bytes(spool) - reserve
            if largest > capacity:
                raise StorageError(
                    f"{spool.parent}: a file of {format_bytes(largest)} is made here before its upload, but only"
                    f" {format_bytes(max(0, capacity))} are free",
                    hint="set TMPDIR to a folder with more space",
                )
            for group in upload_groups(target, left, max(1, min(settings.REMOTE_SPOOL_BYTES, capacity // 2))):
                nbytes = sum(target.files[number].size for number in group)
                # Files of known bytes, such as `latest`, wait until everything that they refer to is uploaded.
                if pending_bytes + nbytes > capacity or not target.files[group[0]].items:
                    self._wait_for(pending)
                    pending, pending_bytes = [], 0
                written = self._make_files(group, source, spool, budget, meter)
                self._wait_for(pending)
                streams = max(1, 2 * _UPLOADS // min(_UPLOADS, len(group)))
                upload = partial(self._upload, spool=spool, streams=streams)
                pending = [uploads.submit(upload, number, written=tuple(written[number])) for number in group]
                pending_bytes = nbytes
            self._wait_for(pending)
        finally:
            uploads.shutdown(cancel_futures=True)
            remove_tree(spool)

    def _make_files(
        self, group: Sequence[int], source: SourceFiles, spool: Path, budget: WorkerBudget, meter: Meter
    ) -> dict[int, list[WrittenRange]]:
        """Write some files into the spool folder; returns what was written into each."""
        files = self.target.files
        for number in group:
            make_file(spool / files[number].path, files[number].size, 0o600)
        written: dict[int, list[WrittenRange]] = {number: [] for number in group}

        def record(ranges: list[WrittenRange]) -> None:
            for one in ranges:
                written[one.file].append(one)

        def write(queues: Sequence[Iterable[CopyTask]]) -> None:
            run_copy_tasks(queues, source, spool, files, budget, record, meter)

        only = frozenset(group)
        write(task_queues(self.target, max(1, budget.jobs), only))
        write([trailer_tasks(self.target, [one for some in written.values() for one in some], only)])
        return written

    def _upload(self, number: int, *, spool: Path, streams: int, written: tuple[WrittenRange, ...]) -> UploadedFile:
        """Upload a file from the spool folder and remove it there."""
        file = self.target.files[number]
        info = self.path.store.upload(spool / file.path, (self.path / file.path).key, streams)
        (spool / file.path).unlink()
        return UploadedFile(number, file.size, info.stamp, written)

    def _wait_for(self, uploads: Iterable[Future[UploadedFile]]) -> None:
        """Wait for uploads, record those that succeeded, and raise the first error of the others."""
        futures = list(uploads)
        failures = [error for future in futures if (error := future.exception()) is not None]
        uploaded = [future.result() for future in futures if future.exception() is None]
        if uploaded:
            self._uploaded.update((one.file, one) for one in uploaded)
            self._record(uploaded)
        if failures:
            raise failures[0]

    def end_shard(self, *, durable: bool) -> None:
        del durable
        self._record((), done=True)

    def collect_shards(self) -> None:
        objects = self._objects()
        shards = _shards_with_journals(objects)
        if not shards:
            raise no_shards_error(self.path)
        problems = []
        for shard in (WorkShard(number, shards[0].count) for number in range(shards[0].count)):
            if shard not in shards:
                problems.append(f"{shard} was not started")
            elif not self._load(objects, shard):
                problems.append(f"{shard} did not finish")
        missing = [file.path for number, file in enumerate(self.target.files) if number not in self._uploaded]
        if not problems and missing:
            problems.append(f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" * (len(missing) > 1)))
        if problems:
            raise incomplete_shards_error(self.path, problems)

    def commit(self, manifest: ManifestBuilder, *, durable: bool) -> None:
        """Upload the manifest, remove objects that do not belong to the output, and write the completion marker."""
        del durable
        if self._owner:
            self._check_owner()
        store = self.path.store
        sizes = {file.path: file.size for file in self.target.files}
        last = manifest(digests_of(self.target, (w for one in self._uploaded.values() for w in one.written)))
        if last is not None:
            data = b"".join(literal.data for literal in last.literals)
            store.put((self.path / last.path).key, data)
            sizes[last.path] = len(data)
        objects = self._objects()
        journals = {name for name in objects if name.startswith(UPLOAD_JOURNAL)}
        for name, size in sizes.items():
            if name not in objects or objects[name].size != size:
                raise StorageError(f"{self.path / name}: is missing or has another size after its upload")
        self._remove(objects.keys() - journals - sizes.keys())
        marker = {"ucp": "complete", "version": 1, "fingerprint": self.fingerprint, "files": sizes}
        store.put((self.path / COMPLETION_MARKER).key, _json(marker))
        self._remove(journals)

    def has_partial_output(self) -> bool:
        return True

    def discard(self) -> None:
        if self.shard.is_whole:
            with suppress(StorageError):
                self._remove(self._objects())

    def _objects(self) -> dict[str, ObjectInfo]:
        return self.path.store.list_all(self.path.key)

    def _shards_among(self, objects: Mapping[str, ObjectInfo]) -> list[WorkShard]:
        """Shards that have a journal among these objects; a folder that contains something else is refused."""
        shards = _shards_with_journals(objects)
        if COMPLETION_MARKER in objects or (objects and not shards):
            raise already_exists_error(self.path)
        return shards

    def _remove(self, names: Iterable[str]) -> None:
        """Remove objects, journals last: what is left if this is interrupted is still recognized as unfinished."""
        ordered = sorted(names, key=lambda name: (name.startswith(UPLOAD_JOURNAL), name))
        self.path.store.remove((self.path / name).key for name in ordered)

    # Other processes ------------------------------------------------------------------------------------------------

    def started_shards(self, *, restart: bool) -> list[WorkShard]:
        objects = self._objects()
        shards = self._shards_among(objects)
        if restart and shards:
            self._remove(objects)
            return []
        return shards

    def shard_progress(self, shard: WorkShard) -> ShardProgress:
        record = read_upload_journal(self.path, self._notes(shard), shard, self.fingerprint)
        return ShardProgress(record.done, sum(one.size for one in record.files.values()))

    def heartbeat(self, shard: WorkShard) -> object:
        info = self._notes(shard).get(f"{_journal_folder(shard)}/{_ALIVE}")
        return None if info is None else info.stamp

    def prepare_launch(self) -> None:
        if self.path.store.get((self.path / COMPLETION_MARKER).key) is not None:
            raise already_exists_error(self.path)
        self._put_note(_FAILED, None)

    def send_heartbeat(self) -> None:
        self._put_note(_ALIVE, {"count": self._heartbeats})
        self._heartbeats += 1

    def stop_heartbeat(self) -> None:
        with suppress(StorageError):
            self._put_note(_ALIVE, None)

    def report_failure(self, text: str) -> None:
        self._put_note(_FAILED, {"error": text})

    def failure(self, shard: WorkShard) -> ShardFailure | None:
        name = f"{_journal_folder(shard)}/{_FAILED}"
        info = self._notes(shard).get(name)
        note = None if info is None else _read_entry(self.path / name)
        return None if info is None or note is None else ShardFailure(info.stamp, str(note.get("error")))

    def _notes(self, shard: WorkShard) -> dict[str, ObjectInfo]:
        """The objects in the journal folder of a shard."""
        folder = _journal_folder(shard)
        objects = self.path.store.list_all((self.path / folder).key)
        return {f"{folder}/{name}": info for name, info in objects.items()}

    def _put_note(self, name: str, note: object) -> None:
        """Write a journal entry or a note of this shard, or remove it."""
        key = (self._own_folder / name).key
        if note is None:
            self.path.store.remove([key])
        else:
            self.path.store.put(key, _json(note))


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The contents of a shard's journal."""

    files: dict[int, UploadedFile]
    done: bool


def read_upload_journal(
    path: RemotePath, objects: Mapping[str, ObjectInfo], shard: WorkShard, fingerprint: str
) -> UploadRecord:
    """The journal of a shard among `objects`; the journal of another conversion is refused."""
    names = _journal_entries(objects, shard)
    if not names:  # a process of the launch that has not come this far
        return UploadRecord({}, False)
    first, *entries = [_read_entry(path / name) for name in names]
    if first is None or first.get("fingerprint") != fingerprint:
        raise other_conversion_error(path)
    files: dict[int, UploadedFile] = {}
    for entry in entries:
        for file, size, stamp, written in (entry or {}).get("files", ()):
            files[file] = UploadedFile(file, size, stamp, tuple(WrittenRange(*one) for one in written))
    return UploadRecord(files, any(bool(entry and entry.get("done")) for entry in entries))


def upload_groups(target: Target, numbers: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Files to make and upload together, at most `limit` bytes or one file; files of known bytes come last."""
    known = [n for n in sorted(numbers) if not target.files[n].items]
    others = [n for n in sorted(numbers) if target.files[n].items]
    # Deeper paths first, so that top-level markers such as `latest` are uploaded last.
    known.sort(key=lambda n: (-target.files[n].path.count("/"), n))
    for some in (others, known):
        group: list[int] = []
        nbytes = 0
        for number in some:
            if group and nbytes + target.files[number].size > limit:
                yield group
                group, nbytes = [], 0
            group.append(number)
            nbytes += target.files[number].size
        if group:
            yield group


def _journal_folder(shard: WorkShard) -> str:
    return f"{UPLOAD_JOURNAL}{shard.label}"


def _shards_with_journals(objects: Iterable[str]) -> list[WorkShard]:
    names = {name.partition("/")[0].removeprefix(UPLOAD_JOURNAL) for name in objects if name.startswith(UPLOAD_JOURNAL)}
    numbers = sorted((int(count), int(number)) for number, _, count in (name.partition("-of-") for name in names))
    return [WorkShard(number - 1, count) for count, number in numbers]


def _journal_entries(objects: Iterable[str], shard: WorkShard) -> list[str]:
    """Names of a shard's journal entries, in order, without the notes of a launch next to them."""
    names = [name for name in objects if name.startswith(_journal_folder(shard) + "/")]
    return sorted(name for name in names if name.rpartition("/")[2].removesuffix(".json").isdigit())


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _read_entry(path: RemotePath) -> dict[str, Any] | None:
    data = path.store.get(path.key)
    if data is None:
        return None
    try:
        entry = json.loads(data)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise IntegrityError(f"{path}: not an upload journal of ucp", hint="remove the partial output and start over")
    return entry
