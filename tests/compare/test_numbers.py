"""Raw elements as numbers, and how many representable numbers are between two of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucp.compare.elements import has_ulps, numbers, ulps, unequal_bits
from ucp.core.dtypes import BY_NAME
from ucp.read.casting import words


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("float8")])
def test_every_code_of_fp8_has_its_value_in_torch(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float32).numpy()
    found = numbers(codes, BY_NAME[name])
    np.testing.assert_array_equal(found, expected)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(found[zeros]), np.signbit(expected[zeros]))


def test_bfloat16_and_complex32() -> None:
    values = torch.tensor([1.5, -0.001, 3e38, float("inf")], dtype=torch.bfloat16)
    raw = values.view(torch.uint16).numpy()
    np.testing.assert_array_equal(numbers(raw, BY_NAME["bfloat16"]), values.to(torch.float32).numpy())
    pairs = np.array([1.5, -2.0, 0.25, 8.0], np.float16).view(np.uint32)
    np.testing.assert_array_equal(numbers(pairs, BY_NAME["complex32"]), [1.5 - 2j, 0.25 + 8j])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@given(st.integers(0, 300), st.integers(0, 40))
def test_ulps_are_steps_of_nextafter(kind: type[np.floating], start: int, steps: int) -> None:
    with np.errstate(over="ignore"):
        low = kind(start - 150) * kind(1e-7 if kind is np.float16 else 1e-40 if kind is np.float32 else 1e-310)
    high = low
    for _ in range(steps):
        if high == 0:
            high = kind(0.0)  # both zeros are one number
        high = np.nextafter(high, kind(np.inf))
    a, b = np.array([low, high]), np.array([high, low])
    assert ulps(words(a), words(b)).tolist() == [steps, steps]


def test_the_widest_distance_does_not_overflow() -> None:
    a, b = np.array([-np.inf]), np.array([np.inf])
    assert ulps(words(a), words(b)).tolist() == [2 * 0x7FF0_0000_0000_0000]


def test_elements_of_16_bytes_differ_as_one() -> None:
    a = np.array([1 + 2j, 3 + 4j, 5 + 6j])
    b = np.array([1 + 2j, 3 + 5j, 6 + 7j])
    assert unequal_bits(a, b).tolist() == [False, True, True]
    assert not has_ulps(BY_NAME["complex128"])
    assert not has_ulps(BY_NAME["int64"])
