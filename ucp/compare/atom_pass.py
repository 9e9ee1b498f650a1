"""One pass over atoms that are read side by side, slab by slab, by several threads in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, slabs
from ucp.core.checkpoint import Atom
from ucp.engine.convert import Progress
from ucp.errors import UcpError
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, raw_dtype
from ucp.read.verbatim import can_flatten
from ucp.storage.local import SourceFiles


class SlabConsumer(Protocol):
    """Takes in what passes by."""

    def take(self, at: int, raws: Sequence[RawArray]) -> None:
        """The elements from row-major position `at` on, of every atom of the bundle."""

    def merge(self, later: Any) -> None:
        """Take in what another sink of the same type saw of the elements that come after."""


S = TypeVar("S", bound="SlabConsumer")


@dataclass(frozen=True, slots=True)
class AtomGroup:
    """Atoms of one shape that are read together, each with the files it lies in."""

    members: tuple[tuple[SourceFiles, Atom], ...]

    @property
    def shape(self) -> Shape:
        return self.members[0][1].shape

    @property
    def elements(self) -> int:
        """Of one slab, so that no atom's part of it is larger than a slab should be."""
        return max(1, settings.SLAB_BYTES // max(atom.dtype.itemsize for _, atom in self.members))

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for _, atom in self.members)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """A bundle that could not be read."""

    error: UcpError


@dataclass(frozen=True, slots=True)
class _SlabBatch:
    """Some of the work on a bundle: its number, whether it is read flat, and consecutive slabs."""

    number: int
    flat: bool
    slabs: Sequence[Box]


def run_pass(
    bundles: Sequence[AtomGroup],
    sink: Callable[[int], S],
    *,
    jobs: int,
    progress: Progress | None = None,
    sample: int | None = None,
    keep_going: bool = False,
) -> list[S | ReadFailure]:
    """Read every bundle once and give what came of each, in order.

    `sink` makes an empty sink for a bundle's number. With `sample`, at most so many elements of each bundle are read,
    in slabs spread evenly over it. With `keep_going` a bundle that cannot be read becomes a `Failure`; without, its
    error is raised and stops all threads.
    """
    work = _PassState(bundles, sink, progress or Progress(), sample, keep_going)
    work.progress.start(sum(bundle.nbytes if sample is None else 0 for bundle in bundles))
    try:
        if jobs <= 1:
            work.run()
        else:
            with ThreadPoolExecutor(jobs, thread_name_prefix="ucp-pass") as pool:
                futures = [pool.submit(work.run) for _ in range(jobs)]
                try:
                    wait(futures)
                finally:  # an interrupt of the waiting thread ends the workers too
                    work.stop.set()
    finally:
        work.progress.finish()
    if work.failure is not None:
        raise work.failure
    return [work.result(number) for number in range(len(bundles))]


class _PassState(Generic[S]):
    """What the threads of one pass share."""

    def __init__(
        self,
        bundles: Sequence[AtomGroup],
        sink: Callable[[int], S],
        progress: Progress,
        sample: int | None,
        keep_going: bool,
    ) -> None:
        self.bundles = bundles
        self.sink = sink
        self.progress = progress
        self.sample = sample
        self.keep_going = keep_going
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._todo = self._parts()
        self._done: dict[int, list[tuple[int, S]]] = {}  # bundle → what its parts gave, with their position
        self._failed: dict[int, UcpError] = {}

    def run(self) -> None:
        """Take parts until none is left."""
        worker = _PassWorker(self.bundles, self.stop)
        try:
            while not self.stop.is_set():
                with self._lock:
                    part = next(self._todo, None)
                if part is None:
                    return
                self._carry_out(worker, part)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self._lock:
                self.failure = self.failure or error
            self.stop.set()

    def _carry_out(self, worker: _PassWorker, part: _SlabBatch) -> None:
        sink = self.sink(part.number)
        try:
            position = worker.read(part, sink, self.progress)
        except UcpError as error:
            if not self.keep_going:
                raise
            with self._lock:
                self._failed.setdefault(part.number, error)
            return
        with self._lock:
            self._done.setdefault(part.number, []).append((position, sink))

    def _parts(self) -> Iterator[_SlabBatch]:
        for number, bundle in enumerate(self.bundles):
            try:
                flat = all(can_flatten(atom) for _, atom in bundle.members)
            except UcpError as error:
                if not self.keep_going:
                    raise
                self._failed[number] = error
                continue
            shape: Shape = (bundle.members[0][1].numel,) if flat else bundle.shape
            cut = list(slabs(shape, bundle.elements))
            if self.sample is not None:
                cut = _spread(cut, max(1, self.sample // bundle.elements))
            together = max(1, settings.COPY_TASK_BYTES // settings.SLAB_BYTES)
            for start in range(0, len(cut), together):
                yield _SlabBatch(number, flat, cut[start : start + together])

    def result(self, number: int) -> S | ReadFailure:
        """What all parts of a bundle gave together."""
        if number in self._failed:
            return ReadFailure(self._failed[number])
        total = self.sink(number)
        for _, sink in sorted(self._done.get(number, ()), key=lambda item: item[0]):
            total.merge(sink)
        return total


def _spread(cut: list[Box], count: int) -> list[Box]:
    """`count` of the slabs, the first and the last among them, the others evenly between."""
    if count >= len(cut):
        return cut
    if count == 1:
        return [cut[len(cut) // 2]]
    return [cut[i * (len(cut) - 1) // (count - 1)] for i in range(count)]


class _PassWorker:
    """One thread's blocks of memory and its readers, kept from part to part."""

    def __init__(self, bundles: Sequence[AtomGroup], stop: threading.Event) -> None:
        self._bundles = bundles
        self._stop = stop
        self._blocks: list[RawArray] = []
        self._number: int | None = None
        self._readers: list[AtomReader] = []

    def read(self, part: _SlabBatch, sink: SlabConsumer, progress: Progress) -> int:
        """Pass the slabs of a part to the sink; gives the position of the first element."""
        bundle = self._bundles[part.number]
        if self._number != part.number:
            self._readers = [AtomReader(files, atom, flat=part.flat) for files, atom in bundle.members]
            self._number = part.number
        while len(self._blocks) < len(bundle.members):
            self._blocks.append(np.empty(settings.SLAB_BYTES + 16, np.uint8))
        shape = self._readers[0].shape
        for slab in part.slabs:
            if self._stop.is_set():
                break
            raws = []
            for reader, block in zip(self._readers, self._blocks, strict=False):
                dtype = reader.atom.dtype
                values = block[: slab.numel * dtype.itemsize].view(raw_dtype(dtype)).reshape(slab.shape)
                reader.read(slab, values)
                raws.append(values)
            sink.take(flat_index(slab.start, shape), raws)
            progress.advance(sum(raw.nbytes for raw in raws))
        return flat_index(part.slabs[0].start, shape)
