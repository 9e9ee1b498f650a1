"""CRC-32 as used in zip archives: of blocks, of concatenations, and of long runs of zeros.

The `isal` package is three times as fast as zlib. If installed, it is imported for the first large block, so commands
that only read pickles do not pay for the import.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Final

__all__ = ["Crc32", "crc32", "crc32_combine", "crc32_of_zeros", "hex_crc"]

_Crc32 = Callable[[bytes | bytearray | memoryview, int], int]

_POLYNOMIAL: Final = 0xEDB88320
_ONES: Final = 0xFFFFFFFF
_LARGE: Final = 64 * 1024  # bytes


def crc32(data: bytes | bytearray | memoryview, before: int) -> int:
    """The CRC-32 of a stream that ends with `data`; `before` is the CRC-32 of all bytes before it."""
    return zlib.crc32(data, before) if len(data) < _LARGE else _fastest()(data, before)


@cache
def _fastest() -> _Crc32:
    try:
        fast: _Crc32 = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fast


def hex_crc(crc: int) -> str:
    """The CRC as eight hexadecimal digits."""
    return f"{crc:08x}"


class Crc32:
    """The CRC-32 of a stream, with the interface of `hashlib` objects."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._crc = crc32(data, self._crc)

    def hexdigest(self) -> str:
        return hex_crc(self._crc)


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of a concatenation of two byte strings, given the CRC of each and the length of the second."""
    return _after_zeros(first, second_bytes) ^ second


def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of `nbytes` zero bytes, in logarithmic time."""
    return _after_zeros(_ONES, nbytes) ^ _ONES


# Feeding zero bytes into the CRC register is linear over its bits: one lookup table per byte of the register.
_Step = tuple[list[int], list[int], list[int], list[int]]


def _after_zeros(register: int, nbytes: int) -> int:
    """The register after feeding `nbytes` zero bytes into it."""
    k = 0
    while nbytes:
        if nbytes & 1:
            register = _apply(_step(k), register)
        nbytes >>= 1
        k += 1
    return register


def _apply(step: _Step, register: int) -> int:
    a, b, c, d = step
    return a[register & 255] ^ b[register >> 8 & 255] ^ c[register >> 16 & 255] ^ d[register >> 24]


@cache
def _step(k: int) -> _Step:
    """Tables that feed 2**k zero bytes: the tables for k - 1, applied twice."""
    if k == 0:
        images = [_feed_zero_byte(1 << bit) for bit in range(32)]
    else:
        half = _step(k - 1)
        images = [_apply(half, _apply(half, 1 << bit)) for bit in range(32)]
    a, b, c, d = (_tabulate(images[at : at + 8]) for at in (0, 8, 16, 24))
    return a, b, c, d


def _feed_zero_byte(register: int) -> int:
    for _ in range(8):
        register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _tabulate(images: list[int]) -> list[int]:
    """The images of all 256 values of a byte, given the images of its eight bits."""
    table = [0]
    for image in images:
        table += [image ^ known for known in table]
    return table
