"""What a shadow follows now, and how it comes to follow something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ucp.engine.shares import Share
from ucp.formats.registry import ReadOptions
from ucp.log.manifest import Manifest
from ucp.shadow.epochs import epochs_of, from_held, from_told, goes_on_from, newest_of
from ucp.shadow.lanes import Following
from ucp.shadow.loading import Beginning


class Course:
    """The epoch that is followed, and why it cannot be followed any more. `changed` guards all of it: hold it."""

    def __init__(
        self,
        base: Path | None,
        log: Path | None,
        options: ReadOptions,
        share: Share,
        note: Callable[[str], None],
    ) -> None:
        self.base = base
        self.log = log
        self.options = options
        self.share = share
        self.note = note
        self.changed = threading.Condition()
        self.following: Following | None = None
        self.stale: str | None = None
        self.stopping = False
        self._beginnings = 0

    def begin(self, beginning: Beginning, log: Path | None) -> Following:
        """Follow what goes on from a beginning."""
        self._beginnings += 1
        manifest = beginning.state.manifest
        self.following = Following.after(self._beginnings, beginning, log)
        self.stale = None
        self.changed.notify_all()
        self.note(
            f"holds step {beginning.state.step} of epoch {manifest.epoch}"
            f" ({len(manifest.streams)} streams, {manifest.kernel.id}), from {beginning.base}"
        )
        return self.following

    def follow(self, manifest: Manifest, run: Path | None) -> Following:
        """Begin with an epoch that a feed, or the log, has told of."""
        log = self.log
        if log is None and run is not None and epochs_of(run):
            log = run
        old = self.following
        if old is not None and self.stale is None:
            old.advance(self.changed, manifest.start, lambda: self.is_over(old))
            if goes_on_from(old.state, manifest):
                held = from_held(old.state, old.base, manifest, self.options)
                if held is not None:
                    return self.begin(held, log)
        return self.begin(from_told(manifest, run, log, self.base, self.options, self.share), log)

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

    def is_over(self, following: Following) -> bool:
        """Will nothing be applied any more to what was followed?"""
        return self.stopping or self.following is not following


__all__ = ["Course"]
