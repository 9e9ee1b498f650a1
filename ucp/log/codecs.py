"""Lossless encodings of blocks of numbers: raw, narrowed, compressed, sparse, all zero, or as a difference.

A block is a flat array of unsigned integers: the bit patterns of its elements (`uint16` for bfloat16, `uint32` for
float32, …). So nothing is rounded, and -0.0 and every NaN are restored bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from ucp.core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType
from ucp.errors import IntegrityError, NotUnderstoodError, missing_package
from ucp.log.frames import BadBytesError

Bits = npt.NDArray[Any]  # one-dimensional, unsigned integers, one per element
Bytes = npt.NDArray[np.uint8]

# Codes of element types in the log, part of the format.
DTYPE_CODES: Final = {
    name: code
    for code, name in enumerate(
        ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"), start=1
    )
}
DTYPES: Final = {code: BY_NAME[name] for name, code in DTYPE_CODES.items()}

ZSTD_LEVEL: Final = 1


class Encoding(IntEnum):
    """How the bytes of a block represent its elements."""

    RAW = 0
    NARROWED = 1  # float32 whose low 16 bits are all zero, as bfloat16
    PLANES = 2  # first bytes of all elements, then second bytes, …; zstd
    SPARSE = 3  # u32 number of entries; LEB128 distances between them; their values
    ZERO = 4  # no bytes: every bit is zero
    UNCHANGED = 5  # no bytes: a difference of zero
    DELTA = 6  # differences as signed integers, zigzag; planes; zstd


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block as it is stored."""

    block: int  # id in the stream's schema
    encoding: int
    dtype: DType
    count: int  # elements
    data: Bytes
    state: int = 0  # index into the manifest's state kinds; 0 is the gradient

    def bits(self) -> Bits:
        """The bit patterns of the elements as unsigned integers; for a DIFF entry, their differences."""
        try:
            return decode(self.encoding, self.data, self.dtype, self.count)
        except BadBytesError as error:  # although its checksum was right
            raise IntegrityError(
                f"block {self.block} of a log: {error}", hint="`ucp log verify` reads all of it and reports where"
            ) from None

    def float32(self) -> npt.NDArray[np.float32]:
        """The elements as float32: exact, because no gradient type has more than 32 bits."""
        return to_float32(self.bits(), self.dtype)


def bits_type(dtype: DType) -> np.dtype[Any]:
    """The unsigned integer type for this element type's bit patterns."""
    return np.dtype(f"<u{dtype.itemsize}")


def encode(bits: Bits, dtype: DType, *, compress: bool = False, sparse: bool = False) -> tuple[Encoding, Bytes]:
    """Encode a block: as ZERO, NARROWED or RAW; with `compress` also as SPARSE or PLANES if that is smaller.

    With `sparse`, blocks that are mostly zero become SPARSE. The data of a RAW block is not copied.
    """
    if is_zero(bits):
        return Encoding.ZERO, np.empty(0, np.uint8)
    if sparse and int(np.count_nonzero(bits)) * (dtype.itemsize + 2) * 2 < bits.nbytes:
        return Encoding.SPARSE, encode_sparse(bits)
    if compress:
        best = Encoding.PLANES, encode_planes(bits)
        count = int(np.count_nonzero(bits))
        if count * (dtype.itemsize + 1) < best[1].nbytes:
            few = encode_sparse(bits)
            if few.nbytes < best[1].nbytes:
                best = Encoding.SPARSE, few
        if best[1].nbytes < bits.nbytes:
            return best
    if dtype is FLOAT32 and fits_bfloat16(bits):
        return Encoding.NARROWED, narrow(bits).view(np.uint8)
    return Encoding.RAW, np.ascontiguousarray(bits).view(np.uint8)


def encode_difference(old: Bits, new: Bits) -> tuple[Encoding, Bytes]:
    """Encode the difference from the bit patterns `old` to `new`."""
    delta = difference(old, new)
    if is_zero(delta):
        return Encoding.UNCHANGED, np.empty(0, np.uint8)
    return Encoding.DELTA, encode_planes(zigzag(delta))


