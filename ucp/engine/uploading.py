"""A conversion into an object store: files are made on this machine, a few at a time, and put there whole.

Objects are written front to back and files are not, so a file is made in a spool folder first; while some are being
sent, the next are made. What a checkpoint is known by (small files of known bytes, such as `latest`) goes after the
tensors, the manifest after everything, and the mark that makes the folder whole after that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ucp import tunables
from ucp.engine.plan import Part, stretches
from ucp.engine.sealing import sealing_parts
from ucp.engine.shares import WHOLE
from ucp.engine.stream import stream
from ucp.engine.upload_folder import Last, Upload
from ucp.engine.upload_notes import Uploaded
from ucp.engine.worker import Written
from ucp.errors import StorageError, UsageError
from ucp.files.local import SourceFiles, free_bytes, make_file, remove_tree
from ucp.files.paths import RemotePath
from ucp.model.target import Target

if TYPE_CHECKING:
    from ucp.engine.convert import Progress, RunOptions
    from ucp.model.checkpoint import Checkpoint

_SENDERS: Final = 8  # files that are sent at once, by two streams of parts each; fewer files have more streams


def run(
    target: Target,
    source: Checkpoint,
    path: RemotePath,
    options: RunOptions,
    last: Last,
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


def finish(target: Target, path: RemotePath, last: Last, fingerprint: str) -> None:
    """Make the folder whole when all shares are written."""
    upload = Upload(path, target, fingerprint, WHOLE)
    if not upload.was_published():
        upload.gather()
        upload.publish(last)


def groups(target: Target, numbers: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Files to make and send together, at most `limit` bytes or one file; those of known bytes come last."""
    known = [n for n in sorted(numbers) if not target.files[n].holes]
    others = [n for n in sorted(numbers) if target.files[n].holes]
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
    sending: list[Future[Uploaded]] = []
    held = 0  # bytes that are being sent
    try:
        room = _room(spool, max((target.files[number].size for number in left), default=0))
        for group in groups(target, left, max(1, min(tunables.REMOTE_SPOOL_BYTES, room // 2))):
            nbytes = sum(target.files[number].size for number in group)
            # What says what the checkpoint is waits for all that it tells of.
            if held + nbytes > room or not target.files[group[0]].holes:
                _settle(upload, sending)
                sending, held = [], 0
            written = _make(upload, group, source, spool, options, progress)
            _settle(upload, sending)
            send = partial(_send, upload, spool=spool, streams=max(1, 2 * _SENDERS // min(_SENDERS, len(group))))
            sending = [pool.submit(send, number, written=tuple(written[number])) for number in group]
            held = nbytes
        _settle(upload, sending)
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
) -> dict[int, list[Written]]:
    """Write some files into the spool folder. Gives what was written into each."""
    target, jobs = upload.target, max(1, options.budget.jobs)
    written: list[Written] = []
    for number in group:
        make_file(spool / target.files[number].path, target.files[number].size, 0o600)
    only = frozenset(group)

    def write(parts: Sequence[Iterable[Part]]) -> None:
        stream(
            parts,
            source=source,
            folder=spool,
            files=target.files,
            budget=options.budget,
            done=written.extend,
            progress=progress.advance,
        )

    write(stretches(target, jobs, only))
    write([sealing_parts(target, list(written), only)])
    of_files: dict[int, list[Written]] = {number: [] for number in group}
    for one in written:
        of_files[one.file].append(one)
    return of_files


def _send(upload: Upload, number: int, *, spool: Path, streams: int, written: tuple[Written, ...]) -> Uploaded:
    """Put a file where it belongs, and remove it here."""
    file = upload.target.files[number]
    found = upload.path.store.upload(spool / file.path, (upload.path / file.path).key, streams)
    (spool / file.path).unlink()
    return Uploaded(number, file.size, found.stamp, written)


def _settle(upload: Upload, sending: Iterable[Future[Uploaded]]) -> None:
    """Wait for what is being sent, note what has arrived, and raise what went wrong with the rest."""
    futures = list(sending)
    failures = [error for future in futures if (error := future.exception()) is not None]
    sent = [future.result() for future in futures if future.exception() is None]
    if sent:
        upload.done.update((one.file, one) for one in sent)
        upload.notes.record(sent)
    if failures:
        raise failures[0]


def _room(spool: Path, largest: int) -> int:
    """Bytes that may be on this machine's disk at once."""
    room = free_bytes(spool) - tunables.SPACE_RESERVE_BYTES
    if largest > room:
        raise StorageError(
            f"{spool.parent}: a file of {largest:,} bytes is made here before it is sent, and {room:,} are free",
            hint="set TMPDIR to a folder with more space",
        )
    return room
