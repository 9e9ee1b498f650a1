"""Casts without torch return the same bits as torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import UsageError
from ucp.read.casting import can_cast, cast, mean, raw_dtype, unscale

NAMES = ["float64", "float32", "float16", "bfloat16"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def interesting(dtype: DType) -> torch.Tensor:
    """Every 16-bit pattern, or as many random patterns plus the edges of the wider types."""
    kind = getattr(torch, dtype.name)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind)
    raw = np.random.default_rng(1).integers(0, 256, 200_000 * dtype.itemsize, dtype=np.uint8)
    noise = torch.from_numpy(raw).view(kind)
    edges = [0.0, -0.0, 1.0, 65504.0, 65520.0, 3.3895e38, 3.4e38, 1e-45, 6e-8, 1.00390625, 1.01171875]
    return torch.cat([noise, torch.tensor([*edges, float("inf"), float("-inf"), float("nan")], dtype=kind)])


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_cast_equals_torch(source: str, target: str) -> None:
    a, b = BY_NAME[source], BY_NAME[target]
    tensor = interesting(a)
    raw = np.frombuffer(bits(tensor), raw_dtype(a))
    ours = torch.from_numpy(cast(raw, a, b).copy().view(np.uint8)).view(getattr(torch, target))
    theirs = tensor.to(getattr(torch, target))
    same = ours.view(torch.uint8).reshape(-1, b.itemsize).eq(theirs.view(torch.uint8).reshape(-1, b.itemsize)).all(1)
    # The payload of a NaN is not specified; that it is a NaN is.
    assert torch.all(same | (ours.isnan() & theirs.isnan()))
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_cast_to_the_same_dtype_returns_the_same_array() -> None:
    raw = np.arange(4, dtype=np.uint16)
    assert cast(raw, BY_NAME["bfloat16"], BY_NAME["bfloat16"]) is raw


def test_fp8_is_refused_with_its_name() -> None:
    assert not can_cast(BY_NAME["float8_e4m3fn"], BY_NAME["float32"])
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        cast(np.zeros(1, np.uint8), BY_NAME["float8_e4m3fn"], BY_NAME["float32"])


def test_mean_sums_in_order_then_divides() -> None:
    slices = [np.random.default_rng(i).standard_normal(1000).astype(np.float32) for i in range(3)]
    expected = (slices[0] + slices[1] + slices[2]) / np.float32(3)
    assert np.array_equal(mean(slices, BY_NAME["float32"]), expected)


def test_unscale_divides() -> None:
    values = np.arange(10, dtype=np.float32)
    assert np.array_equal(unscale(values, BY_NAME["float32"], 0.5), values * 2)
