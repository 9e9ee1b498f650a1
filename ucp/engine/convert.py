"""Running a conversion: from a target to published output.

The processes of one launch, which write shards of one target, see each other only through the destination: journals
show how far each shard is and whether its process lives, and a process that fails leaves a note that stops the others
with its message. Clocks are never compared: a heartbeat counts if it differs from the one before.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ucp import settings
from ucp.core.checkpoint import Checkpoint
from ucp.core.target import Target
from ucp.engine.destination import Destination, ManifestBuilder, open_destination
from ucp.engine.journal import OutputBusyError
from ucp.engine.plan import fingerprint
from ucp.engine.pool import Meter, Progress
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget
from ucp.errors import StorageError, UcpError
from ucp.storage.local import SourceFiles


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a conversion; the output does not depend on any of it."""

    budget: WorkerBudget
    resume: bool = False
    restart: bool = False
    durable: bool = False
    shard: WorkShard = UNSHARDED
    in_launch: bool = False  # processes of one launch write the shards; the first waits for the others and publishes


def run(
    target: Target,
    source: Checkpoint,
    path: Path,
    options: RunOptions,
    manifest: ManifestBuilder,
    progress: Progress,
) -> None:
    """Write `target`, or one shard of it, to `path`. `manifest` makes the last file from the digests of all others."""
    destination = open_destination(path, target, fingerprint(target, source), options.shard)
    if not options.in_launch:
        _write(destination, source, options, manifest, progress)
        return
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
            if finished := destination.finished_bytes:
                progress.resume(finished)
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


class PeerFailedError(StorageError):
    """Another process of the launch has failed or disappeared."""


class Coordinator(Progress):
    """One process of a launch. It stands between the run and the user's `progress`: it stops if another has failed."""

    def __init__(self, destination: Destination, progress: Progress) -> None:
        """The first process reports the bytes of all processes to `progress`."""
        self._destination = destination
        self._progress = progress
        self._others = destination.shard.others
        self._reported = dict.fromkeys(self._others, 0)  # bytes of other shards that were passed on
        self._heartbeats: dict[WorkShard, tuple[object, float]] = {}  # the last heartbeat, and when it was new
        destination.prepare_launch()
        # Notes of an earlier launch: a process of this one removes its own when it starts.
        self._old_failures = {other: destination.failure(other) for other in self._others}
        self._failure: PeerFailedError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ucp-coordinator", daemon=True)
        self._thread.start()

    @property
    def is_leader(self) -> bool:
        """Whether this process waits for the others and publishes the target."""
        return self._destination.shard.number == 0

    def start(self, total: int) -> None:
        del total
        if self.is_leader:
            self._progress.start(self._destination.target.nbytes)

    def resume(self, nbytes: int) -> None:
        if self.is_leader:
            self._progress.resume(nbytes)

    def advance(self, nbytes: int) -> None:
        if self.is_leader:
            self._progress.advance(nbytes)
        self._raise_failure()

    def close(self) -> None:
        """Stop the heartbeat, and end the progress."""
        self._stop.set()
        self._thread.join()
        self._destination.stop_heartbeat()
        self._progress.finish()

    def fail(self, error: BaseException) -> None:
        """Report this process's failure to the others, unless it only repeats theirs."""
        if not isinstance(error, PeerFailedError):
            text = str(error) if isinstance(error, UcpError) else f"{type(error).__name__}: {error}"
            with suppress(StorageError):
                self._destination.report_failure(text)

    def wait(self) -> None:
        """Return when all other shards are done; raise if one of them has failed."""
        left = self._others
        while left := [shard for shard in left if not self._is_done(shard)]:
            self._raise_failure()
            self._stop.wait(self._destination.poll_seconds)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        """Send heartbeats and look for failures of others, until `close`."""
        while True:
            with suppress(UcpError, ValueError):  # the next attempt may succeed
                self._destination.send_heartbeat()
                for other in self._others:
                    failure = self._destination.failure(other)
                    if failure is not None and failure != self._old_failures[other]:
                        self._failure = PeerFailedError(
                            f"{other} failed: {failure.text}", hint="fix that and launch again"
                        )
            if self._stop.wait(max(self._destination.poll_seconds, settings.LIVENESS_SECONDS)):
                return

    def _is_done(self, shard: WorkShard) -> bool:
        state = self._destination.shard_progress(shard)
        if self.is_leader:
            self._progress.advance(max(0, state.nbytes - self._reported[shard]))
            self._reported[shard] = max(state.nbytes, self._reported[shard])
        if state.done:
            return True
        beat = self._destination.heartbeat(shard)
        last, since = self._heartbeats.setdefault(shard, (beat, time.monotonic()))
        if beat != last:
            self._heartbeats[shard] = beat, time.monotonic()
        elif time.monotonic() - since > settings.MISSING_PROCESS_SECONDS:
            failure = self._destination.failure(shard)
            raise PeerFailedError(
                f"{shard} failed: {failure.text}" if failure else f"{shard} is not done, and no process works on it",
                hint=f"run it with --shard {shard.number + 1}/{shard.count}, then --finish; or launch all again, which"
                " keeps what was done",
            )
        return False
