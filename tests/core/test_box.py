"""Boxes against numpy's index arithmetic."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import boxes, elements, numbered, shapes
from ucp.core.box import Box, flat_index, intersect, interval_boxes, strides_of, whole


@given(st.data())
def test_interval_boxes_are_the_interval_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    found = list(interval_boxes(shape, start, stop))
    laid = [elements(numbered(shape), box) for box in found]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *laid]), np.arange(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in found)


@given(st.data())
def test_intersection_holds_exactly_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = set(elements(numbered(shape), a)) & set(elements(numbered(shape), b))
    box = intersect(a, b)
    assert (set(elements(numbered(shape), box)) if box else set()) == common
    assert intersect(b, a) == box


@given(shapes(min_side=1))
def test_strides_and_flat_index_agree_with_numpy(shape: tuple[int, ...]) -> None:
    tensor = numbered(shape)
    assert strides_of(shape) == tuple(stride // tensor.itemsize for stride in tensor.strides)
    for index in np.ndindex(shape):
        assert flat_index(index, shape) == tensor[index]


@given(st.data())
def test_shift_moves_every_element(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_dims=1, min_side=1))
    box = data.draw(boxes(shape))
    by = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    moved = box.shift(by)
    assert moved.shape == box.shape
    assert tuple(b - a for a, b in zip(box.start, moved.start, strict=True)) == by
    assert moved.stop == tuple(a + n for a, n in zip(moved.start, moved.shape, strict=True))


def test_a_scalar_is_one_element() -> None:
    assert whole(()).numel == 1
    assert list(interval_boxes((), 0, 1)) == [Box((), ())]
    assert list(interval_boxes((), 0, 0)) == []
    assert intersect(whole(()), whole(())) == whole(())
