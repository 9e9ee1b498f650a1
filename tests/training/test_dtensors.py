"""Boxes of DTensors: they tile the tensor, and equal the shards of torch."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import index_of
from ucp.core.box import Shape, coverage
from ucp.errors import UsageError
from ucp.training.adapters import box_of


class Shard:
    """Replaces torch's placement of the same name: the code uses names and fields only."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


class _StridedShard(Shard):
    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        self.split_factor = split_factor


class Replicate:
    pass


class Partial:
    pass


def chunks(values: np.ndarray[Any, Any], dim: int, count: int) -> list[np.ndarray[Any, Any]]:
    """Like `torch.chunk`, with empty chunks at the end."""
    size = -(-values.shape[dim] // count)
    edges = [min(i * size, values.shape[dim]) for i in range(count + 1)]
    return [values.take(range(a, b), axis=dim) for a, b in pairwise(edges)]


@given(data=st.data())
def test_shards_equal_torch_chunk_and_tile_the_tensor(data: st.DataObject) -> None:
    shape: Shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = [data.draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    boxes = {}
    for place in product(*map(range, mesh)):
        expected = whole
        for dim, count, at in zip(dims, mesh, place, strict=True):
            if dim is not None:
                expected = chunks(expected, dim, count)[at]
        box = box_of(shape, placements, mesh, place)
        assert np.array_equal(whole[index_of(box)], expected)
        boxes[tuple(at for dim, at in zip(dims, place, strict=True) if dim is not None)] = box
    assert list(coverage(shape, [box for box in boxes.values() if box.numel])) == []


def test_fsdp_splits_after_tensor_parallelism() -> None:
    """Tensor parallelism splits rows first, then FSDP splits each slice: mesh (dp 2, tp 3)."""
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    rows = [box_of((12, 2), placements, (2, 3), place) for place in product(range(2), range(3))]
    assert [(box.start[0], box.shape[0]) for box in rows] == [(0, 2), (4, 2), (8, 2), (2, 2), (6, 2), (10, 2)]


@pytest.mark.parametrize(
    "placements",
    [[Partial(), Replicate()], [_StridedShard(0, split_factor=4), Shard(0)], [Shard(0), _StridedShard(0, 1)]],
)
def test_other_placements_are_refused(placements: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"parameter p: DTensor placement.* not supported"):
        box_of((12, 2), placements, (2, 3), (0, 0), "p")
