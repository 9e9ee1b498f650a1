"""One epoch that a shadow follows: what has come of each stream, and which step is complete in all of them.

What keeps a share from going on for a moment, so that all shares can be brought to one step.
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
from ucp.training.shadow.initial_state import InitialState, epochs_of, holds_states, root_of
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
    """One stream: what has come of it, and how the log is read where nothing else comes."""

    intake: StepAssembler
    tail: LogTail | None = None
    feeds: int = 0  # connections that bring its frames now
    hole: int | None = None  # a feed has come to this frame, and frames before it are missing


@dataclass(slots=True)
class EpochFollower:
    """One epoch that is being followed. Not thread-safe: the shadow's lock guards it."""

    number: int  # counts up with every beginning: what was meant for an older one is refused
    state: ShadowState
    base: Path
    lanes: dict[int, StreamFeed]
    log: Path | None
    run: Path | None = None  # as the job names it: its log may not be there yet
    goal: int = -1  # a share applies its steps up to this one at once
    is_broken: bool = False  # a step could not be applied: none can be any more
    pins: int = 0  # who wants that no step is applied beyond the goal, …
    pinned_until: float = 0.0  # … and until when (`time.monotonic`) that is granted
    applied_at: float = field(default_factory=time.time)

    @staticmethod
    def after(number: int, beginning: InitialState, log: Path | None) -> EpochFollower:
        """What is followed after a beginning: every stream from the frame that the state does not have."""
        manifest, share = beginning.state.manifest, beginning.state.share
        mine = stream_shards(manifest, share)
        lanes = {}
        for schema in manifest.streams:
            portion = None if share.is_whole else mine[schema.stream]
            tables = BlockTables(schema, manifest.state_kinds, portion)
            lane = StreamFeed(StepAssembler(manifest.epoch, tables, beginning.positions.get(schema.stream)))
            if lane.intake.expected is None:
                lane.intake.expected = 0
            lanes[schema.stream] = lane
        made = EpochFollower(number, beginning.state, beginning.base, lanes, None)
        if log is not None:
            made.follow_log(log)
        return made

    def follow_log(self, log: Path) -> None:
        """Read from a log what nothing else brings."""
        self.log = log
        epoch = self.state.manifest.epoch
        for stream, lane in self.lanes.items():
            folder = stream_folder(epoch_folder(root_of(log), epoch), stream)
            lane.tail = LogTail(folder, epoch, lane.intake.tables)

    def find_log(self) -> None:
        """Follow the job's log too, if it is there by now: a log of states does not appear before the first step."""
        manifest = self.state.manifest
        if self.log is not None or self.run is None or manifest.epoch not in epochs_of(self.run):
            return
        if read_manifest(epoch_folder(root_of(self.run), manifest.epoch)).run == manifest.run:
            self.follow_log(self.run)

    @property
    def lacks_kinds(self) -> bool:
        """Is this a log of states whose names are not known yet? The optimizer makes them in its first step."""
        manifest = self.state.manifest
        return holds_states(manifest) and len(manifest.state_kinds) <= len(FIRST_KINDS)

    def learn_kinds(self, told: EpochManifest) -> None:
        """Take the names of states from what is told of the same epoch later, where they are not known."""
        if self.lacks_kinds and len(told.state_kinds) > len(FIRST_KINDS):
            self.state.manifest.state_kinds = told.state_kinds
            for lane in self.lanes.values():
                lane.intake.tables.learn(told.state_kinds)

    @property
    def complete_step(self) -> int:
        """The newest step that all streams have, applied or not."""
        before = self.state.step
        if self.is_broken:
            return before
        committed = [lane.intake.committed for lane in self.lanes.values()]
        return max(before, min((before if step is None else step for step in committed), default=before))

    def is_complete(self) -> bool:
        """Is there anything that can be applied, and should be now?"""
        ready = [lane.intake.ready[0] for lane in self.lanes.values() if lane.intake.ready]
        if any(isinstance(item, ReceivedDigests) for item in ready):
            return True
        return bool(ready) and len(ready) == len(self.lanes) and self._should_go_on()

    def _should_go_on(self) -> bool:
        """A share keeps some complete steps back: other shares may have come less far, and there is no way back."""
        state = self.state
        if state.share.is_whole or state.step < self.goal:
            return True
        if self.pins and time.monotonic() < self.pinned_until:
            return False
        waiting = max(lane.intake.pending_bytes for lane in self.lanes.values())
        steps = self.complete_step - state.step
        return waiting > settings.SHADOW_RETAINED_BYTES or steps > settings.SHADOW_RETAINED_STEPS

    def take(self) -> dict[int, ReceivedStep] | ReceivedDigests | None:
        """The next step of all streams, or digests of one; None for what is older than the state.

        `BadBytesError` where another step has come than the one that should.
        """
        for lane in self.lanes.values():
            head = lane.intake.ready[0] if lane.intake.ready else None
            if isinstance(head, ReceivedDigests):
                lane.intake.pop()
                return head if head.step == self.state.step else None
        heads: dict[int, ReceivedStep] = {}
        for number, lane in self.lanes.items():
            head = lane.intake.ready[0]
            assert isinstance(head, ReceivedStep)
            if head.step <= self.state.step:  # the base had it
                lane.intake.pop()
                return None
            heads[number] = head
        wrong = {step.step for step in heads.values()} - {self.state.step + 1}
        if wrong:
            raise BadBytesError(f"step {min(wrong)} came where step {self.state.step + 1} should be")
        for lane in self.lanes.values():
            lane.intake.pop()
        return heads

    def advance(self, changed: threading.Condition, step: int, is_over: Callable[[], bool]) -> None:
        """Let a share apply what it has kept back, up to a step that is complete. The lock is held."""
        self.goal = max(self.goal, min(step, self.complete_step))
        end = time.monotonic() + settings.SHADOW_ALIGN_SECONDS
        while self.state.step < self.goal and not self.is_broken and not is_over():
            changed.notify_all()
            if time.monotonic() > end:
                raise UsageError(f"step {self.goal} was not reached in time", hint="try again")
            changed.wait(0.1)

    def read_log(self, changed: threading.Condition) -> bool:
        """Read what the log has of streams that nothing else brings; gives whether that was anything."""
        moved = 0
        for lane in self.lanes.values():
            with changed:
                until = lane.hole
                if lane.tail is None or (lane.feeds and until is None):
                    continue
                wanted = lane.intake.expected or 0
            moved += lane.tail.poll(wanted, _frame_consumer(changed, lane), until)
        return moved > 0

    def told(self) -> dict[str, Any]:
        """What is held and how far it is behind, as JSON values."""
        state, lanes = self.state, self.lanes.values()
        complete = state.step if state.share.is_whole else self.complete_step  # a share applies when it is asked
        seen = max([complete, *(lane.intake.newest or 0 for lane in lanes)])
        return {
            "run": state.manifest.run,
            "epoch": state.manifest.epoch,
            "step": complete,
            "applied_step": state.step,
            "lag_steps": seen - complete,
            "seconds_since_step": time.time() - self.applied_at,
            "state_bytes": state.nbytes,
            "pending_bytes": sum(lane.intake.pending_bytes for lane in lanes),
            "streams": len(lanes),
            "feeds": sum(lane.feeds for lane in lanes),
            "proven_step": state.proven_step,
            "exact": not state.labels and state.refuted is None,
            "labels": [str(label) for label in (*([state.refuted] if state.refuted else []), *state.labels)],
            "base": str(self.base),
            "log": None if self.log is None else str(self.log),
        }


