"""What a shadow follows now, and how it comes to follow something else.

The thread that applies every step that is complete in all streams.

The thread that reads the log: what no feed brings, and epochs that no feed has told of.

The shadow itself: takes frames from wherever they come, and is asked what it holds.
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
    """The epoch that is followed, and why it cannot be followed any more. `changed` guards all of it: hold it."""

    def __init__(
        self,
        base: Path | None,
        log: Path | None,
        options: ReadOptions,
        share: WorkShard,
        note: Callable[[str], None],
    ) -> None:
        self.base = base
        self.log = log
        self.options = options
        self.share = share
        self.note = note
        self.changed = threading.Condition()
        self.following: EpochFollower | None = None
        self.stale: str | None = None
        self.stopping = False
        self._beginnings = 0

    def begin(self, beginning: InitialState, log: Path | None) -> EpochFollower:
        """Follow what goes on from a beginning."""
        self._beginnings += 1
        manifest = beginning.state.manifest
        self.following = EpochFollower.after(self._beginnings, beginning, log)
        self.stale = None
        self.changed.notify_all()
        self.note(
            f"holds step {beginning.state.step} of epoch {manifest.epoch}"
            f" ({len(manifest.streams)} streams, {manifest.kernel.id}), from {beginning.base}"
        )
        return self.following

    def follow(self, manifest: EpochManifest, run: Path | None) -> EpochFollower:
        """Begin with an epoch that a feed, or the log, has told of."""
        log = self.log
        if log is None and run is not None and epochs_of(run):
            log = run
        old = self.following
        if old is not None and self.stale is None:
            old.advance(self.changed, manifest.start, lambda: self.is_over(old))
            if continues_from(old.state, manifest):
                held = from_current_state(old.state, old.base, manifest, self.options)
                if held is not None:
                    return self.begin(held, log)
        return self.begin(from_manifest(manifest, run, log, self.base, self.options, self.share), log)

    def begin_again(self, reason: str) -> None:
        """The frames that are wanted are gone from the log: begin again with its newest base."""
        assert self.following is not None
        log = self.following.log
        assert log is not None
        self.note(f"begins again: {reason}")
        self.begin(newest_of(log, self.base, self.options, self.share), log)

    def make_stale(self, reason: str) -> None:
        """Nothing can be applied any more, for this reason or for one before it; what is held stays."""
        self.stale = self.stale or reason
        self.changed.notify_all()

    def give_up(self, reason: str) -> None:
        """The same for who does not hold the lock, and told to whoever runs the shadow."""
        with self.changed:
            self.make_stale(reason)
        self.note(f"stale: {reason}")

    def is_over(self, following: EpochFollower) -> bool:
        """Will nothing be applied any more to what was followed?"""
        return self.stopping or self.following is not following


def apply_all(course: FollowControl, pool: ThreadPoolExecutor | None) -> None:
    """Apply what is complete, until the course stops and nothing complete is left."""
    while True:
        with course.changed:
            while not course.stopping and not _is_complete(course):
                course.changed.wait(1.0)
            following = course.following
            if following is None or not _is_complete(course):
                return  # stopping
            try:
                step = following.take()
            except BadBytesError as error:
                course.make_stale(str(error))
                following.is_broken = True
                step = None
            course.changed.notify_all()
        if step is not None:
            _apply(course, following, step, pool)


def _apply(
    course: FollowControl,
    following: EpochFollower,
    step: dict[int, ReceivedStep] | ReceivedDigests,
    pool: ThreadPoolExecutor | None,
) -> None:
    try:
        if isinstance(step, ReceivedDigests):
            following.state.compare(step.stream, step.digests)
        else:
            following.state.apply(step, pool)
    except (UcpError, BadBytesError) as error:
        following.is_broken = True
        course.give_up(f"step {following.state.step + 1}: {error}")
    except BaseException as error:
        following.is_broken = True
        course.give_up(f"step {following.state.step + 1}: {error!r}")
        raise  # nobody expects this: whoever runs the shadow should see where it comes from
    following.applied_at = time.time()
    with course.changed:
        course.changed.notify_all()
    if following.state.refuted is not None:
        course.note(str(following.state.refuted))


def _is_complete(course: FollowControl) -> bool:
    """Is there anything that can be applied now?"""
    following = course.following
    if following is None or following.is_broken:
        return False
    # A share that is stale still gives the steps that it has kept back.
    return (course.stale is None or following.state.step < following.goal) and following.is_complete()


def read_log(course: FollowControl, ending: threading.Event) -> None:
    """Read what there is until the end is told of."""
    pause, looked = 0.0, 0.0
    while not ending.wait(pause):
        moved = False
        try:
            if time.monotonic() - looked > settings.SHADOW_EPOCH_SECONDS:
                moved, looked = _find_newer_epoch(course), time.monotonic()
            moved |= _poll(course)
        except GapError as gap:
            with course.changed:
                course.begin_again(f"the log begins with frame {gap.got}, and frame {gap.expected} is wanted")
        except BadBytesError as error:
            course.give_up(f"the log is out of order: {error}")
        except UcpError as error:
            course.give_up(str(error))
        shortest = settings.SHADOW_POLL_SECONDS  # at first, and then less and less often
        pause = 0.0 if moved else min(max(1.2 * pause, shortest), 10 * shortest)


def _poll(course: FollowControl) -> bool:
    """Read what the log has of streams that nothing else brings."""
    with course.changed:
        following = None if course.stale is not None else course.following
    return following is not None and following.read_log(course.changed)


def _find_newer_epoch(course: FollowControl) -> bool:
    """Go on with an epoch of the log that is newer than the one that is followed."""
    with course.changed:
        if course.following is not None:
            course.following.find_log()
        log = course.log if course.following is None else course.following.log
    epochs = [] if log is None else epochs_of(log)
    if log is None or not epochs:
        return False
    newest = max(epochs)
    with course.changed:
        following = course.following
        if following is not None and newest <= following.state.manifest.epoch:
            if following.lacks_kinds and newest == following.state.manifest.epoch:
                following.learn_kinds(read_manifest(epoch_folder(root_of(log), newest)))
            return False
        if following is not None and any(lane.feeds for lane in following.lanes.values()):
            return False  # the feeds tell when they go over to it
        course.follow(read_manifest(epoch_folder(root_of(log), newest)), root_of(log).parent)
    return True


LIVE, STALE, LOADING = "live", "stale", "loading"


class Shadow:
    """Holds the state of the newest complete step. Start it, feed it, ask it. Thread-safe."""

    def __init__(
        self,
        base: Path | None = None,
        log: Path | None = None,
        *,
        options: ReadOptions | None = None,
        jobs: int = 1,
        wait_for_job: bool = False,
        share: WorkShard = WHOLE,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`base` is any checkpoint; `log` a log (or run) to follow. `note` is told what a person may want to know.

        With `wait_for_job`, what there is to begin with may come later, with the job. With a `share`, it holds that
        part of the state only, and keeps the newest steps back until it is asked for one.
        """
        self.share = share
        self.course = FollowControl(base, log, options or ReadOptions(), share, note)
        self._waits = wait_for_job
        self._pool = ThreadPoolExecutor(jobs, "ucp-shadow") if jobs > 1 else None
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------------------------------------------------------
    # Life

    def start(self) -> None:
        """Load what there is, and begin to apply."""
        course = self.course
        if course.log is not None and epochs_of(course.log):
            with course.changed:
                course.begin(from_log(course.base, course.log, course.options, self.share), course.log)
        elif course.base is not None:
            spread = course.log is not None  # which will bring its parts to one step
            # To say now, and not with the first step, that it is none.
            open_checkpoint(course.base, replace(course.options, spread=spread))
        elif course.log is None and not self._waits:
            raise UsageError("a shadow needs something to begin with", hint="name a base, or a log with its bases")
        if course.log is not None and course.following is None:
            course.note(f"{course.log}: no log is there yet: waits for it")
        for work, name in (
            (partial(apply_all, course, self._pool), "ucp-shadow-apply"),
            (partial(read_log, course, self._ending), "ucp-shadow-log"),
        ):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Apply what is complete, and end."""
        with self.course.changed:
            self.course.stopping = True
            self._ending.set()
            self.course.changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    # ------------------------------------------------------------------------------------------------------------------
    # Feeding

    def join(
        self, manifest: EpochManifest, stream: int, run: Path | None, oldest: int = 0
    ) -> tuple[int, int | None, StreamShard | None]:
        """A feed of a stream begins.

        Gives the number that `put` and `leave` ask for, the frame that is wanted next, and which portion of frames is
        (None: all of them). `oldest` is the first frame that the job still has. `UsageError` where frames before it are
        wanted, and no log has them.
        """
        with self.course.changed:
            following = self.course.following
            known = None if following is None else following.state.manifest
            if known is not None and known.run != manifest.run:
                raise UsageError(
                    f"this is the shadow of run {known.run}, not of {manifest.run}",
                    hint="start another shadow for another run, or this one again with another base",
                )
            if known is not None and manifest.epoch < known.epoch:
                raise UsageError(f"epoch {manifest.epoch} is over: the shadow follows epoch {known.epoch}")
            if following is None or known is None or manifest.epoch > known.epoch or self.course.stale is not None:
                if oldest > 0 and self.course.log is None and not (run is not None and epochs_of(run)):
                    raise frames_gone_error(0, oldest)  # and it would be in vain to begin with the base
                following = self.course.follow(manifest, run)
            following.run = run
            following.find_log()
            following.learn_kinds(manifest)
            lane = following.lanes.get(stream)
            if lane is None or lane.intake.tables.schema.hash() != manifest.stream(stream).hash():
                raise UsageError(f"stream {stream} is not what the other ranks say it is")
            wanted = lane.intake.expected or 0
            if wanted < oldest and lane.tail is None:
                self.course.stale = str(frames_gone_error(wanted, oldest).what)
                self.course.changed.notify_all()
                raise frames_gone_error(wanted, oldest)
            lane.feeds += 1
            return following.number, lane.intake.expected, lane.intake.tables.portion

    def leave(self, number: int, stream: int) -> None:
        """A feed of a stream is over."""
        with self.course.changed:
            if self.course.following is not None and self.course.following.number == number:
                lane = self.course.following.lanes[stream]
                lane.feeds -= 1
                lane.hole = None
                self.course.changed.notify_all()

    def put(self, number: int, stream: int, frame: ReceivedFrame, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take a frame of a feed. Waits while too much is pending, and while the log fills a gap before it.

        `UsageError` where it cannot be taken, or `is_over` says that nobody waits for that any more. A log that does
        not come nearer is not waited for: who feeds asks again which frame is wanted.
        """
        before, end = -1, 0.0
        with self.course.changed:
            while True:
                following = self.course.following
                if following is None or following.number != number or self.course.stopping or is_over():
                    raise UsageError("the shadow follows another epoch now, or stops")
                if self.course.stale is not None:
                    raise UsageError(f"the shadow is stale: {self.course.stale}")
                lane = following.lanes[stream]
                if lane.intake.pending_bytes > settings.SHADOW_PENDING_BYTES:
                    self.course.changed.wait(1.0)
                    continue
                try:
                    lane.intake.offer(frame)
                except GapError as gap:
                    if lane.tail is None:
                        self.course.stale = f"stream {stream}: {gap}, and there is no log to read it from"
                        self.course.changed.notify_all()
                        continue
                    if gap.expected != before:
                        before, end = gap.expected, time.monotonic() + settings.SHADOW_GAP_SECONDS
                    elif time.monotonic() > end:
                        raise UsageError(f"{gap}, and the log does not have it") from gap
                    lane.hole = gap.got
                    self.course.changed.wait(1.0)
                    continue
                lane.hole = None
                self.course.changed.notify_all()
                return

    # ------------------------------------------------------------------------------------------------------------------
    # Asking

    def status(self) -> dict[str, Any]:
        """What the shadow holds and how far it is behind, as JSON values."""
        with self.course.changed:
            following, stale = self.course.following, self.course.stale
            condition = STALE if stale else LIVE if following else LOADING
            told = {"step": None} if following is None else following.told()
            share = [self.share.number + 1, self.share.count]
            return {"schema": 1, "condition": condition, "reason": stale, "share": share, **told}

    def snapshot(self) -> StateSnapshot:
        """The state as it is after the newest complete step; the shadow goes on. Close it."""
        with self.course.changed:
            following = self._held()
            if not self.share.is_whole:
                following.advance(self.course.changed, following.complete_step, lambda: self.course.is_over(following))
        return following.state.snapshot(lambda: describe_state(following.state, following.base, following.log))

    def pin(self) -> StepPin:
        """Keep a share at the steps that it can give now, until the pin is let go of. More may become complete."""
        with self.course.changed:
            following = self._held()
            return StepPin(
                self.course.changed, following, lambda: self.course.is_over(following), lambda: self.course.stale
            )

    def _held(self) -> EpochFollower:
        if self.course.following is None:
            raise UsageError("the shadow holds nothing yet", hint="the job that it follows has not begun")
        return self.course.following
