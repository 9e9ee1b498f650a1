"""What an unfinished folder in an object store says of itself: notes beside its objects, and a mark when it is whole.

Nothing can be renamed there, so objects are put where they belong, and notes say that they do not count yet. Each
process has some: the first tells what is being written and by whom, each of the others which objects it has put there
with what digests. The mark is put when everything else is; then the notes go. A folder with notes and without the mark
is half-done, and readers do not see into it. A folder with neither was put there by somebody else.

A folder of an object store under construction: what is there already, what counts, and the last act.

A conversion into an object store: files are made on this machine, a few at a time, and put there whole.

Objects are written front to back and files are not, so a file is made in a spool folder first; while some are being
sent, the next are made. What a checkpoint is known by (small files of known bytes, such as `latest`) goes after the
tensors, the manifest after everything, and the mark that makes the folder whole after that.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from ucp import settings
from ucp.core.target import Digests, OutputFile, Target
from ucp.engine.execute import copy_all, trailer_tasks
from ucp.engine.plan import CopyTask, task_queues
from ucp.engine.staging import digests_of
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WrittenRange
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.storage.local import SourceFiles, free_bytes, make_file, remove_tree
from ucp.storage.object_store import ObjectInfo
from ucp.storage.paths import COMPLETION_MARKER, UPLOAD_JOURNAL, RemotePath

if TYPE_CHECKING:
    from ucp.core.checkpoint import Checkpoint
    from ucp.engine.convert import Progress, RunOptions


FIRST_ENTRY: Final = "000000.json"


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file of the target that is in the store: what was written into it, and what the store says of the object."""

    file: int
    size: int
    stamp: int
    written: tuple[WrittenRange, ...]


def journal_folder(share: WorkShard) -> str:
    """Name of the folder that has the notes of a share."""
    return f"{UPLOAD_JOURNAL}{share.number + 1}-of-{share.count}"


class UploadJournal:
    """The notes of one share of a target. Only the process that wrote the first one last may write more."""

    def __init__(self, path: RemotePath, share: WorkShard) -> None:
        self._share = share
        self._path = path
        self._folder = path / journal_folder(share)
        self._count = 0
        self._owner = ""

    def begin(self, fingerprint: str) -> None:
        """Say that this process writes the share from now on. Notes of an earlier one stay, and count."""
        self._owner = uuid4().hex
        store = self._path.store
        self._count = len(_journal_entries(store.everything(self._path.key), self._share))
        told = {"ucp": "upload", "version": 1, "fingerprint": fingerprint, "owner": self._owner}
        store.put((self._folder / FIRST_ENTRY).key, _json(told))
        self._count = max(1, self._count)
        self.check_owner()

    def check_owner(self) -> None:
        """Refuse to go on where another process has begun with the same share since."""
        told = _read_entry(self._folder / FIRST_ENTRY)
        if told is None or told.get("owner") != self._owner:
            raise UsageError(
                f"{self._path}: another process writes it now, or has removed it", hint="let one of the two end"
            )

    def record(self, uploaded: Iterable[UploadedFile], *, done: bool = False) -> None:
        """Note files that are in the store; with `done`, that the share is."""
        self.check_owner()
        told = {"files": [_file_entry(one) for one in uploaded], "done": done}
        self._path.store.put((self._folder / f"{self._count:06}.json").key, _json(told))
        self._count += 1


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """What the notes of a share say."""

    files: dict[int, UploadedFile]
    done: bool


