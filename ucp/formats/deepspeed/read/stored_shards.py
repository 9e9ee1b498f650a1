"""Where the local tensor of one coord lies: whole in one file, or cut over the data-parallel ranks by ZeRO.

A *run* is a flat interval of the local tensor that lies contiguous in one file. Runs are computed when asked for: a
checkpoint of a thousand ranks has millions of them.

From what one coord stores to fragments of the whole: the tensor-parallel slice's boxes, cut by ZeRO's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import NamedTuple, Protocol, overload

from ucp.containers.inert import TensorRef
from ucp.core.box import Shape, strides_of
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment, LazyFragments
from ucp.core.dtypes import DType
from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.core.rules import SlicePiece


class StoredRun(NamedTuple):
    """Elements `[start, stop)` of a local tensor: contiguous in `file` (relative to the root) from byte `offset` on."""

    start: int
    stop: int
    file: str
    offset: int
    dp: int = 0
    strides: Shape | None = None  # in elements, where the whole local tensor lies strided in the file
    inline: bytes | None = None


class StoredShard(Protocol):
    """One state of one parameter as one coord has it."""

    @property
    def dtype(self) -> DType: ...

    @property
    def count(self) -> int:
        """Number of runs."""

    def runs(self) -> Iterator[StoredRun]:
        """The runs in order; together they are the whole local tensor."""


class TensorArchive(Protocol):
    """A file that knows where its tensors lie."""

    def position(self, ref: TensorRef) -> int:
        """Byte of the file where the first element of `ref` lies."""

    def number(self, ref: TensorRef) -> bytes | None:
        """The bytes of a one-element tensor, where they are known already."""


class TensorInFile:
    """A tensor of a file. Its byte offset is looked up when it is first needed (that costs a read of the zip entry)."""

    __slots__ = ("_archive", "_offset", "dp", "file", "ref")

    def __init__(
        self, file: str, archive: TensorArchive | None, ref: TensorRef | None, dp: int = 0, offset: int = -1
    ) -> None:
        self.file = file
        self.dp = dp
        self.ref = ref
        self._archive = archive
        self._offset = offset

    @property
    def offset(self) -> int:
        if self._offset < 0:
            assert self._archive is not None
            assert self.ref is not None
            self._offset = self._archive.position(self.ref)
        return self._offset

    def number(self) -> bytes | None:
        """The bytes of a one-element tensor, where they are known without reading the file again."""
        return None if self._archive is None or self.ref is None else self._archive.number(self.ref)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """All of the local tensor in one file."""

    spot: TensorInFile
    dtype: DType
    shape: Shape
    strides: Shape | None = None

    @property
    def count(self) -> int:
        return 1 if prod(self.shape) else 0

    def runs(self) -> Iterator[StoredRun]:
        spot = self.spot
        if numel := prod(self.shape):
            yield StoredRun(0, numel, spot.file, spot.offset, spot.dp, self.strides)


@dataclass(frozen=True, slots=True)
class InlineNumber:
    """A scalar that the file keeps as a plain number: its little-endian bytes."""

    file: str
    dtype: DType
    data: bytes
    dp: int = 0

    @property
    def count(self) -> int:
        return 1

    def runs(self) -> Iterator[StoredRun]:
        yield StoredRun(0, 1, self.file, 0, self.dp, None, self.data)


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Elements `[begin, begin + numel)` of a flat buffer that is cut into shards of `per` elements (ZeRO-1, 2)."""

    spots: Sequence[TensorInFile]
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
        shard = begin // per if self.numel else 0
        at = begin
        while at < end:
            stop = min(end, (shard + 1) * per)
            spot = self.spots[shard]
            offset = spot.offset + (at - shard * per) * itemsize
            yield StoredRun(at - begin, stop - begin, spot.file, offset, spot.dp)
            at = stop
            shard += 1


@dataclass(frozen=True, slots=True)
class EvenSlices:
    """A tensor cut into slices of `per` elements, one a rank, each `at` elements into that rank's buffer (ZeRO-3)."""

    spots: Sequence[TensorInFile]
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
            spot = self.spots[rank]
            offset = spot.offset + self.at * self.dtype.itemsize
            yield StoredRun(start, min(start + self.per, self.numel), spot.file, offset, spot.dp)


class RankFragments(LazyFragments):
    """Fragments of many ranks, which are not kept: of a thousand ranks there are millions."""

    __slots__ = ("_parts",)

    def __init__(
        self,
        make: Callable[[], Iterator[Fragment]],
        count: int | None,
        parts: Sequence[tuple[RankSlice, StoredShard]] | None = None,
    ) -> None:
        super().__init__(make, count)
        self._parts = parts

    def outline(self, located: set[int]) -> Iterator[Fragment] | None:
        """What the fragments amount to before ZeRO cuts them: one a coord, without a place. None where they are few.

        The files are asked for the place of every tensor all the same, once for those whose ids are in `located`.
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


class RankSlice:
    """What one coord's local tensor is of the whole: all kinds of a parameter have the same."""

    __slots__ = ("pieces", "rank", "region", "shape")

    def __init__(self, pieces: tuple[SlicePiece, ...], shape: Shape, rank: Rank) -> None:
        """`shape` is that of the local tensor. The rank's dp is filled in run by run."""
        self.pieces = pieces
        self.shape = shape
        self.rank = rank
        # Where the pieces are the whole local tensor, end to end and unscaled.
        self.region = Region.of(piece.box for piece in pieces) if _fill_shape(pieces, shape) else None


