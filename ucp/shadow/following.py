"""The shadow itself: takes frames from wherever they come, and is asked what it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.engine.shares import Share
from ucp.errors import UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.manifest import Manifest
from ucp.shadow.applying import apply_all
from ucp.shadow.assembling import tell
from ucp.shadow.course import Course
from ucp.shadow.epochs import epochs_of
from ucp.shadow.intake import Frame, GapError
from ucp.shadow.lanes import Following, cannot_catch_up
from ucp.shadow.loading import from_log
from ucp.shadow.log_reading import read_log
from ucp.shadow.pins import Pin
from ucp.shadow.portions import WHOLE, Portion
from ucp.shadow.snapshot import Snapshot

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
        share: Share = WHOLE,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`base` is any checkpoint; `log` a log (or run) to follow. `note` is told what a person may want to know.

        With `wait_for_job`, what there is to begin with may come later, with the job. With a `share`, it holds that
        part of the state only, and keeps the newest steps back until it is asked for one.
        """
        self.share = share
        self.course = Course(base, log, options or ReadOptions(), share, note)
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
        self, manifest: Manifest, stream: int, run: Path | None, oldest: int = 0
    ) -> tuple[int, int | None, Portion | None]:
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
                    raise cannot_catch_up(0, oldest)  # and it would be in vain to begin with the base
                following = self.course.follow(manifest, run)
            following.run = run
            following.find_log()
            following.learn_kinds(manifest)
            lane = following.lanes.get(stream)
            if lane is None or lane.intake.tables.schema.hash() != manifest.stream(stream).hash():
                raise UsageError(f"stream {stream} is not what the other ranks say it is")
            wanted = lane.intake.expected or 0
            if wanted < oldest and lane.tail is None:
                self.course.stale = str(cannot_catch_up(wanted, oldest).what)
                self.course.changed.notify_all()
                raise cannot_catch_up(wanted, oldest)
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

    def put(self, number: int, stream: int, frame: Frame, is_over: Callable[[], bool] = lambda: False) -> None:
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
                if lane.intake.pending_bytes > tunables.SHADOW_PENDING_BYTES:
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
                        before, end = gap.expected, time.monotonic() + tunables.SHADOW_GAP_SECONDS
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

    def snapshot(self) -> Snapshot:
        """The state as it is after the newest complete step; the shadow goes on. Close it."""
        with self.course.changed:
            following = self._held()
            if not self.share.is_whole:
                following.advance(self.course.changed, following.complete_step, lambda: self.course.is_over(following))
        return following.state.snapshot(lambda: tell(following.state, following.base, following.log))

    def pin(self) -> Pin:
        """Keep a share at the steps that it can give now, until the pin is let go of. More may become complete."""
        with self.course.changed:
            following = self._held()
            return Pin(
                self.course.changed, following, lambda: self.course.is_over(following), lambda: self.course.stale
            )

    def _held(self) -> Following:
        if self.course.following is None:
            raise UsageError("the shadow holds nothing yet", hint="the job that it follows has not begun")
        return self.course.following


__all__ = ["LIVE", "LOADING", "STALE", "Shadow"]
