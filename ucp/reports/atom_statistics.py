"""Statistics of one atom in one pass: norm, extremes, mean, NaN and infinity, and a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ucp.compare.elements import numbers, sum_of_squares
from ucp.core.dtypes import DType
from ucp.read.casting import RawArray

_BLOCK: Final = 65_536  # elements to compute with at a time
_BINS: Final = 1024  # sign, exponent and first mantissa bit of a float32
_HALF: Final = _BINS // 2
_LEVELS: Final = np.frombuffer(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_", np.uint8)


class AtomStatistics:
    """Statistics of one atom of a real dtype, computed slab by slab.

    The histogram counts magnitudes, on both sides of zero, with two bins per power of two (1 to 1.5, 1.5 to 2, 2 to 3,
    …). Unlike bins between the extremes, these are known before the extremes are, and they show what underflows.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.count = 0  # elements measured
        self.nan = 0
        self.infinite = 0
        self.zeros = 0
        self.low = math.inf  # extremes and sums are of finite elements
        self.high = -math.inf
        self.total = 0.0
        self.squares = 0.0
        self.bins = np.zeros(_BINS, np.int64)

    def take(self, at: int, raws: Sequence[RawArray]) -> None:
        del at
        flat = raws[0].reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            self._take(numbers(flat[start : start + _BLOCK], self.dtype))

    def _take(self, values: RawArray) -> None:
        self.count += values.size
        if values.dtype.kind != "f":
            values = values.astype(np.float64)
        with np.errstate(all="ignore"):
            total = float(values.sum(dtype=np.float64))
            if not math.isfinite(total):  # cheaper than testing each element if all are finite
                nan = int(np.count_nonzero(np.isnan(values)))
                finite = values[np.isfinite(values)]
                self.nan += nan
                self.infinite += values.size - finite.size - nan
                values, total = finite, float(finite.sum(dtype=np.float64))
            if values.size:
                self._take_finite(values, total)

    def _take_finite(self, values: RawArray, total: float) -> None:
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.total += total
        self.squares += sum_of_squares(values)
        filled = int(np.count_nonzero(values))
        if filled < values.size:
            self.zeros += values.size - filled
            values = values[values != 0]
        single = values.astype(np.float32, copy=False)
        self.bins += np.bincount(single.view(np.uint32) >> np.uint32(22), minlength=_BINS)

    def merge(self, later: AtomStatistics) -> None:
        self.count += later.count
        self.nan += later.nan
        self.infinite += later.infinite
        self.zeros += later.zeros
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.squares += later.squares
        self.bins += later.bins

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite

    @property
    def mean(self) -> float:
        return self.total / self.finite if self.finite else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of the finite elements."""
        if not self.finite:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.finite - self.mean * self.mean))

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    def to_json(self) -> list[Any]:
        """For the page: norm, low, high, mean, deviation, NaN, infinite, zeros, then `_histogram`."""
        numbers_ = [self.norm, self.low, self.high, self.mean, self.deviation]
        return [*(_short(n) for n in numbers_), self.nan, self.infinite, self.zeros, *self._histogram()]

    def _histogram(self) -> tuple[int, str, str]:
        """The first used bin, and the heights below and above zero, one character per bin: 64 levels, 0 to _.

        Bin b starts at magnitude 2^(b//2 - 127), 1.5 times that if b is odd. A nonempty bin is at least one level.
        """
        sides = self.bins[_HALF:], self.bins[:_HALF]
        used = np.flatnonzero(sides[0] + sides[1])
        if not used.size:
            return 0, "", ""
        first, last = int(used[0]), int(used[-1])
        peak = max(int(side.max()) for side in sides)
        below, above = (_letters(side[first : last + 1], peak) for side in sides)
        return first, below, above


def _letters(counts: NDArray[np.int64], peak: int) -> str:
    levels = np.rint(counts * ((len(_LEVELS) - 1) / peak)).astype(np.int64)
    letters: bytes = _LEVELS[np.where(counts > 0, np.maximum(levels, 1), 0)].tobytes()
    return letters.decode()


def _short(value: float) -> float | None:
    """Rounded to four digits, which keeps pages small."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def measurable(dtype: DType) -> bool:
    """Whether values of this dtype are ordered, so that they have extremes."""
    return dtype.family != "complex"
