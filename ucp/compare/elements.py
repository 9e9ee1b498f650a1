"""Elements of two atoms: as numbers, their distance in units in the last place, and statistics of how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ucp.core.dtypes import DType
from ucp.read.casting import RawArray, can_cast, cast, widen, words

_BLOCK: Final = 65_536  # elements to compute with at a time: as doubles they fit into the CPU cache

# name → (bits of the exponent, its bias, largest code without sign that is a number, has a sign bit)
_FLOAT8: Final = {
    "float8_e4m3fn": (4, 7, 0x7E, True),
    "float8_e5m2": (5, 15, 0x7B, True),
    "float8_e4m3fnuz": (4, 8, 0x7F, True),
    "float8_e5m2fnuz": (5, 16, 0x7F, True),
    "float8_e8m0fnu": (8, 127, 0xFE, False),
}


def numbers(raw: RawArray, dtype: DType) -> RawArray:
    """Raw elements, flattened, as numpy numbers of exactly the same value: bfloat16 and float8 become float32."""
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
        table[0x80] = np.nan  # the code of negative zero in other dtypes
    return table


def unequal_bits(a: RawArray, b: RawArray) -> NDArray[np.bool_]:
    """Mask of the elements that differ in any bit."""
    differ: NDArray[np.bool_] = words(a) != words(b)
    return differ if differ.size == a.size else np.logical_or.reduce(differ.reshape(a.size, -1), axis=1)


def sum_of_squares(values: RawArray) -> float:
    """Sum of squared magnitudes in double precision. Not by `dot`, whose threads would compete with ours."""
    wide = np.abs(values) if values.dtype.kind == "c" else values.astype(np.float64)
    return float(np.multiply(wide, wide, out=wide).sum())


def has_ulps(dtype: DType) -> bool:
    """Whether the bits of this dtype are sign and magnitude, so that units in the last place can be counted."""
    return dtype.family == "float" and dtype.name != "float8_e8m0fnu"


def ulps(a: RawArray, b: RawArray) -> NDArray[Any]:
    """Number of representable steps from each element to its partner; both zeros are the same.

    Takes bits of the same size, of numbers that are not NaN.
    """
    sign = a.dtype.type(1 << (8 * a.dtype.itemsize - 1))
    magnitude_a, magnitude_b = a & (sign - a.dtype.type(1)), b & (sign - a.dtype.type(1))
    same_sign = (a ^ b) < sign
    apart = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    # The sum of two magnitudes cannot overflow: neither has the sign bit.
    distance: NDArray[Any] = np.where(same_sign, apart, magnitude_a + magnitude_b)
    return distance


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two numbers a and b may be apart and count as equal.

    They do if |a - b| ≤ `absolute` + `relative` · max(|a|, |b|), or if they are at most `ulp` steps of their dtype
    apart, or if both are NaN. Without any tolerance only identical bits are equal.
    """

    relative: float = 0.0
    absolute: float = 0.0
    ulp: int = 0

    @property
    def exact(self) -> bool:
        return not (self.relative or self.absolute or self.ulp)


EXACT: Final = Tolerance()


