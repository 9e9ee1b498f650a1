"""A conversion that is planned: run whole, as one share of several, or together with other processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import Checkpoint
from ucp.core.target import Target
from ucp.formats.registry import FormatWriter
from ucp.settings import MIB
from ucp.storage.paths import RemotePath

if TYPE_CHECKING:
    from ucp.engine.convert import Progress
    from ucp.engine.coordinator import StoreCoordinator
    from ucp.engine.work_shard import WorkShard

DEFAULT_MEMORY = 256 * MIB


def default_jobs() -> int:
    """Threads to use unless told: the cores that this process may run on, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion that is planned and not yet run."""

    source: Checkpoint
    writer: FormatWriter
    target: Target
    path: Path

    def run(
        self,
        *,
        jobs: int | None = None,
        memory: int = DEFAULT_MEMORY,
        resume: bool = False,
        restart: bool = False,
        durable: bool = False,
        share: WorkShard | None = None,
        progress: Progress | None = None,
        processes: bool = False,
    ) -> None:
        """Write the target. It appears whole, or not at all. A `share` of it waits for `finish` to appear.

        With `processes` the work is done by `jobs` forks of this process, where it has no other threads.
        """
        from ucp.engine.convert import Progress, RunOptions, run
        from ucp.engine.work_shard import UNSHARDED
        from ucp.engine.worker import WorkerBudget

        options = RunOptions(
            WorkerBudget(jobs or default_jobs(), memory, processes), resume, restart, durable, share or UNSHARDED
        )
        run(
            self.target,
            self.source,
            self.path,
            options,
            lambda digests: self.writer.last(self.target, digests),
            progress or Progress(),
        )

    def finish(self, *, durable: bool = False) -> None:
        """Let the target appear that shares of it have written."""
        from ucp.engine.convert import finish

        finish(
            self.target,
            self.source,
            self.path,
            lambda digests: self.writer.last(self.target, digests),
            durable=durable,
        )

    def run_together(self, share: WorkShard, progress: Progress, **options: Any) -> None:
        """Write this process's share of a launch; the first process waits for the others and lets the target appear."""
        from ucp.engine.convert import fingerprint
        from ucp.engine.coordinator import FolderCoordinator

        together: FolderCoordinator | StoreCoordinator
        if isinstance(self.path, RemotePath):
            from ucp.engine.coordinator import StoreCoordinator as InStore

            together = InStore(self.path, share, progress)
        else:
            together = FolderCoordinator(self.path, share, self.target.nbytes, progress)
        try:
            self.run(share=share, progress=together, **options)
            if together.leads:
                together.wait(fingerprint(self.target, self.source))
                self.finish(durable=options.get("durable", False))
        except BaseException as error:
            together.fail(error)
            raise
        finally:
            together.close()
