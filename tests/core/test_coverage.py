"""Coverage against a brute-force count of how many boxes hold each element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import boxes, shapes
from ucp.core.box import Box, Gap, Overlap, coverage, slabs, whole
from ucp.core.region import Region


@given(st.data())
def test_finds_every_gap_and_every_overlap_and_nothing_else(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_side=4))
    given_boxes = data.draw(st.lists(boxes(shape), max_size=5))
    # Each element's owners, by counting.
    owners: dict[tuple[int, ...], set[int]] = {index: set() for index in np.ndindex(*shape)}
    for i, box in enumerate(given_boxes):
        for index in np.ndindex(*box.shape):
            owners[tuple(a + b for a, b in zip(box.start, index, strict=True))].add(i)
    seen: dict[tuple[int, ...], set[int]] = {}
    for defect in coverage(shape, given_boxes):
        assert defect.box.numel > 0
        for index in np.ndindex(*defect.box.shape):
            at = tuple(a + b for a, b in zip(defect.box.start, index, strict=True))
            assert at not in seen  # no element is reported twice
            seen[at] = set(defect.owners) if isinstance(defect, Overlap) else set()
    assert seen == {index: held for index, held in owners.items() if len(held) != 1}


@given(shapes(min_side=1), st.integers(1, 30))
def test_a_tiling_has_no_defects_and_a_lost_box_is_a_gap(shape: tuple[int, ...], limit: int) -> None:
    tiles = list(slabs(shape, limit))
    assert list(coverage(shape, tiles)) == []
    gaps = list(coverage(shape, tiles[1:]))
    assert all(isinstance(gap, Gap) for gap in gaps)
    assert sum(gap.box.numel for gap in gaps) == tiles[0].numel
    doubled = list(coverage(shape, [*tiles, tiles[0]]))
    assert all(isinstance(overlap, Overlap) and overlap.owners == (0, len(tiles)) for overlap in doubled)
    assert sum(overlap.box.numel for overlap in doubled) == tiles[0].numel


def test_padding_outside_the_shape_is_ignored() -> None:
    assert list(coverage((3,), [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (5,))])) == []


def test_defects_come_in_row_major_order() -> None:
    found = list(coverage((4, 2), [Box((1, 0), (1, 2)), Box((1, 1), (2, 1))]))
    assert found == [
        Gap(Box((0, 0), (1, 2))),
        Overlap(Box((1, 1), (1, 1)), (0, 1)),
        Gap(Box((2, 0), (1, 1))),
        Gap(Box((3, 0), (1, 2))),
    ]


def test_a_scalar_needs_exactly_one_owner() -> None:
    assert list(coverage((), [])) == [Gap(whole(()))]
    assert list(coverage((), [whole(())])) == []
    assert list(coverage((), [whole(()), whole(())])) == [Overlap(whole(()), (0, 1))]


def test_a_cut_region_leaves_its_rest_as_gaps() -> None:
    pieces = [piece.box for piece in Region.all_of((3, 4)).cut(2, 9).pieces()]
    missing = sorted(
        4 * (box.start[0] + i) + box.start[1] + j
        for box in (defect.box for defect in coverage((3, 4), pieces))
        for i, j in np.ndindex(*box.shape)
    )
    assert missing == [0, 1, 9, 10, 11]
