"""The output files of one thread: positional writes, with a bounded set of open descriptors.

A worker: moves one part after the other through a block of memory, from source fragments to output extents.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ucp import settings
from ucp.containers.crc32 import crc32, crc32_of_zeros, hex_crc
from ucp.core.box import Box, slabs
from ucp.core.checkpoint import Atom
from ucp.core.strided_runs import StridedRun
from ucp.core.target import OutputFile
from ucp.engine.plan import CopyTask, OutputRange, OverlapSweep
from ucp.errors import StorageError
from ucp.read.verbatim import StoredRuns, VerbatimReader, ViewCache
from ucp.storage.local import SourceFiles, write_all

if TYPE_CHECKING:
    from ucp.read.atom_reader import AtomReader


class OutputDescriptors:
    """Files of a target, below `folder`, by number. At most `limit` are open; the longest unused is closed first."""

    def __init__(self, folder: Path, files: Sequence[OutputFile], limit: int) -> None:
        self.folder = folder
        self.files = files
        self._limit = limit
        self._open: dict[int, int] = {}  # number of the file → descriptor, longest unused first

    def path(self, number: int) -> Path:
        return self.folder / self.files[number].path

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Write all of `data` into a file at byte `offset`."""
        fd = self._descriptor(number)
        try:
            write_all(fd, offset, data)
        except OSError as error:
            raise StorageError(f"{self.path(number)}: cannot write bytes at {offset}: {error.strerror}") from error

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, number: int) -> int:
        fd = self._open.pop(number, None)
        if fd is None:
            if len(self._open) >= self._limit:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                fd = os.open(self.path(number), os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StorageError(f"{self.path(number)}: cannot be written: {error.strerror}") from error
        self._open[number] = fd
        return fd


_LARGEST_ITEMSIZE = 16  # bytes of the widest element there is


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """An extent that is on disk, and the digest of its bytes in hex: XXH3-128, or in a file with a seal their CRC-32,
    which is computed for the seal anyway."""

    file: int
    offset: int
    nbytes: int
    digest: str
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """How many workers there are, and how much work may be in memory at once: `memory` is in bytes over all of them.

    With `processes` workers are processes where that is possible, else threads of this one.
    """

    jobs: int
    memory: int
    processes: bool = False

    @property
    def slab_bytes(self) -> int:
        """A worker holds a slab, as much scratch for the stored form, and as much for what it writes."""
        return max(_LARGEST_ITEMSIZE, min(settings.SLAB_BYTES, self.memory // (3 * max(1, self.jobs))))


@dataclass(frozen=True, slots=True)
class CopyContext:
    """What all workers of a stream are told. `progress` gets numbers of bytes; `stopped` says when to leave."""

    source: SourceFiles
    folder: Path
    files: Sequence[OutputFile]
    budget: WorkerBudget
    progress: Callable[[int], None]
    stopped: Callable[[], bool]


class StoppedError(Exception):
    """Another worker failed; this one leaves its part unfinished."""


class CopyWorker:
    """Writes parts, one after the other. Keeps its block of memory, its reader and its open files from part to part."""

    def __init__(self, work: CopyContext) -> None:
        self.work = work
        # Whole pages: AMD's Zen copies four times slower where target and source differ by 1 to 31 bytes modulo 4,096,
        # as memory of malloc and the start of a file do.
        self.block = memoryview(mmap.mmap(-1, work.budget.slab_bytes))
        self.views = ViewCache(self.block)
        self.outputs = OutputDescriptors(work.folder, work.files, max(1, settings.MAX_OPEN_FILES // work.budget.jobs))
        self.straight: tuple[Atom, VerbatimReader] | None = None
        self.shaped: AtomReader | None = None

    def write(self, part: CopyTask) -> list[WrittenRange]:
        """Write a part; gives what is on disk now, extent by extent."""
        targets = [_OpenRange(self.outputs, extent) for extent in part.extents]
        if part.atom is not None:
            self._write_atom(part, part.atom, targets)
        else:
            for target in targets:
                self._write_known(target)
        return [target.finish() for target in targets]

    def _write_known(self, target: _OpenRange) -> None:
        """Write a literal, or zeros."""
        data, left = target.extent.data, target.extent.nbytes
        if data is not None:
            target.append(memoryview(data))
            self.work.progress(len(data))
            return
        zeros = self.block[:left]
        zeros[:] = bytes(len(zeros))
        while left:
            self._check_stop()
            some = min(left, len(zeros))
            target.append(zeros[:some])
            self.work.progress(some)
            left -= some

    def _write_atom(self, part: CopyTask, atom: Atom, targets: Sequence[_OpenRange]) -> None:
        if part.stored is not None:
            self._copy(part, atom, part.stored, targets)
        else:
            self._reshape(part, atom, targets)

    def _copy(self, part: CopyTask, atom: Atom, stored: StoredRuns, targets: Sequence[_OpenRange]) -> None:
        """Bytes that go as they are: no arrays."""
        if self.straight is None or self.straight[0] is not atom:
            self.straight = atom, VerbatimReader(self.work.source, atom, stored)
        reader = self.straight[1]
        itemsize = atom.dtype.itemsize
        begin = part.block.start[0] * itemsize
        end = begin + part.block.numel * itemsize
        step = len(self.block) // itemsize * itemsize
        only = targets[0] if len(targets) == 1 and targets[0].is_interval else None  # which takes all, without looking
        sweep = _sweep(() if only else targets)
        distance = targets[0].distance * itemsize
        if 0 < distance <= step:
            # Slabs that begin at the same place of a row are cut alike.
            step -= step % distance
            start, stop = begin, begin + step
        else:
            # Slabs end where blocks of the (first) file do, because Linux caches whole, aligned writes in large pages.
            start, stop = begin, begin + step - targets[0].extent.offset % step // itemsize * itemsize
        while start < end:
            self._check_stop()
            stop = min(stop, end)
            reader.read(start, stop, self.views)
            if only is not None:
                only.append(self.block[: stop - start])
                self.work.progress(stop - start)
            else:
                slab = Box((start // itemsize,), ((stop - start) // itemsize,))
                met = sweep.meeting(slab)
                self.work.progress(sum(target.take(start, stop, self.views, itemsize) for _, target in met))
            start, stop = stop, stop + step

    def _reshape(self, part: CopyTask, atom: Atom, targets: Sequence[_OpenRange]) -> None:
        import numpy as np

        from ucp.read.atom_reader import AtomReader, extract_bytes
        from ucp.read.casting import raw_dtype

        if self.shaped is None or self.shaped.atom is not atom or self.shaped.flat != part.flat:
            self.shaped = AtomReader(self.work.source, atom, flat=part.flat)
        sweep = _sweep(targets)
        for local in slabs(part.block.shape, max(1, len(self.block) // atom.dtype.itemsize)):
            self._check_stop()
            slab = local.shift(part.block.start)
            values = np.frombuffer(self.block, raw_dtype(atom.dtype), slab.numel).reshape(slab.shape)
            self.shaped.read(slab, values)
            done = 0
            for box, target in sweep.meeting(slab):
                data = extract_bytes(values, slab, box)
                target.append(data)
                done += len(data)
            self.work.progress(done)

    def _check_stop(self) -> None:
        if self.work.stopped():
            raise StoppedError


def _sweep(targets: Iterable[_OpenRange]) -> OverlapSweep[_OpenRange]:
    return OverlapSweep((target.reach, target) for target in targets)


class _OpenRange:
    """An extent being written, front to back, with its running digest."""

    def __init__(self, outputs: OutputDescriptors, extent: OutputRange) -> None:
        self.outputs = outputs
        self.extent = extent
        self._sealed = outputs.files[extent.file].trailer is not None
        self._at = extent.offset
        self._digest = None if self._sealed else xxhash.xxh3_128()
        self._is_zeros = extent.place is None and extent.data is None
        self._crc = crc32_of_zeros(extent.nbytes) if self._is_zeros else 0

    @property
    def is_interval(self) -> bool:
        """Does it hold all of the flattened atom from its first to its last element?"""
        return isinstance(self.extent.place, StridedRun) and self.extent.place.times == 1

    @property
    def reach(self) -> Box:
        """The smallest box of the atom, or of the flattened one, that all of it lies in."""
        place = self.extent.place
        assert place is not None
        return Box((place.first,), (place.stop - place.first,)) if isinstance(place, StridedRun) else place

    @property
    def distance(self) -> int:
        """Elements from the beginning of a run in the flattened atom to that of the next one; 0 where there is one."""
        place = self.extent.place
        return place.step if isinstance(place, StridedRun) and place.times > 1 else 0

    def take(self, start: int, stop: int, data: ViewCache, itemsize: int) -> int:
        """Append what this extent holds of the flattened atom's bytes `[start, stop)`; gives their number."""
        assert isinstance(self.extent.place, StridedRun)
        runs = self.extent.place.scaled(itemsize).within(start, stop)
        if not runs.times:
            return 0
        views = data.of(runs)
        self.append(views[0] if len(views) == 1 else memoryview(b"".join(views)))
        return runs.numel

    def append(self, data: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(data)
        elif not self._is_zeros:
            self._crc = crc32(data, self._crc)
        self.outputs.write(self.extent.file, self._at, data)
        self._at += len(data)

    def finish(self) -> WrittenRange:
        extent = self.extent
        if self._at != extent.offset + extent.nbytes:
            raise AssertionError(f"{self.outputs.path(extent.file)}: wrote up to {self._at} of extent {extent}")
        if self._digest is not None:
            return WrittenRange(extent.file, extent.offset, extent.nbytes, self._digest.hexdigest())
        return WrittenRange(extent.file, extent.offset, extent.nbytes, hex_crc(self._crc), self._crc)