def decode(encoding: int, data: Bytes, dtype: DType, count: int) -> Bits:
    """Decode a block to its bit patterns, or a difference to the argument of `apply_difference`."""
    kind = bits_type(dtype)
    if encoding == Encoding.RAW:
        return cast(Bits, _sized(data, count * kind.itemsize).view(kind))
    if encoding in (Encoding.ZERO, Encoding.UNCHANGED):
        _sized(data, 0)
        return np.zeros(count, kind)
    if encoding == Encoding.NARROWED and dtype is FLOAT32:
        return widen(_sized(data, count * 2).view(np.dtype("<u2")))
    if encoding == Encoding.PLANES:
        return decode_planes(data, kind, count)
    if encoding == Encoding.SPARSE:
        return decode_sparse(data, kind, count)
    if encoding == Encoding.DELTA:
        return unzigzag(decode_planes(data, kind, count))
    raise BadBytesError(f"unknown encoding {encoding} of {dtype}")


def _bytes_per_element() -> npt.NDArray[np.int64]:
    sizes = np.full((256, 256), UNKNOWN, np.int64)
    for code, dtype in DTYPES.items():
        sizes[: max(Encoding) + 1, code] = VARIES
        sizes[Encoding.RAW, code] = dtype.itemsize
        sizes[Encoding.NARROWED, code] = 2
        sizes[[Encoding.ZERO, Encoding.UNCHANGED], code] = 0
    return sizes


# Indexed by the bytes of encoding and dtype: bytes per element, if that does not depend on the values.
UNKNOWN: Final = -2  # no such encoding or dtype
VARIES: Final = -1
BYTES_PER_ELEMENT: Final = _bytes_per_element()


def to_float32(bits: Bits, dtype: DType) -> npt.NDArray[np.float32]:
    """Elements as float32. May be a view of `bits`."""
    if dtype is FLOAT32:
        return bits.view(np.float32)
    if dtype is BFLOAT16:
        return widen(bits).view(np.float32)
    if dtype is FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    raise NotUnderstoodError(f"a gradient of element type {dtype} cannot be replayed")


def is_zero(bits: Bits) -> bool:
    """Is every bit zero? Fast if not."""
    if len(bits) and bits.item(0):
        return False
    return not bits[:8].any() and not bits.any()


def fits_bfloat16(bits: Bits) -> bool:
    """Are the low 16 bits of every float32 zero? Fast if not."""
    if len(bits) and bits.item(0) & 0xFFFF:
        return False
    low = bits.view(np.dtype("<u2"))[::2]
    return not low[:64].any() and not low.any()


def narrow(bits: Bits) -> Bits:
    """float32 → bfloat16 by dropping the low 16 bits, which must be zero."""
    return np.ascontiguousarray(bits.view(np.dtype("<u2"))[1::2])


def widen(bits: Bits) -> Bits:
    """bfloat16 → float32."""
    wide = bits.astype(np.dtype("<u4"))
    wide <<= np.uint32(16)
    return wide


# Byte planes --------------------------------------------------------------------------------------------------------


def encode_planes(bits: Bits) -> Bytes:
    """All first bytes, then all second bytes, …, compressed: this groups the exponents."""
    size = bits.dtype.itemsize
    planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, size).T)
    return np.frombuffer(_zstd().ZstdCompressor(level=ZSTD_LEVEL).compress(planes.data), np.uint8)


def decode_planes(data: Bytes, kind: np.dtype[Any], count: int) -> Bits:
    zstd = _zstd()
    total = count * kind.itemsize
    try:
        plain = zstd.ZstdDecompressor().decompress(np.ascontiguousarray(data).data, max_output_size=max(total, 1))
    except zstd.ZstdError as error:
        raise BadBytesError(f"a compressed block cannot be unpacked: {error}") from error
    planes = _sized(np.frombuffer(plain, np.uint8), total).reshape(kind.itemsize, count)
    return cast(Bits, np.ascontiguousarray(planes.T).reshape(-1).view(kind))


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise missing_package(error, "a log with compressed blocks") or error from None
    return zstandard


# Sparse blocks ------------------------------------------------------------------------------------------------------


def encode_sparse(bits: Bits) -> Bytes:
    """Only the nonzero elements: their number, the distances between them, their values."""
    where = np.flatnonzero(bits)
    return pack_sparse(where, bits[where])


