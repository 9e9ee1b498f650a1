"""Puts shifted state back: every element from the place where Megatron's bug left it.

What lay in the gaps between parameters is lost. A lost element of a master is taken from the weight, which is the same
number in fewer bits; lost elements of moments are zero, as at the start of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ucp.errors import NotUnderstoodError
from ucp.formats.megatron.local_module import Lodger
from ucp.formats.megatron.shifts import ShiftedBuffer
from ucp.model.box import Box, flat_index, intersect, interval_boxes
from ucp.model.checkpoint import MASTER, Fragment
from ucp.model.dtypes import DType
from ucp.model.layout import Rank
from ucp.model.region import Region

Source = Mapping[str, Sequence[Fragment]]  # name → fragments as stored


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements `[start, stop)` of a buffer that lie in the stored slice of `lodger`, from its element `at` on."""

    start: int
    stop: int
    lodger: Lodger
    at: int


class BufferRepair:
    """One buffer: where the elements of each of its parameters really are."""

    def __init__(self, buffer: ShiftedBuffer) -> None:
        self._rank = Rank(buffer.rank.pp, buffer.rank.tp)
        self._spans: list[_Span] = []
        self._homes: dict[str, tuple[int, Lodger]] = {}
        for tenancy in buffer.tenancies:
            # Of equal slices and tied copies one was stored, and that one went through another rank's buffer.
            stored = [] if tenancy.tensor.copy else [item for item in tenancy.tensor.lodgers if not item.repeats]
            for lodger in stored:
                numel = sum(piece.box.numel for piece in lodger.pieces)
                start = tenancy.start + lodger.shift
                self._homes[lodger.name] = (start, lodger)
                if not lodger.transposed:
                    late = start + tenancy.shift
                    self._spans.append(_Span(late, late + numel, lodger, 0))

    @property
    def names(self) -> list[str]:
        return list(self._homes)

    def fragments(
        self, name: str, kind: str, stored: Source, weight: Sequence[Fragment], dtype: DType
    ) -> tuple[list[Fragment], int]:
        """The state of this rank's slice of a parameter, and how many of its elements are lost."""
        start, lodger = self._homes[name]
        home = Region.of(piece.box for piece in lodger.pieces)
        made: list[Fragment] = []
        lost = at = 0
        for span in sorted(self._spans, key=lambda span: span.start):
            lo, hi = max(start, span.start) - start, min(start + home.numel, span.stop) - start
            if lodger.transposed or lo >= hi or lo < at:
                continue
            lost += self._lose(home, at, lo, kind, weight, dtype, made)
            from_ = span.at + start + lo - span.start
            made += _moved(home, lo, span.lodger, from_, from_ + hi - lo, stored[span.lodger.name], self._rank)
            at = hi
        lost += self._lose(home, at, home.numel, kind, weight, dtype, made)
        return made, lost

    def _lose(
        self, home: Region, lo: int, hi: int, kind: str, weight: Sequence[Fragment], dtype: DType, made: list[Fragment]
    ) -> int:
        for piece in home.cut(lo, hi).pieces():
            if kind == MASTER:
                made += (
                    Fragment(Region.of((box,)), source.file, offset, source.dtype, self._rank)
                    for box, source, offset in _found(piece.box, weight)
                )
            else:
                for i in range(piece.box.numel):
                    for one in interval_boxes(piece.box.shape, i, i + 1):
                        region = Region.of((one.shift(piece.box.start),))
                        made.append(Fragment(region, "", 0, dtype, self._rank, inline=bytes(dtype.itemsize)))
        return max(hi - lo, 0)


def _moved(
    home: Region, to: int, lodger: Lodger, start: int, stop: int, stored: Sequence[Fragment], rank: Rank
) -> Iterator[Fragment]:
    """Elements [start, stop) of the stored slice of `lodger`, as elements `to` and following of another slice."""
    for piece in Region.of(piece.box for piece in lodger.pieces).cut(start, stop).pieces():
        for box, source, offset in _found(piece.box, stored):
            # Blocks are whole slices or whole parts of them, so that what is found is in the order of the piece.
            first = to + piece.offset + flat_index(_minus(box, piece.box), piece.box.shape)
            yield Fragment(home.cut(first, first + box.numel), source.file, offset, source.dtype, rank)


def _found(box: Box, stored: Sequence[Fragment]) -> Iterator[tuple[Box, Fragment, int]]:
    """The stored blocks that hold `box`, each with the part that it holds and where that starts, in bytes."""
    for fragment in stored:
        held = fragment.region.boxes[0]
        common = intersect(held, box)
        if common is not None:
            if fragment.strides is not None or not _is_run(common, held):
                raise NotUnderstoodError(f"{fragment.file}: {held} is not a slice as the optimizer had it")
            at = flat_index(_minus(common, held), held.shape)
            yield common, fragment, fragment.offset + at * fragment.dtype.itemsize


def _is_run(box: Box, of: Box) -> bool:
    """Whether the elements of `box` lie side by side in the block `of`."""
    inner = [n != extent for n, extent in zip(box.shape, of.shape, strict=True)]
    cut = max((i for i, differs in enumerate(inner) if differs), default=0)
    return all(n == 1 for n in box.shape[:cut])


def _minus(box: Box, base: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(box.start, base.start, strict=True))