class AtomComparison:
    """Compares two atoms of dtypes `a` and `b`, slab by slab. Positions are row-major, in elements."""

    def __init__(self, a: DType, b: DType, tolerance: Tolerance, *, norms: bool = False) -> None:
        """With `norms`, also sum up the squares of `a` and of the change."""
        self.dtypes = (a, b)
        self.tolerance = tolerance
        self.differing = 0  # elements that differ in any bit (with different dtypes: in value)
        self.outside = 0  # of these, the ones outside the tolerance
        self.one_sided_nan = 0  # of these, the ones that are NaN in one atom only
        self.first: int | None = None  # position of the first element outside the tolerance
        self.max_abs = 0.0
        self.max_rel = 0.0
        self.max_ulp: int | None = 0 if self._ulp_dtype is not None else None
        self.worst: int | None = None  # position of the largest absolute difference
        self.norms = norms
        self.squares_a = 0.0
        self.squares_of_change = 0.0

    @property
    def _ulp_dtype(self) -> DType | None:
        """The dtype whose units are counted: the coarser of the two; None if they have no common one."""
        a, b = self.dtypes
        if a == b:
            return a if has_ulps(a) else None
        if has_ulps(a) and has_ulps(b) and can_cast(a, b):
            # float16 and bfloat16 have the same size, and neither is coarser everywhere: take one of them for both.
            return min(a, b, key=lambda dtype: (dtype.itemsize, dtype.name))
        return None

    def take(self, at: int, raws: Sequence[RawArray]) -> None:
        """Compare the elements of both atoms from position `at` on."""
        a, b = (raw.reshape(-1) for raw in raws)
        for start in range(0, a.size, _BLOCK):
            self._compare_block(at + start, a[start : start + _BLOCK], b[start : start + _BLOCK])

    def _compare_block(self, at: int, a: RawArray, b: RawArray) -> None:
        if self.norms:
            with np.errstate(all="ignore"):
                x, y = self._values(a, b)
                self.squares_a += sum_of_squares(x)
                self.squares_of_change += sum_of_squares(y - x)
        if self.dtypes[0] == self.dtypes[1]:
            positions = np.flatnonzero(unequal_bits(a, b))
        else:
            x, y = self._values(a, b)
            positions = np.flatnonzero((x != y) & ~((x != x) & (y != y)))
        if positions.size:
            self._measure(at, positions, a[positions], b[positions])

    def _values(self, a: RawArray, b: RawArray) -> tuple[RawArray, RawArray]:
        """Both as numbers wide enough to subtract."""
        x, y = (numbers(raw, dtype) for raw, dtype in zip((a, b), self.dtypes, strict=True))
        wide = np.result_type(np.float64, x, y)
        return x.astype(wide), y.astype(wide)

    def _measure(self, at: int, positions: RawArray, a: RawArray, b: RawArray) -> None:
        """Take in the elements that differ; `positions` are relative to `at`."""
        with np.errstate(all="ignore"):
            x, y = self._values(a, b)
            nan_x, nan_y = np.isnan(x), np.isnan(y)
            comparable = ~(nan_x | nan_y)
            apart = np.abs(x - y)
            largest = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(largest > 0, apart / largest, 0.0)
        steps = self._ulps(a, b)
        self.differing += positions.size
        self.one_sided_nan += int(np.count_nonzero(nan_x != nan_y))
        outside = self._outside_tolerance(apart, largest, steps, comparable, nan_x & nan_y)
        self.outside += int(np.count_nonzero(outside))
        if self.first is None and outside.any():
            self.first = at + int(positions[np.argmax(outside)])
        if not comparable.any():
            return
        apart[~comparable] = -1.0
        peak = int(np.argmax(apart))
        if self.worst is None or apart[peak] > self.max_abs:
            self.max_abs, self.worst = float(apart[peak]), at + int(positions[peak])
        # Infinity minus a number is infinite; divided by infinity it is NaN, which counts as infinite.
        known = relative[comparable]
        known[np.isnan(known)] = np.inf
        self.max_rel = max(self.max_rel, float(known.max()))
        if steps is not None and self.max_ulp is not None:
            self.max_ulp = max(self.max_ulp, int(steps[comparable].max()))

    def _ulps(self, a: RawArray, b: RawArray) -> RawArray | None:
        common = self._ulp_dtype
        if common is None:
            return None
        a, b = (cast(raw, dtype, common) for raw, dtype in zip((a, b), self.dtypes, strict=True))
        return ulps(words(a), words(b))

    def _outside_tolerance(
        self, apart: RawArray, largest: RawArray, steps: RawArray | None, comparable: RawArray, both_nan: RawArray
    ) -> RawArray:
        allowed = self.tolerance
        if allowed.exact:
            return np.ones(apart.size, np.bool_)
        with np.errstate(invalid="ignore"):
            inside = apart <= allowed.absolute + allowed.relative * largest
        if steps is not None:
            inside |= steps <= allowed.ulp
        # Infinity is within a relative tolerance of everything, and one step from the largest finite number.
        inside &= np.isfinite(largest) & comparable
        outside: RawArray = ~(inside | both_nan | (apart == 0))
        return outside

    def merge(self, later: AtomComparison) -> None:
        """Add the comparison of elements that come after all elements compared so far."""
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