def read_upload_journal(
    path: RemotePath, found: Mapping[str, ObjectInfo], share: WorkShard, fingerprint: str
) -> UploadRecord:
    """The notes of a share among what was `found`; those of another run are refused."""
    names = _journal_entries(found, share)
    if not names:  # a process that was launched to write it did not come so far
        return UploadRecord({}, False)
    told = [_read_entry(path / name) for name in names]
    if told[0] is None or told[0].get("fingerprint") != fingerprint:
        raise UsageError(
            f"{path}: the half-done output belongs to another source, target or version",
            hint="add --restart instead of --resume to throw it away and begin again",
        )
    files: dict[int, UploadedFile] = {}
    for note in told[1:]:
        for file, size, stamp, written in (note or {}).get("files", ()):
            files[file] = UploadedFile(file, size, stamp, tuple(WrittenRange(*entry) for entry in written))
    return UploadRecord(files, any(bool(note and note.get("done")) for note in told[1:]))


def uploading_shards(found: Iterable[str]) -> list[WorkShard]:
    """The shares that have notes, in order."""
    names = {name.partition("/")[0].removeprefix(UPLOAD_JOURNAL) for name in found if name.startswith(UPLOAD_JOURNAL)}
    numbers = sorted((int(count), int(number)) for number, _, count in (name.partition("-of-") for name in names))
    return [WorkShard(number - 1, count) for count, number in numbers]


def write_completion_marker(path: RemotePath, fingerprint: str, sizes: Mapping[str, int]) -> None:
    """Say that the folder is whole."""
    told = {"ucp": "complete", "version": 1, "fingerprint": fingerprint, "files": dict(sizes)}
    path.store.put((path / COMPLETION_MARKER).key, _json(told))


def completed_by(path: RemotePath) -> str | None:
    """Fingerprint of the run that has made the folder whole, where one has."""
    told = _read_entry(path / COMPLETION_MARKER)
    return None if told is None else str(told.get("fingerprint"))


def _journal_entries(found: Iterable[str], share: WorkShard) -> list[str]:
    """Names of the notes of a share, in order; what else is beside them is of a launch."""
    notes = [name for name in found if name.startswith(journal_folder(share) + "/")]
    return sorted(name for name in notes if name.rpartition("/")[2].removesuffix(".json").isdigit())


def _file_entry(one: UploadedFile) -> list[Any]:
    return [one.file, one.size, one.stamp, [[w.file, w.offset, w.nbytes, w.digest, w.crc] for w in one.written]]


def _json(told: Any) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def _read_entry(path: RemotePath) -> dict[str, Any] | None:
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


ManifestBuilder = Callable[[Digests], "OutputFile | None"]
"""Gets all digests, gives the file that is written last."""


class Upload:
    """A folder of an object store under construction, as one process sees it."""

    def __init__(self, path: RemotePath, target: Target, fingerprint: str, share: WorkShard) -> None:
        self.path = path
        self.target = target
        self.fingerprint = fingerprint
        self.share = share
        self.files = share.files(target)
        self.notes = UploadJournal(path, share)
        self.done: dict[int, UploadedFile] = {}
        self._gathered = False

    def begin(self, *, resume: bool, restart: bool) -> None:
        """Take the place; what is there already must be ours to go on with, or to throw away."""
        found = self._everything()
        shares = _shards_among(self.path, found)
        if shares and self.share.is_whole and not restart and (not resume or shares != [UNSHARDED]):
            on = "--resume" if shares == [UNSHARDED] else f"--part N/{shares[0].count} and --finish"
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
            _remove_objects(self.path, found)
        elif self.share in shares:
            self._take_up(found, self.share)
        self.notes.begin(self.fingerprint)

    def _take_up(self, found: dict[str, ObjectInfo], share: WorkShard) -> bool:
        """Believe notes of objects that are as they were when the notes were made. Gives whether the share is done."""
        told = read_upload_journal(self.path, found, share, self.fingerprint)
        for number, one in told.files.items():
            there = found.get(self.target.files[number].path)
            if there is not None and (there.size, there.stamp) == (one.size, one.stamp):
                self.done[number] = one
        return told.done

    def gather(self) -> None:
        """Take what all shares have written together; refused where something is missing."""
        found = self._everything()
        shares = uploading_shards(found)
        if not shares:
            raise UsageError(
                f"{self.path}: no part of this target is here", hint="write the parts first, --part 1/N to --part N/N"
            )
        count = shares[0].count
        lacking = []
        for share in (WorkShard(number, count) for number in range(count)):
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

    def publish(self, last: ManifestBuilder) -> None:
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
        ours = {name for name in found if name.startswith(UPLOAD_JOURNAL)}
        for name, size in sizes.items():
            if name not in found or found[name].size != size:
                raise StorageError(f"{self.path / name}: was written, but is not there as it was")
        _remove_objects(self.path, found.keys() - ours - sizes.keys())
        write_completion_marker(self.path, self.fingerprint, sizes)
        _remove_objects(self.path, ours)

    def was_published(self) -> bool:
        """Whether an earlier run has made the folder whole, and was killed before it had put its notes away."""
        if completed_by(self.path) != self.fingerprint:
            return False
        _remove_objects(self.path, (name for name in self._everything() if name.startswith(UPLOAD_JOURNAL)))
        return True

    def _everything(self) -> dict[str, ObjectInfo]:
        return self.path.store.everything(self.path.key)

    def discard(self) -> None:
        """Remove what was begun, as far as the store lets us. A share leaves it to the others."""
        if self.share.is_whole:
            with suppress(StorageError):
                _remove_objects(self.path, self._everything())


