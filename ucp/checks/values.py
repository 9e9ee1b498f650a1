"""Numbers that should not be there: NaN, infinities, negative second moments. Found on raw elements, by their bits."""

from __future__ import annotations

from typing import Final

import numpy as np

from ucp.engine.casting import RawArray
from ucp.model.dtypes import DType

# name → bits of infinity (the largest finite magnitude is below it) in the unsigned integer of the element's size.
_INFINITY: Final = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,  # has no infinity; this is its only NaN
}

# States that are sums of squares, or maxima of such or of magnitudes, under the names that optimizers give them.
SECOND_MOMENTS: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "v"})

# States that do not start at zero, or leave it without a gradient: Adamax adds eps, Rprop starts at its learning rate,
# Adagrad at `initial_accumulator_value`.
NEVER_ZERO: Final = frozenset({"exp_inf", "step_size", "sum"})


def scannable(dtype: DType) -> bool:
    """Is it known how NaN and infinity look in this dtype?"""
    return dtype.name in _INFINITY


def bits_of(data: RawArray, dtype: DType) -> RawArray:
    """Bytes or raw elements as unsigned integers of the element's size."""
    return data.reshape(-1).view(np.dtype(f"uint{8 * dtype.itemsize}"))


def quite_right(bits: RawArray, dtype: DType, squares: bool) -> bool:
    """Is every element finite and, with `squares`, none below zero? At least one element.

    As integers, what is wrong is larger than what is right, so the largest one tells: one or two passes in the cache.
    """
    infinity, sign = _INFINITY[dtype.name], 1 << (8 * dtype.itemsize - 1)
    top = int(bits.max())
    if top < infinity:
        return True
    if top >= sign | infinity or (squares and top > sign):
        return False
    return int(bits.view(f"int{8 * dtype.itemsize}").max()) < infinity


def not_finite(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """How many elements are NaN or infinite, and the position of the first."""
    bad = _magnitude(bits, dtype) >= _INFINITY[dtype.name]
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def negative(bits: RawArray, dtype: DType) -> tuple[int, int]:
    """How many elements are below zero (NaN and -0 are not), and the position of the first."""
    sign = 1 << (8 * dtype.itemsize - 1)
    if int(bits.max()) <= sign:
        return 0, 0
    bad = (bits > sign) & (bits <= sign | _INFINITY[dtype.name])
    return int(np.count_nonzero(bad)), int(np.argmax(bad))


def is_mask(bits: RawArray, dtype: DType) -> bool:
    """Are there several elements, all of them zero or negative infinity? So are masks of attention, and no weights."""
    hidden = bits == (1 << (8 * dtype.itemsize - 1) | _INFINITY[dtype.name])
    return bits.size > 1 and bool((hidden | (bits == 0)).all()) and dtype.name != "float8_e4m3fn"


def is_nan(bits: RawArray, dtype: DType) -> RawArray:
    """Which elements are NaN."""
    magnitude = _magnitude(bits, dtype)
    infinity = _INFINITY[dtype.name]
    return magnitude >= infinity if dtype.name == "float8_e4m3fn" else magnitude > infinity


def _magnitude(bits: RawArray, dtype: DType) -> RawArray:
    magnitude: RawArray = bits & bits.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)
    return magnitude
