"""Slabs: the unit of work. Consecutive, contiguous blocks of an atom in logical row-major order."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ucp.model.box import Box, Shape


def slabs(shape: Shape, limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `limit` elements that are contiguous in row-major order, first to last.

    Every box fixes some leading indices, takes a range of one dimension and all of the dimensions after it. That form
    is what makes the part that any row-major box shares with a slab contiguous in that box.
    """
    if 0 in shape:
        return
    limit = max(limit, 1)
    dim = _cut_dimension(shape, limit)
    if dim is None:
        yield Box((0,) * len(shape), shape)
        return
    inner = shape[dim + 1 :]
    rows = max(1, limit // prod(inner))
    zeros = (0,) * len(inner)
    for lead in _indices(shape[:dim]):
        for row in range(0, shape[dim], rows):
            yield Box((*lead, row, *zeros), ((1,) * dim) + (min(rows, shape[dim] - row), *inner))


def _cut_dimension(shape: Shape, limit: int) -> int | None:
    """The first dimension whose rows fit the limit; None when the whole tensor does."""
    if prod(shape) <= limit:
        return None
    for dim in range(len(shape)):
        if prod(shape[dim + 1 :]) <= limit:
            return dim
    raise AssertionError("a row of no dimensions has one element")


def _indices(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for i in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (i, *rest)
