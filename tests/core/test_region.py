"""Regions against numpy: their pieces agree with their definition."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import cuts, elements, numbered, region_elements, regions, shapes
from ucp.core.region import Region


@given(st.data())
def test_pieces_concatenated_are_the_region(data: st.DataObject) -> None:
    tensor = numbered(data.draw(shapes()))
    region = data.draw(regions(tensor.shape))
    position = 0
    for piece in region.pieces():
        assert piece.offset == position
        held = elements(tensor, piece.box)
        assert np.array_equal(held, region_elements(tensor, region)[position : position + piece.box.numel])
        position += piece.box.numel
    assert position == region.numel


@given(st.data())
def test_cutting_and_joining_is_the_identity(data: st.DataObject) -> None:
    tensor = numbered(data.draw(shapes()))
    region = data.draw(regions(tensor.shape))
    parts = [region.cut(start, stop) for start, stop in data.draw(cuts(region.numel))]
    joined = [region_elements(tensor, part) for part in parts]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *joined]), region_elements(tensor, region))


@given(st.data())
def test_cutting_a_cut_is_cutting_once(data: st.DataObject) -> None:
    region = data.draw(regions(data.draw(shapes())))
    a, b, c, d = (data.draw(st.integers(0, region.numel + 2)) for _ in range(4))
    once = range(region.numel)[a:b][c:d]
    assert region.cut(a, b).cut(c, d).numel == len(once)
    if once:
        assert region.cut(a, b).cut(c, d) == region.cut(once.start, once.stop)


@given(st.data())
def test_any_layout_maps_to_any_other_and_back(data: st.DataObject) -> None:
    """A tensor scattered over the regions of one layout, gathered into another's, and brought back, is unchanged."""
    tensor = numbered(data.draw(shapes(min_side=1)))
    layouts = [_layout(data, tensor.shape) for _ in range(2)]
    source = [region_elements(tensor, region) for region in layouts[0]]
    middle = _recut(tensor.shape, layouts[0], source, layouts[1])
    assert all(np.array_equal(m, region_elements(tensor, r)) for m, r in zip(middle, layouts[1], strict=True))
    back = _recut(tensor.shape, layouts[1], middle, layouts[0])
    assert all(np.array_equal(a, b) for a, b in zip(source, back, strict=True))


def _layout(data: st.DataObject, shape: tuple[int, ...]) -> list[Region]:
    """Regions that tile a tensor: cut along a dimension as tensor parallelism does, then flat as ZeRO does."""
    columns = [Region.all_of(shape)]
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        columns = []
        for lo, hi in data.draw(cuts(shape[dim])):
            box = Region.all_of(shape).boxes[0]
            start = (*box.start[:dim], lo, *box.start[dim + 1 :])
            columns.append(Region.of([type(box)(start, (*shape[:dim], hi - lo, *shape[dim + 1 :]))]))
    return [column.cut(lo, hi) for column in columns for lo, hi in data.draw(cuts(column.numel))]


def _recut(
    shape: tuple[int, ...], held: list[Region], values: list[np.ndarray], wanted: list[Region]
) -> list[np.ndarray]:
    """Move values between layouts through pieces only, as the engine does."""
    whole = np.full(shape, -1, dtype=np.int64)
    for region, flat in zip(held, values, strict=True):
        for piece in region.pieces():
            place = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
            whole[place] = flat[piece.offset : piece.offset + piece.box.numel].reshape(piece.box.shape)
    out = []
    for region in wanted:
        flat = np.full(region.numel, -1, dtype=np.int64)
        for piece in region.pieces():
            flat[piece.offset : piece.offset + piece.box.numel] = elements(whole, piece.box)
        out.append(flat)
    return out


@given(shapes())
def test_all_of_a_tensor(shape: tuple[int, ...]) -> None:
    region = Region.all_of(shape)
    assert region.numel == prod(shape)
    assert np.array_equal(region_elements(numbered(shape), region), numbered(shape).reshape(-1))
