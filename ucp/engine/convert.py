"""One conversion from start to finish: a target in, a published folder out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from ucp import settings
from ucp.core.checkpoint import Checkpoint
from ucp.core.target import Digests, OutputFile, Target
from ucp.engine.execute import copy_all, trailer_tasks
from ucp.engine.plan import VERSION, task_queues
from ucp.engine.staging import Staging, collect_shards, publish, was_published
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget
from ucp.errors import StorageError
from ucp.storage.local import SourceFiles
from ucp.storage.paths import RemotePath


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run; what is written does not depend on any of it."""

    budget: WorkerBudget
    resume: bool = False
    restart: bool = False
    durable: bool = False
    share: WorkShard = UNSHARDED


class Progress:
    """Where a run reports to; this one says nothing. `advance` is called from any thread."""

    def start(self, total: int) -> None:
        """`total` bytes will be moved."""

    def advance(self, nbytes: int) -> None:
        """Some more bytes are done."""

    def finish(self) -> None:
        """No more reports will come, whether the run ended well or not."""


def run(
    target: Target,
    source: Checkpoint,
    path: Path,
    options: RunOptions,
    last: Callable[[Digests], OutputFile | None],
    progress: Progress,
) -> None:
    """Write `target` to the folder `path`, or a share of it. `last` gets all digests and gives the last file."""
    identity = fingerprint(target, source)
    if isinstance(path, RemotePath):
        from ucp.engine import upload

        upload.upload_target(target, source, path, options, last, progress, identity)
        return
    if options.resume and was_published(path, identity, durable=options.durable):
        return
    staging = Staging(path, target, identity, resume=options.resume, restart=options.restart, share=options.share)
    try:
        progress.start(sum(target.files[number].size for number in staging.files))
        with SourceFiles(source.root, computed=source.computed) as files:
            progress.advance(staging.finished_bytes)
            write = partial(
                copy_all,
                source=files,
                folder=staging.folder,
                files=target.files,
                done=staging.record,
                progress=progress.advance,
            )
            walks = task_queues(target, settings.PLAN_RANGES_PER_WORKER * max(1, options.budget.jobs), staging.files)
            # What is resumed is checked first, and that once: not by every process.
            in_threads = replace(options.budget, processes=False)
            write(
                [staging.remaining(walk) for walk in walks], budget=in_threads if staging.finished else options.budget
            )
            write([staging.remaining(trailer_tasks(target, staging.written(), staging.files))], budget=in_threads)
        if options.share.is_whole:
            staging.publish(last(staging.digests()), durable=options.durable)
        else:
            staging.end_share(durable=options.durable)
    except (KeyboardInterrupt, StorageError) as error:
        # What was done is good: a full disk or an impatient person should not cost it.
        staging.leave()
        if isinstance(error, StorageError) and error.hint is None and staging.folder.exists():
            again = "with --resume " if options.share.is_whole else ""
            error.hint = f"what was done is kept in {staging.folder}: repeat the command {again}to go on"
        raise
    except BaseException:
        staging.discard()
        raise
    finally:
        progress.finish()


def finish(
    target: Target,
    source: Checkpoint,
    path: Path,
    last: Callable[[Digests], OutputFile | None],
    *,
    durable: bool,
) -> None:
    """Publish what the shares of a conversion have written, when all of them are done."""
    identity = fingerprint(target, source)
    if isinstance(path, RemotePath):
        from ucp.engine import upload

        upload.finish_upload(target, path, last, identity)
    elif not was_published(path, identity, durable=durable):
        publish(path, target, last(collect_shards(path, target, identity)), durable=durable)


def fingerprint(target: Target, source: Checkpoint) -> str:
    """Identity of a run: the target, how it is cut into parts, and the source files with their sizes and times."""
    digest = xxhash.xxh3_128(repr((VERSION, settings.COPY_TASK_BYTES)).encode())
    texts: dict[int, str] = {}  # of atoms and boxes, by identity: the ranks of a target share them

    def text(value: object, *described: object) -> str:
        known = texts.get(id(value))
        if known is None:
            known = texts[id(value)] = repr(described or value)
        return known

    for file in target.files:
        lines = [repr((file.path, file.size, file.zeros, file.trailer and file.trailer.spans))]
        for item in file.items:
            atom, region = item.atom, item.region
            whose = text(atom, atom.name, atom.kind, atom.dtype.name, atom.shape)
            lines.append(f"{item.offset} {region.start} {region.stop} {text(region.boxes)} {whose}")
        digest.update("\n".join(lines).encode())
        for literal in file.literals:
            digest.update(b"%d %d\n" % (literal.offset, len(literal.data)))
            digest.update(literal.data)
    for name in sorted(source.sizes):
        try:
            status = (source.root / name).stat()
        except OSError as error:
            raise StorageError(f"{source.root / name}: {error.strerror}") from error
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    if source.computed is not None:
        digest.update(source.computed.identity.encode())
    return digest.hexdigest()
