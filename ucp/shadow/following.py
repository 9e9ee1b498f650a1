"""The shadow itself: takes frames from wherever they come, applies every step that is complete in all streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ucp import tunables
from ucp.engine.shares import Share
from ucp.errors import UcpError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.frames import BadBytesError
from ucp.log.manifest import Manifest, read_manifest
from ucp.log.reader import epoch_folder
from ucp.records import replace
from ucp.shadow.assembling import tell
from ucp.shadow.epochs import epochs_of, from_held, from_told, goes_on_from, newest_of, root_of
from ucp.shadow.intake import ArrivedDigests, Frame, GapError
from ucp.shadow.lanes import Following, cannot_catch_up
from ucp.shadow.loading import Beginning, from_log
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
        self.base = base
        self.log = log
        self._options = options or ReadOptions()
        self._note = note
        self._waits = wait_for_job
        self._pool = ThreadPoolExecutor(jobs, "ucp-shadow") if jobs > 1 else None
        self._changed = threading.Condition()  # guards everything below
        self._following: Following | None = None
        self._stale: str | None = None
        self._stopping = False
        self._ending = threading.Event()
        self._beginnings = 0
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------------------------------------------------------
    # Life

    def start(self) -> None:
        """Load what there is, and begin to apply."""
        if self.log is not None and epochs_of(self.log):
            with self._changed:
                self._begin(from_log(self.base, self.log, self._options, self.share), self.log)
        elif self.base is not None:
            spread = self.log is not None  # which will bring its parts to one step
            open_checkpoint(
                self.base, replace(self._options, spread=spread)
            )  # to say now, and not with the first step, that it is none
        elif self.log is None and not self._waits:
            raise UsageError("a shadow needs something to begin with", hint="name a base, or a log with its bases")
        for work, name in ((self._apply_all, "ucp-shadow-apply"), (self._read_log, "ucp-shadow-log")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Apply what is complete, and end."""
        with self._changed:
            self._stopping = True
            self._ending.set()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    def _give_up(self, reason: str) -> None:
        """Nothing can be applied any more; what is held stays."""
        with self._changed:
            self._stale = self._stale or reason
            self._changed.notify_all()
        self._note(f"stale: {reason}")

    def _begin(self, beginning: Beginning, log: Path | None) -> Following:
        self._beginnings += 1
        manifest = beginning.state.manifest
        self._following = Following.after(self._beginnings, beginning, log)
        self._stale = None
        self._changed.notify_all()
        self._note(
            f"holds step {beginning.state.step} of epoch {manifest.epoch}"
            f" ({len(manifest.streams)} streams, {manifest.kernel.id}), from {beginning.base}"
        )
        return self._following

    # ------------------------------------------------------------------------------------------------------------------
    # Feeding

    def join(
        self, manifest: Manifest, stream: int, run: Path | None, oldest: int = 0
    ) -> tuple[int, int | None, Portion | None]:
        """A feed of a stream begins: gives (number of the beginning, the frame that is wanted next, what of it).

        `oldest` is the first frame that the job still has. `UsageError` where frames before it are wanted, and no log
        has them.
        """
        with self._changed:
            following = self._following
            known = None if following is None else following.state.manifest
            if known is not None and known.run != manifest.run:
                raise UsageError(
                    f"this is the shadow of run {known.run}, not of {manifest.run}",
                    hint="start another shadow for another run, or this one again with another base",
                )
            if known is not None and manifest.epoch < known.epoch:
                raise UsageError(f"epoch {manifest.epoch} is over: the shadow follows epoch {known.epoch}")
            if following is None or known is None or manifest.epoch > known.epoch or self._stale is not None:
                if oldest > 0 and self.log is None and not (run is not None and epochs_of(run)):
                    raise cannot_catch_up(0, oldest)  # and it would be in vain to begin with the base
                following = self._follow(manifest, run)
            following.run = run
            following.find_log()
            following.learn_kinds(manifest)
            lane = following.lanes.get(stream)
            if lane is None or lane.intake.tables.schema.hash() != manifest.stream(stream).hash():
                raise UsageError(f"stream {stream} is not what the other ranks say it is")
            wanted = lane.intake.expected or 0
            if wanted < oldest and lane.tail is None:
                self._stale = str(cannot_catch_up(wanted, oldest).what)
                self._changed.notify_all()
                raise cannot_catch_up(wanted, oldest)
            lane.feeds += 1
            return following.number, lane.intake.expected, lane.intake.tables.portion

    def leave(self, number: int, stream: int) -> None:
        """A feed of a stream is over."""
        with self._changed:
            if self._following is not None and self._following.number == number:
                lane = self._following.lanes[stream]
                lane.feeds -= 1
                lane.hole = None
                self._changed.notify_all()

    def put(self, number: int, stream: int, frame: Frame, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take a frame of a feed. Waits while too much is pending, and while the log fills a gap before it.

        `UsageError` where it cannot be taken, or `is_over` says that nobody waits for that any more.
        """
        with self._changed:
            while True:
                following = self._following
                if following is None or following.number != number or self._stopping or is_over():
                    raise UsageError("the shadow follows another epoch now, or stops")
                if self._stale is not None:
                    raise UsageError(f"the shadow is stale: {self._stale}")
                lane = following.lanes[stream]
                if lane.intake.pending_bytes > tunables.SHADOW_PENDING_BYTES:
                    self._changed.wait(1.0)
                    continue
                try:
                    lane.intake.offer(frame)
                except GapError as gap:
                    if lane.tail is None:
                        self._stale = f"stream {stream}: {gap}, and there is no log to read it from"
                        self._changed.notify_all()
                        continue
                    lane.hole = gap.got
                    self._changed.wait(1.0)
                    continue
                lane.hole = None
                self._changed.notify_all()
                return

    def _follow(self, manifest: Manifest, run: Path | None) -> Following:
        """Begin with an epoch that a feed, or the log, has told of."""
        log = self.log
        if log is None and run is not None and epochs_of(run):
            log = run
        old = self._following
        if old is not None and self._stale is None:
            old.advance(self._changed, manifest.start, lambda: self._is_over(old))
            if goes_on_from(old.state, manifest):
                held = from_held(old.state, old.base, manifest, self._options)
                if held is not None:
                    return self._begin(held, log)
        return self._begin(from_told(manifest, run, log, self.base, self._options, self.share), log)

    def _is_over(self, following: Following) -> bool:
        """Will nothing be applied any more to what was followed?"""
        return self._stopping or self._following is not following

    # ------------------------------------------------------------------------------------------------------------------
    # Applying

    def _apply_all(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and not self._is_complete():
                    self._changed.wait(1.0)
                following = self._following
                if following is None or not self._is_complete():
                    return  # stopping
                try:
                    step = following.take()
                except BadBytesError as error:
                    self._stale = self._stale or str(error)
                    following.is_broken = True
                    step = None
                self._changed.notify_all()
            if step is None:
                continue
            try:
                if isinstance(step, ArrivedDigests):
                    following.state.compare(step.stream, step.digests)
                else:
                    following.state.apply(step, self._pool)
            except (UcpError, BadBytesError) as error:
                following.is_broken = True
                self._give_up(f"step {following.state.step + 1}: {error}")
            except BaseException as error:
                following.is_broken = True
                self._give_up(f"step {following.state.step + 1}: {error!r}")
                raise  # nobody expects this: whoever runs the shadow should see where it comes from
            following.applied_at = time.time()
            with self._changed:
                self._changed.notify_all()
            if following.state.refuted is not None:
                self._note(str(following.state.refuted))

    def _is_complete(self) -> bool:
        """Is there anything that can be applied now?"""
        following = self._following
        if following is None or following.is_broken:
            return False
        # A share that is stale still gives the steps that it has kept back.
        return (self._stale is None or following.state.step < following.goal) and following.is_complete()

    # ------------------------------------------------------------------------------------------------------------------
    # Reading the log

    def _read_log(self) -> None:
        pause, looked = 0.0, 0.0
        while not self._ending.wait(pause):
            moved = False
            try:
                if time.monotonic() - looked > tunables.SHADOW_EPOCH_SECONDS:
                    moved, looked = self._look_for_epoch(), time.monotonic()
                moved |= self._poll()
            except GapError as gap:
                self._reload(f"the log begins with frame {gap.got}, and frame {gap.expected} is wanted")
            except BadBytesError as error:
                self._give_up(f"the log is out of order: {error}")
            except UcpError as error:
                self._give_up(str(error))
            shortest = tunables.SHADOW_POLL_SECONDS  # at first, and then less and less often
            pause = 0.0 if moved else min(max(1.2 * pause, shortest), 10 * shortest)

    def _poll(self) -> bool:
        """Read what the log has of streams that nothing else brings."""
        with self._changed:
            following = None if self._stale is not None else self._following
        return following is not None and following.read_log(self._changed)

    def _look_for_epoch(self) -> bool:
        """Go on with an epoch of the log that is newer than the one that is followed."""
        with self._changed:
            if self._following is not None:
                self._following.find_log()
            log = self.log if self._following is None else self._following.log
        epochs = [] if log is None else epochs_of(log)
        if log is None or not epochs:
            return False
        newest = max(epochs)
        with self._changed:
            following = self._following
            if following is not None and newest <= following.state.manifest.epoch:
                if following.lacks_kinds and newest == following.state.manifest.epoch:
                    following.learn_kinds(read_manifest(epoch_folder(root_of(log), newest)))
                return False
            if following is not None and any(lane.feeds for lane in following.lanes.values()):
                return False  # the feeds tell when they go over to it
            self._follow(read_manifest(epoch_folder(root_of(log), newest)), root_of(log).parent)
        return True

    def _reload(self, reason: str) -> None:
        """The frames that are wanted are gone from the log: begin again with its newest base."""
        with self._changed:
            assert self._following is not None
            log = self._following.log
            assert log is not None
            self._note(f"begins again: {reason}")
            self._begin(newest_of(log, self.base, self._options, self.share), log)

    # ------------------------------------------------------------------------------------------------------------------
    # Asking

    def status(self) -> dict[str, Any]:
        """What the shadow holds and how far it is behind, as JSON values."""
        with self._changed:
            following, stale = self._following, self._stale
            condition = STALE if stale else LIVE if following else LOADING
            told = {"step": None} if following is None else following.told()
            share = [self.share.number + 1, self.share.count]
            return {"schema": 1, "condition": condition, "reason": stale, "share": share, **told}

    def snapshot(self) -> Snapshot:
        """The state as it is after the newest complete step; the shadow goes on. Close it."""
        with self._changed:
            following = self._held()
            if not self.share.is_whole:
                following.advance(self._changed, following.complete_step, lambda: self._is_over(following))
        return following.state.snapshot(lambda: tell(following.state, following.base, following.log))

    def pin(self) -> Pin:
        """Keep a share at the steps that it can give now, until the pin is let go of. More may become complete."""
        with self._changed:
            following = self._held()
            return Pin(self._changed, following, lambda: self._is_over(following), lambda: self._stale)

    def _held(self) -> Following:
        if self._following is None:
            raise UsageError("the shadow holds nothing yet", hint="the job that it follows has not begun")
        return self._following


__all__ = ["LIVE", "LOADING", "STALE", "Shadow"]
