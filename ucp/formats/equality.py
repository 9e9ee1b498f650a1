"""Are slices of several ranks bit-equal? Compared in blocks of bounded size, up to the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import product
from typing import Final

from ucp import tunables
from ucp.files.local import SourceFiles
from ucp.model.box import Shape
from ucp.model.checkpoint import Fragment

_FIRST_BLOCK: Final = 4096  # bytes


class Sameness(Enum):
    """What a comparison of slices found."""

    DIFFERENT = "different"
    EQUAL = "equal"
    CONSTANT = "equal, and one value throughout"  # tells copies and cuts of a constant apart no longer


def compare(files: SourceFiles, slices: Sequence[tuple[Shape, Sequence[Fragment]]]) -> Sameness:
    """Compare the bytes of slices, each a shape and its fragments in slice order. One element is never CONSTANT."""
    first_shape, first_fragments = slices[0]
    dtypes = {fragment.dtype for _, fragments in slices for fragment in fragments}
    if any(shape != first_shape for shape, _ in slices) or len(dtypes) > 1:
        return Sameness.DIFFERENT
    if not dtypes:
        return Sameness.EQUAL if 0 in first_shape else Sameness.DIFFERENT  # no bytes are no evidence
    itemsize = dtypes.pop().itemsize
    others = [_blocks(files, fragments, itemsize) for _, fragments in slices[1:]]
    element: bytes | None = None
    constant, total = True, 0
    for data in _blocks(files, first_fragments, itemsize):
        for other in others:
            if next(other, b"") != data:
                return Sameness.DIFFERENT
        element = element or bytes(data[:itemsize])
        constant = constant and data == element * (len(data) // itemsize)
        total += len(data)
    if any(next(other, None) is not None for other in others):
        return Sameness.DIFFERENT
    return Sameness.CONSTANT if constant and total > itemsize else Sameness.EQUAL


def _blocks(files: SourceFiles, fragments: Sequence[Fragment], itemsize: int) -> Iterator[bytearray]:
    """The bytes of fragments laid end to end, in blocks of whole elements that grow: most differences come early."""
    pending = bytearray()
    size = min(_FIRST_BLOCK, tunables.SLAB_BYTES) // itemsize * itemsize
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
                    size = max(size, min(8 * size, tunables.SLAB_BYTES // itemsize * itemsize))
    if pending:
        yield pending


def _runs(fragment: Fragment) -> Iterator[tuple[int, int]]:
    """Contiguous byte ranges (offset, length) of a fragment, in the order of its region."""
    if fragment.strides is None:
        yield fragment.offset, fragment.nbytes
        return
    # A strided fragment is a single box: take the innermost dimension as runs where it is contiguous.
    shape, itemsize = fragment.region.boxes[0].shape, fragment.dtype.itemsize
    dense = bool(shape) and fragment.strides[-1] == 1
    outer = len(shape) - 1 if dense else len(shape)
    length = (shape[-1] if dense else 1) * itemsize
    for index in product(*(range(n) for n in shape[:outer])):
        step = sum(i * stride for i, stride in zip(index, fragment.strides, strict=False))
        yield fragment.offset + step * itemsize, length
