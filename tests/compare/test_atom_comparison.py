"""What is counted while two atoms are compared."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.compare.elements import EXACT, AtomComparison, Tolerance
from ucp.core.dtypes import BFLOAT16, BOOL, BY_NAME, FLOAT32, FLOAT64, INT64
from ucp.read.casting import cast

NAN, INF = math.nan, math.inf


def tally(a: object, b: object, tolerance: Tolerance = EXACT, norms: bool = False) -> AtomComparison:
    made = AtomComparison(FLOAT32, FLOAT32, tolerance, norms=norms)
    made.take(0, [np.asarray(a, np.float32), np.asarray(b, np.float32)])
    return made


def test_equal_elements() -> None:
    found = tally([1, NAN, INF, 0], [1, NAN, INF, 0])
    assert (found.differing, found.outside, found.first, found.max_abs, found.max_ulp) == (0, 0, None, 0.0, 0)


def test_differing_elements() -> None:
    found = tally([1, 2, 3, 4], [1, 2.5, 3, 2])
    assert (found.differing, found.outside, found.first, found.worst) == (2, 2, 1, 3)
    assert found.max_abs == 2.0
    assert found.max_rel == 0.5  # relative to the larger of both
    assert found.max_ulp == 1 << 23


def test_zeros_of_different_sign_differ_in_bits_but_not_in_value() -> None:
    found = tally([0.0, 1.0], [-0.0, 1.0])
    assert (found.differing, found.outside, found.max_abs, found.max_rel, found.max_ulp) == (1, 1, 0.0, 0.0, 0)
    assert tally([0.0], [-0.0], Tolerance(absolute=1e-30)).outside == 0


def test_nan_and_infinity_are_far_from_every_number() -> None:
    loose = Tolerance(relative=10.0, absolute=1e30, ulp=1 << 40)
    found = tally([NAN, INF, 1, INF], [1, 1, NAN, -INF], loose)
    assert (found.differing, found.outside, found.one_sided_nan, found.first) == (4, 4, 2, 0)
    assert found.max_abs == INF
    assert found.max_rel == INF
    other_nan = np.array([0x7FC0_0001], np.uint32).view(np.float32)
    assert tally(other_nan, [NAN]).outside == 1, "other bits"
    assert tally(other_nan, [NAN], loose).outside == 0, "both are no number"
    assert tally(other_nan, [NAN]).one_sided_nan == 0


@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=20),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.sampled_from([0.0, 1e-3, 10.0]),
)
def test_tolerances_against_plain_python(pairs: list[tuple[float, float]], relative: float, absolute: float) -> None:
    def inside(x: float, y: float) -> bool:
        if relative == absolute == 0:
            return np.float32(x).tobytes() == np.float32(y).tobytes()
        if x == y or (math.isnan(x) and math.isnan(y)):
            return True
        if not (math.isfinite(x) and math.isfinite(y)):
            return False
        return abs(x - y) <= absolute + relative * max(abs(x), abs(y))

    found = tally(*zip(*pairs, strict=True), Tolerance(relative, absolute))
    outside = [i for i, (x, y) in enumerate(pairs) if not inside(x, y)]
    assert found.outside == len(outside)
    assert found.first == (outside[0] if outside else None)
    finite = [abs(x - y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    assert found.max_abs >= max(finite, default=0.0)


def test_units_in_the_last_place_are_a_tolerance() -> None:
    one = np.float32(1)
    next_one = np.nextafter(one, np.float32(2))
    assert tally([one], [next_one], Tolerance(ulp=1)).outside == 0
    assert tally([one], [np.nextafter(next_one, np.float32(2))], Tolerance(ulp=1)).outside == 1


def test_different_dtypes_are_compared_by_value_and_ulps_counted_in_the_coarser() -> None:
    precise = np.array([1.0, 1.001, 1.1], np.float32)
    coarse = cast(precise, FLOAT32, BFLOAT16)
    found = AtomComparison(FLOAT32, BFLOAT16, EXACT)
    found.take(0, [precise, coarse])
    assert (found.differing, found.max_ulp, found.first) == (2, 0, 1)
    assert 0 < found.max_rel < 1 / 256
    masks = AtomComparison(BOOL, FLOAT32, EXACT)
    masks.take(0, [np.array([True, False]), np.array([1.0, 0.0], np.float32)])
    assert (masks.differing, masks.max_ulp) == (0, None)


def test_integers() -> None:
    found = AtomComparison(INT64, INT64, EXACT)
    found.take(0, [np.array([2**62, 5]), np.array([2**62 + 1, 7])])
    assert (found.differing, found.max_abs, found.max_ulp) == (2, 2.0, None)


def test_fp8_codes() -> None:
    dtype = BY_NAME["float8_e4m3fn"]
    found = AtomComparison(dtype, dtype, EXACT)
    found.take(0, [np.array([0x38, 0x7F], np.uint8), np.array([0x39, 0x7F], np.uint8)])
    assert (found.differing, found.max_abs, found.max_ulp) == (1, 0.125, 1)


@pytest.mark.parametrize("cut", [1, 7, 65_536, 100_000])
def test_parts_add_up_to_the_whole(cut: int) -> None:
    noise = np.random.default_rng(0)
    a = noise.normal(size=150_000).astype(np.float32)
    b = a.copy()
    b[noise.integers(0, a.size, 1000)] += np.float32(0.25)
    whole, parts = tally(a, b, norms=True), tally([], [], norms=True)
    cuts = [0, cut, 70_001, a.size] if cut < 70_001 else [0, cut, a.size]
    for start, stop in pairwise(cuts):
        part = AtomComparison(FLOAT32, FLOAT32, EXACT, norms=True)
        part.take(start, [a[start:stop], b[start:stop]])
        parts.merge(part)
    for field in ("differing", "outside", "first", "worst", "max_abs", "max_rel", "max_ulp"):
        assert getattr(parts, field) == getattr(whole, field), field
    assert whole.squares_a == pytest.approx(float(np.sum(a.astype(np.float64) ** 2)))
    assert parts.squares_a == pytest.approx(whole.squares_a)
    assert parts.squares_of_change == pytest.approx(float(np.sum((b.astype(np.float64) - a) ** 2)))


def test_double_precision_is_kept() -> None:
    found = AtomComparison(FLOAT64, FLOAT64, EXACT)
    found.take(0, [np.array([1.0]), np.array([1.0 + 2**-52])])
    assert (found.differing, found.max_abs, found.max_ulp) == (1, 2**-52, 1)
