"""Random shapes, boxes, regions and rules, and the numpy arithmetic that they are checked against."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ucp.core.box import Box, Shape
from ucp.core.region import Region
from ucp.core.rules import Rule

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def shapes(max_dims: int = 4, min_dims: int = 0, max_side: int = 5, min_side: int = 0) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def numbered(shape: Shape) -> Numbers:
    """A tensor whose elements are their own row-major positions."""
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


def elements(tensor: Numbers, box: Box) -> Numbers:
    """The elements of a box, row-major, flat."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))].reshape(-1)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box inside a tensor of `shape`, possibly empty."""
    start, size = [], []
    for n in shape:
        a = draw(st.integers(0, n))
        start.append(a)
        size.append(draw(st.integers(0, n - a)))
    return Box(tuple(start), tuple(size))


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    """Any concatenation of boxes, and any interval of it."""
    whole = Region.of(draw(st.lists(boxes(shape), max_size=4)))
    start = draw(st.integers(0, whole.numel))
    return whole.cut(start, draw(st.integers(start, whole.numel)))


def region_elements(tensor: Numbers, region: Region) -> Numbers:
    """The elements of a region in its own order, by its definition."""
    parts = [elements(tensor, box) for box in region.boxes]
    laid = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return laid[region.start : region.stop]


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Half-open intervals that tile `[0, length)` in order."""
    marks = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
    return list(zip([0, *marks], [*marks, length], strict=True))


@st.composite
def split_rules(draw: st.DrawFn) -> tuple[Rule, Shape, int]:
    """A `split` rule, a whole shape that it can cut, and a tp degree: with and without parts, even and uneven."""
    tp = draw(st.integers(1, 4))
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    count = draw(st.integers(1, 3))
    if draw(st.booleans()):
        widths = [[draw(st.integers(0, 3)) for _ in range(tp)] for _ in range(count)]
        parts = [sum(row) for row in widths]
        rule = Rule("split", dim, parts=tuple(parts), widths=tuple(map(tuple, widths)))
    else:
        parts = [tp * draw(st.integers(1, 3)) for _ in range(count)]
        rule = Rule("split", dim, parts=tuple(parts) if count > 1 else None)
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    shape[dim] = sum(parts)
    return rule, tuple(shape), tp
