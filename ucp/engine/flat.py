"""When dimensions do not matter: atoms whose pieces are intervals of the flattened tensor, and their straight copy.

Most bytes of most conversions go from file to file as they are. That path needs integers and a block of memory only,
so it works without numpy, whose import costs as much as moving a few hundred megabytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.model.box import Box, Shape, flat_index, interval_boxes
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.region import Piece, Region


def is_contiguous_in(box: Box, shape: Shape) -> bool:
    """Do the elements of `box` lie side by side in a row-major tensor of `shape`?"""
    seen = False
    for n, extent in zip(box.shape, shape, strict=True):
        if seen and n != extent:
            return False
        seen = seen or n > 1
    return True


def is_flat(pieces: Iterable[Piece], shape: Shape) -> bool:
    """Does every piece occupy one interval of the flattened tensor, so that dimensions do not matter?"""
    return all(_is_interval(piece.box, shape) for piece in pieces)


def flatten(box: Box, shape: Shape) -> Box:
    """A box that is contiguous in `shape`, as a box of the flattened tensor."""
    return Box((flat_index(box.start, shape),), (box.numel,))


def _is_interval(box: Box, shape: Shape) -> bool:
    return is_contiguous_in(box, shape) and all(a + n <= m for a, n, m in zip(box.start, box.shape, shape, strict=True))


def flat_runs(region: Region, shape: Shape) -> list[tuple[int, int, int]] | None:
    """A region as runs of the flattened tensor: first element, one past the last, and where that is in the region.

    In the region's order, neighbours joined. None where a piece of it is no single interval of a tensor of `shape`.
    """
    runs: list[tuple[int, int, int]] = []
    position = 0  # of the current box in the region's boxes laid end to end
    for box in region.boxes:
        numel = box.numel
        low, high = max(region.start, position), min(region.stop, position + numel)
        if low < high:
            start = low - position
            if _is_interval(box, shape):
                pieces = [(flat_index(box.start, shape) + start, high - low)]
            else:
                boxes = [part.shift(box.start) for part in interval_boxes(box.shape, start, high - position)]
                if not all(_is_interval(part, shape) for part in boxes):
                    return None
                pieces = [(flat_index(part.start, shape), part.numel) for part in boxes]
            offset = low - region.start
            for first, count in pieces:
                if runs and runs[-1][1] == first:
                    before = runs.pop()
                    runs.append((before[0], first + count, before[2]))
                else:
                    runs.append((first, first + count, offset))
                offset += count
        position += numel
    return runs


def can_flatten(atom: Atom) -> bool:
    """May this atom be read as if it had one dimension?"""
    covers: list[Sequence[Fragment]] = [atom.fragments]
    if atom.combine == "average":
        covers.extend(atom.replicas)
    return all(f.strides is None and flat_runs(f.region, atom.shape) is not None for cover in covers for f in cover)


def is_stored_as_is(atom: Atom) -> bool:
    """Are the stored bytes of this atom, which can be flattened, its logical bytes: no cast, scale, mean or number?"""
    return atom.combine == "copy" and all(
        f.dtype == atom.dtype and f.inline is None and f.scale == 1.0 for f in atom.fragments
    )


class StraightReader:
    """Reads byte ranges of an atom that is stored as it is and can be flattened. Safe to share between threads."""

    def __init__(self, files: SourceFiles, atom: Atom) -> None:
        self._files = files
        self._atom = atom
        size = atom.dtype.itemsize
        runs: list[tuple[int, int, str, int]] = []  # first byte of the atom, one past the last, file, byte of the file
        for fragment in atom.fragments:
            for first, last, offset in flat_runs(fragment.region, atom.shape) or ():
                runs.append((size * first, size * last, fragment.file, fragment.offset + size * offset))
        self._runs = sorted(runs)
        self._starts = [run[0] for run in self._runs]

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the atom's bytes from byte `start` on."""
        at, stop = start, start + len(out)
        index = max(0, bisect_right(self._starts, start) - 1)
        while at < stop:
            first, last, file, offset = self._runs[index] if index < len(self._runs) else (stop, stop, "", 0)
            if not first <= at < last or (index + 1 < len(self._runs) and self._starts[index + 1] < last):
                raise self._gap(at)
            end = min(stop, last)
            self._files.read_into(file, offset + at - first, out[at - start : end - start])
            at = end
            index += 1

    def _gap(self, at: int) -> InconsistentError:
        element = at // self._atom.dtype.itemsize
        return InconsistentError(
            f"parameter {self._atom.name}, {self._atom.kind}: element {element} of {self._atom.numel} is missing or"
            " there twice",
            hint="run `ucp verify` on the source to see which ranks are missing",
        )
