"""Destinations: where output goes, as one transaction, whether that is a local folder or an object store.

A process calls, in this order:

1. `was_published`, if it resumes: the output may already be complete;
2. `begin`: take the destination, and load what an earlier run has finished;
3. `write`: write the files of its shard, except those parts that are finished;
4. `commit`, if it writes the whole target, or `end_shard`, if it is one of several. When all shards have ended, one
   process calls `collect_shards` and then `commit`.

After a failure, `keep` leaves what was written for `--resume`, and `discard` removes it. The remaining methods are for
processes that watch the shards of others: the first process of a launch, and the driver of a Ray job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp.core.target import Digests, OutputFile, Target
from ucp.engine.pool import Meter
from ucp.engine.work_shard import UNSHARDED, WorkShard
from ucp.engine.worker import WorkerBudget
from ucp.storage.local import SourceFiles
from ucp.storage.paths import RemotePath

ManifestBuilder = Callable[[Digests], OutputFile | None]
"""Makes the file that is written last from the digests of all others; None if the format has none."""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far a shard is: whether it is done, and the bytes that its journal lists."""

    done: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardFailure:
    """Why a shard failed; `stamp` differs between two failures."""

    stamp: int
    text: str


class Destination(Protocol):
    """The place where one target is written, as the process of one shard sees it."""

    target: Target
    shard: WorkShard
    location: str  # for messages: where unfinished output is kept
    poll_seconds: float  # how often it makes sense to look at other shards

    @property
    def finished_bytes(self) -> int:
        """Bytes that an earlier run has written; known after `begin`."""

    def was_published(self, *, durable: bool) -> bool:
        """Whether an earlier run completed the output and was killed before it removed its notes; removes them now."""

    def begin(self, *, resume: bool, restart: bool) -> None:
        """Take the destination; refused if something else is there, or another process is writing it."""

    def write(self, source: SourceFiles, budget: WorkerBudget, meter: Meter) -> None:
        """Write all files of this shard."""

    def end_shard(self, *, durable: bool) -> None:
        """Record that all files of this shard are written."""

    def collect_shards(self) -> None:
        """Load what all shards have written; refused if something is missing."""

    def commit(self, manifest: ManifestBuilder, *, durable: bool) -> None:
        """Write the manifest and let the output appear."""

    def keep(self) -> None:
        """Leave what was written for a later run."""
        return

    def has_partial_output(self) -> bool:
        """Whether there is something that a later run could continue."""

    def discard(self) -> None:
        """Remove what was written; a shard of several leaves it to the others."""

    def started_shards(self, *, restart: bool) -> list[WorkShard]:
        """Shards that have a journal here; with `restart` they are discarded."""

    def shard_progress(self, shard: WorkShard) -> ShardProgress:
        """How far a shard is."""

    def heartbeat(self, shard: WorkShard) -> object:
        """A value that changes as long as a process works on a shard."""

    def prepare_launch(self) -> None:
        """Remove the failure note that an earlier launch has left of this shard; refused if the output is complete."""

    def send_heartbeat(self) -> None:
        """Show other processes that this one is alive, if they cannot see that themselves."""
        return

    def stop_heartbeat(self) -> None:
        """This process sends no more heartbeats."""
        return

    def report_failure(self, text: str) -> None:
        """Record why this shard failed, for the other processes."""

    def failure(self, shard: WorkShard) -> ShardFailure | None:
        """Why a shard failed, in this launch or an earlier one."""


def open_destination(path: Path, target: Target, fingerprint: str, shard: WorkShard = UNSHARDED) -> Destination:
    """The destination at `path`. `fingerprint` identifies the conversion: no other one is ever resumed."""
    if isinstance(path, RemotePath):
        from ucp.engine.upload import StoreDestination

        return StoreDestination(path, target, fingerprint, shard)
    from ucp.engine.staging import StagingFolder

    return StagingFolder(path, target, fingerprint, shard)
