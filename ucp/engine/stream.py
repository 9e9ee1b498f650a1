"""The slab stream: workers walk along stretches of the plan, and what they have written is told part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ucp.engine.plan import Part, first_stretch
from ucp.engine.worker import Budget, StoppedError, Work, Worker, Written
from ucp.files.local import SourceFiles
from ucp.model.target import OutputFile


def stream(
    stretches: Sequence[Iterable[Part]],
    source: SourceFiles,
    folder: Path,
    files: Sequence[OutputFile],
    budget: Budget,
    done: Callable[[list[Written]], None],
    progress: Callable[[int], None],
) -> None:
    """Write every part into the files below `folder`; each worker walks along a stretch, then helps with the others.

    `done` is called with what a finished part wrote, `progress` with numbers of bytes; both maybe from other threads,
    `done` never twice at once. The first failure stops all workers and is raised.
    """
    stop = threading.Event()
    work = Work(source, folder, files, budget, progress, stop.is_set)
    if budget.processes and budget.jobs > 1:
        from ucp.engine import forked

        if forked.is_possible(source):
            forked.stream(stretches, work, done)
            return
    shared = _Shared([iter(stretch) for stretch in stretches], work, done, stop)
    if budget.jobs <= 1:
        shared.work_on(0)
    else:
        threads: list[threading.Thread] = []
        try:
            for number in range(budget.jobs):
                thread = threading.Thread(target=shared.work_on, args=(number,), name=f"ucp-slab-{number}")
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
        finally:  # an interrupt of the waiting thread ends the workers too, and so does one that cannot be started
            stop.set()
            for thread in threads:
                thread.join()
    if shared.failure is not None:
        raise shared.failure


@dataclass(slots=True)
class _Shared:
    """What the threads of one stream share."""

    todo: Sequence[Iterator[Part]]
    work: Work
    done: Callable[[list[Written]], None]
    stop: threading.Event
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def work_on(self, number: int) -> None:
        """Take parts until none is left. The first failure of any worker is kept and stops all of them."""
        begin = first_stretch(number, max(1, self.work.budget.jobs), len(self.todo))
        todo = chain(self.todo[begin:], self.todo[:begin])
        stretch: Iterator[Part] | None = next(todo, None)
        worker: Worker | None = None
        try:
            worker = Worker(self.work)  # there may be no memory for it
            while stretch is not None and not self.stop.is_set():
                with self.lock:
                    part = next(stretch, None)
                if part is None:
                    stretch = next(todo, None)
                    continue
                written = worker.write(part)
                with self.lock:
                    self.done(written)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self.lock:
                self.failure = self.failure or error
            self.stop.set()
        finally:
            if worker is not None:
                worker.outputs.close()
