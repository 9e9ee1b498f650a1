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
from ucp.files.local import SourceFiles, write_all
from ucp.model.box import Box, flat_index, intersect
from ucp.model.checkpoint import Atom
from ucp.model.slabs import slabs
from ucp.model.target import OutputFile

_LARGEST_ITEM = 16  # bytes of the widest element there is


@dataclass(frozen=True, slots=True)
class Written:
    """An extent that is on disk, with the XXH3-128 digest (hex) of its bytes."""

    file: int
    offset: int
    nbytes: int
    digest: str


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
            targets = [_Target(stack, shared.folder / shared.files[e.file].path, e) for e in part.extents]
            if part.atom is not None:
                self._write_atom(part, part.atom, targets)
            else:
                for target in targets:
                    assert target.extent.data is not None
                    target.append(memoryview(target.extent.data))
                    shared.progress(len(target.extent.data))
            return [target.finish() for target in targets]

    def _write_atom(self, part: Part, atom: Atom, targets: Sequence[_Target]) -> None:
        if self.reader is None or self.reader.atom is not atom or self.reader.flat != part.flat:
            self.reader = AtomReader(self.shared.source, atom, flat=part.flat)
        itemsize = atom.dtype.itemsize
        for local in slabs(part.block.shape, max(1, self.block.size // itemsize)):
            if self.shared.stop.is_set():
                raise _StoppedError
            slab = local.shift(part.block.start)
            values = self.block[: slab.numel * itemsize].view(raw_dtype(atom.dtype)).reshape(slab.shape)
            self.reader.read(slab, values)
            for target in targets:
                target.take(slab, values)
            self.shared.progress(values.nbytes)


class _Target:
    """An extent being written, front to back, with its running digest."""

    def __init__(self, stack: ExitStack, path: Path, extent: Extent) -> None:
        self.path = path
        self.extent = extent
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        stack.callback(os.close, self._fd)
        self._at = extent.offset
        self._digest = xxhash.xxh3_128()

    def take(self, slab: Box, values: RawArray) -> None:
        """Append what this extent holds of a slab."""
        assert self.extent.box is not None
        common = intersect(self.extent.box, slab)
        if common is None:
            return
        inner = common.shift(tuple(-a for a in slab.start))
        if is_contiguous_in(inner, slab.shape):
            at = flat_index(inner.start, slab.shape)
            picked = values.reshape(-1)[at : at + common.numel]
        else:
            where = tuple(slice(a, a + n) for a, n in zip(inner.start, inner.shape, strict=True))
            picked = np.ascontiguousarray(values[where]).reshape(-1)
        self.append(picked.view(np.uint8).data)

    def append(self, data: memoryview) -> None:
        self._digest.update(data)
        try:
            write_all(self._fd, self._at, data)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write bytes at {self._at}: {error.strerror}") from error
        self._at += len(data)

    def finish(self) -> Written:
        if self._at != self.extent.offset + self.extent.nbytes:
            raise AssertionError(f"{self.path}: wrote up to {self._at} of extent {self.extent}")
        return Written(self.extent.file, self.extent.offset, self.extent.nbytes, self._digest.hexdigest())
