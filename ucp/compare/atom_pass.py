"""One pass over atoms that are read side by side, slab by slab, by several threads in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, slabs
from ucp.core.checkpoint import Atom
from ucp.engine.pool import Meter, Progress, Work, Worker, run_pool
from ucp.errors import UcpError
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, raw_dtype
from ucp.read.verbatim import can_flatten
from ucp.storage.local import SourceFiles


class SlabConsumer(Protocol):
    """Takes in the slabs of a group of atoms."""

    def take(self, at: int, raws: Sequence[RawArray]) -> None:
        """Take in the elements from row-major position `at` on, of every atom of the group."""

    def merge(self, later: Any) -> None:
        """Add what another consumer of the same type took in of the elements that follow."""


S = TypeVar("S", bound="SlabConsumer")


@dataclass(frozen=True, slots=True)
class AtomGroup:
    """Atoms of one shape that are read together, each with the files that store it."""

    members: tuple[tuple[SourceFiles, Atom], ...]

    @property
    def shape(self) -> Shape:
        return self.members[0][1].shape

    @property
    def elements(self) -> int:
        """Elements per slab, so that the slab of no atom is larger than SLAB_BYTES."""
        return max(1, settings.SLAB_BYTES // max(atom.dtype.itemsize for _, atom in self.members))

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for _, atom in self.members)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """A group that could not be read."""

    error: UcpError


@dataclass(frozen=True, slots=True)
class _SlabBatch:
    """Some consecutive slabs of group `number`; of the flattened atoms if `flat`."""

    number: int
    flat: bool
    slabs: Sequence[Box]


def run_pass(
    groups: Sequence[AtomGroup],
    consumer: Callable[[int], S],
    *,
    jobs: int,
    progress: Progress | None = None,
    sample: int | None = None,
    keep_going: bool = False,
) -> list[S | ReadFailure]:
    """Read every group once and return what its consumer took in, in order.

    `consumer` makes an empty consumer for the number of a group. With `sample`, at most that many elements of each
    group are read, in slabs spread evenly over it. With `keep_going` a group that cannot be read becomes a
    `ReadFailure`; without, its error stops the pass and is raised.
    """
    progress = progress or Progress()
    parts: dict[int, list[tuple[int, S]]] = {}  # group → consumers of its batches, with their positions
    failed: dict[int, UcpError] = {}

    def done(result: tuple[int, int, S | UcpError]) -> None:
        number, position, taken = result
        if isinstance(taken, UcpError):
            failed.setdefault(number, taken)
        else:
            parts.setdefault(number, []).append((position, taken))

    def merged(number: int) -> S | ReadFailure:
        if number in failed:
            return ReadFailure(failed[number])
        total = consumer(number)
        for _, part in sorted(parts.get(number, ()), key=lambda entry: entry[0]):
            total.merge(part)
        return total

    progress.start(sum(group.nbytes if sample is None else 0 for group in groups))
    try:
        batches = _batches(groups, sample, failed if keep_going else None)
        run_pool(_PassWork(groups, consumer, keep_going), [batches], done, Meter(progress.advance), jobs=jobs)
    finally:
        progress.finish()
    return [merged(number) for number in range(len(groups))]


def _batches(
    groups: Sequence[AtomGroup], sample: int | None, failed: dict[int, UcpError] | None
) -> Iterator[_SlabBatch]:
    """All batches; groups whose fragments cannot be located go to `failed`, or their error is raised."""
    for number, group in enumerate(groups):
        try:
            flat = all(can_flatten(atom) for _, atom in group.members)
        except UcpError as error:
            if failed is None:
                raise
            failed[number] = error
            continue
        shape: Shape = (group.members[0][1].numel,) if flat else group.shape
        cut = list(slabs(shape, group.elements))
        if sample is not None and (wanted := max(1, sample // group.elements)) < len(cut):
            # The first and the last slab and others evenly between them; the middle one if it is the only one.
            last = len(cut) - 1
            cut = [cut[i * last // (wanted - 1) if wanted > 1 else len(cut) // 2] for i in range(wanted)]
        count = max(1, settings.COPY_TASK_BYTES // settings.SLAB_BYTES)
        for start in range(0, len(cut), count):
            yield _SlabBatch(number, flat, cut[start : start + count])


@dataclass(frozen=True, slots=True)
class _PassWork(Work[_SlabBatch, "tuple[int, int, Any]"]):
    """A result is the number of a group, the position of the batch's first element, and its consumer or error."""

    groups: Sequence[AtomGroup]
    consumer: Callable[[int], SlabConsumer]
    keep_going: bool

    def start(self, meter: Meter) -> Worker[_SlabBatch, tuple[int, int, Any]]:
        return Worker(_PassWorker(self, meter).run)


class _PassWorker:
    """Keeps its blocks of memory and its readers from batch to batch."""

    def __init__(self, work: _PassWork, meter: Meter) -> None:
        self._work = work
        self._meter = meter
        self._blocks: list[RawArray] = []
        self._number: int | None = None
        self._readers: list[AtomReader] = []

    def run(self, batch: _SlabBatch) -> tuple[int, int, Any]:
        consumer = self._work.consumer(batch.number)
        try:
            return batch.number, self._read(batch, consumer), consumer
        except UcpError as error:
            if not self._work.keep_going:
                raise
            return batch.number, 0, error

    def _read(self, batch: _SlabBatch, consumer: SlabConsumer) -> int:
        """Pass the slabs of a batch to the consumer; returns the position of the first element."""
        group = self._work.groups[batch.number]
        if self._number != batch.number:
            self._readers = [AtomReader(files, atom, flat=batch.flat) for files, atom in group.members]
            self._number = batch.number
        while len(self._blocks) < len(group.members):
            self._blocks.append(np.empty(settings.SLAB_BYTES + 16, np.uint8))
        shape = self._readers[0].shape
        for slab in batch.slabs:
            raws = []
            for reader, block in zip(self._readers, self._blocks, strict=False):
                dtype = reader.atom.dtype
                values = block[: slab.numel * dtype.itemsize].view(raw_dtype(dtype)).reshape(slab.shape)
                reader.read(slab, values)
                raws.append(values)
            consumer.take(flat_index(slab.start, shape), raws)
            self._meter.advance(sum(raw.nbytes for raw in raws))
        return flat_index(batch.slabs[0].start, shape)
