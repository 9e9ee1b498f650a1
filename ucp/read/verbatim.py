"""The fast path of reading: bytes that are copied unchanged, without numpy.

In most conversions most bytes go from file to file unchanged. That needs integers and a block of memory only, and
importing numpy would take as long as moving a few hundred megabytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ucp import settings
from ucp.core.box import Box, Shape, coverage, flat_index, is_contiguous_in
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import DType
from ucp.core.region import Region, RegionPiece
from ucp.core.strided_runs import StridedRun, StridedSpan, strided_runs
from ucp.errors import InconsistentError
from ucp.storage.local import SourceFiles

# The runs of an atom's flattened elements, each with the fragment that stores it.
StoredRuns = Sequence[tuple[StridedRun, Fragment]]


def can_flatten(atom: Atom) -> bool:
    """Whether the atom can be read as if it had one dimension: every fragment is made of intervals of it."""
    covers: list[Sequence[Fragment]] = [atom.fragments]
    if atom.combine == "average":
        covers.extend(atom.replicas)
    return all(f.strides is None and _is_intervals(f.region, atom.shape) for cover in covers for f in cover)


def _is_intervals(region: Region, shape: Shape) -> bool:
    runs = strided_runs(region, shape)
    return runs is not None and all(run.times == 1 for run in runs)


def pieces_are_intervals(pieces: Iterable[RegionPiece], shape: Shape) -> bool:
    """Whether every piece is one interval of the flattened tensor."""
    return all(
        is_contiguous_in(piece.box, shape) and all(stop <= n for stop, n in zip(piece.box.stop, shape, strict=True))
        for piece in pieces
    )


def flatten_box(box: Box, shape: Shape) -> Box:
    """A box that is contiguous in `shape`, as a box of the flattened tensor."""
    return Box((flat_index(box.start, shape),), (box.numel,))


def is_verbatim(atom: Atom) -> bool:
    """Whether the stored bytes are the bytes of the atom, in some order: no cast, scale, mean or inline number."""
    return atom.combine == "copy" and all(
        f.dtype == atom.dtype and f.inline is None and f.scale == 1.0 and f.strides is None for f in atom.fragments
    )


def runs_are_long(runs: Iterable[StridedRun], dtype: DType) -> bool:
    """Whether every run is so long that moving it costs more than locating it."""
    return all(run.times == 1 or run.run * dtype.itemsize >= settings.LONG_RUN_BYTES for run in runs)


def stored_runs(atom: Atom) -> StoredRuns | None:
    """The runs of the flattened atom in which its elements are stored.

    None if the stored bytes are not the atom's bytes, or if the runs are so short that numpy moves them faster.
    """
    if not is_verbatim(atom):
        return None
    stored: list[tuple[StridedRun, Fragment]] = []
    for fragment in atom.fragments:
        runs = strided_runs(fragment.region, atom.shape, padded=True)
        if runs is None or not runs_are_long(runs, atom.dtype):
            return None
        stored.extend((run, fragment) for run in runs)
    return stored


class ViewCache:
    """Memoryviews of runs of one block of memory.

    They are cached, because slabs of a tensor mostly consist of the same runs, and making the views takes as long as
    moving their bytes.
    """

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self._views: dict[StridedSpan, list[memoryview]] = {}
        self._count = 0

    def of(self, span: StridedSpan) -> list[memoryview]:
        """One view per run."""
        views = self._views.get(span)
        if views is None:
            if self._count >= settings.CACHED_VIEWS:
                self._views.clear()
                self._count = 0
            block = self.block
            views = self._views[span] = [block[first:last] for first, last in span.intervals()]
            self._count += len(views)
        return views


class VerbatimReader:
    """Reads byte ranges of an atom whose bytes are stored unchanged. Safe to share between threads."""

    def __init__(self, files: SourceFiles, atom: Atom, stored: StoredRuns) -> None:
        """`stored` is what `stored_runs` returns for this atom."""
        self._files = files
        _check_cover(atom, [run for run, _ in stored])
        size = atom.dtype.itemsize
        self._runs = sorted((run.scaled(size, fragment.offset), fragment.file) for run, fragment in stored)
        self._starts = [run.first for run, _ in self._runs]
        self._ends = list(accumulate((run.stop for run, _ in self._runs), max))

    def read(self, start: int, stop: int, out: ViewCache) -> None:
        """Read the atom's bytes `[start, stop)` to the start of the block."""
        for run, file in self._runs[bisect_right(self._ends, start) : bisect_left(self._starts, stop)]:
            span = run.within(start, stop)
            if span.times:
                self._files.scatter(file, run.offset + run.before(start), out.of(span), span.numel)


def _check_cover(atom: Atom, runs: Sequence[StridedRun]) -> None:
    """Raise InconsistentError unless every element is stored exactly once."""
    if all(run.times == 1 for run in runs):
        position = 0
        for run in sorted(runs):
            if run.first != position:
                break
            position = run.stop
        if position == atom.numel:
            return
    else:
        defect = next(coverage(atom.shape, [piece.box for f in atom.fragments for piece in f.region.pieces()]), None)
        if defect is None:
            return
        position = flat_index(defect.box.start, atom.shape)
    raise InconsistentError(
        f"parameter {atom.name}, {atom.kind}: element {position} of {atom.numel} is missing or stored twice",
        hint="run `ucp verify` on the source to see which ranks are missing",
    )
