"""From what one rank stores of its slice to fragments of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from ucp.files.inert import TensorRef
from ucp.files.torchzip import TorchFile
from ucp.model.box import Box, Shape, intersect, interval_boxes, strides_of
from ucp.model.checkpoint import Fragment
from ucp.model.dtypes import DType
from ucp.model.layout import Rank
from ucp.model.lazy import LazyFragments
from ucp.model.region import Region
from ucp.model.rules import SlicePiece


class Spot(Protocol):
    """Where something starts: `offset` bytes into `file` (relative to the checkpoint's root), looked up when asked."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorSpot:
    """Element `shift` of a tensor in a torch file."""

    file: str
    archive: TorchFile
    ref: TensorRef
    shift: int = 0

    @property
    def offset(self) -> int:
        return self.archive.position(self.ref) + self.shift * self.ref.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[start, stop)` of a local tensor as it is stored, contiguous from `spot` on.

    With `strides` (in elements) it is the whole tensor, which does not lie row-major.
    """

    start: int
    stop: int
    spot: Spot
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """One state of one parameter as one rank has it: its runs, in order, are the local tensor.

    `transposed` means that what is stored is the transpose of the local matrix (experts of a grouped GEMM).
    """

    dtype: DType
    runs: tuple[Run, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """What the local tensor of one rank is of the whole."""

    pieces: tuple[SlicePiece, ...]
    shape: Shape
    rank: Rank


def fragments_of(parts: Sequence[tuple[Slice, Stored]]) -> LazyFragments:
    """The fragments of several ranks' slices, rank by rank."""
    plain = all(not stored.transposed and all(run.strides is None for run in stored.runs) for _, stored in parts)
    count = sum(len(stored.runs) for part, stored in parts if prod(part.shape)) if plain else None
    return LazyFragments(lambda: _make(parts), count)


def _make(parts: Sequence[tuple[Slice, Stored]]) -> Iterator[Fragment]:
    for part, stored in parts:
        if not prod(part.shape):
            continue
        region = Region.of(piece.box for piece in part.pieces)
        for run in stored.runs:
            if run.strides is None and not stored.transposed:
                cut = region.cut(run.start, run.stop)
                yield Fragment(cut, run.spot.file, run.spot.offset, stored.dtype, part.rank)
            else:
                yield from _blockwise(part, stored, run)


def _blockwise(part: Slice, stored: Stored, run: Run) -> Iterator[Fragment]:
    """One fragment a block of the local tensor that lies with constant strides in the file."""
    kept = part.shape[::-1] if stored.transposed else part.shape
    strides = run.strides or strides_of(kept)
    at = 0  # elements of the run before this block
    for block in interval_boxes(kept, run.start, run.stop):
        first = 0 if run.strides is not None else at
        at += block.numel
        if stored.transposed:
            block, steps = Box(block.start[::-1], block.shape[::-1]), strides[::-1]
        else:
            steps = strides
        for piece in part.pieces:
            held = Box(_unravel(piece.offset, part.shape), piece.box.shape)
            common = intersect(held, block)
            if common is None:
                continue
            inside = tuple(a - b for a, b in zip(common.start, block.start, strict=True))
            offset = first + sum(i * step for i, step in zip(inside, steps, strict=True))
            away = tuple(a - b for a, b in zip(piece.box.start, held.start, strict=True))
            yield Fragment(
                Region.of((common.shift(away),)),
                run.spot.file,
                run.spot.offset + offset * stored.dtype.itemsize,
                stored.dtype,
                part.rank,
                steps,
            )


def _unravel(flat: int, shape: Shape) -> Shape:
    index: list[int] = []
    for step in strides_of(shape):
        i, flat = divmod(flat, step)
        index.append(i)
    return tuple(index)