def started_shards(path: RemotePath, *, restart: bool) -> list[WorkShard]:
    """Shares of a target that were begun there; with `restart` they are thrown away."""
    found = path.store.everything(path.key)
    shares = _shards_among(path, found)
    if restart and shares:
        _remove_objects(path, found)
        return []
    return shares


def _shards_among(path: RemotePath, found: dict[str, ObjectInfo]) -> list[WorkShard]:
    """Shares that have notes among what was found; a folder that has something else is refused."""
    shares = uploading_shards(found)
    if COMPLETION_MARKER in found or (found and not shares):
        raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
    return shares


def _remove_objects(path: RemotePath, names: Iterable[str]) -> None:
    """Remove objects, notes last: what is left half-way is still known to be half-done."""
    path.store.remove((path / name).key for name in sorted(names, key=_journal_last))


def _journal_last(name: str) -> tuple[bool, str]:
    return name.startswith(UPLOAD_JOURNAL), name


_SENDERS: Final = 8  # files that are sent at once, by two streams of parts each; fewer files have more streams


def upload_target(
    target: Target,
    source: Checkpoint,
    path: RemotePath,
    options: RunOptions,
    last: ManifestBuilder,
    progress: Progress,
    fingerprint: str,
) -> None:
    """Write `target`, or a share of it, to the folder `path` of an object store."""
    upload = Upload(path, target, fingerprint, options.share)
    if options.resume and upload.was_published():
        return
    upload.begin(resume=options.resume, restart=options.restart)
    try:
        progress.start(sum(target.files[number].size for number in upload.files))
        progress.advance(sum(one.size for one in upload.done.values()))
        with SourceFiles(source.root, computed=source.computed) as files:
            _make_and_send(upload, files, options, progress)
        if options.share.is_whole:
            upload.publish(last)
        else:
            upload.notes.record((), done=True)
    except (KeyboardInterrupt, StorageError, UsageError) as error:
        if isinstance(error, StorageError) and error.hint is None:
            again = "with --resume " if options.share.is_whole else ""
            error.hint = f"what was done is kept in {path}: repeat the command {again}to go on"
        raise
    except BaseException:
        upload.discard()
        raise
    finally:
        progress.finish()


def finish_upload(target: Target, path: RemotePath, last: ManifestBuilder, fingerprint: str) -> None:
    """Make the folder whole when all shares are written."""
    upload = Upload(path, target, fingerprint, UNSHARDED)
    if not upload.was_published():
        upload.gather()
        upload.publish(last)


