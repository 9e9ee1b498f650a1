"""Raw elements as numbers, and the distance between two of them in units in the last place.

What is counted while two atoms pass by: how many elements differ, by how much, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ucp.core.dtypes import DType
from ucp.read.casting import RawArray, can_cast, cast, widen

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


_BLOCK: Final = 65_536  # elements that are computed with at a time: their doubles should stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two numbers a and b may be apart and count as equal.

    They do when |a - b| ≤ `absolute` + `relative` · max(|a|, |b|), or when at most `ulp` steps of their dtype lie
    between them, or when both are NaN. Without any tolerance only the same bits are equal.
    """

    relative: float = 0.0
    absolute: float = 0.0
    ulp: int = 0

    @property
    def exact(self) -> bool:
        return not (self.relative or self.absolute or self.ulp)


EXACT: Final = Tolerance()


class AtomComparison:
    """Takes in slabs of two atoms of dtypes `a` and `b`. Positions are row-major, in elements."""

    def __init__(self, a: DType, b: DType, tolerance: Tolerance, *, norms: bool = False) -> None:
        self.dtypes = (a, b)
        self.tolerance = tolerance
        self.differing = 0  # elements that are not the same, bit for bit (with other dtypes: in value)
        self.outside = 0  # of these, the ones that the tolerance does not allow
        self.one_sided_nan = 0  # of these, the ones that are NaN in one only
        self.first: int | None = None  # position of the first element outside the tolerance
        self.max_abs = 0.0
        self.max_rel = 0.0
        self.max_ulp: int | None = 0 if self._common is not None else None
        self.worst: int | None = None  # position of the largest absolute difference
        self.norms = norms
        self.squares_a = 0.0  # sums over all elements, where norms are wanted
        self.squares_of_change = 0.0

    @property
    def _common(self) -> DType | None:
        """The dtype whose steps are counted: the coarser of the two; None where there is none."""
        a, b = self.dtypes
        if a == b:
            return a if has_ulps(a) else None
        if has_ulps(a) and has_ulps(b) and can_cast(a, b):
            # float16 is finer than bfloat16, and both are 2 bytes: whichever is counted in, both must round to it.
            return min(a, b, key=lambda dtype: (dtype.itemsize, dtype.name))
        return None

    def take(self, at: int, raws: Sequence[RawArray]) -> None:
        """The elements from position `at` on, of both atoms."""
        a, b = (raw.reshape(-1) for raw in raws)
        for start in range(0, a.size, _BLOCK):
            self._take(at + start, a[start : start + _BLOCK], b[start : start + _BLOCK])

    def _take(self, at: int, a: RawArray, b: RawArray) -> None:
        if self.norms:
            self._add_norms(a, b)
        if self.dtypes[0] == self.dtypes[1]:
            where = np.flatnonzero(unequal_bits(a, b))
        else:
            x, y = self._values(a, b)
            where = np.flatnonzero((x != y) & ~((x != x) & (y != y)))
        if where.size:
            self._differ(at, where, a[where], b[where])

    def _values(self, a: RawArray, b: RawArray) -> tuple[RawArray, RawArray]:
        """Both as numbers wide enough to subtract."""
        x, y = (numbers(raw, dtype) for raw, dtype in zip((a, b), self.dtypes, strict=True))
        wide = np.result_type(np.float64, x, y)
        return x.astype(wide), y.astype(wide)

    def _add_norms(self, a: RawArray, b: RawArray) -> None:
        with np.errstate(all="ignore"):
            x, y = self._values(a, b)
            self.squares_a += sum_of_squares(x)
            self.squares_of_change += sum_of_squares(y - x)

    def _differ(self, at: int, where: RawArray, a: RawArray, b: RawArray) -> None:
        """`a` and `b` are the elements that are not the same, and `where` they are from position `at` on."""
        with np.errstate(all="ignore"):
            x, y = self._values(a, b)
            nan_x, nan_y = np.isnan(x), np.isnan(y)
            comparable = ~(nan_x | nan_y)
            apart = np.abs(x - y)
            largest = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(largest > 0, apart / largest, 0.0)
        steps = self._steps(a, b)
        self.differing += where.size
        self.one_sided_nan += int(np.count_nonzero(nan_x != nan_y))
        outside = self._outside(apart, largest, steps, comparable, nan_x & nan_y)
        self.outside += int(np.count_nonzero(outside))
        if self.first is None and outside.any():
            self.first = at + int(where[np.argmax(outside)])
        if not comparable.any():
            return
        apart[~comparable] = -1.0
        peak = int(np.argmax(apart))
        if self.worst is None or apart[peak] > self.max_abs:
            self.max_abs, self.worst = float(apart[peak]), at + int(where[peak])
        # Infinity less a number is infinitely far; relative to infinity that is no number.
        known = relative[comparable]
        known[np.isnan(known)] = np.inf
        self.max_rel = max(self.max_rel, float(known.max()))
        if steps is not None and self.max_ulp is not None:
            self.max_ulp = max(self.max_ulp, int(steps[comparable].max()))

    def _steps(self, a: RawArray, b: RawArray) -> RawArray | None:
        common = self._common
        if common is None:
            return None
        a, b = (cast(raw, dtype, common) for raw, dtype in zip((a, b), self.dtypes, strict=True))
        return ulps(bits(a), bits(b))

    def _outside(
        self, apart: RawArray, largest: RawArray, steps: RawArray | None, comparable: RawArray, both_nan: RawArray
    ) -> RawArray:
        allowed = self.tolerance
        if allowed.exact:
            return np.ones(apart.size, np.bool_)
        with np.errstate(invalid="ignore"):
            inside = apart <= allowed.absolute + allowed.relative * largest
        if steps is not None:
            inside |= steps <= allowed.ulp
        # Infinity is within a relative tolerance of everything, and one step from the largest number.
        inside &= np.isfinite(largest) & comparable
        outside: RawArray = ~(inside | both_nan | (apart == 0))
        return outside

    def merge(self, later: AtomComparison) -> None:
        """Take in the tally of elements that come after all that this one has seen."""
        self.differing += later.differing
        self.outside += later.outside
        self.one_sided_nan += later.one_sided_nan
        self.first = later.first if self.first is None else self.first
        if later.worst is not None and (self.worst is None or later.max_abs > self.max_abs):
            self.max_abs, self.worst = later.max_abs, later.worst
        self.max_rel = max(self.max_rel, later.max_rel)
        if self.max_ulp is not None and later.max_ulp is not None:
            self.max_ulp = max(self.max_ulp, later.max_ulp)
        self.squares_a += later.squares_a
        self.squares_of_change += later.squares_of_change
