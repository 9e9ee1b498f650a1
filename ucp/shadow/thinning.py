"""Frames of gradients of which only some blocks are sent: the whole table, and of the blocks those that are wanted.

Header, table and all checksums are the log's own, so that such a frame stands for the same frame of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ucp.log.frames import BadBytesError, FrameHeader, FrameType, checksum
from ucp.log.payloads import TABLE_HEAD, Table, table_bytes, unpack_table
from ucp.log.schema import StreamSchema
from ucp.records import replace
from ucp.shadow.intake import Frame, stored_block
from ucp.shadow.portions import Portion
from ucp.shadow.wire import Buffer, Channel, receive

THIN: Final = 128  # frame flag, on the wire only: blocks are left out


def thin(header: FrameHeader, payload: bytearray, schema: StreamSchema, portion: Portion) -> list[Buffer] | None:
    """What is sent of the payload of a GRAD frame; None where it is sent whole."""
    if header.type is not FrameType.GRAD:
        return None
    view = memoryview(payload)
    size = table_bytes(TABLE_HEAD.unpack_from(payload)[0])
    table, _ = unpack_table(view[:size], header.length)
    places = ((int(entry["offset"]), int(entry["length"])) for entry in _wanted(table, schema, portion))
    return [view[:size], *(view[at : at + length] for at, length in places if length)]


def thinned(header: FrameHeader) -> FrameHeader:
    """The header that says so."""
    return replace(header, flags=header.flags | THIN)


def receive_thin(sock: Channel, header: FrameHeader, schema: StreamSchema, portion: Portion) -> Frame:
    """A GRAD frame without the blocks that are not wanted; those that came are checked."""
    head = receive(sock, TABLE_HEAD.size)
    count = TABLE_HEAD.unpack_from(head)[0]
    size = table_bytes(count)
    if header.type is not FrameType.GRAD or count > len(schema.blocks) or size > header.length:
        raise BadBytesError("a table of blocks is longer than its frame, or than the stream has blocks")
    data = b"".join((head, receive(sock, size - len(head))))
    if checksum(data) != header.checksum:
        raise BadBytesError("the checksum of a table of blocks is wrong")
    table, _ = unpack_table(data, header.length)
    blocks = {}
    for entry in _wanted(table, schema, portion):
        stored = stored_block(entry, np.frombuffer(receive(sock, int(entry["length"])), np.uint8), schema)
        assert stored is not None
        blocks[stored.block] = stored
    return Frame(header, memoryview(b""), blocks)


def _wanted(table: Table, schema: StreamSchema, portion: Portion) -> Iterator[Any]:
    """The entries of blocks that are in a portion."""
    for entry in table:
        number = int(entry["block"])
        if number >= len(schema.blocks):
            raise BadBytesError(f"block {number} is none of the stream")
        if portion.has(schema.blocks[number]):
            yield entry