def pack_sparse(indices: npt.NDArray[Any], values: Bits) -> Bytes:
    """A sparse block from increasing `indices` and the bit patterns there."""
    gaps = np.diff(indices.astype(np.int64), prepend=np.int64(-1)) - 1
    if len(gaps) and int(gaps.min()) < 0:
        raise ValueError("indices of a sparse block must increase")
    head = np.array([len(indices)], np.dtype("<u4")).view(np.uint8)
    return np.concatenate([head, pack_varints(gaps.astype(np.uint64)), np.ascontiguousarray(values).view(np.uint8)])


def decode_sparse(data: Bytes, kind: np.dtype[Any], count: int) -> Bits:
    if len(data) < 4:
        raise BadBytesError("a sparse block ends early")
    entries = int(data[:4].view(np.dtype("<u4"))[0])
    values_bytes = entries * kind.itemsize
    if entries > count or len(data) < 4 + entries + values_bytes:
        raise BadBytesError("a sparse block ends early")
    gaps = unpack_varints(data[4 : len(data) - values_bytes], entries)
    where = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if entries and (int(gaps.max()) >= count or int(where[-1]) >= count):
        raise BadBytesError(f"a sparse block of {count} elements has an entry past its end")
    dense = np.zeros(count, kind)
    dense[where] = np.ascontiguousarray(data[len(data) - values_bytes :]).view(kind)
    return dense


def pack_varints(numbers: npt.NDArray[np.uint64]) -> Bytes:
    """LEB128: seven bits per byte, low ones first; the top bit is set on every byte of a number but its last."""
    if not len(numbers):
        return np.empty(0, np.uint8)
    columns = []
    rest = numbers.copy()
    while True:
        columns.append(rest)
        rest = rest >> np.uint64(7)
        if not rest.any():
            break
    digits = (np.stack(columns, axis=1) & np.uint64(0x7F)).astype(np.uint8)
    lengths = np.ones(len(numbers), np.int64)
    for place in range(1, len(columns)):
        lengths[columns[place] > 0] = place + 1
    places = np.arange(len(columns))
    digits[places[None, :] < lengths[:, None] - 1] |= 0x80
    packed: Bytes = digits[places[None, :] < lengths[:, None]]
    return packed


def unpack_varints(data: Bytes, count: int) -> npt.NDArray[np.uint64]:
    """Exactly `count` numbers, which must use all of `data`."""
    last = np.flatnonzero(data < 0x80)
    if len(last) != count or (len(data) and (not count or last[-1] != len(data) - 1)):
        raise BadBytesError("the distances of a sparse block are damaged")
    starts = np.concatenate([[0], last[:-1] + 1]) if count else last
    lengths = last - starts + 1
    if count and int(lengths.max()) > 9:
        raise BadBytesError("the distances of a sparse block are damaged")
    numbers = np.zeros(count, np.uint64)
    for place in range(int(lengths.max()) if count else 0):
        there = lengths > place
        digit = (data[starts[there] + place] & 0x7F).astype(np.uint64)
        numbers[there] |= digit << np.uint64(7 * place)
    return numbers


# Differences of bit patterns as integers modulo 2ⁿ: they can be added, and applied in both directions ---------------


def difference(old: Bits, new: Bits) -> Bits:
    """new - old, modulo 2ⁿ."""
    return new - old


def apply_difference(old: Bits, delta: Bits) -> Bits:
    """old + delta, modulo 2ⁿ: the new bit patterns. Also adds two differences."""
    return old + delta


def zigzag(delta: Bits) -> Bits:
    """Map small differences of either sign to small numbers."""
    width = delta.dtype.itemsize * 8
    sign = (delta >> delta.dtype.type(width - 1)).astype(delta.dtype)
    return cast(Bits, (delta << delta.dtype.type(1)) ^ (np.zeros_like(delta) - sign))


def unzigzag(coded: Bits) -> Bits:
    flip = np.zeros_like(coded) - (coded & coded.dtype.type(1))
    return cast(Bits, (coded >> coded.dtype.type(1)) ^ flip)


def _sized(data: Bytes, size: int) -> Bytes:
    if data.nbytes != size:
        raise BadBytesError(f"a block has {data.nbytes} bytes (expected {size})")
    return np.ascontiguousarray(data)
