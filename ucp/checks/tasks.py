"""Work that reads bytes: tasks with their cost, and the threads or processes that carry them out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ucp import settings
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding, Level
from ucp.errors import UcpError
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    from ucp.checks.deep_state import DeepState
    from ucp.checks.task_processes import CheckProcesses


class ForkMergeable(Protocol):
    """A result that several tasks contribute to. Forked processes have copies of it, whose changes are merged."""

    def mark_known(self) -> None:
        """In a fork: the parent process has the current content."""

    def changes(self) -> Any:
        """In a fork: what was added since `mark_known`, as a JSON value; None if nothing was."""

    def merge_changes(self, changes: Any) -> None:
        """In the parent: add the changes of a fork."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What a check gets: the index, and the files to read from.

    Fragments are created when they are accessed, and some may turn out not to be in their file. The check `coverage`,
    which runs first and visits all of them, reports these atoms and adds them to `broken`: no other check reads them.
    """

    checkpoint: Checkpoint
    files: SourceFiles
    level: Level = Level.DEFAULT
    broken: set[tuple[str, str]] = field(default_factory=set)
    deep: DeepState | None = None  # at level DEEP only
    shared: list[ForkMergeable] = field(default_factory=list)  # results that tasks contribute to

    def atoms(self) -> Iterator[Atom]:
        """Every atom whose fragments can be located."""
        return (atom for atom in self.checkpoint.atoms() if self.is_sound(atom))

    def is_sound(self, atom: Atom) -> bool:
        return (atom.name, atom.kind) not in self.broken


@dataclass(frozen=True, slots=True)
class CheckTask:
    """A unit of reading for one check: `run` reads `nbytes` bytes and returns findings.

    Tasks of a later `phase` start when all tasks of earlier phases are done, and depend on what those have read.
    """

    check: str
    nbytes: int
    run: Callable[[ReadMeter], Iterable[Finding]]
    parameter: str | None = None
    kind: str | None = None
    phase: int = 0


class CheckStoppedError(Exception):
    """Another task failed for good or the person gave up: leave the work where it is."""


class ReadMeter:
    """Counts the bytes that all threads read. A task tells it each block, and that is where it can be stopped."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.bytes_read = 0
        self._advance = advance
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def read(self, nbytes: int) -> None:
        """`nbytes` more were read."""
        with self._lock:
            self.bytes_read += nbytes
        self._advance(nbytes)
        self.check()

    def check(self) -> None:
        """Leave here if the work was stopped."""
        if self._stop.is_set():
            raise CheckStoppedError

    def stop(self) -> None:
        self._stop.set()


def run_tasks(
    tasks: Iterable[CheckTask], jobs: int, meter: ReadMeter, forking: CheckProcesses | None = None
) -> list[Finding]:
    """Carry out all tasks, the longest first so that workers finish together. A failure to read becomes a finding.

    Workers are threads, or with `forking` processes where there is enough to read.
    """
    # Those of a part or more are all the same: neighbours in a file stay neighbours.
    ordered = sorted(tasks, key=lambda task: -min(task.nbytes, settings.COPY_TASK_BYTES))
    findings: list[Finding] = []
    for phase in sorted({task.phase for task in ordered}):
        findings += _run([task for task in ordered if task.phase == phase], jobs, meter, forking)
    return findings


def _run(tasks: Sequence[CheckTask], jobs: int, meter: ReadMeter, forking: CheckProcesses | None) -> list[Finding]:
    if forking is not None and jobs > 1:
        if sum(task.nbytes for task in tasks) > settings.COPY_TASK_BYTES:
            return forking.run(tasks, jobs, meter)
        jobs = 1  # a thread would cost more than it reads, and would be in the way of forks
    if jobs <= 1 or len(tasks) <= 1:
        return [finding for task in tasks for finding in run_task(task, meter)]
    from concurrent.futures import ThreadPoolExecutor, wait  # takes long to import

    with ThreadPoolExecutor(min(jobs, len(tasks)), thread_name_prefix="ucp-check") as pool:
        futures = [pool.submit(partial(run_task, task, meter)) for task in tasks]
        try:
            wait(futures, return_when="FIRST_EXCEPTION")
        finally:  # an interrupt of the waiting thread ends the workers too
            if not all(future.done() for future in futures):
                meter.stop()
                pool.shutdown(cancel_futures=True)
        failures = [future.exception() for future in futures if future.done() and not future.cancelled()]
        failure = next((f for f in failures if f is not None and not isinstance(f, CheckStoppedError)), None)
        if failure is not None:
            raise failure
        return [finding for future in futures for finding in future.result()]


def run_task(task: CheckTask, meter: ReadMeter) -> list[Finding]:
    """What a task finds; that it could not read is a finding too."""
    meter.check()
    try:
        return list(task.run(meter))
    except UcpError as error:
        return [failure_finding(task.check, error, task.parameter, task.kind)]


def failure_finding(check: str, error: UcpError, parameter: str | None = None, kind: str | None = None) -> Finding:
    """A failure to read as a finding of the check that tried; it keeps its own exit code."""
    return Finding(
        check,
        "error",
        error.what,
        parameter=parameter,
        kind=kind,
        hint=error.hint,
        exit_code=error.exit_code,
    )
