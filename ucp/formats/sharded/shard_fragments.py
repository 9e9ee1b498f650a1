"""What a rank stores of its slice of a parameter, as fragments of the whole.

A rank's *local tensor* is its slice of the parameter. A *run* is a flat interval of the local tensor that is contiguous
in one file. Runs and fragments are computed when they are iterated: a checkpoint of a thousand ranks has millions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple, Protocol, overload

from ucp.containers.inert import TensorRef
from ucp.core.box import Box, Shape, intersect, interval_boxes, strides_of
from ucp.core.checkpoint import Atom, Fragment, LazyFragments, Rank
from ucp.core.dtypes import BOOL, FLOAT32, FLOAT64, INT64, DType, scalar_data
from ucp.core.optimizers import state_scale
from ucp.core.region import Region
from ucp.core.rules import SlicePiece
from ucp.storage.local import SourceFiles


class StoredRun(NamedTuple):
    """Elements `[start, stop)` of a local tensor: contiguous in `file` (relative to the root) from byte `offset` on."""

    start: int
    stop: int
    file: str
    offset: int
    dp: int = 0
    strides: Shape | None = None  # in elements, if the whole local tensor is stored strided
    inline: bytes | None = None


class StoredShard:
    """Base class: one state of one parameter as one rank stores it."""

    __slots__ = ()

    dtype: DType
    strides: Shape | None = None  # in elements, of a tensor that is not stored row-major
    transposed: bool = False  # whether the transpose of the local matrix is stored

    @property
    def count(self) -> int:
        """Number of runs."""
        raise NotImplementedError

    def runs(self) -> Iterator[StoredRun]:
        """Yield the runs in order; together they are the whole local tensor as it is stored."""
        raise NotImplementedError


class TensorArchive(Protocol):
    """A file that knows the positions of its tensors."""

    def position(self, ref: TensorRef) -> int:
        """Return the byte offset of the first element of `ref` in the file."""

    def number(self, ref: TensorRef) -> bytes | None:
        """Return the bytes of a one-element tensor if they are already in memory."""


@dataclass(slots=True, eq=False)
class TensorInFile:
    """A tensor of a file. Its byte offset is looked up on first use, because that reads the zip entry."""

    file: str
    archive: TensorArchive | None
    ref: TensorRef | None
    dp: int = 0
    known_offset: int = -1

    @property
    def offset(self) -> int:
        if self.known_offset < 0:
            assert self.archive is not None
            assert self.ref is not None
            self.known_offset = self.archive.position(self.ref)
        return self.known_offset

    def number(self) -> bytes | None:
        """Return the bytes of a one-element tensor if they are already in memory."""
        return None if self.archive is None or self.ref is None else self.archive.number(self.ref)


@dataclass(frozen=True, slots=True)
class WholeTensor(StoredShard):
    """All of the local tensor, `begin` elements into a tensor of one file."""

    tensor: TensorInFile
    dtype: DType
    shape: Shape
    strides: Shape | None = None
    begin: int = 0
    transposed: bool = False

    @property
    def count(self) -> int:
        return 1 if prod(self.shape) else 0

    def runs(self) -> Iterator[StoredRun]:
        tensor = self.tensor
        if numel := prod(self.shape):
            offset = tensor.offset + self.begin * self.dtype.itemsize
            yield StoredRun(0, numel, tensor.file, offset, tensor.dp, self.strides)


@dataclass(frozen=True, slots=True)
class InlineNumber(StoredShard):
    """A scalar that the file keeps as a plain number: its little-endian bytes."""

    file: str
    dtype: DType
    data: bytes
    dp: int = 0

    @staticmethod
    def of(file: str, value: Any, dp: int = 0) -> InlineNumber | None:
        """Return a Python number in 64 bits; None if it does not fit or is not a number."""
        dtype = {bool: BOOL, int: INT64, float: FLOAT64}.get(type(value))
        if dtype is None or (dtype is INT64 and not -(2**63) <= value < 2**63):
            return None
        data = scalar_data(value, dtype)
        return InlineNumber(file, dtype, data, dp) if data is not None else None

    @property
    def count(self) -> int:
        return 1

    def runs(self) -> Iterator[StoredRun]:
        yield StoredRun(0, 1, self.file, 0, self.dp, None, self.data)


@dataclass(frozen=True, slots=True)
class FlatSlice(StoredShard):
    """Elements `[begin, begin + numel)` of a flat buffer, partitioned over ranks by `per` elements each (ZeRO-1, 2)."""

    partitions: Sequence[TensorInFile]
    dtype: DType
    per: int
    begin: int
    numel: int

    @property
    def count(self) -> int:
        if not self.numel:
            return 0
        return (self.begin + self.numel - 1) // self.per - self.begin // self.per + 1

    def runs(self) -> Iterator[StoredRun]:
        begin, end, per = self.begin, self.begin + self.numel, self.per
        itemsize = self.dtype.itemsize
        number = begin // per if self.numel else 0
        at = begin
        while at < end:
            stop = min(end, (number + 1) * per)
            partition = self.partitions[number]
            offset = partition.offset + (at - number * per) * itemsize
            yield StoredRun(at - begin, stop - begin, partition.file, offset, partition.dp)
            at = stop
            number += 1


@dataclass(frozen=True, slots=True)
class EvenSlices(StoredShard):
    """A tensor split into `per` elements per rank, each `at` elements into that rank's buffer (ZeRO-3)."""

    partitions: Sequence[TensorInFile]
    dtype: DType
    per: int
    at: int
    numel: int

    @property
    def count(self) -> int:
        return -(-self.numel // self.per) if self.numel else 0

    def runs(self) -> Iterator[StoredRun]:
        for rank in range(self.count):
            start = rank * self.per
            partition = self.partitions[rank]
            offset = partition.offset + self.at * self.dtype.itemsize
            yield StoredRun(start, min(start + self.per, self.numel), partition.file, offset, partition.dp)


class RankSlice:
    """Which part of the whole one rank's local tensor is: the same for all kinds of a parameter."""

    __slots__ = ("pieces", "rank", "region", "shape")

    def __init__(self, pieces: tuple[SlicePiece, ...], shape: Shape, rank: Rank) -> None:
        """`shape` is that of the local tensor. The dp rank of `rank` is replaced by that of each run."""
        self.pieces = pieces
        self.shape = shape
        self.rank = rank
        # Set if the pieces are the whole local tensor, end to end and unscaled.
        region = contiguous_region(pieces)
        self.region = region if region is not None and region.numel == prod(shape) else None


def contiguous_region(pieces: Sequence[SlicePiece]) -> Region | None:
    """Return the region of pieces that follow each other from offset 0 on, unscaled; None for any others."""
    at = 0
    for piece in pieces:
        if piece.offset != at or piece.scale != 1.0:
            return None
        at += piece.box.numel
    return Region.of(piece.box for piece in pieces)


SliceParts = Sequence[tuple[RankSlice, StoredShard]]


class RankFragments(LazyFragments):
    """Fragments of many ranks, which are not kept: for a thousand ranks there are millions."""

    __slots__ = ("_parts",)

    def __init__(
        self, make: Callable[[], Iterator[Fragment]], count: int | None, parts: SliceParts | None = None
    ) -> None:
        super().__init__(make, count)
        self._parts = parts

    def outline(self, located: set[int]) -> Iterator[Fragment] | None:
        """Yield one fragment per rank without file and offset, as before ZeRO partitions them; None if there are few.

        The offset of every partition is still looked up, so that damaged files are noticed. Ids of lists of partitions
        that were looked up are added to `located`.
        """
        if self._parts is None or not all(isinstance(stored, (FlatSlice, EvenSlices)) for _, stored in self._parts):
            return None
        return _outline(self._parts, located)

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._fragments if self._fragments is not None else self._make())

    @overload
    def __getitem__(self, index: int) -> Fragment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...

    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        if index == 0 and self._fragments is None:
            for first in islice(self._make(), 1):
                return first
        return self._all()[index]


