"""One file of a stream, open for reading: whether a frame at some place is provably whole."""

from __future__ import annotations

from typing import Final

from ucp.files.opened import OpenedFile
from ucp.log.codecs import DTYPES
from ucp.log.frames import (
    FRAME_BYTES,
    FRAME_MAGIC,
    TABLE_TYPES,
    BadBytesError,
    FrameHeader,
    SegmentHeader,
    checksum,
    padded,
)
from ucp.log.payloads import TABLE_HEAD, Table, table_bytes, unpack_table

CHUNK: Final = 1 << 20


class SegmentFile(OpenedFile):
    """A segment open for positional reads."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes, or fewer where the file ends."""
        data = self.read_at_most(offset, size)
        if len(data) < size and offset + size <= self.size:
            raise BadBytesError(f"the file ends at byte {offset + len(data)}")
        return data

    def is_zero(self, offset: int) -> bool:
        """Are all bytes from `offset` on zero (or are there none)?"""
        while data := self.read(offset, min(CHUNK, max(self.size - offset, 0))):
            if data.count(0) != len(data):
                return False
            offset += len(data)
        return True

    def frame_after(self, offset: int) -> int:
        """Offset of the next place that looks like the beginning of a frame, or -1."""
        at = -(-offset // FRAME_BYTES) * FRAME_BYTES
        while data := self.read(at, min(CHUNK, max(self.size - at, 0))):
            found = data.find(FRAME_MAGIC)
            while found >= 0 and found % FRAME_BYTES:
                found = data.find(FRAME_MAGIC, found + 1)
            if found >= 0:
                return at + found
            at += len(data)
        return -1


def frame_at(file: SegmentFile, segment: SegmentHeader, offset: int, lsn: int) -> FrameHeader:
    """The frame at `offset`, which must be the stream's frame `lsn`. Blocks are not read."""
    header = FrameHeader.unpack(file.read(offset, FRAME_BYTES), segment.salt)
    if (header.epoch, header.stream) != (segment.epoch, segment.stream):
        raise BadBytesError(f"a frame of epoch {header.epoch}, stream {header.stream}")
    if header.offset != offset:
        raise BadBytesError(f"a frame that was written for byte {header.offset}")
    if header.lsn != lsn:
        raise BadBytesError(f"frame {header.lsn} where frame {lsn} should be")
    if header.end > file.size:
        raise BadBytesError(f"the file ends at byte {file.size}, inside a frame that ends at {header.end}")
    if header.type in TABLE_TYPES:
        read_table(file, header)
    else:
        payload = file.read(offset + FRAME_BYTES, padded(header.length))
        if checksum(payload[: header.length]) != header.checksum:
            raise BadBytesError("the checksum of a payload is wrong")
        if any(payload[header.length :]):
            raise BadBytesError("the bytes after a payload are not zero")
    return header


def read_table(file: SegmentFile, header: FrameHeader) -> tuple[Table, int]:
    """(entries, base step) of a table frame, checked."""
    start = header.offset + FRAME_BYTES
    if header.length < TABLE_HEAD.size:
        raise BadBytesError("a table of blocks ends early")
    count = TABLE_HEAD.unpack(file.read(start, TABLE_HEAD.size))[0]
    size = table_bytes(count)
    if size > header.length:
        raise BadBytesError("a table of blocks is longer than its frame")
    data = file.read(start, size)
    if checksum(data) != header.checksum:
        raise BadBytesError("the checksum of a table of blocks is wrong")
    return unpack_table(data, header.length)


def check_blocks(file: SegmentFile, header: FrameHeader) -> None:
    """Read every block of a table frame and compare checksums; what lies between blocks must be zero."""
    table, _ = read_table(file, header)
    start = header.offset + FRAME_BYTES
    gap = table_bytes(len(table))
    if any(file.read(start + gap, padded(gap) - gap)):
        raise BadBytesError("the bytes after a table of blocks are not zero")
    for entry in table:
        length = int(entry["length"])
        data = file.read(start + int(entry["offset"]), padded(length))
        if checksum(memoryview(data)[:length]) != int(entry["checksum"]):
            kind = DTYPES[int(entry["dtype"])]
            raise BadBytesError(f"the checksum of block {entry['block']} ({entry['count']} × {kind}) is wrong")
        if any(data[length:]):
            raise BadBytesError(f"the bytes after block {entry['block']} are not zero")
