"""Compares the bytes of slices of several ranks, in blocks of bounded size, up to the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import product
from typing import Final

from ucp import settings
from ucp.core.box import Shape
from ucp.core.checkpoint import Fragment
from ucp.storage.local import SourceFiles

_FIRST_BLOCK: Final = 4096  # bytes


class SliceEquality(Enum):
    """The result of a comparison of slices."""

    DIFFERENT = "different"
    EQUAL = "equal"
    CONSTANT = "equal, and one value throughout"  # may be copies, or a split of a constant


def compare_slices(files: SourceFiles, slices: Sequence[tuple[Shape, Sequence[Fragment]]]) -> SliceEquality:
    """Compare the bytes of slices, given as shape and fragments in slice order. One element is never CONSTANT."""
    first_shape, first_fragments = slices[0]
    dtypes = {fragment.dtype for _, fragments in slices for fragment in fragments}
    if any(shape != first_shape for shape, _ in slices) or len(dtypes) > 1:
        return SliceEquality.DIFFERENT
    if not dtypes:
        return SliceEquality.EQUAL if 0 in first_shape else SliceEquality.DIFFERENT  # without bytes nothing is known
    itemsize = dtypes.pop().itemsize
    others = [_blocks(files, fragments, itemsize) for _, fragments in slices[1:]]
    element: bytes | None = None
    constant, total = True, 0
    for data in _blocks(files, first_fragments, itemsize):
        for other in others:
            if next(other, b"") != data:
                return SliceEquality.DIFFERENT
        element = element or bytes(data[:itemsize])
        constant = constant and data == element * (len(data) // itemsize)
        total += len(data)
    if any(next(other, None) is not None for other in others):
        return SliceEquality.DIFFERENT
    return SliceEquality.CONSTANT if constant and total > itemsize else SliceEquality.EQUAL


def _blocks(files: SourceFiles, fragments: Sequence[Fragment], itemsize: int) -> Iterator[bytearray]:
    """Yield the bytes of fragments in blocks of whole elements, which grow because most differences come early."""
    pending = bytearray()
    size = min(_FIRST_BLOCK, settings.SLAB_BYTES) // itemsize * itemsize
    for fragment in fragments:
        for offset, nbytes in _runs(fragment):
            done = 0
            while done < nbytes:
                take = min(size - len(pending), nbytes - done)
                if fragment.inline is not None:
                    pending += fragment.inline[done : done + take]
                else:
                    pending += files.read(fragment.file, offset + done, take)
                done += take
                if len(pending) == size:
                    yield pending
                    pending = bytearray()
                    size = max(size, min(8 * size, settings.SLAB_BYTES // itemsize * itemsize))
    if pending:
        yield pending


def _runs(fragment: Fragment) -> Iterator[tuple[int, int]]:
    """Yield the contiguous byte ranges (offset, length) of a fragment, in the order of its region."""
    if fragment.strides is None:
        yield fragment.offset, fragment.nbytes
        return
    # A strided fragment is a single box. Its rows are runs if the innermost dimension is contiguous.
    shape, itemsize = fragment.region.boxes[0].shape, fragment.dtype.itemsize
    dense = bool(shape) and fragment.strides[-1] == 1
    outer = len(shape) - 1 if dense else len(shape)
    length = (shape[-1] if dense else 1) * itemsize
    for index in product(*(range(n) for n in shape[:outer])):
        step = sum(i * stride for i, stride in zip(index, fragment.strides, strict=False))
        yield fragment.offset + step * itemsize, length
