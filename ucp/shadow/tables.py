"""Tables of blocks as they come: gradients, states, buffers. No entry is believed before it was compared with the
stream's schema, and no byte before its checksum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ucp.log.codecs import DTYPES, Bytes, Encoding
from ucp.log.frames import TABLE_TYPES, BadBytesError, FrameHeader, FrameType, checksum, padded
from ucp.log.kinds import BUFFER, FIRST_KINDS, parse_own
from ucp.log.payloads import TABLE_HEAD, Table, data_start, table_bytes, unpack_table
from ucp.log.reader import StoredBlock
from ucp.log.schema import StreamSchema
from ucp.shadow.portions import Portion

_WIDEST: Final = 8  # bytes of an element
_OF_DIFFERENCES: Final = frozenset({Encoding.UNCHANGED, Encoding.DELTA})


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one table that are wanted, each checked."""

    found: tuple[StoredBlock, ...]
    base_step: int = -1  # that the differences of a DIFF frame are to

    def copied(self) -> Blocks:
        """With bytes of their own, so that the frame that they came in can go."""
        return Blocks(tuple(replace(block, data=block.data.copy()) for block in self.found), self.base_step)


class Tables:
    """What the tables of a stream may hold, and what of that is wanted."""

    def __init__(self, schema: StreamSchema, kinds: Sequence[str] = FIRST_KINDS, portion: Portion | None = None):
        """`kinds` are the manifest's names of states. Of gradients and states only those in the `portion` are wanted;
        buffers, and states with shapes of their own, are small, and wanted everywhere.
        """
        self.schema = schema
        self.portion = portion
        self.kinds: Sequence[str] = ()
        self._own: dict[int, int] = {}  # state with a shape of its own → its elements
        self.learn(kinds)

    def learn(self, kinds: Sequence[str]) -> None:
        """An optimizer may make its states in its first step: their names become known then."""
        own = {number: parse_own(name) for number, name in enumerate(kinds)}
        self._own = {number: math.prod(told[1]) for number, told in own.items() if told is not None}
        self.kinds = list(kinds)

    def limit(self, frame: FrameType) -> int:
        """The most bytes that the payload of a table of this type can have: what claims more is not read."""
        data = sum(padded(block.count * _WIDEST) for block in self.schema.blocks)
        if frame is not FrameType.GRAD:
            data *= max(1, len(self.kinds))
            data += sum(padded(block.count * _WIDEST) for block in self.schema.buffers)
            data += len(self.schema.tensors) * sum(padded(count * _WIDEST) for count in self._own.values())
        return data_start(self._most(frame)) + data

    def _most(self, frame: FrameType) -> int:
        """The most entries that a table can have."""
        blocks = len(self.schema.blocks)
        return blocks if frame is FrameType.GRAD else blocks * max(1, len(self.kinds)) + len(self.schema.buffers)

    def read(self, header: FrameHeader, payload: memoryview) -> Blocks:
        """The blocks of a whole payload that are wanted."""
        if len(payload) < TABLE_HEAD.size:
            raise BadBytesError("a table of blocks ends early")
        size = self.size_of_table(header, payload)
        table, base_step = self.table(header, payload[:size])
        found = []
        for entry in self.wanted(header.type, table):
            offset, length = int(entry["offset"]), int(entry["length"])
            found.append(self.block(header.type, entry, np.frombuffer(payload, np.uint8, length, offset)))
        return Blocks(tuple(found), base_step)

    def size_of_table(self, header: FrameHeader, head: bytes | bytearray | memoryview) -> int:
        """Bytes of head and entries, from the head of a payload."""
        count = TABLE_HEAD.unpack_from(head)[0]
        size = table_bytes(count)
        if header.type not in TABLE_TYPES or count > self._most(header.type) or size > header.length:
            raise BadBytesError("a table of blocks is longer than its frame, or than the stream has blocks")
        return size

    def table(self, header: FrameHeader, data: bytes | memoryview) -> tuple[Table, int]:
        """(entries, step that differences are to) from head and entries; no entry is there twice."""
        if checksum(data) != header.checksum:
            raise BadBytesError("the checksum of a table of blocks is wrong")
        table, base_step = unpack_table(data, header.length)
        named = {(int(entry["block"]), int(entry["state"])) for entry in table}
        if len(named) < len(table):
            raise BadBytesError("a block is there twice")
        return table, base_step

    def wanted(self, frame: FrameType, table: Table) -> Iterator[Any]:
        """The entries that are wanted; every entry of the table is compared with the schema."""
        for entry in table:
            number, state = int(entry["block"]), int(entry["state"])
            if int(entry["count"]) != self._elements(frame, number, state):
                raise BadBytesError(f"block {number} of {entry['count']} elements is none of the stream")
            everywhere = frame is not FrameType.GRAD and (self.kinds[state] == BUFFER or state in self._own)
            if self.portion is None or everywhere or self.portion.has(self.schema.blocks[number]):
                yield entry

    def _elements(self, frame: FrameType, number: int, state: int) -> int:
        """How many elements the entry of a block must have."""
        if frame is not FrameType.GRAD and state >= len(self.kinds):
            raise BadBytesError(f"state {state} has no name")
        is_buffer = frame is not FrameType.GRAD and self.kinds[state] == BUFFER
        blocks = self.schema.buffers if is_buffer else self.schema.blocks
        if number >= len(blocks):
            raise BadBytesError(f"block {number} is none of the stream")
        return self._own[state] if frame is not FrameType.GRAD and state in self._own else blocks[number].count

    def block(self, frame: FrameType, entry: Any, data: Bytes) -> StoredBlock:
        """A block from its entry and its bytes."""
        number, encoding = int(entry["block"]), int(entry["encoding"])
        if checksum(data.data) != int(entry["checksum"]):
            raise BadBytesError(f"the checksum of block {number} is wrong")
        if (encoding in _OF_DIFFERENCES) != (frame is FrameType.DIFF):
            raise BadBytesError(f"block {number} is encoded as it must not be in a {frame.name} frame")
        dtype = DTYPES[int(entry["dtype"])]
        return StoredBlock(number, int(entry["state"]), encoding, dtype, int(entry["count"]), data)
