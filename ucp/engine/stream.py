"""The slab stream: one pass of slabs through a buffer, from source fragments to output extents."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ucp import tunables
from ucp.engine.flat import StraightReader, is_stored_as_is
from ucp.engine.outputs import Outputs
from ucp.engine.plan import Extent, Part
from ucp.engine.sweep import Sweep
from ucp.files.crc import crc32, crc32_of_zeros
from ucp.files.local import SourceFiles
from ucp.model.box import Box
from ucp.model.checkpoint import Atom
from ucp.model.slabs import slabs
from ucp.model.target import OutputFile
from ucp.records import dataclass, field

if TYPE_CHECKING:
    from ucp.engine.shaped import ShapedReader

_LARGEST_ITEM = 16  # bytes of the widest element there is


@dataclass(frozen=True, slots=True)
class Written:
    """An extent that is on disk: the XXH3-128 digest (hex) of its bytes and, in a file with a seal, their CRC-32."""

    file: int
    offset: int
    nbytes: int
    digest: str
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """How much work may be in memory at once. `memory` is in bytes over all threads."""

    jobs: int
    memory: int

    @property
    def slab_bytes(self) -> int:
        """A worker holds a slab, as much scratch for the stored form, and as much for what it writes."""
        return max(_LARGEST_ITEM, min(tunables.SLAB_BYTES, self.memory // (3 * max(1, self.jobs))))


def stream(
    stretches: Sequence[Iterable[Part]],
    source: SourceFiles,
    folder: Path,
    files: Sequence[OutputFile],
    budget: Budget,
    done: Callable[[list[Written]], None],
    progress: Callable[[int], None],
) -> None:
    """Write every part into the files below `folder`; each thread walks along a stretch, then helps with the others.

    `done` is called with what a finished part wrote, `progress` with numbers of bytes; both from worker threads, `done`
    never twice at once. The first failure stops all workers and is raised.
    """
    shared = _Shared([iter(stretch) for stretch in stretches], source, folder, files, budget, done, progress)
    if budget.jobs <= 1:
        shared.work(0)
    else:
        threads = [threading.Thread(target=shared.work, args=(n,), name=f"ucp-slab-{n}") for n in range(budget.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # an interrupt of the waiting thread ends the workers too
            shared.stop.set()
            for thread in threads:
                thread.join()
    if shared.failure is not None:
        raise shared.failure


class _StoppedError(Exception):
    """Another worker failed; this one leaves its part unfinished."""


@dataclass(slots=True)
class _Shared:
    """What the workers of one stream share."""

    todo: Sequence[Iterator[Part]]
    source: SourceFiles
    folder: Path
    files: Sequence[OutputFile]
    budget: Budget
    done: Callable[[list[Written]], None]
    progress: Callable[[int], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def work(self, number: int) -> None:
        """Take parts until none is left. The first failure of any worker is kept and stops all of them."""
        todo = chain(self.todo[number:], self.todo[:number])
        stretch: Iterator[Part] | None = next(todo, None)
        worker = _Worker(self)
        try:
            while stretch is not None and not self.stop.is_set():
                with self.lock:
                    part = next(stretch, None)
                if part is None:
                    stretch = next(todo, None)
                    continue
                written = worker.write(part)
                with self.lock:
                    self.done(written)
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self.lock:
                self.failure = self.failure or error
            self.stop.set()
        finally:
            worker.outputs.close()


class _Worker:
    """One thread's block of memory and its reader, kept from part to part."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        # Whole pages: AMD's Zen copies four times slower where target and source differ by 1 to 31 bytes modulo 4,096,
        # as memory of malloc and the start of a file do.
        self.block = memoryview(mmap.mmap(-1, shared.budget.slab_bytes))
        self.outputs = Outputs(shared.folder, shared.files, max(1, tunables.OPEN_FILES // shared.budget.jobs))
        self.straight: tuple[Atom, StraightReader] | None = None
        self.shaped: ShapedReader | None = None

    def write(self, part: Part) -> list[Written]:
        targets = [_Target(self.outputs, extent) for extent in part.extents]
        if part.atom is not None:
            self._write_atom(part, part.atom, targets)
        else:
            for target in targets:
                self._write_known(target)
        return [target.finish() for target in targets]

    def _write_known(self, target: _Target) -> None:
        """Write a literal, or zeros."""
        data, left = target.extent.data, target.extent.nbytes
        if data is not None:
            target.append(memoryview(data))
            self.shared.progress(len(data))
            return
        zeros = self.block[:left]
        zeros[:] = bytes(len(zeros))
        while left:
            self._check_stop()
            some = min(left, len(zeros))
            target.append(zeros[:some])
            self.shared.progress(some)
            left -= some

    def _write_atom(self, part: Part, atom: Atom, targets: Sequence[_Target]) -> None:
        if part.flat and is_stored_as_is(atom):
            self._copy(part, atom, targets)
        else:
            self._reshape(part, atom, targets)

    def _copy(self, part: Part, atom: Atom, targets: Sequence[_Target]) -> None:
        """Bytes that go as they are: no arrays."""
        if self.straight is None or self.straight[0] is not atom:
            self.straight = atom, StraightReader(self.shared.source, atom)
        reader = self.straight[1]
        itemsize = atom.dtype.itemsize
        begin = part.block.start[0] * itemsize
        end = begin + part.block.numel * itemsize
        step = len(self.block) // itemsize * itemsize
        only = targets[0] if len(targets) == 1 else None  # which takes all, without looking
        sweep = _sweep(() if only else targets)
        # Slabs end where blocks of the (first) file do, because Linux caches whole, aligned writes in large pages.
        start, stop = begin, begin + step - targets[0].extent.offset % step // itemsize * itemsize
        while start < end:
            self._check_stop()
            data = self.block[: min(stop, end) - start]
            reader.read(start, data)
            if only is not None:
                only.append(data)
                self.shared.progress(len(data))
            else:
                slab = Box((start // itemsize,), (len(data) // itemsize,))
                self.shared.progress(sum(target.take_bytes(start, data, itemsize) for _, target in sweep.meeting(slab)))
            start, stop = stop, stop + step

    def _reshape(self, part: Part, atom: Atom, targets: Sequence[_Target]) -> None:
        from ucp.engine.shaped import ShapedReader, pick

        if self.shaped is None or self.shaped.atom is not atom or self.shaped.flat != part.flat:
            self.shaped = ShapedReader(self.shared.source, atom, flat=part.flat)
        sweep = _sweep(targets)
        for local in slabs(part.block.shape, max(1, len(self.block) // atom.dtype.itemsize)):
            self._check_stop()
            slab = local.shift(part.block.start)
            values = self.shaped.read(slab, self.block)
            done = 0
            for box, target in sweep.meeting(slab):
                data = pick(values, slab, box)
                target.append(data)
                done += len(data)
            self.shared.progress(done)

    def _check_stop(self) -> None:
        if self.shared.stop.is_set():
            raise _StoppedError


def _sweep(targets: Iterable[_Target]) -> Sweep[_Target]:
    return Sweep((target.extent.box, target) for target in targets if target.extent.box is not None)


class _Target:
    """An extent being written, front to back, with its running digest."""

    def __init__(self, outputs: Outputs, extent: Extent) -> None:
        self.outputs = outputs
        self.extent = extent
        self._sealed = outputs.files[extent.file].seal is not None
        self._at = extent.offset
        self._digest = xxhash.xxh3_128()
        self._is_zeros = extent.box is None and extent.data is None
        self._crc = crc32_of_zeros(extent.nbytes) if self._is_zeros else 0

    def take_bytes(self, start: int, data: memoryview, itemsize: int) -> int:
        """Append what this extent holds of the flat atom's bytes from byte `start` on; gives the number of bytes."""
        assert self.extent.box is not None
        first = self.extent.box.start[0] * itemsize
        lo, hi = max(first, start), min(first + self.extent.nbytes, start + len(data))
        if lo >= hi:
            return 0
        self.append(data[lo - start : hi - start])
        return hi - lo

    def append(self, data: memoryview) -> None:
        self._digest.update(data)
        if self._sealed and not self._is_zeros:
            self._crc = crc32(data, self._crc)
        self.outputs.write(self.extent.file, self._at, data)
        self._at += len(data)

    def finish(self) -> Written:
        extent = self.extent
        if self._at != extent.offset + extent.nbytes:
            raise AssertionError(f"{self.outputs.path(extent.file)}: wrote up to {self._at} of extent {extent}")
        crc = self._crc if self._sealed else None
        return Written(extent.file, extent.offset, extent.nbytes, self._digest.hexdigest(), crc)
