"""Checksums put right after bytes were changed: without that, most changes go no further than the first checksum."""

from __future__ import annotations

import contextlib
import struct
import zlib

import xxhash

from ucp.errors import UcpError
from ucp.formats.store.store_layout import (
    HEADER_ENTRY,
    HEADER_FIXED,
    PAGE,
    SCHEMA_AT,
    SUPERBLOCKS_AT,
    StoreLayout,
    StoreSchema,
)
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, TABLE_TYPES, FrameType, checksum, padded
from ucp.log.payloads import ENTRY, TABLE_HEAD, StepCommit, table_bytes

LARGEST = 1 << 20  # bytes of a file that is made


def sealed_segment(data: bytes) -> bytes:
    """A segment whose header, frames and blocks all have the checksums that they should have."""
    made = bytearray(data.ljust(SEGMENT_BYTES, b"\0"))
    made[SEGMENT_BYTES - 8 : SEGMENT_BYTES] = struct.pack("<Q", checksum(bytes(made[: SEGMENT_BYTES - 8])))
    salt = struct.unpack_from("<Q", made, 28)[0]
    at, step_lsn, grads = SEGMENT_BYTES, 0, []
    while at + FRAME_BYTES <= len(made):
        kind, lsn, length = made[at + 4], *struct.unpack_from("<Q8xQ", made, at + 16)
        body, end = at + FRAME_BYTES, at + FRAME_BYTES + length
        end = min(end, len(made))
        if kind == FrameType.COMMIT and end - body == len(commit := StepCommit.of(grads, step_lsn).pack()):
            made[body:end] = commit
        if kind in TABLE_TYPES and end - body >= TABLE_HEAD.size:
            covered = min(end, body + table_bytes(struct.unpack_from("<I", made, body)[0]))
            for entry in range(body + TABLE_HEAD.size, covered - ENTRY.itemsize + 1, ENTRY.itemsize):
                offset, size = struct.unpack_from("<QQ", made, entry + 16)
                made[entry + 32 : entry + 40] = struct.pack(
                    "<Q", checksum(bytes(made[body:end][offset : offset + size]))
                )
        else:
            covered = end
        total = checksum(bytes(made[body:covered]))
        made[at + 40 : at + 48] = struct.pack("<Q", total)
        if kind == FrameType.STEP:
            step_lsn, grads = lsn, []
        elif kind == FrameType.GRAD:
            grads.append((length, total))
        made[at + 60 : at + 64] = struct.pack("<I", zlib.crc32(made[at : at + 60], salt & 0xFFFFFFFF))
        at = body + padded(length)
    return bytes(made)


def sealed_store(data: bytes) -> bytes:
    """A store whose blocks have the checksums, and whose head has the sizes, that they should have."""
    made = bytearray(data.ljust(SCHEMA_AT, b"\0"))
    slots, schema_bytes = struct.unpack_from("<I", made, 12)[0], struct.unpack_from("<Q", made, 48)[0]
    schema = bytes(made[SCHEMA_AT : SCHEMA_AT + schema_bytes])
    made[32:48] = xxhash.xxh3_128_digest(schema)
    with contextlib.suppress(UcpError):
        layout = StoreLayout(StoreSchema.parse(schema, "x"), slots, schema_bytes)
        if max(layout.numbers()) <= LARGEST:
            struct.pack_into("<QQQQ", made, 56, *layout.numbers()[2:])
            made = made[: layout.file_bytes].ljust(layout.file_bytes, b"\0")
            for slot in range(slots):
                _seal_slot(made, layout, slot)
    for at in (0, *SUPERBLOCKS_AT):
        _seal(made, at, PAGE)
    return bytes(made)


def _seal_slot(made: bytearray, layout: StoreLayout, slot: int) -> None:
    at = layout.slot_at(slot)
    notes = struct.unpack_from("<Q", made, at + 56)[0]
    body = at + HEADER_FIXED
    end = min(body + HEADER_ENTRY * len(layout.schema.entries) + notes, len(made))
    made[at + 64 : at + 80] = xxhash.xxh3_128_digest(bytes(made[body:end]))
    _seal(made, at, HEADER_FIXED)
    for superblock in SUPERBLOCKS_AT:
        if struct.unpack_from("<i", made, superblock + 32)[0] == slot:
            made[superblock + 56 : superblock + 64] = made[at + HEADER_FIXED - 8 : at + HEADER_FIXED]


def _seal(made: bytearray, at: int, size: int) -> None:
    made[at + size - 8 : at + size] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(made[at : at + size - 8])))
