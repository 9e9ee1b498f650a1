"""Tasks: the reading that checks need, with its cost, and how threads or processes do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from ucp import settings
from ucp.core.checkpoint import Atom, Checkpoint, Rank
from ucp.core.findings import Finding, Level
from ucp.engine.pool import Meter, Work, Worker, run_pool
from ucp.errors import UcpError
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    from ucp.checks.deep_state import DeepState

_BATCHES_PER_WORKER: Final = 16  # at least: towards the end, workers should wait for each other only briefly


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
    run: Callable[[Meter], Iterable[Finding]]
    parameter: str | None = None
    kind: str | None = None
    phase: int = 0


def run_tasks(tasks: Iterable[CheckTask], jobs: int, meter: Meter, forked: CheckContext | None = None) -> list[Finding]:
    """Run all tasks, the longest first so that workers finish together. A failure to read becomes a finding.

    Workers are threads. With `forked`, the context of the tasks, they are processes if there is enough to read.
    """
    # Longest first, but everything above COPY_TASK_BYTES counts as equal, so that tasks on one file stay adjacent.
    ordered = sorted(tasks, key=lambda task: -min(task.nbytes, settings.COPY_TASK_BYTES))
    findings: list[Finding] = []
    for phase in sorted({task.phase for task in ordered}):
        some = [task for task in ordered if task.phase == phase]
        total = sum(task.nbytes for task in some)
        # For little reading a worker would cost more than it saves, and a thread would prevent forks later.
        workers = 1 if forked is not None and total <= settings.COPY_TASK_BYTES else max(1, min(jobs, len(some)))
        work = _CheckWork(min(settings.COPY_TASK_BYTES, total // (_BATCHES_PER_WORKER * workers)), forked)
        found: dict[int, list[Finding]] = {}
        run_pool(work, [list(enumerate(some))], found.update, meter, jobs=workers, processes=forked is not None)
        findings += [finding for number in sorted(found) for finding in found[number]]
    return findings


class _CheckWork(Work[tuple[int, CheckTask], dict[int, list[Finding]]]):
    """Runs numbered tasks; a result maps the number of a task to its findings."""

    def __init__(self, batch_bytes: int, forked: CheckContext | None) -> None:
        self._batch_bytes = max(1, batch_bytes)
        self._context = forked

    def start(self, meter: Meter) -> Worker[tuple[int, CheckTask], dict[int, list[Finding]]]:
        return Worker(lambda item: {item[0]: run_task(item[1], meter)})

    def load(self, item: tuple[int, CheckTask]) -> float:
        return item[1].nbytes / self._batch_bytes

    def prepare_fork(self) -> bool:
        if self._context is None or self._context.files.is_remote:
            return False
        # Processes that inherit a descriptor share it, and so what the kernel reads ahead for it.
        self._context.files.close()
        return True

    def enter_fork(self, workers: int) -> None:
        del workers
        assert self._context is not None
        for item in self._context.shared:
            item.mark_known()

    def encode(self, result: dict[int, list[Finding]]) -> Any:
        return [(number, [asdict(finding) for finding in findings]) for number, findings in result.items()]

    def decode(self, value: Any) -> dict[int, list[Finding]]:
        return {number: [_decode_finding(finding) for finding in findings] for number, findings in value}

    def collect(self) -> Any:
        assert self._context is not None
        return [item.changes() for item in self._context.shared] or None

    def merge(self, collected: Any) -> None:
        assert self._context is not None
        for item, added in zip(self._context.shared, collected, strict=True):
            if added is not None:
                item.merge_changes(added)


def run_task(task: CheckTask, meter: Meter) -> list[Finding]:
    """The findings of a task; a failure to read is one of them."""
    meter.check()
    try:
        return list(task.run(meter))
    except UcpError as error:
        return [failure_finding(task.check, error, task.parameter, task.kind)]


def failure_finding(check: str, error: UcpError, parameter: str | None = None, kind: str | None = None) -> Finding:
    """A failure to read as a finding of the check that tried; it keeps its exit code."""
    return Finding(
        check, "error", error.what, parameter=parameter, kind=kind, hint=error.hint, exit_code=error.exit_code
    )


def _decode_finding(value: dict[str, Any]) -> Finding:
    tuples: dict[str, Callable[[Any], Any]] = {"rank": lambda numbers: Rank(*numbers), "byte_range": tuple}
    return Finding(**{key: tuples[key](v) if key in tuples and v is not None else v for key, v in value.items()})
