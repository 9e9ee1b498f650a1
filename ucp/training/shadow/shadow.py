"""The shadow: receives frames from connections and the log, applies complete steps, and provides snapshots.

One thread applies every step that is complete in all streams; another reads the log for streams without a connection
and looks for new epochs. Both share a `FollowControl`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ucp import settings
from ucp.engine.work_shard import WorkShard
from ucp.errors import UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.epoch_manifest import EpochManifest, read_manifest
from ucp.log.frames import BadBytesError
from ucp.log.reader import epoch_folder
from ucp.training.shadow.epoch_follower import EpochFollower, StepPin, frames_gone_error
from ucp.training.shadow.initial_state import (
    InitialState,
    continues_from,
    epochs_of,
    from_current_state,
    from_log,
    from_manifest,
    newest_of,
    root_of,
)
from ucp.training.shadow.shadow_state import StateSnapshot
from ucp.training.shadow.step_assembler import (
    WHOLE,
    GapError,
    ReceivedDigests,
    ReceivedFrame,
    ReceivedStep,
    StreamShard,
)
from ucp.training.shadow.to_checkpoint import describe_state


class FollowControl:
    """The epoch that is followed, or the reason why it cannot be followed. Hold `changed` for every access."""

    def __init__(
        self,
        base: Path | None,
        log: Path | None,
        options: ReadOptions,
        shard: WorkShard,
        note: Callable[[str], None],
    ) -> None:
        self.base = base
        self.log = log
        self.options = options
        self.shard = shard
        self.note = note
        self.changed = threading.Condition()
        self.follower: EpochFollower | None = None
        self.stale: str | None = None
        self.stopping = False
        self._generation = 0

    def begin(self, initial: InitialState, log: Path | None) -> EpochFollower:
        """Follow the epoch of an initial state."""
        self._generation += 1
        manifest = initial.state.manifest
        self.follower = EpochFollower.after(self._generation, initial, log)
        self.stale = None
        self.changed.notify_all()
        self.note(
            f"holds step {initial.state.step} of epoch {manifest.epoch}"
            f" ({len(manifest.streams)} streams, {manifest.kernel.id}), from {initial.base}"
        )
        return self.follower

    def follow(self, manifest: EpochManifest, run: Path | None) -> EpochFollower:
        """Follow a new epoch, announced by a connection or found in the log."""
        log = self.log
        if log is None and run is not None and epochs_of(run):
            log = run
        old = self.follower
        if old is not None and self.stale is None:
            old.advance(self.changed, manifest.start, lambda: self.is_over(old))
            if continues_from(old.state, manifest):
                initial = from_current_state(old.state, old.base, manifest, self.options)
                if initial is not None:
                    return self.begin(initial, log)
        return self.begin(from_manifest(manifest, run, log, self.base, self.options, self.shard), log)

    def restart(self, reason: str) -> None:
        """Start again from the newest base of the log, because needed frames were dropped from it."""
        assert self.follower is not None
        log = self.follower.log
        assert log is not None
        self.note(f"starts again: {reason}")
        self.begin(newest_of(log, self.base, self.options, self.shard), log)

    def set_stale(self, reason: str) -> None:
        """Stop applying steps; the current state is kept. An earlier reason is not overwritten."""
        self.stale = self.stale or reason
        self.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Like `set_stale`, but acquires the lock and notifies the operator."""
        with self.changed:
            self.set_stale(reason)
        self.note(f"stale: {reason}")

    def is_over(self, follower: EpochFollower) -> bool:
        """Whether no further step will be applied to a follower."""
        return self.stopping or self.follower is not follower


def apply_all(control: FollowControl, pool: ThreadPoolExecutor | None) -> None:
    """Apply complete steps until the shadow stops and none is left."""
    while True:
        with control.changed:
            while not control.stopping and not _is_complete(control):
                control.changed.wait(1.0)
            follower = control.follower
            if follower is None or not _is_complete(control):
                return  # stopping
            try:
                step = follower.take()
            except BadBytesError as error:
                control.set_stale(str(error))
                follower.is_broken = True
                step = None
            control.changed.notify_all()
        if step is not None:
            _apply(control, follower, step, pool)


def _apply(
    control: FollowControl,
    follower: EpochFollower,
    step: dict[int, ReceivedStep] | ReceivedDigests,
    pool: ThreadPoolExecutor | None,
) -> None:
    try:
        if isinstance(step, ReceivedDigests):
            follower.state.compare(step.stream, step.digests)
        else:
            follower.state.apply(step, pool)
    except (UcpError, BadBytesError) as error:
        follower.is_broken = True
        control.fail(f"step {follower.state.step + 1}: {error}")
    except BaseException as error:
        follower.is_broken = True
        control.fail(f"step {follower.state.step + 1}: {error!r}")
        raise  # unexpected: show the operator a traceback
    follower.applied_at = time.time()
    with control.changed:
        control.changed.notify_all()
    if follower.state.refuted is not None:
        control.note(str(follower.state.refuted))


