"""The slab stream: workers walk along stretches of the plan, and what they have written is told part by part.

Sealing: the last bytes of a file that carries CRC-32s of the others, put together from those of its parts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ucp.containers.crc32 import crc32_combine
from ucp.core.target import OutputFile, Target
from ucp.engine.plan import CopyTask, first_queue, literal_tasks
from ucp.engine.worker import CopyContext, CopyWorker, StoppedError, WorkerBudget, WrittenRange
from ucp.storage.local import SourceFiles


def copy_all(
    stretches: Sequence[Iterable[CopyTask]],
    source: SourceFiles,
    folder: Path,
    files: Sequence[OutputFile],
    budget: WorkerBudget,
    done: Callable[[list[WrittenRange]], None],
    progress: Callable[[int], None],
) -> None:
    """Write every part into the files below `folder`; each worker walks along a stretch, then helps with the others.

    `done` is called with what a finished part wrote, `progress` with numbers of bytes; both maybe from other threads,
    `done` never twice at once. The first failure stops all workers and is raised.
    """
    stop = threading.Event()
    work = CopyContext(source, folder, files, budget, progress, stop.is_set)
    if budget.processes and budget.jobs > 1:
        from ucp.engine import pool

        if pool.can_copy_in_processes(source):
            pool.copy_in_processes(stretches, work, done)
            return
    shared = _CopyThreads([iter(stretch) for stretch in stretches], work, done, stop)
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
class _CopyThreads:
    """What the threads of one stream share."""

    todo: Sequence[Iterator[CopyTask]]
    work: CopyContext
    done: Callable[[list[WrittenRange]], None]
    stop: threading.Event
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def work_on(self, number: int) -> None:
        """Take parts until none is left. The first failure of any worker is kept and stops all of them."""
        begin = first_queue(number, max(1, self.work.budget.jobs), len(self.todo))
        todo = chain(self.todo[begin:], self.todo[:begin])
        stretch: Iterator[CopyTask] | None = next(todo, None)
        worker: CopyWorker | None = None
        try:
            worker = CopyWorker(self.work)  # there may be no memory for it
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


def trailer_tasks(target: Target, written: Iterable[WrittenRange], only: Container[int]) -> Iterator[CopyTask]:
    """What is left to write of the files `only` when everything else of them is on disk, as `written` says."""
    sealed: dict[int, list[WrittenRange]] = {
        n: [] for n, file in enumerate(target.files) if file.trailer is not None and n in only
    }
    for extent in written:
        if extent.file in sealed:
            sealed[extent.file].append(extent)
    for number, extents in sealed.items():
        extents.sort(key=_by_position)
        file = target.files[number]
        assert file.trailer is not None
        crcs = [_crc_of_span(extents, offset, nbytes, file.path) for offset, nbytes in file.trailer.spans]
        yield from literal_tasks(number, file.trailer.build(crcs))


def _by_position(extent: WrittenRange) -> tuple[int, int]:
    return extent.offset, extent.nbytes


def _crc_of_span(extents: Sequence[WrittenRange], offset: int, nbytes: int, path: str) -> int:
    """The CRC-32 of bytes `[offset, offset + nbytes)`, which some of the extents (sorted) must tile."""
    crc, at, stop = 0, offset, offset + nbytes
    index = bisect_left(extents, (offset, 0), key=_by_position)
    while at < stop:
        extent = extents[index] if index < len(extents) else None
        if extent is None or extent.offset != at or extent.offset + extent.nbytes > stop or extent.crc is None:
            raise AssertionError(f"{path}: bytes [{offset}, {stop}) are not tiled by extents with a CRC-32 at {at}")
        crc = crc32_combine(crc, extent.crc, extent.nbytes)
        at += extent.nbytes
        index += 1
    return crc
