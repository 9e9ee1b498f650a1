"""Raw elements as numbers, and the distance between two of them in units in the last place."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ucp.engine.casting import RawArray, widen
from ucp.model.dtypes import DType

# name → (bits of the exponent, its bias, largest code without sign that is a number, has a sign bit)
_FLOAT8: Final = {
    "float8_e4m3fn": (4, 7, 0x7E, True),
    "float8_e5m2": (5, 15, 0x7B, True),
    "float8_e4m3fnuz": (4, 8, 0x7F, True),
    "float8_e5m2fnuz": (5, 16, 0x7F, True),
    "float8_e8m0fnu": (8, 127, 0xFE, False),
}


def numbers(raw: RawArray, dtype: DType) -> RawArray:
    """Raw elements, flat, as numpy numbers of exactly their value: bfloat16 and fp8 become float32."""
    flat = raw.reshape(-1)
    if dtype.name in _FLOAT8:
        return _float8_table(dtype.name)[flat]
    if dtype.name == "complex32":
        return flat.view(np.float16).astype(np.float32).view(np.complex64)
    return widen(flat, dtype)


@cache
def _float8_table(name: str) -> NDArray[np.float32]:
    """The value of each of the 256 codes."""
    exponent_bits, bias, largest, signed = _FLOAT8[name]
    mantissa_bits = 7 - exponent_bits if signed else 0
    table = np.empty(256, np.float32)
    for code in range(256):
        magnitude = code & 0x7F if signed else code
        exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
        if magnitude > largest:
            value = np.inf if name == "float8_e5m2" and magnitude == 0x7C else np.nan
        elif not signed:
            value = 2.0 ** (exponent - bias)
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        table[code] = -value if signed and code & 0x80 else value
    if name.endswith("fnuz"):
        table[0x80] = np.nan  # where others have their negative zero
    return table


def bits(raw: RawArray) -> RawArray:
    """Raw elements as unsigned integers, flat; an element of 16 bytes as two."""
    return raw.reshape(-1).view(np.dtype(f"uint{8 * min(raw.dtype.itemsize, 8)}"))


def unequal_bits(a: RawArray, b: RawArray) -> NDArray[np.bool_]:
    """Which elements differ in any bit."""
    differ: NDArray[np.bool_] = bits(a) != bits(b)
    return differ if differ.size == a.size else np.logical_or.reduce(differ.reshape(a.size, -1), axis=1)


def sum_of_squares(values: RawArray) -> float:
    """Of magnitudes, in double precision. Not with `dot`, whose own threads and ours would wait for each other."""
    wide = np.abs(values) if values.dtype.kind == "c" else values.astype(np.float64)
    return float(np.multiply(wide, wide, out=wide).sum())


def has_ulps(dtype: DType) -> bool:
    """Are the values of this dtype steps of a ladder, sign and magnitude?"""
    return dtype.family == "float" and dtype.name != "float8_e8m0fnu"


def ulps(a: RawArray, b: RawArray) -> NDArray[Any]:
    """How many representable numbers lie from each element to its partner, both zeros being one.

    Takes bits of the same size, of numbers (not NaN).
    """
    sign = a.dtype.type(1 << (8 * a.dtype.itemsize - 1))
    magnitude_a, magnitude_b = a & (sign - a.dtype.type(1)), b & (sign - a.dtype.type(1))
    same_side = (a ^ b) < sign
    apart = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    # Two magnitudes without their sign bit fit the type when added.
    distance: NDArray[Any] = np.where(same_side, apart, magnitude_a + magnitude_b)
    return distance
