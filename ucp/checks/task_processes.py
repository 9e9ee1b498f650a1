"""Tasks carried out by workers that are processes (see ucp.engine.pool).

Workers ask for tasks in the order in which threads would take them. What tasks fill together (checksums of pieces,
counts) every worker fills for itself, and hands over when there is no more to do. Each turn has workers of its own,
which know what those of the turns before have read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from ucp import settings
from ucp.checks.tasks import CheckTask, ForkMergeable, ReadMeter, run_task
from ucp.core.findings import Finding
from ucp.core.mesh import Rank
from ucp.engine import pool
from ucp.engine.pool import BatchedProgress, PipeChannel, WorkerProcess, WorkerProcesses
from ucp.storage.local import SourceFiles

_MOST_TASKS: Final = 64  # at a time
_SHARES: Final = 16  # of a worker, at least
_NOTHING: Final = -1  # in the place of a batch: there is no more to do


def is_possible(files: SourceFiles) -> bool:
    """Connections to an object store are not for several processes."""
    return pool.can_fork() and not files.is_remote


@dataclass(frozen=True, slots=True)
class CheckProcesses:
    """Runs tasks in forks of this process. `shared` is all that tasks fill together, `files` what they read from."""

    files: SourceFiles
    shared: Sequence[ForkMergeable]

    def run(self, tasks: Sequence[CheckTask], jobs: int, meter: ReadMeter) -> list[Finding]:
        """Carry out tasks, all of one turn; findings in the order of the tasks."""
        # A descriptor that workers inherit is one for all of them, also in what the kernel reads ahead.
        self.files.close()
        # Towards the end workers are to wait for each other only briefly.
        limit = min(settings.COPY_TASK_BYTES, sum(task.nbytes for task in tasks) // (_SHARES * jobs))
        batches = list(_batches(tasks, limit))
        parent = _CheckDispatcher(len(batches), self.shared)
        with WorkerProcesses(meter.read) as started:
            for _ in range(min(jobs, len(batches))):
                started.start(partial(_work, tasks, batches, self.shared))
            started.serve(parent.hear)
        return [finding for number in sorted(parent.findings) for finding in parent.findings[number]]


@dataclass(slots=True)
class _CheckDispatcher:
    """Hands out batches one after the other, and takes in what they led to."""

    batches: int
    shared: Sequence[ForkMergeable]
    handed: int = 0
    findings: dict[int, list[Finding]] = field(default_factory=dict)  # by the number of the task

    def hear(self, fork: WorkerProcess, message: dict[str, Any]) -> None:
        for number, told in message.get("found", ()):
            self.findings[number] = list(map(_finding, told))
        for number, told in message.get("shared", ()):
            self.shared[number].merge_changes(told)
        if "next" in message:
            fork.answer(self.handed if self.handed < self.batches else _NOTHING)
            self.handed += 1


def _batches(tasks: Sequence[CheckTask], limit: int) -> Iterator[range]:
    """Numbers of tasks that are handed out together: neighbours, of at most `limit` bytes where they are several."""
    first, nbytes = 0, 0
    for number, task in enumerate(tasks):
        if number > first and (nbytes + task.nbytes > limit or number - first == _MOST_TASKS):
            yield range(first, number)
            first, nbytes = number, 0
        nbytes += task.nbytes
    if first < len(tasks):
        yield range(first, len(tasks))


def _work(
    tasks: Sequence[CheckTask],
    batches: Sequence[range],
    shared: Sequence[ForkMergeable],
    number: int,
    channel: PipeChannel,
) -> None:
    """What a worker does, until there are no more tasks."""
    del number
    told = BatchedProgress(channel)
    meter = ReadMeter(told.progress)
    for item in shared:
        item.mark_known()
    message: dict[str, Any] = {}
    while True:
        channel.send({**message, "next": True, "bytes": told.flush()})
        (batch,) = channel.receive()  # a parent that is gone takes us along
        if batch == _NOTHING:
            break
        found = {task: run_task(tasks[task], meter) for task in batches[batch]}
        message = {"found": [(task, list(map(asdict, findings))) for task, findings in found.items() if findings]}
    channel.send({"shared": [(at, told) for at, item in enumerate(shared) if (told := item.changes()) is not None]})


def _finding(told: dict[str, Any]) -> Finding:
    rank, byte_range = told["rank"], told["byte_range"]
    return Finding(
        **{
            **told,
            "rank": None if rank is None else Rank(*rank),
            "byte_range": None if byte_range is None else (byte_range[0], byte_range[1]),
        }
    )
