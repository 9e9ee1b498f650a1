"""Running a conversion: from a target to published output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ucp.core.checkpoint import Checkpoint
from ucp.core.target import Target
from ucp.engine.coordinator import Coordinator
from ucp.engine.destination import Destination, ManifestBuilder, open_destination
from ucp.engine.journal import OutputBusyError
from ucp.engine.plan import fingerprint
from ucp.engine.pool import Meter, Progress
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget
from ucp.errors import StorageError
from ucp.storage.local import SourceFiles


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a conversion; the output does not depend on any of it."""

    budget: WorkerBudget
    resume: bool = False
    restart: bool = False
    durable: bool = False
    shard: WorkShard = UNSHARDED


def run(
    target: Target,
    source: Checkpoint,
    path: Path,
    options: RunOptions,
    manifest: ManifestBuilder,
    progress: Progress,
) -> None:
    """Write `target`, or one shard of it, to `path`. `manifest` makes the last file from the digests of all others."""
    _write(
        open_destination(path, target, fingerprint(target, source), options.shard), source, options, manifest, progress
    )


def run_in_launch(
    target: Target,
    source: Checkpoint,
    path: Path,
    options: RunOptions,
    manifest: ManifestBuilder,
    progress: Progress,
) -> None:
    """Write this process's shard of a launch; the first process waits for the others and publishes the target."""
    destination = open_destination(path, target, fingerprint(target, source), options.shard)
    coordinator = Coordinator(destination, progress)
    try:
        _write(destination, source, options, manifest, coordinator)
        if coordinator.is_leader:
            coordinator.wait()
            finish(target, source, path, manifest, durable=options.durable)
    except BaseException as error:
        coordinator.fail(error)
        raise
    finally:
        coordinator.close()


def finish(target: Target, source: Checkpoint, path: Path, manifest: ManifestBuilder, *, durable: bool) -> None:
    """Publish the target when all its shards are written."""
    destination = open_destination(path, target, fingerprint(target, source))
    if not destination.was_published(durable=durable):
        destination.collect_shards()
        destination.commit(manifest, durable=durable)


def _write(
    destination: Destination, source: Checkpoint, options: RunOptions, manifest: ManifestBuilder, progress: Progress
) -> None:
    if options.resume and destination.was_published(durable=options.durable):
        return
    destination.begin(resume=options.resume, restart=options.restart)
    target, is_whole = destination.target, destination.shard.is_whole
    try:
        progress.start(sum(target.files[number].size for number in destination.shard.files(target)))
        with SourceFiles(source.root, computed=source.computed) as files:
            progress.advance(destination.finished_bytes)
            destination.write(files, options.budget, Meter(progress.advance))
        if is_whole:
            destination.commit(manifest, durable=options.durable)
        else:
            destination.end_shard(durable=options.durable)
    except (KeyboardInterrupt, StorageError, OutputBusyError) as error:
        # What was written is good: a full disk or an interrupt should not cost it.
        destination.keep()
        if isinstance(error, StorageError) and error.hint is None and destination.has_partial_output():
            error.hint = resume_hint(destination.location, with_resume=is_whole)
        raise
    except BaseException:
        destination.discard()
        raise
    finally:
        progress.finish()


def resume_hint(location: object, *, with_resume: bool) -> str:
    """How to continue a conversion that was stopped."""
    option = " with --resume" if with_resume else ""
    return f"finished work is kept in {location}: repeat the command{option} to continue"
