"""Plans: a conversion as a value, before anything is written.

A plan is a source (the index of a checkpoint), a target (every output file, with its known bytes and its write items)
and a destination. Everything else follows from these and from the settings: the copy tasks, which are generated when
they are needed because a job of thousands of ranks has millions of them; the cost; and the fingerprint, by which a
resumed run, another process or a Ray task makes sure that it executes the same plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ucp import settings
from ucp.core.checkpoint import Checkpoint, Mesh, Note
from ucp.core.notebook import html_table
from ucp.core.target import Digests, OutputFile, Target
from ucp.errors import StorageError
from ucp.settings import MIB

if TYPE_CHECKING:
    from ucp.engine.copy_tasks import CopyTask
    from ucp.engine.pool import Progress
    from ucp.engine.work_shard import WorkShard

DEFAULT_MEMORY = 256 * MIB


def default_jobs() -> int:
    """The default number of workers: the cores that this process may run on, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class TargetWriter(Protocol):
    """What a plan needs to know of the writer that laid out its target."""

    notes: list[Note]
    mesh: Mesh | None

    def last(self, target: Target, digests: Digests) -> OutputFile | None: ...


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Bytes that a plan reads, writes and holds in memory at once."""

    reads: int
    writes: int
    memory: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A conversion that is planned but not yet run. Plans with the same destination and fingerprint are equal."""

    source: Checkpoint
    writer: TargetWriter
    target: Target
    path: Path
    request: Mapping[str, Any] = field(default_factory=dict)  # arguments of `ucp.plan` as JSON values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.destination == other.destination and self.fingerprint() == other.fingerprint()

    __hash__ = None  # type: ignore[assignment]

    @property
    def destination(self) -> str:
        """The absolute path, or the URL, of the output."""
        return str(self.request.get("dst", self.path))

    def _repr_html_(self) -> str:
        title = (
            f"{self.source.root} to {self.destination}: {len(self.target.files)} files, {self.target.nbytes:,} bytes"
        )
        rows = ((file.path, len(file.items), f"{file.size:,}") for file in self.target.files)
        return html_table(title, ("file", "write items", "bytes"), rows, len(self.target.files))

    def tasks(self) -> Iterator[CopyTask]:
        """The copy tasks, in an order that depends only on the target and the settings."""
        from ucp.engine.copy_tasks import copy_tasks

        return copy_tasks(self.target)

    def cost(self, jobs: int | None = None, memory: int = DEFAULT_MEMORY) -> PlanCost:
        """What running the plan takes with `jobs` workers and at most `memory` bytes of buffers."""
        from ucp.engine.worker import WorkerBudget

        jobs = jobs or default_jobs()
        atoms = {id(item.atom): item.atom for file in self.target.files for item in file.items}.values()
        covers = [cover for a in atoms for cover in (a.fragments, *(a.replicas if a.combine == "average" else ()))]
        reads = sum(fragment.nbytes for cover in covers for fragment in cover)
        return PlanCost(reads, self.target.nbytes, 3 * jobs * WorkerBudget(jobs, memory).slab_bytes)

    def fingerprint(self) -> str:
        """The identity of this conversion; see `fingerprint`."""
        return fingerprint(self.target, self.source)

    def to_json(self) -> dict[str, Any]:
        """The plan with all files and write items, for scripts and for `from_json`."""
        return {**self.target.to_json(), **self.reference()}

    def reference(self) -> dict[str, Any]:
        """What `from_json` needs of `to_json`: which source, destination and options, and the fingerprint."""
        return {
            "source": {"path": self.request["src"], "fingerprint": self.fingerprint()},
            "destination": self.destination,
            "options": dict(self.request["options"]),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], planner: Callable[..., Plan]) -> Plan:
        """The plan that `to_json` described; refused if it cannot be reproduced exactly.

        `planner` is `ucp.plan`: the source is indexed again, because JSON contains neither its fragments nor the bytes
        of headers and pickles.
        """
        plan = planner(data["source"]["path"], data["destination"], **data["options"])
        if plan.fingerprint() != data["source"]["fingerprint"]:
            raise StorageError(
                f"{data['source']['path']}: the checkpoint, or what this version of ucp makes of it, differs from the"
                " plan",
                hint="plan the conversion again; processes of one conversion must see the same files under the same"
                " paths",
            )
        return plan

    def manifest(self, digests: Digests) -> OutputFile | None:
        """The file that is written last, once everything else is on disk."""
        return self.writer.last(self.target, digests)

    def run(
        self,
        *,
        jobs: int | None = None,
        memory: int = DEFAULT_MEMORY,
        resume: bool = False,
        restart: bool = False,
        durable: bool = False,
        shard: WorkShard | None = None,
        in_launch: bool = False,
        progress: Progress | None = None,
        processes: bool = False,
    ) -> None:
        """Write the target. It appears whole or not at all; one `shard` of several appears with `finish`.

        With `in_launch` all shards are being written by processes of one launch: the first one waits for the others and
        publishes the target. With `processes` the work is done by `jobs` forks of this process, if it has no other
        threads.
        """
        from ucp.engine import convert
        from ucp.engine.pool import Progress
        from ucp.engine.work_shard import UNSHARDED
        from ucp.engine.worker import WorkerBudget

        budget = WorkerBudget(jobs or default_jobs(), memory, processes)
        options = convert.RunOptions(budget, resume, restart, durable, shard or UNSHARDED, in_launch)
        convert.run(self.target, self.source, self.path, options, self.manifest, progress or Progress())

    def finish(self, *, durable: bool = False) -> None:
        """Publish the target when all its shards are written."""
        from ucp.engine import convert

        convert.finish(self.target, self.source, self.path, self.manifest, durable=durable)


def fingerprint(target: Target, source: Checkpoint) -> str:
    """Identity of a conversion: the target, how it is cut into tasks, and the source files (sizes and times)."""
    import xxhash

    from ucp.engine.copy_tasks import VERSION

    digest = xxhash.xxh3_128(repr((VERSION, settings.COPY_TASK_BYTES)).encode())
    texts: dict[int, str] = {}  # of atoms and boxes, by identity: the ranks of a target share them

    def text(value: object, *described: object) -> str:
        known = texts.get(id(value))
        if known is None:
            known = texts[id(value)] = repr(described or value)
        return known

    for file in target.files:
        lines = [repr((file.path, file.size, file.zeros, file.trailer and file.trailer.spans))]
        for item in file.items:
            atom, region = item.atom, item.region
            described = text(atom, atom.name, atom.kind, atom.dtype.name, atom.shape)
            lines.append(f"{item.offset} {region.start} {region.stop} {text(region.boxes)} {described}")
        digest.update("\n".join(lines).encode())
        for literal in file.literals:
            digest.update(b"%d %d\n" % (literal.offset, len(literal.data)))
            digest.update(literal.data)
    for name in sorted(source.sizes):
        try:
            status = (source.root / name).stat()
        except OSError as error:
            raise StorageError(f"{source.root / name}: {error.strerror}") from error
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    if source.computed is not None:
        digest.update(source.computed.identity.encode())
    return digest.hexdigest()