def upload_groups(target: Target, numbers: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Files to make and send together, at most `limit` bytes or one file; those of known bytes come last."""
    known = [n for n in sorted(numbers) if not target.files[n].items]
    others = [n for n in sorted(numbers) if target.files[n].items]
    # A file beside all others says more of the checkpoint than one in a folder of it: `latest` is the last of all.
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


def _make_and_send(upload: Upload, source: SourceFiles, options: RunOptions, progress: Progress) -> None:
    target = upload.target
    left = [number for number in upload.files if number not in upload.done]
    spool = Path(tempfile.mkdtemp(prefix="ucp-spool-"))
    pool = ThreadPoolExecutor(_SENDERS, thread_name_prefix="ucp-upload")
    sending: list[Future[UploadedFile]] = []
    held = 0  # bytes that are being sent
    try:
        room = _spool_bytes(spool, max((target.files[number].size for number in left), default=0))
        for group in upload_groups(target, left, max(1, min(settings.REMOTE_SPOOL_BYTES, room // 2))):
            nbytes = sum(target.files[number].size for number in group)
            # What says what the checkpoint is waits for all that it tells of.
            if held + nbytes > room or not target.files[group[0]].items:
                _wait_for_uploads(upload, sending)
                sending, held = [], 0
            written = _make(upload, group, source, spool, options, progress)
            _wait_for_uploads(upload, sending)
            send = partial(_send, upload, spool=spool, streams=max(1, 2 * _SENDERS // min(_SENDERS, len(group))))
            sending = [pool.submit(send, number, written=tuple(written[number])) for number in group]
            held = nbytes
        _wait_for_uploads(upload, sending)
    finally:
        pool.shutdown(cancel_futures=True)
        remove_tree(spool)


def _make(
    upload: Upload,
    group: Sequence[int],
    source: SourceFiles,
    spool: Path,
    options: RunOptions,
    progress: Progress,
) -> dict[int, list[WrittenRange]]:
    """Write some files into the spool folder. Gives what was written into each."""
    target, jobs = upload.target, max(1, options.budget.jobs)
    written: list[WrittenRange] = []
    for number in group:
        make_file(spool / target.files[number].path, target.files[number].size, 0o600)
    only = frozenset(group)

    def write(parts: Sequence[Iterable[CopyTask]]) -> None:
        copy_all(
            parts,
            source=source,
            folder=spool,
            files=target.files,
            budget=options.budget,
            done=written.extend,
            progress=progress.advance,
        )

    write(task_queues(target, jobs, only))
    write([trailer_tasks(target, list(written), only)])
    of_files: dict[int, list[WrittenRange]] = {number: [] for number in group}
    for one in written:
        of_files[one.file].append(one)
    return of_files


def _send(upload: Upload, number: int, *, spool: Path, streams: int, written: tuple[WrittenRange, ...]) -> UploadedFile:
    """Put a file where it belongs, and remove it here."""
    file = upload.target.files[number]
    found = upload.path.store.upload(spool / file.path, (upload.path / file.path).key, streams)
    (spool / file.path).unlink()
    return UploadedFile(number, file.size, found.stamp, written)


def _wait_for_uploads(upload: Upload, sending: Iterable[Future[UploadedFile]]) -> None:
    """Wait for what is being sent, note what has arrived, and raise what went wrong with the rest."""
    futures = list(sending)
    failures = [error for future in futures if (error := future.exception()) is not None]
    sent = [future.result() for future in futures if future.exception() is None]
    if sent:
        upload.done.update((one.file, one) for one in sent)
        upload.notes.record(sent)
    if failures:
        raise failures[0]


def _spool_bytes(spool: Path, largest: int) -> int:
    """Bytes that may be on this machine's disk at once."""
    room = free_bytes(spool) - settings.SPACE_RESERVE_BYTES
    if largest > room:
        raise StorageError(
            f"{spool.parent}: a file of {largest:,} bytes is made here before it is sent, and {room:,} are free",
            hint="set TMPDIR to a folder with more space",
        )
    return room
