"""Casts between element types on raw arrays, without torch.

numpy has neither bfloat16 nor fp8, so a *raw* array holds such elements as unsigned integers of the same size. All
functions here take and return raw arrays; rounding is to nearest even, as in torch.

Scratch buffers are page-aligned and reused: on AMD Zen, a copy is several times slower if destination minus source is 1
to 31 bytes modulo 4,096, as it is for a large block of malloc and the pages of a file, and fresh pages cost as much as
the read into them.
"""

from __future__ import annotations

import threading
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucp.core.dtypes import BFLOAT16, FLOAT32, FLOAT64, DType
from ucp.errors import ImpossibleError

RawArray = NDArray[Any]

_NATIVE = {
    name: np.dtype(name)
    for name in (
        *("float64", "float32", "float16", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy type of raw elements: `dtype` itself if numpy has it, otherwise an unsigned integer of that size."""
    return _NATIVE.get(dtype.name) or np.dtype(f"uint{8 * dtype.itemsize}")


def words(raw: RawArray) -> RawArray:
    """Raw elements as unsigned integers, flattened; an element of 16 bytes as two."""
    return raw.reshape(-1).view(np.dtype(f"uint{8 * min(raw.dtype.itemsize, 8)}"))


def can_cast(source: DType, target: DType) -> bool:
    """Whether `cast` supports this pair of types."""
    return source == target or all(dtype.name in _NATIVE or dtype == BFLOAT16 for dtype in (source, target))


def cast(raw: RawArray, source: DType, target: DType) -> RawArray:
    """Raw elements of type `source` as raw elements of type `target`; the same array if the types are equal."""
    if source == target:
        return raw
    if not can_cast(source, target):
        raise ImpossibleError(
            f"cannot cast {source} to {target}", hint="keep the stored dtype; cast with torch afterwards"
        )
    values = widen(raw, source)
    with np.errstate(over="ignore", invalid="ignore"):  # a narrowing cast may overflow to infinity
        result: RawArray = _to_bfloat16(values) if target == BFLOAT16 else values.astype(raw_dtype(target))
    return result


def widen(raw: RawArray, source: DType) -> RawArray:
    """Raw elements as numbers that numpy can compute with: bfloat16 becomes float32, other types are unchanged."""
    if source == BFLOAT16:
        wide: RawArray = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return raw


def _to_bfloat16(values: RawArray) -> RawArray:
    if values.dtype != np.float32:
        # torch casts float64 and integers to bfloat16 through float32.
        values = values.astype(np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding would carry the payload of a NaN into infinity; torch returns the canonical quiet NaN.
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded = np.where(is_nan, np.uint32(0x7FC0), rounded)
    narrow: RawArray = rounded.astype(np.uint16)
    return narrow


def mean(raws: list[RawArray], dtype: DType) -> RawArray:
    """The arithmetic mean of raw arrays of equal shape: summed in order, then divided, in at least float32."""
    wide = _compute_dtype(dtype)
    total = cast(raws[0], dtype, wide)
    for raw in raws[1:]:
        total = total + cast(raw, dtype, wide)
    return cast(total / total.dtype.type(len(raws)), wide, dtype)


def unscale(raw: RawArray, dtype: DType, scale: float) -> RawArray:
    """Raw elements divided by `scale`, computed in at least float32."""
    wide = _compute_dtype(dtype)
    values = cast(raw, dtype, wide)
    return cast(values / values.dtype.type(scale), wide, dtype)


def _compute_dtype(dtype: DType) -> DType:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


_BUFFERS = threading.local()


def scratch_buffer(use: str, nbytes: int) -> RawArray:
    """An uninitialized buffer of `nbytes` bytes, valid until this thread requests one for the same use again."""
    buffers: dict[str, RawArray] = vars(_BUFFERS)  # of this thread
    buffer = buffers.get(use)
    if buffer is None or buffer.size < nbytes:
        buffer = buffers[use] = page_aligned(nbytes)
    return buffer[:nbytes]


def page_aligned(nbytes: int) -> RawArray:
    """At least `nbytes` zero bytes that start at a page boundary; private to each process after a fork."""
    size = -(-max(1, nbytes) // PAGESIZE) * PAGESIZE
    return np.frombuffer(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS), np.uint8)