def fragments_of(kind: str, parts: SliceParts) -> RankFragments:
    """Return the fragments of the slices of several ranks, rank by rank."""
    count = 0
    for rank_slice, stored in parts:
        if rank_slice.region is None or not _is_row_major(stored):
            return RankFragments(lambda: _make_fragments(kind, parts), None)
        count += stored.count
    return RankFragments(lambda: _make_fragments(kind, parts), count, parts)


def scalar_fragments(rank: Rank, stored: StoredShard) -> LazyFragments:
    """Return the fragment of a one-element state."""
    region = Region.all_of(())

    def make() -> Iterator[Fragment]:
        for run in stored.runs():
            yield Fragment(region, run.file, run.offset, stored.dtype, _with_dp(rank, run.dp), None, run.inline)

    return LazyFragments(make, 1)


def scalar_bytes(stored: StoredShard, files: SourceFiles) -> bytes:
    """Return the bytes of a one-element state; reads them if they are not in memory."""
    known = stored.tensor.number() if isinstance(stored, WholeTensor) and stored.count else None
    if known is not None:
        return known
    for run in stored.runs():
        if run.inline is not None:
            return run.inline
        return files.read(run.file, run.offset, stored.dtype.itemsize)
    return b""


def number_atom(name: str, kind: str, value: float, shape: Shape = ()) -> Atom:
    """Return an atom of one element in float32, as torch's optimizers count steps, that is in no file."""
    data = scalar_data(value, FLOAT32)
    return Atom(name, kind, shape, FLOAT32, (Fragment(Region.all_of(shape), "", 0, FLOAT32, inline=data),))


