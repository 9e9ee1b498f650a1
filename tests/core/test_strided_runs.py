"""Strided runs against numpy: they agree with the definition of a region."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import numbered, region_elements, regions, shapes
from ucp.core.box import Box
from ucp.core.region import Region
from ucp.core.strided_runs import StridedRun, strided_runs


def positions(stripe: StridedRun) -> list[int]:
    return [stripe.first + r * stripe.step + k for r in range(stripe.times) for k in range(stripe.run)]


@given(st.data())
def test_strided_runs_concatenated_are_the_region(data: st.DataObject) -> None:
    tensor = numbered(data.draw(shapes(min_side=1)))
    region = data.draw(regions(tensor.shape))
    found = strided_runs(region, tensor.shape)
    assert found is not None
    held = [position for stripe in found for position in positions(stripe)]
    assert held == region_elements(tensor, region).tolist()
    lengths = [stripe.run * stripe.times for stripe in found]
    assert [stripe.offset for stripe in found] == np.cumsum([0, *lengths])[:-1].tolist()


@given(st.data())
def test_runs_between_two_positions(data: st.DataObject) -> None:
    run = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 5))
    stripe = StridedRun(data.draw(st.integers(0, 5)), run, run + data.draw(st.integers(0, 4)), count, 0)
    low, high = sorted((data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))))
    wanted = [position for position in positions(stripe) if low <= position < high]
    runs = stripe.within(low, high)
    assert [low + position for a, b in runs.intervals() for position in range(a, b)] == wanted
    assert runs.numel == len(wanted)
    assert stripe.before(high) == sum(position < high for position in positions(stripe))


def test_a_slice_of_columns_is_one_strided_run() -> None:
    columns = Region.of((Box((0, 0, 10), (4, 8, 10)),))
    assert strided_runs(columns, (4, 8, 30)) == [StridedRun(10, 10, 30, 32, 0)]
    one_row = Region.of((Box((0, 3, 10), (4, 1, 10)),))
    assert strided_runs(one_row, (4, 8, 30)) == [StridedRun(100, 10, 240, 4, 0)]


def test_a_slice_that_begins_and_ends_within_rows_is_one_interval() -> None:
    assert strided_runs(Region.all_of((10, 7)).cut(3, 45), (10, 7)) == [StridedRun(3, 42, 42, 1, 0)]


def test_part_of_one_row_of_columns_is_an_interval() -> None:
    columns = Region.of([Box((0, 2), (10, 3))])
    assert strided_runs(columns.cut(4, 6), (10, 7)) == [StridedRun(10, 2, 2, 1, 0)]


def test_adjacent_runs_are_joined() -> None:
    halves = Region.of((Box((0, 0), (2, 5)), Box((2, 0), (2, 5))))
    assert strided_runs(halves, (4, 5)) == [StridedRun(0, 20, 20, 1, 0)]


def test_padding_has_no_runs_unless_it_is_left_out() -> None:
    rows = Region.of([Box((0, 0), (12, 7))])
    assert strided_runs(rows, (10, 7)) is None
    assert strided_runs(rows.cut(0, 70), (10, 7)) == [StridedRun(0, 70, 70, 1, 0)]
    assert strided_runs(rows, (10, 7), padded=True) == [StridedRun(0, 70, 70, 1, 0)]
    assert strided_runs(rows.cut(75, 84), (10, 7), padded=True) == []
    columns = Region.of([Box((0, 0), (10, 9))])
    assert strided_runs(columns, (10, 7), padded=True) is None
    both = Region.of([Box((8, 0), (4, 7)), Box((0, 0), (2, 7))])
    assert strided_runs(both, (10, 7), padded=True) == [StridedRun(56, 14, 14, 1, 0), StridedRun(0, 14, 14, 1, 28)]