def _is_complete(control: FollowControl) -> bool:
    """Whether there is anything to apply now."""
    follower = control.follower
    if follower is None or follower.is_broken:
        return False
    # A stale shard can still apply the steps that it has delayed.
    return (control.stale is None or follower.state.step < follower.target_step) and follower.is_complete()


def read_log(control: FollowControl, ending: threading.Event) -> None:
    """Read the log until `ending` is set."""
    pause, looked = 0.0, 0.0
    while not ending.wait(pause):
        moved = False
        try:
            if time.monotonic() - looked > settings.SHADOW_EPOCH_SECONDS:
                moved, looked = _find_newer_epoch(control), time.monotonic()
            moved |= _poll(control)
        except GapError as gap:
            with control.changed:
                control.restart(f"frame {gap.expected} is not in the log, which starts with frame {gap.got}")
        except BadBytesError as error:
            control.fail(f"the log is out of order: {error}")
        except UcpError as error:
            control.fail(str(error))
        shortest = settings.SHADOW_POLL_SECONDS  # poll less and less often while there is nothing new
        pause = 0.0 if moved else min(max(1.2 * pause, shortest), 10 * shortest)


def _poll(control: FollowControl) -> bool:
    """Read streams without a connection from the log."""
    with control.changed:
        follower = None if control.stale is not None else control.follower
    return follower is not None and follower.read_log(control.changed)


def _find_newer_epoch(control: FollowControl) -> bool:
    """Follow a newer epoch of the log, if there is one."""
    with control.changed:
        if control.follower is not None:
            control.follower.find_log()
        log = control.log if control.follower is None else control.follower.log
    epochs = [] if log is None else epochs_of(log)
    if log is None or not epochs:
        return False
    newest = max(epochs)
    with control.changed:
        follower = control.follower
        if follower is not None and newest <= follower.state.manifest.epoch:
            if follower.lacks_state_kinds and newest == follower.state.manifest.epoch:
                follower.add_state_kinds(read_manifest(epoch_folder(root_of(log), newest)))
            return False
        if follower is not None and any(feed.connections for feed in follower.feeds.values()):
            return False  # the connections will announce it
        control.follow(read_manifest(epoch_folder(root_of(log), newest)), root_of(log).parent)
    return True


LIVE, STALE, LOADING = "live", "stale", "loading"


