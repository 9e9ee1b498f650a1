"""When dimensions do not matter: atoms whose pieces are intervals of the flattened tensor, and their straight copy.

Most bytes of most conversions go from file to file as they are. That path needs integers and a block of memory only,
so it works without numpy, whose import costs as much as moving a few hundred megabytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, is_contiguous_in
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.coverage import coverage
from ucp.core.dtypes import DType
from ucp.core.region import Region, RegionPiece
from ucp.core.strided_runs import StridedRun, StridedSpan, strided_runs
from ucp.errors import InconsistentError
from ucp.storage.local import SourceFiles


def pieces_are_intervals(pieces: Iterable[RegionPiece], shape: Shape) -> bool:
    """Does every piece occupy one interval of the flattened tensor, so that dimensions do not matter?"""
    return all(_is_interval(piece.box, shape) for piece in pieces)


def flatten_box(box: Box, shape: Shape) -> Box:
    """A box that is contiguous in `shape`, as a box of the flattened tensor."""
    return Box((flat_index(box.start, shape),), (box.numel,))


def _is_interval(box: Box, shape: Shape) -> bool:
    return is_contiguous_in(box, shape) and all(a + n <= m for a, n, m in zip(box.start, box.shape, shape, strict=True))


def can_flatten(atom: Atom) -> bool:
    """May this atom be read as if it had one dimension?"""
    covers: list[Sequence[Fragment]] = [atom.fragments]
    if atom.combine == "average":
        covers.extend(atom.replicas)
    return all(f.strides is None and _is_intervals(f.region, atom.shape) for cover in covers for f in cover)


def _is_intervals(region: Region, shape: Shape) -> bool:
    found = strided_runs(region, shape)
    return found is not None and all(stripe.times == 1 for stripe in found)


def is_verbatim(atom: Atom) -> bool:
    """Are the stored bytes of this atom its logical bytes, in some order: no cast, scale, mean or number?"""
    return atom.combine == "copy" and all(
        f.dtype == atom.dtype and f.inline is None and f.scale == 1.0 and f.strides is None for f in atom.fragments
    )


def runs_are_long(held: Iterable[StridedRun], dtype: DType) -> bool:
    """Is a run so long that moving it costs more than finding it?"""
    return all(stripe.times == 1 or stripe.run * dtype.itemsize >= settings.LONG_RUN_BYTES for stripe in held)


StoredRuns = Sequence[tuple[StridedRun, Fragment]]


def stored_runs(atom: Atom) -> StoredRuns | None:
    """Where the stored elements of an atom go in the flattened tensor.

    None where they are not its bytes, or go there in runs so short that they are better moved together.
    """
    if not is_verbatim(atom):
        return None
    held: list[tuple[StridedRun, Fragment]] = []
    for fragment in atom.fragments:
        found = strided_runs(fragment.region, atom.shape, padded=True)
        if found is None or not runs_are_long(found, atom.dtype):
            return None
        held.extend((stripe, fragment) for stripe in found)
    return held


class ViewCache:
    """Runs of bytes of one block of memory.

    They are kept: slabs of a tensor are mostly cut alike, and to make the views takes as long as to move their bytes.
    """

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self._kept: dict[StridedSpan, list[memoryview]] = {}
        self._count = 0

    def of(self, runs: StridedSpan) -> list[memoryview]:
        """A view of each run."""
        found = self._kept.get(runs)
        if found is None:
            if self._count >= settings.CACHED_VIEWS:
                self._kept.clear()
                self._count = 0
            block = self.block
            found = self._kept[runs] = [block[first:last] for first, last in runs.intervals()]
            self._count += len(found)
        return found


class VerbatimReader:
    """Reads byte ranges of an atom that is stored as it is, in stripes. Safe to share between threads."""

    def __init__(self, files: SourceFiles, atom: Atom, stored: StoredRuns) -> None:
        """`stored` is what `stored_stripes` gives for this atom."""
        self._files = files
        _check_cover(atom, [stripe for stripe, _ in stored])
        size = atom.dtype.itemsize
        self._held = sorted((stripe.scaled(size, fragment.offset), fragment.file) for stripe, fragment in stored)
        self._starts = [stripe.first for stripe, _ in self._held]
        self._ends = list(accumulate((stripe.stop for stripe, _ in self._held), max))

    def read(self, start: int, stop: int, out: ViewCache) -> None:
        """Put the atom's bytes `[start, stop)` where the block begins."""
        for stripe, file in self._held[bisect_right(self._ends, start) : bisect_left(self._starts, stop)]:
            runs = stripe.within(start, stop)
            if runs.times:
                self._files.scatter(file, stripe.offset + stripe.before(start), out.of(runs), runs.numel)


def _check_cover(atom: Atom, held: Sequence[StridedRun]) -> None:
    """Every element must be there once."""
    if all(stripe.times == 1 for stripe in held):
        at = 0
        for stripe in sorted(held):
            if stripe.first != at:
                break
            at = stripe.stop
        if at == atom.numel:
            return
    else:
        defect = next(coverage(atom.shape, [piece.box for f in atom.fragments for piece in f.region.pieces()]), None)
        if defect is None:
            return
        at = flat_index(defect.box.start, atom.shape)
    raise InconsistentError(
        f"parameter {atom.name}, {atom.kind}: element {at} of {atom.numel} is missing or there twice",
        hint="run `ucp verify` on the source to see which ranks are missing",
    )
