"""Frames of which only some blocks are sent: the whole table, and of the blocks those that are wanted.

Header, table and all checksums are the log's own, so that such a frame stands for the same frame of the log.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ucp.log.frames import TABLE_TYPES, FrameHeader
from ucp.log.payloads import TABLE_HEAD
from ucp.shadow.intake import Frame
from ucp.shadow.tables import Blocks, Tables
from ucp.shadow.wire import Buffer, Channel, receive

THIN: Final = 128  # frame flag, on the wire only: blocks are left out


def thin(header: FrameHeader, payload: memoryview, tables: Tables) -> list[Buffer] | None:
    """What is sent of the payload of a table; None where a frame is sent whole."""
    if header.type not in TABLE_TYPES:
        return None
    size = tables.size_of_table(header, payload)
    table, _ = tables.table(header, payload[:size])
    places = ((int(entry["offset"]), int(entry["length"])) for entry in tables.wanted(header.type, table))
    return [payload[:size], *(payload[at : at + length] for at, length in places if length)]


def thinned(header: FrameHeader) -> FrameHeader:
    """The header that says so."""
    return replace(header, flags=header.flags | THIN)


def receive_thin(sock: Channel, header: FrameHeader, tables: Tables) -> Frame:
    """A table without the blocks that are not wanted; those that came are checked."""
    head = receive(sock, TABLE_HEAD.size)
    size = tables.size_of_table(header, head)
    table, base_step = tables.table(header, b"".join((head, receive(sock, size - len(head)))))
    found = []
    for entry in tables.wanted(header.type, table):
        data = np.frombuffer(receive(sock, int(entry["length"])), np.uint8)
        found.append(tables.block(header.type, entry, data))
    return Frame(header, memoryview(b""), Blocks(tuple(found), base_step))