class Shadow:
    """Holds the state of the newest complete step. Thread-safe."""

    def __init__(
        self,
        base: Path | None = None,
        log: Path | None = None,
        *,
        options: ReadOptions | None = None,
        jobs: int = 1,
        wait_for_job: bool = False,
        shard: WorkShard = WHOLE,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`base` is any checkpoint, `log` a log (or run) to follow, and `note` receives messages for the operator.

        With `wait_for_job`, base and log may be announced later by the job. With a `shard`, it holds only that part of
        the state, and delays applying the newest steps.
        """
        self.shard = shard
        self.control = FollowControl(base, log, options or ReadOptions(), shard, note)
        self._waits = wait_for_job
        self._pool = ThreadPoolExecutor(jobs, "ucp-shadow") if jobs > 1 else None
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------------------------------------------------------
    # Start and stop

    def start(self) -> None:
        """Load the initial state, and start the threads."""
        control = self.control
        if control.log is not None and epochs_of(control.log):
            with control.changed:
                control.begin(from_log(control.base, control.log, control.options, self.shard), control.log)
        elif control.base is not None:
            spread = control.log is not None  # the log brings a spread snapshot to one step
            # Opened only to report a wrong base now instead of at the first step.
            open_checkpoint(control.base, replace(control.options, spread=spread))
        elif control.log is None and not self._waits:
            raise UsageError(
                "a shadow needs a base or a log to start from", hint="pass --base, or --log with its bases"
            )
        if control.log is not None and control.follower is None:
            control.note(f"{control.log}: no log yet; waiting for it")
        for work, name in (
            (partial(apply_all, control, self._pool), "ucp-shadow-apply"),
            (partial(read_log, control, self._ending), "ucp-shadow-log"),
        ):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Apply the complete steps, and stop."""
        with self.control.changed:
            self.control.stopping = True
            self._ending.set()
            self.control.changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    # ------------------------------------------------------------------------------------------------------------------
    # Frames from connections

    def join(
        self, manifest: EpochManifest, stream: int, run: Path | None, oldest: int = 0
    ) -> tuple[int, int | None, StreamShard | None]:
        """Register a connection that sends the frames of a stream.

        Returns a number to pass to `put` and `leave`, the next frame that is needed, and the shard of it that is needed
        (None: all of it). `oldest` is the first frame that the job still has; `UsageError` if earlier frames are needed
        and no log has them.
        """
        with self.control.changed:
            follower = self.control.follower
            known = None if follower is None else follower.state.manifest
            if known is not None and known.run != manifest.run:
                raise UsageError(
                    f"this is the shadow of run {known.run}, not of {manifest.run}",
                    hint="start another shadow for another run, or this one again with another base",
                )
            if known is not None and manifest.epoch < known.epoch:
                raise UsageError(f"epoch {manifest.epoch} is over: the shadow follows epoch {known.epoch}")
            if follower is None or known is None or manifest.epoch > known.epoch or self.control.stale is not None:
                if oldest > 0 and self.control.log is None and not (run is not None and epochs_of(run)):
                    raise frames_gone_error(0, oldest)  # loading the base would be useless
                follower = self.control.follow(manifest, run)
            follower.run = run
            follower.find_log()
            follower.add_state_kinds(manifest)
            feed = follower.feeds.get(stream)
            if feed is None or feed.assembler.tables.schema.hash() != manifest.stream(stream).hash():
                raise UsageError(f"stream {stream} differs from the manifest of the other ranks")
            wanted = feed.assembler.expected or 0
            if wanted < oldest and feed.tail is None:
                self.control.stale = str(frames_gone_error(wanted, oldest).what)
                self.control.changed.notify_all()
                raise frames_gone_error(wanted, oldest)
            feed.connections += 1
            return follower.number, feed.assembler.expected, feed.assembler.tables.stream_shard

    def leave(self, number: int, stream: int) -> None:
        """Unregister a connection."""
        with self.control.changed:
            if self.control.follower is not None and self.control.follower.number == number:
                feed = self.control.follower.feeds[stream]
                feed.connections -= 1
                feed.missing_until = None
                self.control.changed.notify_all()

    def put(self, number: int, stream: int, frame: ReceivedFrame, is_over: Callable[[], bool] = lambda: False) -> None:
        """Add a frame from a connection. Waits while too much is pending, and while the log fills a gap before it.

        `UsageError` if it cannot be added, or if `is_over` returns True. If the log does not make progress, the
        connection is ended and the job asks again which frame is needed.
        """
        before, end = -1, 0.0
        with self.control.changed:
            while True:
                follower = self.control.follower
                if follower is None or follower.number != number or self.control.stopping or is_over():
                    raise UsageError("the shadow now follows another epoch, or is stopping")
                if self.control.stale is not None:
                    raise UsageError(f"the shadow is stale: {self.control.stale}")
                feed = follower.feeds[stream]
                if feed.assembler.pending_bytes > settings.SHADOW_PENDING_BYTES:
                    self.control.changed.wait(1.0)
                    continue
                try:
                    feed.assembler.offer(frame)
                except GapError as gap:
                    if feed.tail is None:
                        self.control.stale = f"stream {stream}: {gap}, and it has no log to read the missing ones from"
                        self.control.changed.notify_all()
                        continue
                    if gap.expected != before:
                        before, end = gap.expected, time.monotonic() + settings.SHADOW_GAP_SECONDS
                    elif time.monotonic() > end:
                        raise UsageError(f"{gap}, and the missing frames are not in the log") from gap
                    feed.missing_until = gap.got
                    self.control.changed.wait(1.0)
                    continue
                feed.missing_until = None
                self.control.changed.notify_all()
                return

    # ------------------------------------------------------------------------------------------------------------------
    # Queries

    def status(self) -> dict[str, Any]:
        """The condition, step and lag of the shadow, as JSON values."""
        with self.control.changed:
            follower, stale = self.control.follower, self.control.stale
            condition = STALE if stale else LIVE if follower else LOADING
            details = {"step": None} if follower is None else follower.status()
            shard = [self.shard.number + 1, self.shard.count]
            return {"schema": 1, "condition": condition, "reason": stale, "share": shard, **details}

    def snapshot(self) -> StateSnapshot:
        """A snapshot of the newest complete step, which does not change while the shadow continues. Close it."""
        with self.control.changed:
            follower = self._current()
            if not self.shard.is_whole:
                follower.advance(self.control.changed, follower.complete_step, lambda: self.control.is_over(follower))
        return follower.state.snapshot(lambda: describe_state(follower.state, follower.base, follower.log))

    def pin(self) -> StepPin:
        """Stop a shard from applying steps until the pin is closed; further steps may become complete."""
        with self.control.changed:
            follower = self._current()
            return StepPin(
                self.control.changed, follower, lambda: self.control.is_over(follower), lambda: self.control.stale
            )

    def _current(self) -> EpochFollower:
        if self.control.follower is None:
            raise UsageError("the shadow has no state yet", hint="wait until the job has started")
        return self.control.follower