def fragments_of(kind: str, parts: Sequence[tuple[RankSlice, StoredShard]]) -> RankFragments:
    """The fragments of several coords' slices, coord by coord."""
    count = 0
    for part, stored in parts:
        if part.region is None or getattr(stored, "strides", None) is not None:
            return RankFragments(lambda: _make_fragments(kind, parts), None)
        count += stored.count
    return RankFragments(lambda: _make_fragments(kind, parts), count, parts)


def _outline(parts: Sequence[tuple[RankSlice, StoredShard]], located: set[int]) -> Iterator[Fragment]:
    for part, stored in parts:
        assert isinstance(stored, (FlatSlice, EvenSlices))
        if id(stored.spots) not in located:  # parameters of a group share the list
            located.add(id(stored.spots))
            for spot in stored.spots:
                _ = spot.offset
        assert part.region is not None
        # Runs lie end to end from 0 on: they cover the slice if there are as many elements and ranks as it takes.
        held = min(
            stored.numel, len(stored.spots) * stored.per - (stored.begin if isinstance(stored, FlatSlice) else 0)
        )
        yield Fragment(part.region.cut(0, held), "", 0, stored.dtype, part.rank)


def scalar_fragments(rank: Rank, stored: StoredShard) -> LazyFragments:
    """A one-element state."""
    region = Region.all_of(())

    def make() -> Iterator[Fragment]:
        for run in stored.runs():
            yield Fragment(region, run.file, run.offset, stored.dtype, _with_dp(rank, run.dp), None, run.inline)

    return LazyFragments(make, 1)


def _fill_shape(pieces: Sequence[SlicePiece], shape: Shape) -> bool:
    at = 0
    for piece in pieces:
        if piece.offset != at or piece.scale != 1.0:
            return False
        at += piece.box.numel
    return at == prod(shape)


def _make_fragments(kind: str, parts: Sequence[tuple[RankSlice, StoredShard]]) -> Iterator[Fragment]:
    for part, stored in parts:
        if not part.pieces:
            continue
        if getattr(stored, "strides", None) is not None:
            yield from _strided(kind, part, stored)
        elif part.region is not None:
            boxes, numel, dtype, rank = part.region.boxes, part.region.stop, stored.dtype, part.rank
            for start, stop, file, offset, dp, _, _ in stored.runs():
                # As `region.cut` would say it, millions of times.
                cut = part.region if stop - start == numel else Region(boxes, start, min(stop, numel))
                yield Fragment(cut, file, offset, dtype, rank if rank.dp == dp else _with_dp(rank, dp))
        else:
            yield from _piecewise(kind, part, stored)


def _piecewise(kind: str, part: RankSlice, stored: StoredShard) -> Iterator[Fragment]:
    """One fragment a piece and run, for slices with gaps or with pieces that are scaled."""
    regions = [(piece, Region.of((piece.box,))) for piece in part.pieces]
    for run in stored.runs():
        for piece, region in regions:
            start, stop = max(run.start, piece.offset), min(run.stop, piece.offset + region.numel)
            if start < stop:
                yield Fragment(
                    region.cut(start - piece.offset, stop - piece.offset),
                    run.file,
                    run.offset + (start - run.start) * stored.dtype.itemsize,
                    stored.dtype,
                    _with_dp(part.rank, run.dp),
                    scale=scale_of(kind, piece.scale),
                )


def _strided(kind: str, part: RankSlice, stored: StoredShard) -> Iterator[Fragment]:
    """One fragment a piece of a tensor that lies strided in its file (whole: ZeRO flattens what it cuts)."""
    local = strides_of(part.shape)
    for run in stored.runs():
        assert run.strides is not None
        for piece in part.pieces:
            at, rest = 0, piece.offset
            for width, stride in zip(local, run.strides, strict=True):
                index, rest = divmod(rest, width)
                at += index * stride
            yield Fragment(
                Region.of((piece.box,)),
                run.file,
                run.offset + at * stored.dtype.itemsize,
                stored.dtype,
                _with_dp(part.rank, run.dp),
                run.strides,
                scale=scale_of(kind, piece.scale),
            )


def scale_of(kind: str, scale: float) -> float:
    """The factor of a state where the weight is stored times `scale`: gradients, and so moments, scale inversely."""
    if scale == 1.0 or kind in (WEIGHT, MASTER):
        return scale
    return 1.0 / (scale * scale) if "sq" in kind else 1.0 / scale


def _with_dp(rank: Rank, dp: int) -> Rank:
    return rank if rank.dp == dp else Rank(rank.pp, rank.tp, dp, rank.ep)
