"""The shadow: receives frames from connections and the log, applies complete steps, and provides snapshots.

One thread applies every step that is complete in all streams; another reads the log for streams without a connection
and looks for new epochs. A shadow with a shard of the state delays applying its newest steps, and a `StepPin` stops it
for a moment, so that all shards can be brought to the same step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ucp import settings
from ucp.engine.work_shard import WorkShard
from ucp.errors import UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.epoch_manifest import EpochManifest, read_manifest
from ucp.log.frames import BadBytesError
from ucp.log.reader import epoch_folder, stream_folder
from ucp.log.stream_schema import FIRST_KINDS
from ucp.training.shadow.shadow_checkpoint import (
    InitialState,
    continues_from,
    describe_state,
    epochs_of,
    from_current_state,
    from_log,
    from_manifest,
    is_log_of_states,
    newest_of,
    root_of,
)
from ucp.training.shadow.shadow_state import ShadowState, StateSnapshot
from ucp.training.shadow.step_assembler import (
    WHOLE,
    BlockTables,
    GapError,
    LogTail,
    ReceivedDigests,
    ReceivedFrame,
    ReceivedStep,
    StepAssembler,
    StreamShard,
    stream_shards,
)


@dataclass(slots=True)
class StreamFeed:
    """The frames of one stream, from connections or, without any, from the log."""

    assembler: StepAssembler
    tail: LogTail | None = None
    connections: int = 0  # open connections that send its frames
    missing_until: int | None = None  # a connection has sent this frame, but frames before it are missing


@dataclass(slots=True)
class EpochFollower:
    """One epoch that is being followed. Not thread-safe: guarded by the shadow's lock."""

    number: int  # increases with every start, so that frames for an older one are refused
    state: ShadowState
    base: Path
    feeds: dict[int, StreamFeed]
    log: Path | None
    run: Path | None = None  # as the job names it; its log may not exist yet
    target_step: int = -1  # a shard applies its steps up to this one without delay
    is_broken: bool = False  # a step could not be applied, so no further step can be
    pins: int = 0  # number of open pins, which stop the shard at the target step
    pinned_until: float = 0.0  # time (`time.monotonic`) at which the pins expire
    applied_at: float = field(default_factory=time.time)

    @staticmethod
    def after(number: int, initial: InitialState, log: Path | None) -> EpochFollower:
        """Follow an epoch from an initial state: every stream from its first frame that is not in the state."""
        manifest, shard = initial.state.manifest, initial.state.shard
        stream_parts = stream_shards(manifest, shard)
        feeds = {}
        for schema in manifest.streams:
            stream_shard = None if shard.is_whole else stream_parts[schema.stream]
            tables = BlockTables(schema, manifest.state_kinds, stream_shard)
            position = initial.positions.get(schema.stream, 0)
            feeds[schema.stream] = StreamFeed(StepAssembler(manifest.epoch, tables, position))
        made = EpochFollower(number, initial.state, initial.base, feeds, None)
        if log is not None:
            made.follow_log(log)
        return made

    def follow_log(self, log: Path) -> None:
        """Read the streams without connections from a log."""
        self.log = log
        epoch = self.state.manifest.epoch
        for stream, feed in self.feeds.items():
            folder = stream_folder(epoch_folder(root_of(log), epoch), stream)
            feed.tail = LogTail(folder, epoch, feed.assembler.tables)

    def find_log(self) -> None:
        """Follow the job's log if it exists by now: a log of states is created only with the first step."""
        manifest = self.state.manifest
        if self.log is not None or self.run is None or manifest.epoch not in epochs_of(self.run):
            return
        if read_manifest(epoch_folder(root_of(self.run), manifest.epoch)).run == manifest.run:
            self.follow_log(self.run)

    @property
    def lacks_state_kinds(self) -> bool:
        """Whether the names of states are still unknown; an optimizer creates its states in its first step."""
        manifest = self.state.manifest
        return is_log_of_states(manifest) and len(manifest.state_kinds) <= len(FIRST_KINDS)

    def add_state_kinds(self, manifest: EpochManifest) -> None:
        """Take the names of states from a later manifest of the same epoch, if they are still unknown."""
        if self.lacks_state_kinds and len(manifest.state_kinds) > len(FIRST_KINDS):
            self.state.manifest.state_kinds = manifest.state_kinds
            for feed in self.feeds.values():
                feed.assembler.tables.set_kinds(manifest.state_kinds)

    @property
    def complete_step(self) -> int:
        """The newest step that is complete in all streams, applied or not."""
        before = self.state.step
        if self.is_broken:
            return before
        committed = [feed.assembler.committed for feed in self.feeds.values()]
        return max(before, min((before if step is None else step for step in committed), default=before))

    def is_complete(self) -> bool:
        """Whether there is a step, or digests, to apply now."""
        ready = [feed.assembler.ready[0] for feed in self.feeds.values() if feed.assembler.ready]
        if any(isinstance(item, ReceivedDigests) for item in ready):
            return True
        return bool(ready) and len(ready) == len(self.feeds) and self._may_apply()

    def _may_apply(self) -> bool:
        """A shard delays its newest steps: other shards may be behind, and an applied step cannot be undone."""
        state = self.state
        if state.shard.is_whole or state.step < self.target_step:
            return True
        if self.pins and time.monotonic() < self.pinned_until:
            return False
        waiting = max(feed.assembler.pending_bytes for feed in self.feeds.values())
        steps = self.complete_step - state.step
        return waiting > settings.SHADOW_RETAINED_BYTES or steps > settings.SHADOW_RETAINED_STEPS

    def take(self) -> dict[int, ReceivedStep] | ReceivedDigests | None:
        """The next step of all streams, or digests of one; None for an item that is older than the state.

        `BadBytesError` if it is not the expected step.
        """
        for feed in self.feeds.values():
            head = feed.assembler.ready[0] if feed.assembler.ready else None
            if isinstance(head, ReceivedDigests):
                feed.assembler.pop()
                return head if head.step == self.state.step else None
        heads: dict[int, ReceivedStep] = {}
        for number, feed in self.feeds.items():
            head = feed.assembler.ready[0]
            assert isinstance(head, ReceivedStep)
            if head.step <= self.state.step:  # the base had it
                feed.assembler.pop()
                return None
            heads[number] = head
        wrong = {step.step for step in heads.values()} - {self.state.step + 1}
        if wrong:
            raise BadBytesError(f"received step {min(wrong)} instead of step {self.state.step + 1}")
        for feed in self.feeds.values():
            feed.assembler.pop()
        return heads

    def snapshot(self) -> StateSnapshot:
        """A snapshot of the current state. The caller does not hold the lock."""
        return self.state.snapshot(lambda: describe_state(self.state, self.base, self.log))

    def status(self) -> dict[str, Any]:
        """The current step and lag, as JSON values."""
        state, feeds = self.state, self.feeds.values()
        complete = state.step if state.shard.is_whole else self.complete_step  # a shard applies on demand
        seen = max([complete, *(feed.assembler.newest or 0 for feed in feeds)])
        return {
            "run": state.manifest.run,
            "epoch": state.manifest.epoch,
            "step": complete,
            "applied_step": state.step,
            "lag_steps": seen - complete,
            "seconds_since_step": time.time() - self.applied_at,
            "state_bytes": state.nbytes,
            "pending_bytes": sum(feed.assembler.pending_bytes for feed in feeds),
            "streams": len(feeds),
            "feeds": sum(feed.connections for feed in feeds),
            "proven_step": state.proven_step,
            "exact": not state.labels and state.refuted is None,
            "labels": [str(label) for label in (*([state.refuted] if state.refuted else []), *state.labels)],
            "base": str(self.base),
            "log": None if self.log is None else str(self.log),
        }


