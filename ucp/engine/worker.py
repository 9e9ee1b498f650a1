"""Copy workers: move copy tasks through a block of memory, from source fragments to ranges of output files."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ucp import settings
from ucp.containers.crc32 import crc32, crc32_combine, crc32_of_zeros, hex_crc
from ucp.core.box import Box, slabs
from ucp.core.checkpoint import Atom, ForkableFiles
from ucp.core.strided_runs import StridedRun
from ucp.core.target import OutputFile, Target
from ucp.engine.copy_tasks import CopyTask, OutputRange, OverlapSweep, literal_tasks, task_groups
from ucp.engine.pool import Meter, Work, Worker, run_pool
from ucp.errors import StorageError, storage_errors
from ucp.read.verbatim import StoredRuns, VerbatimReader, ViewCache
from ucp.storage.local import SourceFiles, write_all

if TYPE_CHECKING:
    from ucp.read.atom_reader import AtomReader

_LARGEST_ITEMSIZE = 16  # bytes of the widest element type


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """A range of an output file that is on disk, with the digest of its bytes in hex.

    The digest is XXH3-128, or in a file with a trailer the CRC-32, which the trailer needs anyway.
    """

    file: int
    offset: int
    nbytes: int
    digest: str
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """How many workers there are, and how many bytes of memory they may use together.

    With `processes`, workers are processes if that is possible, otherwise threads.
    """

    jobs: int
    memory: int
    processes: bool = False

    @property
    def slab_bytes(self) -> int:
        """A worker holds one slab, a buffer for its stored form, and a buffer for what it writes."""
        return max(_LARGEST_ITEMSIZE, min(settings.SLAB_BYTES, self.memory // (3 * max(1, self.jobs))))

    def in_threads(self) -> WorkerBudget:
        """The same without processes."""
        return replace(self, processes=False)


def run_copy_tasks(
    queues: Sequence[Iterable[CopyTask]],
    source: SourceFiles,
    folder: Path,
    files: Sequence[OutputFile],
    budget: WorkerBudget,
    done: Callable[[list[WrittenRange]], None],
    meter: Meter,
) -> None:
    """Write every task into the files below `folder`; `done` is called with what each finished task has written."""

    def group_done(group: list[list[WrittenRange]]) -> None:
        for written in group:
            done(written)

    work = CopyWork(source, folder, files, budget)
    groups = [task_groups(queue) for queue in queues]
    run_pool(work, groups, group_done, meter, jobs=budget.jobs, processes=budget.processes)


class CopyWork(Work[Sequence[CopyTask], "list[list[WrittenRange]]"]):
    """Writes groups of tasks that are computed together; most groups are a single task."""

    def __init__(self, source: SourceFiles, folder: Path, files: Sequence[OutputFile], budget: WorkerBudget) -> None:
        self.source = source
        self.folder = folder
        self.files = files
        self.budget = budget
        self._open_files = max(1, settings.MAX_OPEN_FILES // max(1, budget.jobs))  # per worker

    def start(self, meter: Meter) -> Worker[Sequence[CopyTask], list[list[WrittenRange]]]:
        outputs = OutputDescriptors(self.folder, self.files, self._open_files)
        worker = CopyWorker(self.source, outputs, self.budget.slab_bytes, meter)
        return Worker(lambda group: [worker.write(task) for task in group], outputs.close)

    def load(self, group: Sequence[CopyTask]) -> float:
        # Computed bytes take longer than copied ones.
        is_computed = any(task.atom is not None and task.atom.computed for task in group)
        limit = settings.COMPUTED_BATCH_BYTES if is_computed else settings.COPY_TASK_BYTES
        return sum(task.nbytes for task in group) / limit

    def prepare_fork(self) -> bool:
        computed = self.source.computed
        # Connections to an object store cannot be shared by processes.
        return not self.source.is_remote and (
            computed is None or (isinstance(computed, ForkableFiles) and computed.before_fork())
        )

    def enter_fork(self, workers: int) -> None:
        if isinstance(self.source.computed, ForkableFiles):
            self.source.computed.in_fork(workers)
        self._open_files = settings.MAX_OPEN_FILES

    def encode(self, group: list[list[WrittenRange]]) -> Any:
        return [[(w.file, w.offset, w.nbytes, w.digest, w.crc) for w in written] for written in group]

    def decode(self, group: Any) -> list[list[WrittenRange]]:
        return [[WrittenRange(*values) for values in written] for written in group]


class CopyWorker:
    """Writes tasks. Keeps its block of memory, its reader and its open files from task to task."""

    def __init__(self, source: SourceFiles, outputs: OutputDescriptors, slab_bytes: int, meter: Meter) -> None:
        self.source = source
        self.outputs = outputs
        self.meter = meter
        # Page-aligned for the reason given in `ucp.read.casting`, which would import numpy.
        self.block = memoryview(mmap.mmap(-1, slab_bytes))
        self.views = ViewCache(self.block)
        self._verbatim: tuple[Atom, VerbatimReader] | None = None
        self._reader: AtomReader | None = None

    def write(self, task: CopyTask) -> list[WrittenRange]:
        """Write a task; returns what is on disk now, range by range."""
        ranges = [_RangeWriter(self.outputs, one) for one in task.ranges]
        if task.atom is None:
            for one in ranges:
                self._write_known(one)
        elif task.stored is not None:
            self._copy_verbatim(task, task.atom, task.stored, ranges)
        else:
            self._copy_arrays(task, task.atom, ranges)
        return [one.finish() for one in ranges]

    def _write_known(self, output: _RangeWriter) -> None:
        """Write a literal, or zeros."""
        self.meter.check()
        data, left = output.range.data, output.range.nbytes
        if data is not None:
            output.append(memoryview(data))
            self.meter.advance(len(data))
            return
        zeros = self.block[:left]
        zeros[:] = bytes(len(zeros))
        while left:
            count = min(left, len(zeros))
            output.append(zeros[:count])
            self.meter.advance(count)
            left -= count

    def _copy_verbatim(self, task: CopyTask, atom: Atom, stored: StoredRuns, outputs: Sequence[_RangeWriter]) -> None:
        """Copy bytes unchanged, without numpy."""
        if self._verbatim is None or self._verbatim[0] is not atom:
            self._verbatim = atom, VerbatimReader(self.source, atom, stored)
        reader = self._verbatim[1]
        itemsize = atom.dtype.itemsize
        begin = task.block.start[0] * itemsize
        end = begin + task.block.numel * itemsize
        step = len(self.block) // itemsize * itemsize
        only = outputs[0] if len(outputs) == 1 and outputs[0].is_interval else None  # takes every byte that is read
        sweep = _sweep(() if only else outputs)
        run_step = outputs[0].run_step * itemsize
        if 0 < run_step <= step:
            # Slabs that start at the same position of a row consist of the same runs.
            step -= step % run_step
            start, stop = begin, begin + step
        else:
            # Slabs end at block boundaries of the first file: Linux caches whole, aligned writes in large pages.
            start, stop = begin, begin + step - outputs[0].range.offset % step // itemsize * itemsize
        self.meter.check()
        while start < end:
            stop = min(stop, end)
            reader.read(start, stop, self.views)
            if only is not None:
                only.append(self.block[: stop - start])
                self.meter.advance(stop - start)
            else:
                slab = Box((start // itemsize,), ((stop - start) // itemsize,))
                overlapping = sweep.overlapping(slab)
                self.meter.advance(sum(one.append_runs(start, stop, self.views, itemsize) for _, one in overlapping))
            start, stop = stop, stop + step

    def _copy_arrays(self, task: CopyTask, atom: Atom, outputs: Sequence[_RangeWriter]) -> None:
        """Copy elements that are rearranged or computed on the way: cut along inner dimensions, cast, averaged, …"""
        import numpy as np

        from ucp.read.atom_reader import AtomReader, extract_bytes
        from ucp.read.casting import raw_dtype

        if self._reader is None or self._reader.atom is not atom or self._reader.flat != task.flat:
            self._reader = AtomReader(self.source, atom, flat=task.flat)
        sweep = _sweep(outputs)
        dtype = raw_dtype(atom.dtype)
        self.meter.check()
        for local in slabs(task.block.shape, max(1, len(self.block) // atom.dtype.itemsize)):
            slab = local.shift(task.block.start)
            values = np.frombuffer(self.block, dtype, slab.numel).reshape(slab.shape)
            self._reader.read(slab, values)
            count = 0
            for box, output in sweep.overlapping(slab):
                data = extract_bytes(values, slab, box)
                output.append(data)
                count += len(data)
            self.meter.advance(count)


def _sweep(outputs: Iterable[_RangeWriter]) -> OverlapSweep[_RangeWriter]:
    return OverlapSweep((output.bounds, output) for output in outputs)


class _RangeWriter:
    """Writes one range of an output file from front to back, and computes its digest."""

    def __init__(self, outputs: OutputDescriptors, output_range: OutputRange) -> None:
        self.outputs = outputs
        self.range = output_range
        self._position = output_range.offset
        self._digest = None if outputs.files[output_range.file].trailer is not None else xxhash.xxh3_128()
        self._is_zeros = output_range.place is None and output_range.data is None
        self._crc = crc32_of_zeros(output_range.nbytes) if self._is_zeros else 0

    @property
    def is_interval(self) -> bool:
        """Whether the range holds all of the flattened atom from its first to its last element."""
        return isinstance(self.range.place, StridedRun) and self.range.place.times == 1

    @property
    def bounds(self) -> Box:
        """The smallest box of the atom, or of the flattened atom, that contains the range."""
        place = self.range.place
        assert place is not None
        return Box((place.first,), (place.stop - place.first,)) if isinstance(place, StridedRun) else place

    @property
    def run_step(self) -> int:
        """Elements of the flattened atom from the start of one run to the start of the next; 0 if there is one run."""
        place = self.range.place
        return place.step if isinstance(place, StridedRun) and place.times > 1 else 0

    def append_runs(self, start: int, stop: int, data: ViewCache, itemsize: int) -> int:
        """Append what the range contains of the flattened atom's bytes `[start, stop)`; returns their number."""
        assert isinstance(self.range.place, StridedRun)
        span = self.range.place.scaled(itemsize).within(start, stop)
        if not span.times:
            return 0
        views = data.of(span)
        self.append(views[0] if len(views) == 1 else memoryview(b"".join(views)))
        return span.numel

    def append(self, data: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(data)
        elif not self._is_zeros:
            self._crc = crc32(data, self._crc)
        self.outputs.write(self.range.file, self._position, data)
        self._position += len(data)

    def finish(self) -> WrittenRange:
        file, offset, nbytes = self.range.file, self.range.offset, self.range.nbytes
        if self._position != offset + nbytes:
            raise AssertionError(f"{self.outputs.path(file)}: wrote up to byte {self._position} of {self.range}")
        if self._digest is not None:
            return WrittenRange(file, offset, nbytes, self._digest.hexdigest())
        return WrittenRange(file, offset, nbytes, hex_crc(self._crc), self._crc)


class OutputDescriptors:
    """The files of a target below `folder`, by number. At most `limit` are open; the least recently used is closed."""

    def __init__(self, folder: Path, files: Sequence[OutputFile], limit: int) -> None:
        self.folder = folder
        self.files = files
        self._limit = limit
        self._open: dict[int, int] = {}  # number of the file → descriptor, least recently used first

    def path(self, number: int) -> Path:
        return self.folder / self.files[number].path

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Write all of `data` into a file at byte `offset`."""
        fd = self._open.pop(number, None)
        if fd is None:
            if len(self._open) >= self._limit:
                os.close(self._open.pop(next(iter(self._open))))
            with storage_errors(self.path(number), "cannot be written"):
                fd = os.open(self.path(number), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open[number] = fd
        try:
            write_all(fd, offset, data)
        except OSError as error:
            raise StorageError(f"{self.path(number)}: cannot write bytes at {offset}: {error.strerror}") from error

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


# Trailers -----------------------------------------------------------------------------------------------------------


def trailer_tasks(target: Target, written: Iterable[WrittenRange], only: Container[int]) -> Iterator[CopyTask]:
    """Tasks for the trailers of the files `only`, whose other bytes are all on disk, as listed in `written`."""
    ranges: dict[int, list[WrittenRange]] = {
        number: [] for number, file in enumerate(target.files) if file.trailer is not None and number in only
    }
    for one in written:
        if one.file in ranges:
            ranges[one.file].append(one)
    for number, own in ranges.items():
        own.sort(key=_by_position)
        file = target.files[number]
        assert file.trailer is not None
        crcs = [_crc_of_span(own, offset, nbytes, file.path) for offset, nbytes in file.trailer.spans]
        yield from literal_tasks(number, file.trailer.build(crcs))


def _by_position(written: WrittenRange) -> tuple[int, int]:
    return written.offset, written.nbytes


def _crc_of_span(written: Sequence[WrittenRange], offset: int, nbytes: int, path: str) -> int:
    """The CRC-32 of bytes `[offset, offset + nbytes)`, which some of the ranges (sorted) must tile."""
    crc, position, stop = 0, offset, offset + nbytes
    index = bisect_left(written, (offset, 0), key=_by_position)
    while position < stop:
        one = written[index] if index < len(written) else None
        if one is None or one.offset != position or one.offset + one.nbytes > stop or one.crc is None:
            raise AssertionError(f"{path}: bytes [{offset}, {stop}) have no CRC-32 at {position}")
        crc = crc32_combine(crc, one.crc, one.nbytes)
        position += one.nbytes
        index += 1
    return crc
