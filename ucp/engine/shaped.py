"""Slabs that are rearranged or computed on their way: cut along inner dimensions, strided, cast, averaged, padded."""

from __future__ import annotations

import numpy as np

from ucp.engine.casting import RawArray, raw_dtype
from ucp.engine.reading import AtomReader
from ucp.files.local import SourceFiles
from ucp.model.box import Box, flat_index, intersect, is_contiguous_in, whole
from ucp.model.checkpoint import Atom


class ShapedReader:
    """Reads slabs of one atom into a block of bytes, as arrays. Not thread-safe."""

    def __init__(self, files: SourceFiles, atom: Atom, *, flat: bool) -> None:
        self.atom = atom
        self.flat = flat
        self._reader = AtomReader(files, atom, flat=flat)

    def read(self, slab: Box, block: memoryview) -> RawArray:
        """The slab, at the start of `block`; it may reach past the atom's shape, and what lies outside is zero."""
        dtype = self.atom.dtype
        values: RawArray = np.frombuffer(block, raw_dtype(dtype), slab.numel).reshape(slab.shape)
        inside = intersect(slab, whole(self._reader.shape))
        if inside == slab:
            self._reader.read(slab, values)
            return values
        values[...] = 0
        if inside is None:
            return values
        # Padding lies after the real elements, so what is inside begins where the slab does.
        corner = values[tuple(slice(0, n) for n in inside.shape)]
        if corner.flags.c_contiguous:
            self._reader.read(inside, corner)
        else:
            real = np.empty(inside.shape, values.dtype)
            self._reader.read(inside, real)
            corner[...] = real
        return values


def pick(values: RawArray, slab: Box, box: Box) -> memoryview:
    """The bytes of those elements of a slab that lie in `box`, in order; none where they do not meet."""
    common = intersect(box, slab)
    if common is None:
        return memoryview(b"")
    inner = common.shift(tuple(-a for a in slab.start))
    if is_contiguous_in(inner, slab.shape):
        at = flat_index(inner.start, slab.shape)
        picked = values.reshape(-1)[at : at + common.numel]
    else:
        where = tuple(slice(a, a + n) for a, n in zip(inner.start, inner.shape, strict=True))
        picked = np.ascontiguousarray(values[where]).reshape(-1)
    return picked.view(np.uint8).data