def frames_gone_error(wanted: int, oldest: int) -> UsageError:
    """What a job is told that no longer has what the shadow lacks."""
    return UsageError(
        f"frame {wanted} is wanted, the job has let go of all before frame {oldest}, and there is no log",
        hint="save a checkpoint, and record again with base= naming it",
    )


def _frame_consumer(changed: threading.Condition, lane: StreamFeed) -> Callable[[ReceivedFrame], bool]:
    """Takes frames of the log until enough are pending."""

    def take(frame: ReceivedFrame) -> bool:
        with changed:
            if lane.intake.pending_bytes > settings.SHADOW_PENDING_BYTES:
                return False
            lane.intake.offer(frame)
            changed.notify_all()
            return True

    return take


class StepPin:
    """No step is applied beyond those that were asked for; more may become complete. Close it soon.

    It holds for a while after it was asked: who forgets it does not stop the share for ever.
    """

    def __init__(
        self,
        changed: threading.Condition,
        following: EpochFollower,
        is_over: Callable[[], bool],
        stale: Callable[[], str | None],
    ) -> None:
        """`changed` is the shadow's lock, which is held now; `stale` tells why nothing comes any more."""
        self._changed = changed
        self._following = following
        self._is_over = is_over
        self._stale = stale
        self._open = True
        following.pins += 1
        self._hold()

    def _hold(self) -> None:
        self._following.pinned_until = time.monotonic() + 2 * settings.SHADOW_ALIGN_SECONDS

    def told(self) -> dict[str, Any]:
        """Which steps can be had, as JSON values."""
        with self._changed:
            self._hold()
            state = self._following.state
            return {
                "run": state.manifest.run,
                "epoch": state.manifest.epoch,
                "share": [state.share.number, state.share.count],
                "applied": state.step,
                "complete": self._following.complete_step,
                "reason": self._stale(),
            }

    def snapshot(self, step: int) -> StateSnapshot:
        """The state after just this step; `UsageError` where that cannot be had."""
        following = self._following
        with self._changed:
            following.advance(self._changed, step, self._is_over)
        made = following.state.snapshot(lambda: describe_state(following.state, following.base, following.log))
        if made.step == step:
            return made
        made.close()
        raise UsageError(f"the shadow has step {made.step}, and not step {step}", hint="try again")

    def close(self) -> None:
        """Let the share go on."""
        with self._changed:
            if self._open:
                self._open = False
                self._following.pins -= 1
                self._changed.notify_all()
