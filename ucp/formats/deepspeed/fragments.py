"""From what one holder stores to fragments of the whole: the tensor-parallel slice's boxes, cut by ZeRO's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import overload

from ucp.formats.deepspeed.stored import EvenSlices, FlatSlice, Stored
from ucp.model.box import Shape, strides_of
from ucp.model.checkpoint import MASTER, WEIGHT, Fragment
from ucp.model.layout import Rank
from ucp.model.lazy import LazyFragments
from ucp.model.region import Region
from ucp.model.rules import SlicePiece


class RankFragments(LazyFragments):
    """Fragments of many ranks, which are not kept: of a thousand ranks there are millions."""

    __slots__ = ("_parts",)

    def __init__(
        self,
        make: Callable[[], Iterator[Fragment]],
        count: int | None,
        parts: Sequence[tuple[Slice, Stored]] | None = None,
    ) -> None:
        super().__init__(make, count)
        self._parts = parts

    def outline(self, located: set[int]) -> Iterator[Fragment] | None:
        """What the fragments amount to before ZeRO cuts them: one a holder, without a place. None where they are few.

        The files are asked for the place of every tensor all the same, once for those whose ids are in `located`.
        """
        if self._parts is None or not all(isinstance(stored, (FlatSlice, EvenSlices)) for _, stored in self._parts):
            return None
        return _outline(self._parts, located)

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._held if self._held is not None else self._make())

    @overload
    def __getitem__(self, index: int) -> Fragment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...

    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        if index == 0 and self._held is None:
            for first in islice(self._make(), 1):
                return first
        return self._all()[index]


class Slice:
    """What one holder's local tensor is of the whole: all kinds of a parameter have the same."""

    __slots__ = ("pieces", "rank", "region", "shape")

    def __init__(self, pieces: tuple[SlicePiece, ...], shape: Shape, rank: Rank) -> None:
        """`shape` is that of the local tensor. The rank's dp is filled in run by run."""
        self.pieces = pieces
        self.shape = shape
        self.rank = rank
        # Where the pieces are the whole local tensor, end to end and unscaled.
        self.region = Region.of(piece.box for piece in pieces) if _are_all(pieces, shape) else None


def fragments_of(kind: str, parts: Sequence[tuple[Slice, Stored]]) -> RankFragments:
    """The fragments of several holders' slices, holder by holder."""
    count = 0
    for part, stored in parts:
        if part.region is None or getattr(stored, "strides", None) is not None:
            return RankFragments(lambda: _make(kind, parts), None)
        count += stored.count
    return RankFragments(lambda: _make(kind, parts), count, parts)


def _outline(parts: Sequence[tuple[Slice, Stored]], located: set[int]) -> Iterator[Fragment]:
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


def scalar_fragments(rank: Rank, stored: Stored) -> LazyFragments:
    """A one-element state."""
    region = Region.all_of(())

    def make() -> Iterator[Fragment]:
        for run in stored.runs():
            yield Fragment(region, run.file, run.offset, stored.dtype, _at(rank, run.dp), None, run.inline)

    return LazyFragments(make, 1)


def _are_all(pieces: Sequence[SlicePiece], shape: Shape) -> bool:
    at = 0
    for piece in pieces:
        if piece.offset != at or piece.scale != 1.0:
            return False
        at += piece.box.numel
    return at == prod(shape)


def _make(kind: str, parts: Sequence[tuple[Slice, Stored]]) -> Iterator[Fragment]:
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
                yield Fragment(cut, file, offset, dtype, rank if rank.dp == dp else _at(rank, dp))
        else:
            yield from _piecewise(kind, part, stored)


def _piecewise(kind: str, part: Slice, stored: Stored) -> Iterator[Fragment]:
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
                    _at(part.rank, run.dp),
                    scale=scale_of(kind, piece.scale),
                )


def _strided(kind: str, part: Slice, stored: Stored) -> Iterator[Fragment]:
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
                _at(part.rank, run.dp),
                run.strides,
                scale=scale_of(kind, piece.scale),
            )


def scale_of(kind: str, scale: float) -> float:
    """The factor of a state where the weight is stored times `scale`: gradients, and so moments, scale inversely."""
    if scale == 1.0 or kind in (WEIGHT, MASTER):
        return scale
    return 1.0 / (scale * scale) if "sq" in kind else 1.0 / scale


def _at(rank: Rank, dp: int) -> Rank:
    return rank if rank.dp == dp else Rank(rank.pp, rank.tp, dp, rank.ep)