def round_elements(data: bytes, source: DType, target: DType) -> bytes:
    """Return elements of float32 rounded to a 16-bit dtype as PyTorch does it; empty for other pairs of dtypes."""
    if source == target:
        return data
    if source.name != "float32" or target.name not in ("bfloat16", "float16"):
        return b""
    import numpy as np  # here, because most checkpoints need no rounding

    from ucp.read.casting import cast, raw_dtype

    return cast(np.frombuffer(data, raw_dtype(source)), source, target).tobytes()


def _outline(parts: SliceParts, located: set[int]) -> Iterator[Fragment]:
    for rank_slice, stored in parts:
        assert isinstance(stored, (FlatSlice, EvenSlices))
        if id(stored.partitions) not in located:  # the parameters of a group share the list
            located.add(id(stored.partitions))
            for partition in stored.partitions:
                _ = partition.offset
        assert rank_slice.region is not None
        # Runs follow each other from 0 on: they cover the slice if the partitions have as many elements as it takes.
        begin = stored.begin if isinstance(stored, FlatSlice) else 0
        numel = min(stored.numel, len(stored.partitions) * stored.per - begin)
        yield Fragment(rank_slice.region.cut(0, numel), "", 0, stored.dtype, rank_slice.rank)


def _make_fragments(kind: str, parts: SliceParts) -> Iterator[Fragment]:
    for rank_slice, stored in parts:
        if not rank_slice.pieces:
            continue
        if not _is_row_major(stored):
            yield from _strided(kind, rank_slice, stored)
        elif rank_slice.region is not None:
            region, dtype, rank = rank_slice.region, stored.dtype, rank_slice.rank
            boxes, numel = region.boxes, region.stop
            for start, stop, file, offset, dp, _, _ in stored.runs():
                # The same as region.cut(start, stop), inlined because it runs millions of times.
                cut = region if stop - start == numel else Region(boxes, start, min(stop, numel))
                yield Fragment(cut, file, offset, dtype, rank if rank.dp == dp else _with_dp(rank, dp))
        else:
            yield from _piecewise(kind, rank_slice, stored)


def _piecewise(kind: str, rank_slice: RankSlice, stored: StoredShard) -> Iterator[Fragment]:
    """Yield one fragment per piece and run, for slices with gaps or scaled pieces."""
    regions = [(piece, Region.of((piece.box,))) for piece in rank_slice.pieces]
    for run in stored.runs():
        for piece, region in regions:
            start, stop = max(run.start, piece.offset), min(run.stop, piece.offset + region.numel)
            if start < stop:
                yield Fragment(
                    region.cut(start - piece.offset, stop - piece.offset),
                    run.file,
                    run.offset + (start - run.start) * stored.dtype.itemsize,
                    stored.dtype,
                    _with_dp(rank_slice.rank, run.dp),
                    scale=state_scale(kind, piece.scale),
                )


def _strided(kind: str, rank_slice: RankSlice, stored: StoredShard) -> Iterator[Fragment]:
    """Yield one fragment per piece and block of a tensor that is stored with strides, or transposed."""
    local = rank_slice.shape
    shape = local[::-1] if stored.transposed else local  # as it is stored
    for run in stored.runs():
        strides = run.strides or strides_of(shape)
        done = 0  # elements of the run before this block
        for block in interval_boxes(shape, run.start, run.stop):
            first, done = (0 if run.strides is not None else done), done + block.numel
            steps = strides
            if stored.transposed:
                block, steps = Box(block.start[::-1], block.shape[::-1]), strides[::-1]
            for piece in rank_slice.pieces:
                box = Box(_index_at(piece.offset, local), piece.box.shape)  # of the piece in the local tensor
                common = intersect(box, block)
                if common is None:
                    continue
                inside = zip(common.start, block.start, steps, strict=True)
                offset = first + sum((i - start) * step for i, start, step in inside)
                to_whole = tuple(a - b for a, b in zip(piece.box.start, box.start, strict=True))
                yield Fragment(
                    Region.of((common.shift(to_whole),)),
                    run.file,
                    run.offset + offset * stored.dtype.itemsize,
                    stored.dtype,
                    _with_dp(rank_slice.rank, run.dp),
                    steps,
                    scale=state_scale(kind, piece.scale),
                )


def _is_row_major(stored: StoredShard) -> bool:
    return stored.strides is None and not stored.transposed


def _index_at(flat: int, shape: Shape) -> Shape:
    """Return the index of element `flat` of a row-major tensor."""
    index: list[int] = []
    for stride in strides_of(shape):
        i, flat = divmod(flat, stride)
        index.append(i)
    return tuple(index)


def _with_dp(rank: Rank, dp: int) -> Rank:
    return rank if rank.dp == dp else Rank(rank.pp, rank.tp, dp, rank.ep)
