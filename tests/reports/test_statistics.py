"""Numbers about an atom, from one pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucp.core.dtypes import BFLOAT16, BOOL, BY_NAME, FLOAT16, FLOAT32, FLOAT64, INT64, DType
from ucp.read.casting import raw_dtype
from ucp.reports.atom_statistics import AtomStatistics

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"


def measured(raw: np.ndarray, dtype: DType = FLOAT32) -> AtomStatistics:
    made = AtomStatistics(dtype)
    made.take(0, [raw])
    return made


def histogram(statistics: AtomStatistics) -> dict[float, tuple[int, int]]:
    """Lower edge of each bin that is in use → heights below and above zero."""
    first, below, above = statistics.to_json()[8:]
    edges = [2.0 ** ((first + i) // 2 - 127) * (1.5 if (first + i) % 2 else 1.0) for i in range(len(below))]
    heights = zip(map(LETTERS.index, below), map(LETTERS.index, above), strict=True)
    return {edge: pair for edge, pair in zip(edges, heights, strict=True) if any(pair)}


def test_against_numpy() -> None:
    values = np.random.default_rng(1).normal(0.5, 2.0, 200_000).astype(np.float32)
    found = measured(values)
    wide = values.astype(np.float64)
    assert found.norm == pytest.approx(np.linalg.norm(wide))
    assert (found.low, found.high) == (values.min(), values.max())
    assert found.mean == pytest.approx(wide.mean())
    assert found.deviation == pytest.approx(wide.std())
    assert (found.nan, found.infinite, found.zeros, found.count) == (0, 0, 0, 200_000)


def test_nan_and_infinity_are_counted_and_left_out() -> None:
    found = measured(np.array([1, math.nan, -3, math.inf, -math.inf, math.nan, 0], np.float32))
    assert (found.nan, found.infinite, found.zeros, found.finite) == (2, 2, 1, 3)
    assert (found.low, found.high, found.norm) == (-3.0, 1.0, pytest.approx(10**0.5))
    assert histogram(found) == {1.0: (0, 63), 3.0: (63, 0)}
    opposite = measured(np.array([math.inf, -math.inf], np.float32))
    assert (opposite.infinite, opposite.nan) == (2, 0)


def test_nothing_but_nan_is_no_number() -> None:
    said = measured(np.array([math.nan], np.float32)).to_json()
    assert said == [0.0, None, None, None, None, 1, 0, 0, 0, "", ""]
    assert AtomStatistics(FLOAT32).to_json()[1:5] == [None] * 4


def test_bins_are_half_octaves() -> None:
    values = np.array([1.0, 1.49, 1.5, 1.99, 2.0, -0.75] * 10, np.float32)
    assert histogram(measured(values)) == {0.75: (32, 0), 1.0: (0, 63), 1.5: (0, 63), 2.0: (0, 32)}


def test_rare_values_stay_visible() -> None:
    values = np.ones(1_000_000, np.float32)
    values[7] = 100.0
    assert histogram(measured(values))[96.0] == (0, 1)


def test_zeros_are_no_bar_and_the_smallest_numbers_are() -> None:
    tiny = np.float32(1e-45)
    found = measured(np.array([0.0, -0.0, 0.0, tiny], np.float32))
    assert found.zeros == 3
    assert list(histogram(found).values()) == [(0, 63)]
    assert histogram(measured(np.zeros(5, np.float32))) == {}


@given(st.lists(st.floats(width=32), max_size=50), st.integers(0, 50))
def test_parts_add_up_to_the_whole(values: list[float], cut: int) -> None:
    raw = np.array(values, np.float32)
    whole, parts = measured(raw), AtomStatistics(FLOAT32)
    for part in (raw[:cut], raw[cut:]):
        parts.merge(measured(part))
    assert (parts.nan, parts.infinite, parts.zeros, parts.low, parts.high) == (
        whole.nan,
        whole.infinite,
        whole.zeros,
        whole.low,
        whole.high,
    )
    assert parts.squares == pytest.approx(whole.squares)
    assert (parts.bins == whole.bins).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT64, BY_NAME["float8_e4m3fn"], INT64, BOOL], ids=str)
def test_every_real_dtype(dtype: DType) -> None:
    values = torch.tensor([1.0, 0.0, 1.0, 1.0]).to(getattr(torch, dtype.name))
    found = measured(values.view(torch.uint8).numpy().view(raw_dtype(dtype)), dtype)
    assert (found.low, found.high, found.mean, found.zeros) == (0.0, 1.0, 0.75, 1)


def test_doubles_beyond_single_precision() -> None:
    found = measured(np.array([1e300, -1e-300]), FLOAT64)
    assert (found.low, found.high, found.infinite, found.zeros) == (-1e-300, 1e300, 0, 0)