class Shadow:
    """Holds the state of the newest complete step. Thread-safe: the lock of `changed` guards all attributes."""

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
        self.changed = threading.Condition()
        self.follower: EpochFollower | None = None
        self.stale: str | None = None  # why it cannot continue
        self._base, self._log = base, log
        self._options = options or ReadOptions()
        self._note = note
        self._waits = wait_for_job
        self._pool = ThreadPoolExecutor(jobs, "ucp-shadow") if jobs > 1 else None
        self._generation = 0
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    # Start and stop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the initial state, and start the threads."""
        if self._log is not None and epochs_of(self._log):
            with self.changed:
                self._begin(from_log(self._base, self._log, self._options, self.shard), self._log)
        elif self._base is not None:
            spread = self._log is not None  # the log brings a spread snapshot to one step
            # Opened only to report a wrong base now instead of at the first step.
            open_checkpoint(self._base, replace(self._options, spread=spread))
        elif self._log is None and not self._waits:
            raise UsageError(
                "a shadow needs a base or a log to start from", hint="pass --base, or --log with its bases"
            )
        if self._log is not None and self.follower is None:
            self._note(f"{self._log}: no log yet; waiting for it")
        for work, name in ((self._apply_steps, "ucp-shadow-apply"), (self._read_log, "ucp-shadow-log")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Apply the complete steps, and stop."""
        with self.changed:
            self._stopping.set()
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self, initial: InitialState, log: Path | None) -> EpochFollower:
        """Follow the epoch of an initial state. The caller holds the lock, as for all methods up to `fail`."""
        self._generation += 1
        manifest = initial.state.manifest
        self.follower = EpochFollower.after(self._generation, initial, log)
        self.stale = None
        self.changed.notify_all()
        self._note(
            f"holds step {initial.state.step} of epoch {manifest.epoch}"
            f" ({len(manifest.streams)} streams, {manifest.kernel.id}), from {initial.base}"
        )
        return self.follower

    def _follow(self, manifest: EpochManifest, run: Path | None) -> EpochFollower:
        """Follow a new epoch, announced by a connection or found in the log."""
        log = self._log
        if log is None and run is not None and epochs_of(run):
            log = run
        old = self.follower
        if old is not None and self.stale is None:
            self.advance(old, manifest.start)
            if continues_from(old.state, manifest):
                initial = from_current_state(old.state, old.base, manifest, self._options)
                if initial is not None:
                    return self._begin(initial, log)
        return self._begin(from_manifest(manifest, run, log, self._base, self._options, self.shard), log)

    def _set_stale(self, reason: str) -> None:
        """Stop applying steps; the current state is kept. An earlier reason is not overwritten."""
        self.stale = self.stale or reason
        self.changed.notify_all()

    def advance(self, follower: EpochFollower, step: int) -> None:
        """Let a shard apply its delayed steps up to a complete one."""
        follower.target_step = max(follower.target_step, min(step, follower.complete_step))
        end = time.monotonic() + settings.SHADOW_ALIGN_SECONDS
        while follower.state.step < follower.target_step and not follower.is_broken:
            if self._stopping.is_set() or self.follower is not follower:
                return
            self.changed.notify_all()
            if time.monotonic() > end:
                raise UsageError(f"step {follower.target_step} was not reached in time", hint="try again")
            self.changed.wait(0.1)

    def fail(self, reason: str) -> None:
        """Stop applying steps, and notify the operator."""
        with self.changed:
            self._set_stale(reason)
        self._note(f"stale: {reason}")

    # The thread that applies steps ------------------------------------------------------------------------------------

    def _apply_steps(self) -> None:
        """Apply complete steps until the shadow stops and none is left."""
        while True:
            with self.changed:
                while not self._stopping.is_set() and not self._can_apply():
                    self.changed.wait(1.0)
                follower = self.follower
                if follower is None or not self._can_apply():
                    return  # stopping
                try:
                    step = follower.take()
                except BadBytesError as error:
                    self._set_stale(str(error))
                    follower.is_broken = True
                    step = None
                self.changed.notify_all()
            if step is not None:
                self._apply(follower, step)

    def _can_apply(self) -> bool:
        """Whether there is anything to apply now."""
        follower = self.follower
        if follower is None or follower.is_broken:
            return False
        # A stale shard can still apply the steps that it has delayed.
        return (self.stale is None or follower.state.step < follower.target_step) and follower.is_complete()

    def _apply(self, follower: EpochFollower, step: dict[int, ReceivedStep] | ReceivedDigests) -> None:
        try:
            if isinstance(step, ReceivedDigests):
                follower.state.compare(step.stream, step.digests)
            else:
                follower.state.apply(step, self._pool)
        except (UcpError, BadBytesError) as error:
            follower.is_broken = True
            self.fail(f"step {follower.state.step + 1}: {error}")
        except BaseException as error:
            follower.is_broken = True
            self.fail(f"step {follower.state.step + 1}: {error!r}")
            raise  # unexpected: show the operator a traceback
        follower.applied_at = time.time()
        with self.changed:
            self.changed.notify_all()
        if follower.state.refuted is not None:
            self._note(str(follower.state.refuted))

    # The thread that reads the log ------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        pause, looked = 0.0, 0.0
        while not self._stopping.wait(pause):
            moved = False
            try:
                if time.monotonic() - looked > settings.SHADOW_EPOCH_SECONDS:
                    moved, looked = self._find_newer_epoch(), time.monotonic()
                with self.changed:
                    follower = None if self.stale is not None else self.follower
                for feed in () if follower is None else follower.feeds.values():
                    moved |= self._poll(feed)
            except GapError as gap:  # needed frames were dropped from the log: start again from its newest base
                with self.changed:
                    assert self.follower is not None
                    log = self.follower.log
                    assert log is not None
                    self._note(
                        f"starts again: frame {gap.expected} is not in the log, which starts with frame {gap.got}"
                    )
                    self._begin(newest_of(log, self._base, self._options, self.shard), log)
            except BadBytesError as error:
                self.fail(f"the log is out of order: {error}")
            except UcpError as error:
                self.fail(str(error))
            shortest = settings.SHADOW_POLL_SECONDS  # poll less and less often while there is nothing new
            pause = 0.0 if moved else min(max(1.2 * pause, shortest), 10 * shortest)

    def _poll(self, feed: StreamFeed) -> bool:
        """Read a stream without connections from the log; returns whether there was anything new."""

        def take(frame: ReceivedFrame) -> bool:
            with self.changed:
                if feed.assembler.pending_bytes > settings.SHADOW_PENDING_BYTES:
                    return False
                feed.assembler.offer(frame)
                self.changed.notify_all()
                return True

        with self.changed:
            wanted, until = feed.assembler.expected, feed.missing_until
            if feed.tail is None or (feed.connections and until is None):
                return False
        return feed.tail.poll(wanted, take, until) > 0

    def _find_newer_epoch(self) -> bool:
        """Follow a newer epoch of the log, if there is one."""
        with self.changed:
            if self.follower is not None:
                self.follower.find_log()
            log = self._log if self.follower is None else self.follower.log
        epochs = [] if log is None else epochs_of(log)
        if log is None or not epochs:
            return False
        newest = max(epochs)
        with self.changed:
            follower = self.follower
            if follower is not None and newest <= follower.state.manifest.epoch:
                if follower.lacks_state_kinds and newest == follower.state.manifest.epoch:
                    follower.add_state_kinds(read_manifest(epoch_folder(root_of(log), newest)))
                return False
            if follower is not None and any(feed.connections for feed in follower.feeds.values()):
                return False  # the connections will announce it
            self._follow(read_manifest(epoch_folder(root_of(log), newest)), root_of(log).parent)
        return True

    # Frames from connections ------------------------------------------------------------------------------------------

    def join(
        self, manifest: EpochManifest, stream: int, run: Path | None, oldest: int = 0
    ) -> tuple[int, int, StreamShard | None]:
        """Register a connection that sends the frames of a stream.

        Returns a number to pass to `put` and `leave`, the next frame that is needed, and the shard of it that is needed
        (None: all of it). `oldest` is the first frame that the job still has; `UsageError` if earlier frames are needed
        and no log has them.
        """
        with self.changed:
            follower = self.follower
            known = None if follower is None else follower.state.manifest
            if known is not None and known.run != manifest.run:
                raise UsageError(
                    f"this is the shadow of run {known.run}, not of {manifest.run}",
                    hint="start another shadow for another run, or this one again with another base",
                )
            if known is not None and manifest.epoch < known.epoch:
                raise UsageError(f"epoch {manifest.epoch} is over: the shadow follows epoch {known.epoch}")
            if follower is None or known is None or manifest.epoch > known.epoch or self.stale is not None:
                if oldest > 0 and self._log is None and not (run is not None and epochs_of(run)):
                    raise _frames_gone_error(0, oldest)  # loading the base would be useless
                follower = self._follow(manifest, run)
            follower.run = run
            follower.find_log()
            follower.add_state_kinds(manifest)
            feed = follower.feeds.get(stream)
            if feed is None or feed.assembler.tables.schema.hash() != manifest.stream(stream).hash():
                raise UsageError(f"stream {stream} differs from the manifest of the other ranks")
            wanted = feed.assembler.expected
            if wanted < oldest and feed.tail is None:
                gone = _frames_gone_error(wanted, oldest)
                self._set_stale(gone.what)
                raise gone
            feed.connections += 1
            return follower.number, wanted, feed.assembler.tables.stream_shard

    def leave(self, number: int, stream: int) -> None:
        """Unregister a connection."""
        with self.changed:
            if self.follower is not None and self.follower.number == number:
                feed = self.follower.feeds[stream]
                feed.connections -= 1
                feed.missing_until = None
                self.changed.notify_all()

    def put(self, number: int, stream: int, frame: ReceivedFrame, is_over: Callable[[], bool] = lambda: False) -> None:
        """Add a frame from a connection. Waits while too much is pending, and while the log fills a gap before it.

        `UsageError` if it cannot be added, or if `is_over` returns True. If the log does not make progress, the
        connection is ended and the job asks again which frame is needed.
        """
        before, end = -1, 0.0
        with self.changed:
            while True:
                follower = self.follower
                if follower is None or follower.number != number or self._stopping.is_set() or is_over():
                    raise UsageError("the shadow now follows another epoch, or is stopping")
                if self.stale is not None:
                    raise UsageError(f"the shadow is stale: {self.stale}")
                feed = follower.feeds[stream]
                if feed.assembler.pending_bytes > settings.SHADOW_PENDING_BYTES:
                    self.changed.wait(1.0)
                    continue
                try:
                    feed.assembler.offer(frame)
                except GapError as gap:
                    if feed.tail is None:
                        self._set_stale(f"stream {stream}: {gap}, and it has no log to read the missing ones from")
                        continue
                    if gap.expected != before:
                        before, end = gap.expected, time.monotonic() + settings.SHADOW_GAP_SECONDS
                    elif time.monotonic() > end:
                        raise UsageError(f"{gap}, and the missing frames are not in the log") from gap
                    feed.missing_until = gap.got
                    self.changed.wait(1.0)
                    continue
                feed.missing_until = None
                self.changed.notify_all()
                return

    # Queries ----------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The condition (live, stale or loading), step and lag of the shadow, as JSON values."""
        with self.changed:
            condition = "stale" if self.stale else "live" if self.follower else "loading"
            details = {"step": None} if self.follower is None else self.follower.status()
            shard = [self.shard.number + 1, self.shard.count]
            return {"schema": 1, "condition": condition, "reason": self.stale, "share": shard, **details}

    def snapshot(self) -> StateSnapshot:
        """A snapshot of the newest complete step, which does not change while the shadow continues. Close it."""
        with self.changed:
            follower = self._current()
            if not self.shard.is_whole:
                self.advance(follower, follower.complete_step)
        return follower.snapshot()

    def pin(self) -> StepPin:
        """Stop a shard from applying steps until the pin is closed; further steps may become complete."""
        with self.changed:
            return StepPin(self, self._current())

    def _current(self) -> EpochFollower:
        if self.follower is None:
            raise UsageError("the shadow has no state yet", hint="wait until the job has started")
        return self.follower


def _frames_gone_error(wanted: int, oldest: int) -> UsageError:
    """The error for a job that no longer has the frames that the shadow needs."""
    return UsageError(
        f"the shadow needs frame {wanted}, but the job has dropped all frames before {oldest}, and it has no log",
        hint="save a checkpoint, and record again with base= naming it",
    )


class StepPin:
    """Stops a shard from applying steps beyond the requested ones; further steps may become complete. Close it soon.

    It expires a while after the last query, so that a client that forgets it does not stop the shard.
    """

    def __init__(self, shadow: Shadow, follower: EpochFollower) -> None:
        """The caller holds the shadow's lock."""
        self._shadow = shadow
        self._follower = follower
        self._open = True
        follower.pins += 1
        self._hold()

    def _hold(self) -> None:
        self._follower.pinned_until = time.monotonic() + 2 * settings.SHADOW_ALIGN_SECONDS

    def status(self) -> dict[str, Any]:
        """The steps that are available, as JSON values."""
        with self._shadow.changed:
            self._hold()
            state = self._follower.state
            return {
                "run": state.manifest.run,
                "epoch": state.manifest.epoch,
                "share": [state.shard.number, state.shard.count],
                "applied": state.step,
                "complete": self._follower.complete_step,
                "reason": self._shadow.stale,
            }

    def snapshot(self, step: int) -> StateSnapshot:
        """The state after exactly this step; `UsageError` if that is not available."""
        with self._shadow.changed:
            self._shadow.advance(self._follower, step)
        made = self._follower.snapshot()
        if made.step == step:
            return made
        made.close()
        raise UsageError(f"the shadow has step {made.step}, not step {step}", hint="try again")

    def close(self) -> None:
        """Let the shard continue."""
        with self._shadow.changed:
            if self._open:
                self._open = False
                self._follower.pins -= 1
                self._shadow.changed.notify_all()
