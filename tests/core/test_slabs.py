"""Slabs tile a tensor in order, and what they share with a box is contiguous in that box."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import boxes, elements, numbered, shapes
from ucp.core.box import intersect, slabs


@given(shapes(), st.integers(0, 60))
def test_slabs_tile_in_row_major_order(shape: tuple[int, ...], limit: int) -> None:
    found = list(slabs(shape, limit))
    laid = [elements(numbered(shape), slab) for slab in found]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *laid]), np.arange(prod(shape)))
    assert all(0 < slab.numel <= max(limit, 1) for slab in found)


@given(st.data())
def test_a_slab_intersects_any_box_in_one_contiguous_run_of_that_box(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_side=1))
    box = data.draw(boxes(shape))
    inside = elements(numbered(shape), box)
    at = 0
    for slab in slabs(shape, data.draw(st.integers(1, prod(shape)))):
        common = intersect(slab, box)
        if common is None:
            continue
        run = elements(numbered(shape), common)
        assert np.array_equal(run, inside[at : at + run.size])  # contiguous, and the runs come in order
        at += run.size
    assert at == inside.size


@given(shapes(min_side=1), st.integers(1, 40))
def test_slabs_are_not_needlessly_small(shape: tuple[int, ...], limit: int) -> None:
    """No two neighbours that fix the same leading indices would fit into one slab."""
    found = list(slabs(shape, limit))
    for a, b in pairwise(found):
        cut = next((d for d in range(len(shape)) if a.start[d] != b.start[d]), None)
        if cut is not None and a.stop[cut] == b.start[cut] and all(n == 1 for n in a.shape[:cut]):
            assert a.numel + prod(shape[cut + 1 :]) > limit
