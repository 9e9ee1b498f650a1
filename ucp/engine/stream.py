"""The slab stream: one pass of slabs through a buffer, from source fragments to output extents."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from ucp import tunables
from ucp.engine.casting import RawArray, raw_dtype
from ucp.engine.plan import Extent, Part
from ucp.engine.reading import AtomReader, is_contiguous_in
from ucp.errors import StorageError
from ucp.files.crc import crc32, crc32_of_zeros
from ucp.files.local import SourceFiles, write_all
from ucp.model.box import Box, flat_index, intersect, whole
from ucp.model.checkpoint import Atom
from ucp.model.slabs import slabs
from ucp.model.target import OutputFile

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
    parts: Iterable[Part],
    source: SourceFiles,
    folder: Path,
    files: Sequence[OutputFile],
    budget: Budget,
    done: Callable[[list[Written]], None],
    progress: Callable[[int], None],
) -> None:
    """Write every part into the files below `folder`.

    `done` is called with what a finished part wrote, `progress` with numbers of bytes; both from worker threads, `done`
    never twice at once. The first failure stops all workers and is raised.
    """
    shared = _Shared(iter(parts), source, folder, files, budget, done, progress)
    if budget.jobs <= 1:
        shared.work()
    else:
        with ThreadPoolExecutor(budget.jobs, thread_name_prefix="ucp-slab") as pool:
            futures = [pool.submit(shared.work) for _ in range(budget.jobs)]
            try:
                wait(futures)
            finally:  # an interrupt of the waiting thread ends the workers too
                shared.stop.set()
    if shared.failure is not None:
        raise shared.failure


class _StoppedError(Exception):
    """Another worker failed; this one leaves its part unfinished."""


@dataclass(slots=True)
class _Shared:
    """What the workers of one stream share."""

    todo: Iterator[Part]
    source: SourceFiles
    folder: Path
    files: Sequence[OutputFile]
    budget: Budget
    done: Callable[[list[Written]], None]
    progress: Callable[[int], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def work(self) -> None:
        """Take parts until none is left. The first failure of any worker is kept and stops all of them."""
        worker = _Worker(self)
        try:
            while not self.stop.is_set():
                with self.lock:
                    part = next(self.todo, None)
                if part is None:
                    return
                written = worker.write(part)
                with self.lock:
                    self.done(written)
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self.lock:
                self.failure = self.failure or error
            self.stop.set()


class _Worker:
    """One thread's block of memory and its reader, kept from part to part."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self.block = np.empty(shared.budget.slab_bytes, np.uint8)
        self.reader: AtomReader | None = None

    def write(self, part: Part) -> list[Written]:
        shared = self.shared
        with ExitStack() as stack:
            opened: dict[int, _Opened] = {}
            for extent in part.extents:
                if extent.file not in opened:
                    opened[extent.file] = _Opened(stack, shared.folder, shared.files[extent.file])
            targets = [_Target(opened[extent.file], extent) for extent in part.extents]
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
        zeros[:] = 0
        while left:
            self._check_stop()
            some = min(left, zeros.size)
            target.append(zeros[:some].data)
            self.shared.progress(some)
            left -= some

    def _write_atom(self, part: Part, atom: Atom, targets: Sequence[_Target]) -> None:
        if self.reader is None or self.reader.atom is not atom or self.reader.flat != part.flat:
            self.reader = AtomReader(self.shared.source, atom, flat=part.flat)
        itemsize = atom.dtype.itemsize
        for local in slabs(part.block.shape, max(1, self.block.size // itemsize)):
            self._check_stop()
            slab = local.shift(part.block.start)
            values = self.block[: slab.numel * itemsize].view(raw_dtype(atom.dtype)).reshape(slab.shape)
            _read_padded(self.reader, slab, values)
            self.shared.progress(sum(target.take(slab, values) for target in targets))

    def _check_stop(self) -> None:
        if self.shared.stop.is_set():
            raise _StoppedError


def _read_padded(reader: AtomReader, slab: Box, values: RawArray) -> None:
    """Read a slab that may reach past the atom's shape; the elements outside become zero."""
    inside = intersect(slab, whole(reader.shape))
    if inside == slab:
        reader.read(slab, values)
        return
    values[...] = 0
    if inside is None:
        return
    # Padding lies after the real elements, so what is inside begins where the slab does.
    corner = values[tuple(slice(0, n) for n in inside.shape)]
    if corner.flags.c_contiguous:
        reader.read(inside, corner)
    else:
        real = np.empty(inside.shape, values.dtype)
        reader.read(inside, real)
        corner[...] = real


class _Opened:
    """An output file open for writing, for as long as `stack` lives."""

    def __init__(self, stack: ExitStack, folder: Path, file: OutputFile) -> None:
        self.path = folder / file.path
        self.sealed = file.seal is not None
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        stack.callback(os.close, self.fd)


class _Target:
    """An extent being written, front to back, with its running digest."""

    def __init__(self, file: _Opened, extent: Extent) -> None:
        self.file = file
        self.extent = extent
        self._at = extent.offset
        self._digest = xxhash.xxh3_128()
        self._is_zeros = extent.box is None and extent.data is None
        self._crc = crc32_of_zeros(extent.nbytes) if self._is_zeros else 0

    def take(self, slab: Box, values: RawArray) -> int:
        """Append what this extent holds of a slab; gives the number of bytes."""
        assert self.extent.box is not None
        common = intersect(self.extent.box, slab)
        if common is None:
            return 0
        inner = common.shift(tuple(-a for a in slab.start))
        if is_contiguous_in(inner, slab.shape):
            at = flat_index(inner.start, slab.shape)
            picked = values.reshape(-1)[at : at + common.numel]
        else:
            where = tuple(slice(a, a + n) for a, n in zip(inner.start, inner.shape, strict=True))
            picked = np.ascontiguousarray(values[where]).reshape(-1)
        data = picked.view(np.uint8).data
        self.append(data)
        return len(data)

    def append(self, data: memoryview) -> None:
        self._digest.update(data)
        if self.file.sealed and not self._is_zeros:
            self._crc = crc32(data, self._crc)
        try:
            write_all(self.file.fd, self._at, data)
        except OSError as error:
            raise StorageError(f"{self.file.path}: cannot write bytes at {self._at}: {error.strerror}") from error
        self._at += len(data)

    def finish(self) -> Written:
        extent = self.extent
        if self._at != extent.offset + extent.nbytes:
            raise AssertionError(f"{self.file.path}: wrote up to {self._at} of extent {extent}")
        crc = self._crc if self.file.sealed else None
        return Written(extent.file, extent.offset, extent.nbytes, self._digest.hexdigest(), crc)
