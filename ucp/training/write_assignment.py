"""Divide the writing of one folder among all ranks of a job: which rank writes and digests which bytes of which file.

Rank 0 makes the assignment from the summaries of all ranks; regions that several ranks hold are divided among them.
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
    """A fragment that could be written by its rank: number `fragment` in that rank's own list."""

    rank: int
    fragment: int
    region: Region


@dataclass(frozen=True, slots=True)
class RankWrite:
    """Write elements `[start, stop)` of one of the rank's fragments to the atom at byte `offset` of a file."""

    fragment: int
    start: int
    stop: int
    file: int
    offset: int
    shape: Shape
    digested: bool  # the elements are contiguous in the file, so their digest is computed while writing


@dataclass(frozen=True, slots=True)
class DigestRange:
    """A byte range with rows of several ranks; its digest is computed from the file when all ranks have written."""

    file: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class WriteAssignment:
    """The writes and digest ranges of every rank, by rank."""

    writes: list[list[RankWrite]]
    digest_ranges: list[list[DigestRange]]
    _next: int = field(default=0)

    @staticmethod
    def for_ranks(count: int) -> WriteAssignment:
        return WriteAssignment([[] for _ in range(count)], [[] for _ in range(count)])

    def by_rank(self, files: list[str]) -> list[tuple[list[RankWrite], list[DigestRange], list[str]]]:
        """(writes, digest ranges, names of all files) of every rank."""
        return [(writes, ranges, files) for writes, ranges in zip(self.writes, self.digest_ranges, strict=True)]

    def add(
        self, name: str, shape: Shape, itemsize: int, file: int, offset: int, candidates: Sequence[WriteCandidate]
    ) -> None:
        """Assign the writes of one atom: owners of equal regions divide them, so that every byte is written once."""
        owners: dict[Region, list[WriteCandidate]] = {}
        for candidate in candidates:
            owners.setdefault(candidate.region, []).append(candidate)
        covered = sum(_numel_inside(region, shape) for region in owners)
        if covered != prod(shape):
            raise InconsistentError(
                f"parameter {name}: the ranks hold {covered} of {prod(shape)} elements",
                hint="call save on all ranks of the job",
            )
        flat = all(pieces_are_intervals(region.pieces(), shape) for region in owners)
        for region, equal in owners.items():
            for candidate, start, stop in self._divide(region, equal, itemsize):
                write = RankWrite(candidate.fragment, start, stop, file, offset, shape, flat)
                self.writes[candidate.rank].append(write)
        if not flat:
            nbytes = prod(shape) * itemsize
            for at in range(0, nbytes, settings.COPY_TASK_BYTES):
                self._next = (self._next + 1) % len(self.digest_ranges)
                length = min(settings.COPY_TASK_BYTES, nbytes - at)
                self.digest_ranges[self._next].append(DigestRange(file, offset + at, length))

    def _divide(
        self, region: Region, equal: Sequence[WriteCandidate], itemsize: int
    ) -> Iterator[tuple[WriteCandidate, int, int]]:
        """Equal intervals for all owners, or everything for one of them, in turn, if the region is small."""
        if region.numel * itemsize < settings.SLAB_BYTES:
            self._next += 1
            yield equal[self._next % len(equal)], 0, region.numel
            return
        for i, candidate in enumerate(equal):
            start, stop = (region.numel * edge // len(equal) for edge in (i, i + 1))
            if start < stop:
                yield candidate, start, stop


def _numel_inside(region: Region, shape: Shape) -> int:
    """The number of elements of a region inside the atom's shape; the rest is padding and is not written."""
    found = (intersect(piece.box, whole(shape)) for piece in region.pieces())
    return sum(box.numel for box in found if box is not None)


def write_elements(path: Path, write: RankWrite, region: Region, tensor: torch.Tensor) -> list[WrittenRange]:
    """Write elements of `tensor` (flat, in the order of `region`); returns the ranges digested while writing."""
    written: list[WrittenRange] = []
    itemsize = tensor.element_size()
    part = region.cut(write.start, write.stop)
    data = tensor.narrow(0, write.start, part.numel)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        for first, start, length in _runs(part, write.shape):
            at = write.offset + first * itemsize
            digest = _write(fd, at, data.narrow(0, start, length), digested=write.digested)
            if write.digested:
                written.append(WrittenRange(write.file, at, length * itemsize, digest))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        os.close(fd)
    return written


def _runs(region: Region, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """(position in the atom, position in the region, length) of every run that is contiguous in both."""
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
    """Split `box` along leading dimensions into blocks that are contiguous in a tensor of `shape`."""
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
    """Write a flat tensor at a byte offset through a bounded buffer; returns its digest if `digested`."""
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


def digest_written_range(path: Path, wanted: DigestRange) -> WrittenRange:
    """Compute the digest of a range that several ranks have written."""
    digest = digest_range(path, wanted.offset, wanted.nbytes, xxhash.xxh3_128())
    if digest is None:
        raise StorageError(f"{path}: ends before byte {wanted.offset + wanted.nbytes}")
    return WrittenRange(wanted.file, wanted.offset, wanted.nbytes, digest)


def digest_literal(data: bytes) -> str:
    """XXH3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)
