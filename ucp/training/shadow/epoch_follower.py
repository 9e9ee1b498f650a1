"""Follow one epoch: collect the frames of all streams, and find the next step that is complete in all of them.

A shadow with a shard of the state delays applying its newest steps, so that all shards can be brought to the same step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp import settings
from ucp.errors import UsageError
from ucp.log.epoch_manifest import EpochManifest, read_manifest
from ucp.log.frames import BadBytesError
from ucp.log.reader import epoch_folder, stream_folder
from ucp.log.stream_schema import FIRST_KINDS
from ucp.training.shadow.initial_state import InitialState, epochs_of, is_log_of_states, root_of
from ucp.training.shadow.shadow_state import ShadowState, StateSnapshot
from ucp.training.shadow.step_assembler import (
    BlockTables,
    LogTail,
    ReceivedDigests,
    ReceivedFrame,
    ReceivedStep,
    StepAssembler,
    stream_shards,
)
from ucp.training.shadow.to_checkpoint import describe_state


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

    def advance(self, changed: threading.Condition, step: int, is_over: Callable[[], bool]) -> None:
        """Let a shard apply its delayed steps up to a complete one. The caller holds the lock."""
        self.target_step = max(self.target_step, min(step, self.complete_step))
        end = time.monotonic() + settings.SHADOW_ALIGN_SECONDS
        while self.state.step < self.target_step and not self.is_broken and not is_over():
            changed.notify_all()
            if time.monotonic() > end:
                raise UsageError(f"step {self.target_step} was not reached in time", hint="try again")
            changed.wait(0.1)

    def read_log(self, changed: threading.Condition) -> bool:
        """Read streams without connections from the log; returns whether there was anything new."""
        moved = 0
        for feed in self.feeds.values():
            with changed:
                until = feed.missing_until
                if feed.tail is None or (feed.connections and until is None):
                    continue
                wanted = feed.assembler.expected

            def take(frame: ReceivedFrame, feed: StreamFeed = feed) -> bool:
                """Add a frame of the log, unless enough are pending."""
                with changed:
                    if feed.assembler.pending_bytes > settings.SHADOW_PENDING_BYTES:
                        return False
                    feed.assembler.offer(frame)
                    changed.notify_all()
                    return True

            moved += feed.tail.poll(wanted, take, until)
        return moved > 0

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
