"""The bytes of a log file: the segment header, and the header of a frame. All numbers are little endian.

A segment is 4,096 bytes of header, then frames, each at a multiple of 64: a header of 64 bytes, a payload, zeros up to
the next multiple of 64. Every frame's checksum includes the segment's salt, and every frame contains its own offset and
number, so that old bytes of a recycled file and misdirected writes are not taken for frames.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

SEGMENT_MAGIC: Final = b"UGLSEG1\0"
SEGMENT_BYTES: Final = 4096  # of the segment header
FRAME_MAGIC: Final = b"UGL1"
FRAME_BYTES: Final = 64  # of a frame header, and the alignment of everything
VERSION: Final = 1
XXH3_64: Final = 3  # the only kind of checksum that is written

COMPRESSED: Final = 1  # frame flag: some block is not stored raw
BATCH_END: Final = 2  # frame flag: the writer syncs after this frame, before it writes the next

_SEGMENT: Final = struct.Struct("<8sIIIQQB16sQ")
_FRAME: Final = struct.Struct("<4sBBHIIQQQQQI")
_CRC: Final = struct.Struct("<I")
_SUM: Final = struct.Struct("<Q")


class FrameType(IntEnum):
    """What a frame contains."""

    STEP = 1  # the scalars of one optimizer step; opens the step
    GRAD = 2  # gradient blocks
    COMMIT = 3  # closes the step: which frames it consists of
    AUX = 4  # JSON that replay does not need
    DIFF = 5  # differences of states between two steps
    FULL = 6  # states after a step
    DIGEST = 7  # digests of states after a step
    EPOCH_END = 8  # the writer closed the stream on purpose


TABLE_TYPES: Final = frozenset({FrameType.GRAD, FrameType.DIFF, FrameType.FULL})


class BadBytesError(Exception):
    """Bytes of a log are wrong; the message is the reason, without file and offset."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 4,096 bytes of a segment."""

    epoch: int
    stream: int
    first_lsn: int
    salt: int  # random, 64 bits
    schema_hash: bytes  # 16 bytes: of the stream's block schema
    created_ns: int
    checksum: int = XXH3_64

    def pack(self) -> bytes:
        numbers = self.epoch, self.stream, self.first_lsn, self.salt, self.checksum
        head = _SEGMENT.pack(SEGMENT_MAGIC, VERSION, *numbers, self.schema_hash, self.created_ns)
        body = head.ljust(SEGMENT_BYTES - _SUM.size, b"\0")
        return body + _SUM.pack(checksum(body))

    @staticmethod
    def unpack(data: bytes) -> SegmentHeader:
        """Parse the first bytes of a file; `BadBytesError` if they are not a valid segment header."""
        if len(data) < SEGMENT_BYTES:
            raise BadBytesError(f"the segment header ends after {len(data)} of {SEGMENT_BYTES} bytes")
        body = data[: SEGMENT_BYTES - _SUM.size]
        if data[: len(SEGMENT_MAGIC)] != SEGMENT_MAGIC:
            raise BadBytesError("not a segment header (wrong magic)")
        if checksum(body) != _SUM.unpack(data[len(body) : SEGMENT_BYTES])[0]:
            raise BadBytesError("the checksum of the segment header is wrong")
        _, version, epoch, stream, first_lsn, salt, kind, schema_hash, created = _SEGMENT.unpack_from(body)
        if version != VERSION:
            raise BadBytesError(f"segment version {version} (this version of ucp reads {VERSION})")
        if kind != XXH3_64:
            raise BadBytesError(f"unknown kind of checksum {kind}")
        return SegmentHeader(epoch, stream, first_lsn, salt, schema_hash, created, kind)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The 64 bytes before a payload. `offset` is where the frame starts in its file, in bytes."""

    type: FrameType
    flags: int
    stream: int
    epoch: int
    lsn: int  # number of the frame: one more than that of the previous frame, over all segments of a stream
    step: int
    length: int  # of the payload, in bytes, without the zeros after it
    checksum: int  # of the payload; of a table frame: of the table, whose entries have checksums of their own
    offset: int

    def pack(self, salt: int) -> bytes:
        numbers = self.stream, self.epoch, self.lsn, self.step, self.length, self.checksum, self.offset
        head = _FRAME.pack(FRAME_MAGIC, self.type, self.flags, FRAME_BYTES, *numbers, 0)
        return head + _CRC.pack(zlib.crc32(head, salt & 0xFFFFFFFF))

    @staticmethod
    def unpack(data: bytes, salt: int) -> FrameHeader:
        """Parse 64 bytes; `BadBytesError` if they are not a frame header of the segment with this salt."""
        if len(data) < FRAME_BYTES:
            raise BadBytesError(f"the frame header ends after {len(data)} of {FRAME_BYTES} bytes")
        if data[:4] != FRAME_MAGIC:
            raise BadBytesError("not a frame (wrong magic)")
        if zlib.crc32(data[:60], salt & 0xFFFFFFFF) != _CRC.unpack_from(data, 60)[0]:
            raise BadBytesError("the checksum of the frame header is wrong")
        _, kind, flags, size, stream, epoch, lsn, step, length, total, offset, zero = _FRAME.unpack_from(data)
        if size != FRAME_BYTES or zero != 0 or kind not in FrameType._value2member_map_:
            raise BadBytesError(f"unknown frame (type {kind}, header of {size} bytes)")
        return FrameHeader(FrameType(kind), flags, stream, epoch, lsn, step, length, total, offset)

    @staticmethod
    def unpack_at(data: bytes, segment: SegmentHeader, offset: int, lsn: int) -> FrameHeader:
        """Parse the header at `offset` of a segment, which must be the one of the stream's frame `lsn`."""
        header = FrameHeader.unpack(data, segment.salt)
        if (header.epoch, header.stream) != (segment.epoch, segment.stream):
            raise BadBytesError(f"a frame of epoch {header.epoch}, stream {header.stream}")
        if header.offset != offset:
            raise BadBytesError(f"a frame that was written for byte {header.offset}")
        if header.lsn != lsn:
            raise BadBytesError(f"frame {header.lsn} where frame {lsn} should be")
        return header

    @property
    def end(self) -> int:
        """Offset of the first byte after the frame and its padding."""
        return self.offset + FRAME_BYTES + padded(self.length)


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 64."""
    return -(-length // FRAME_BYTES) * FRAME_BYTES


def check_padding(payload: bytes | memoryview, length: int) -> None:
    """Check that a payload of `length` bytes is followed by zeros only."""
    if any(payload[length:]):
        raise BadBytesError("the bytes after a payload are not zero")


def checksum(data: bytes | memoryview) -> int:
    """XXH3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)
