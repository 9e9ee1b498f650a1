"""Many ranks writing one folder: who writes which bytes of which file, and the digests that tile every file.

The plan is made on rank 0 from what all ranks say they hold; what several hold alike is dealt out among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, whole
from ucp.core.region import Region
from ucp.engine.staging import digest_range
from ucp.engine.worker import WrittenRange
from ucp.errors import InconsistentError, StorageError
from ucp.read.verbatim import pieces_are_intervals
from ucp.storage.local import write_all

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WriteCandidate:
    """A piece that a rank holds: number `piece` of that rank's own list."""

    rank: int
    piece: int
    region: Region


@dataclass(frozen=True, slots=True)
class RankWrite:
    """Elements `[start, stop)` of one of the rank's pieces go to the atom that starts at byte `offset` of a file."""

    piece: int
    start: int
    stop: int
    file: int
    offset: int
    shape: Shape
    digested: bool  # what is written is contiguous in the file: its digest is taken on the way


@dataclass(frozen=True, slots=True)
class DigestRange:
    """A byte range whose digest is taken from the file when all ranks have written: it is made of their rows."""

    file: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class WriteAssignment:
    """What every rank does."""

    tasks: list[list[RankWrite]]
    sealings: list[list[DigestRange]]
    _next: int = field(default=0)

    @staticmethod
    def for_ranks(count: int) -> WriteAssignment:
        return WriteAssignment([[] for _ in range(count)], [[] for _ in range(count)])

    def deal(
        self, name: str, shape: Shape, itemsize: int, file: int, offset: int, offers: Sequence[WriteCandidate]
    ) -> None:
        """Deal one atom out: equal regions are shared among their owners, everything is written once."""
        owners: dict[Region, list[WriteCandidate]] = {}
        for offer in offers:
            owners.setdefault(offer.region, []).append(offer)
        covered = sum(_real(region, shape) for region in owners)
        if covered != prod(shape):
            raise InconsistentError(
                f"parameter {name}: the ranks hold {covered} of {prod(shape)} elements",
                hint="save on all ranks of the job at once",
            )
        flat = all(pieces_are_intervals(region.pieces(), shape) for region in owners)
        for region, alike in owners.items():
            for offer, start, stop in self._cut(region, alike, itemsize):
                self.tasks[offer.rank].append(RankWrite(offer.piece, start, stop, file, offset, shape, flat))
        if not flat:
            nbytes = prod(shape) * itemsize
            for at in range(0, nbytes, settings.COPY_TASK_BYTES):
                self._next = (self._next + 1) % len(self.sealings)
                length = min(settings.COPY_TASK_BYTES, nbytes - at)
                self.sealings[self._next].append(DigestRange(file, offset + at, length))

    def _cut(
        self, region: Region, alike: Sequence[WriteCandidate], itemsize: int
    ) -> Iterator[tuple[WriteCandidate, int, int]]:
        """Equal intervals for all owners, or everything for one of them in turn where it is little."""
        if region.numel * itemsize < settings.SLAB_BYTES:
            self._next += 1
            yield alike[self._next % len(alike)], 0, region.numel
            return
        for i, offer in enumerate(alike):
            start, stop = (region.numel * edge // len(alike) for edge in (i, i + 1))
            if start < stop:
                yield offer, start, stop


def _real(region: Region, shape: Shape) -> int:
    """Elements of a region inside the atom's shape; the rest is padding and is not written."""
    found = (intersect(piece.box, whole(shape)) for piece in region.pieces())
    return sum(box.numel for box in found if box is not None)


def write_elements(path: Path, task: RankWrite, region: Region, tensor: torch.Tensor) -> list[WrittenRange]:
    """Write a task's elements of `tensor` (flat, `region` in order); gives the digests that were taken on the way."""
    written: list[WrittenRange] = []
    itemsize = tensor.element_size()
    part = region.cut(task.start, task.stop)
    data = tensor.narrow(0, task.start, part.numel)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        for first, start, length in _runs(part, task.shape):
            at = task.offset + first * itemsize
            digest = _write(fd, at, data.narrow(0, start, length), digested=task.digested)
            if task.digested:
                written.append(WrittenRange(task.file, at, length * itemsize, digest))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        os.close(fd)
    return written


def _runs(region: Region, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """(position in the atom, position in the region, length) of every stretch that is contiguous in both, joined."""
    last: tuple[int, int, int] | None = None
    for piece in region.pieces():
        real = intersect(piece.box, whole(shape))
        if real is None:
            continue
        for box in _contiguous(real, shape):
            inner = tuple(a - b for a, b in zip(box.start, piece.box.start, strict=True))
            at, start = flat_index(box.start, shape), piece.offset + flat_index(inner, piece.box.shape)
            if last is not None and (last[0] + last[2], last[1] + last[2]) == (at, start):
                last = (last[0], last[1], last[2] + box.numel)
                continue
            if last is not None:
                yield last
            last = (at, start, box.numel)
    if last is not None:
        yield last


def _contiguous(box: Box, shape: Shape) -> Iterator[Box]:
    """`box` cut along leading dimensions into blocks that are contiguous in a tensor of `shape`."""
    lead = 0
    for dim in reversed(range(box.ndim)):
        if box.shape[dim] != shape[dim]:
            lead = dim
            break
    yield from _rows(box, lead)


def _rows(box: Box, lead: int) -> Iterator[Box]:
    if lead == 0:
        yield box
        return
    for row in range(box.start[0], box.start[0] + box.shape[0]):
        for rest in _rows(Box(box.start[1:], box.shape[1:]), lead - 1):
            yield Box((row, *rest.start), (1, *rest.shape))


def _write(fd: int, offset: int, flat: torch.Tensor, *, digested: bool) -> str:
    """Write a flat tensor at a byte offset through a bounded buffer; gives its digest, or nothing where not wanted."""
    import torch

    digest = xxhash.xxh3_128()
    step = max(1, (settings.SLAB_BYTES if flat.device.type == "cpu" else settings.BOUNCE_BYTES) // flat.element_size())
    for start in range(0, flat.numel(), step):
        block: Any = flat.narrow(0, start, min(step, flat.numel() - start)).cpu().view(torch.uint8).numpy().data
        if digested:
            digest.update(block)
        write_all(fd, offset, block)
        offset += len(block)
    return digest.hexdigest()


def digest_written_range(path: Path, sealing: DigestRange) -> WrittenRange:
    """The digest of a range that several ranks have written."""
    digest = digest_range(path, sealing.offset, sealing.nbytes, xxhash.xxh3_128())
    if digest is None:
        raise StorageError(f"{path}: ends before byte {sealing.offset + sealing.nbytes}")
    return WrittenRange(sealing.file, sealing.offset, sealing.nbytes, digest)


def digest_literal(data: bytes) -> str:
    """XXH3-128 of bytes that are known in advance."""
    return xxhash.xxh3_128_hexdigest(data)
