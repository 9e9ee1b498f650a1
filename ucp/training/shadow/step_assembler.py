"""Assemble the frames of a stream, from a connection or from a growing log, into complete steps.

Every table entry is compared with the stream's schema, and all bytes with their checksums, before they are used.

Several shadows can hold one shard of the state each. The shards follow from the manifest and the number of shadows
alone. A partial frame has the header, table and checksums of the log's frame, but only the blocks of one shard.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ucp import settings
from ucp.core.dtypes import BY_NAME
from ucp.engine.work_shard import WorkShard
from ucp.errors import StorageError
from ucp.log.codecs import DTYPES, Bytes, EncodedBlock, Encoding
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.frames import (
    FRAME_BYTES,
    SEGMENT_BYTES,
    TABLE_TYPES,
    BadBytesError,
    FrameHeader,
    FrameType,
    SegmentHeader,
    check_padding,
    checksum,
    padded,
)
from ucp.log.payloads import (
    TABLE_HEAD,
    StateDigest,
    StepRecord,
    Table,
    data_start,
    table_bytes,
    table_size,
    unpack_digests,
    unpack_json,
    unpack_table,
)
from ucp.log.stream_recovery import FrameRole, LogSegment, StepSequence, list_segments
from ucp.log.stream_schema import BUFFER, FIRST_KINDS, LogBlock, StreamSchema, parse_shaped_kind
from ucp.storage.local import read_at
from ucp.training.shadow.protocol import Buffer, ByteChannel, receive

WHOLE: Final = WorkShard(0, 1)

ElementPosition = tuple[int, int]  # optimizer tensor, element
_Cut = tuple[int, int, int]  # index of the stream, optimizer tensor, element
_NEAR: Final = 0.1  # of a shard's bytes: move a cut this far to avoid splitting a tensor


@dataclass(frozen=True, slots=True)
class StreamShard:
    """The elements of a stream from position `first` up to but excluding `stop`."""

    first: ElementPosition
    stop: ElementPosition

    def of_tensor(self, index: int, numel: int) -> tuple[int, int]:
        """The elements `[start, stop)` of an optimizer tensor that are in the shard."""
        start = numel if index < self.first[0] else self.first[1] if index == self.first[0] else 0
        stop = 0 if index > self.stop[0] else self.stop[1] if index == self.stop[0] else numel
        return start, max(start, min(stop, numel))

    def has(self, block: LogBlock) -> bool:
        """Whether the shard has elements of a block."""
        return (block.tensor, block.offset) < self.stop and self.first < (block.tensor, block.offset + block.count)

    def to_json(self) -> list[int]:
        return [*self.first, *self.stop]

    @staticmethod
    def from_json(data: Any) -> StreamShard:
        a, b, c, d = map(int, data)
        return StreamShard((a, b), (c, d))


def stream_shards(manifest: EpochManifest, shard: WorkShard) -> dict[int, StreamShard]:
    """The part of each stream that belongs to one of several shadows."""
    cuts = _cuts(manifest, shard.count)
    low, high = cuts[shard.number], cuts[shard.number + 1]
    found = {}
    for index, schema in enumerate(manifest.streams):
        end = len(schema.tensors), 0
        first = (0, 0) if low[0] < index else low[1:] if low[0] == index else end
        stop = end if high[0] > index else high[1:] if high[0] == index else (0, 0)
        found[schema.stream] = StreamShard(first, stop)
    return found


def _cuts(manifest: EpochManifest, count: int) -> list[_Cut]:
    """The boundaries of all shards: between chunks, and between tensors if a tensor ends nearby."""
    ends = [(0, (0, 0, 0), True), *_chunk_ends(manifest.streams)]
    bytes_before = [end[0] for end in ends]
    total = bytes_before[-1]
    cuts: list[_Cut] = [(0, 0, 0)]
    for number in range(1, count):
        wanted, near = total * number / count, _NEAR * total / count
        low, high = bisect_left(bytes_before, wanted - near), bisect_right(bytes_before, wanted + near)
        tensors = [end for end in ends[low:high] if end[2]]
        after = bisect_left(bytes_before, wanted)
        nearest = tensors or ends[max(after - 1, 0) : after + 1]
        cuts.append(max(cuts[-1], min(nearest, key=lambda end: abs(end[0] - wanted))[1]))
    return [*cuts, (len(manifest.streams), 0, 0)]


def _chunk_ends(streams: list[StreamSchema]) -> Iterator[tuple[int, _Cut, bool]]:
    """For every chunk: (bytes up to its end, position of the next chunk, whether a tensor ends here)."""
    done = 0
    for index, schema in enumerate(streams):
        for number, tensor in enumerate(schema.tensors):
            size = BY_NAME[tensor.dtype].itemsize
            for start in range(0, tensor.numel, settings.LOG_BLOCK_ELEMENTS):
                stop = min(start + settings.LOG_BLOCK_ELEMENTS, tensor.numel)
                done += (stop - start) * size
                is_end = stop == tensor.numel
                yield done, (index, number + 1, 0) if is_end else (index, number, stop), is_end


_WIDEST: Final = 8  # bytes of the widest element
_OF_DIFFERENCES: Final = frozenset({Encoding.UNCHANGED, Encoding.DELTA})


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """The checked blocks of one table that belong to the shard."""

    found: tuple[EncodedBlock, ...]
    base_step: int = -1  # the step that the differences of a DIFF frame refer to


class BlockTables:
    """Reads and checks the tables of a stream, and selects the entries of a shard."""

    def __init__(
        self, schema: StreamSchema, kinds: Sequence[str] = FIRST_KINDS, stream_shard: StreamShard | None = None
    ):
        """`kinds` are the manifest's names of states. Blocks of gradients and states outside `stream_shard` are left
        out; buffers and factored states are small and belong to every shard.
        """
        self.schema = schema
        self.stream_shard = stream_shard
        self.kinds: Sequence[str] = ()
        self._shaped: dict[int, int] = {}  # state with another shape than its tensor → number of elements
        self.set_kinds(kinds)

    def set_kinds(self, kinds: Sequence[str]) -> None:
        """Set the names of states, which may be known only after the optimizer's first step."""
        shaped = {number: parse_shaped_kind(name) for number, name in enumerate(kinds)}
        self._shaped = {number: math.prod(parsed[1]) for number, parsed in shaped.items() if parsed is not None}
        self.kinds = list(kinds)

    def payload_limit(self, frame: FrameType) -> int:
        """The maximum payload size of a frame of this type; larger ones are refused before they are read."""
        if frame not in TABLE_TYPES:
            return settings.SHADOW_STEP_BYTES if frame is FrameType.STEP else settings.SHADOW_FRAME_BYTES
        data = sum(padded(block.count * _WIDEST) for block in self.schema.blocks)
        if frame is not FrameType.GRAD:
            data *= max(1, len(self.kinds))
            data += sum(padded(block.count * _WIDEST) for block in self.schema.buffers)
            data += len(self.schema.tensors) * sum(padded(count * _WIDEST) for count in self._shaped.values())
        return data_start(self._max_entries(frame)) + data

    def _max_entries(self, frame: FrameType) -> int:
        """The maximum number of entries of a table."""
        blocks = len(self.schema.blocks)
        return blocks if frame is FrameType.GRAD else blocks * max(1, len(self.kinds)) + len(self.schema.buffers)

    def read(self, header: FrameHeader, payload: memoryview) -> TableBlocks:
        """The blocks of a complete payload that belong to the shard."""
        size = self.size_of_table(header, payload)
        table, base_step = self.table(header, payload[:size])
        found = []
        for entry in self.wanted(header.type, table):
            offset, length = int(entry["offset"]), int(entry["length"])
            found.append(self.block(header.type, entry, np.frombuffer(payload, np.uint8, length, offset)))
        return TableBlocks(tuple(found), base_step)

    def size_of_table(self, header: FrameHeader, head: bytes | bytearray | memoryview) -> int:
        """The size of a table's head and entries, from the head of a payload."""
        size = table_size(header, head)
        if header.type not in TABLE_TYPES or size > table_bytes(self._max_entries(header.type)):
            raise BadBytesError("a table of blocks has more entries than the stream has blocks")
        return size

    def table(self, header: FrameHeader, data: bytes | memoryview) -> tuple[Table, int]:
        """(entries, step that differences refer to) from head and entries; refuses duplicate entries."""
        table, base_step = unpack_table(header, data)
        keys = {(int(entry["block"]), int(entry["state"])) for entry in table}
        if len(keys) < len(table):
            raise BadBytesError("a table has a block twice")
        return table, base_step

    def wanted(self, frame: FrameType, table: Table) -> Iterator[Any]:
        """The entries that belong to the shard; every entry of the table is compared with the schema."""
        for entry in table:
            number, state = int(entry["block"]), int(entry["state"])
            if int(entry["count"]) != self._elements(frame, number, state):
                raise BadBytesError(f"block {number} with {entry['count']} elements is not in the stream's schema")
            in_all_shards = frame is not FrameType.GRAD and (self.kinds[state] == BUFFER or state in self._shaped)
            if self.stream_shard is None or in_all_shards or self.stream_shard.has(self.schema.blocks[number]):
                yield entry

    def _elements(self, frame: FrameType, number: int, state: int) -> int:
        """The number of elements that a block's entry must have."""
        if frame is not FrameType.GRAD and state >= len(self.kinds):
            raise BadBytesError(f"state {state} has no name")
        is_buffer = frame is not FrameType.GRAD and self.kinds[state] == BUFFER
        blocks = self.schema.buffers if is_buffer else self.schema.blocks
        if number >= len(blocks):
            raise BadBytesError(f"block {number} is not in the stream's schema")
        return self._shaped[state] if frame is not FrameType.GRAD and state in self._shaped else blocks[number].count

    def block(self, frame: FrameType, entry: Any, data: Bytes) -> EncodedBlock:
        """A block from its entry and its bytes, whose checksum is compared."""
        number, encoding = int(entry["block"]), int(entry["encoding"])
        if checksum(data.data) != int(entry["checksum"]):
            raise BadBytesError(f"the checksum of block {number} is wrong")
        if (encoding in _OF_DIFFERENCES) != (frame is FrameType.DIFF):
            raise BadBytesError(f"block {number} has an encoding that is not allowed in a {frame.name} frame")
        dtype = DTYPES[int(entry["dtype"])]
        return EncodedBlock(number, encoding, dtype, int(entry["count"]), data, int(entry["state"]))


Key = tuple[int, int]  # block, state


class GapError(Exception):
    """Frames are missing between the last one and the one that was received."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"received frame {got} instead of frame {expected}")
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A received frame: its payload without padding, or for a partial frame its checked blocks."""

    header: FrameHeader
    payload: memoryview
    blocks: TableBlocks | None = None


@dataclass(slots=True)
class ReceivedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    blocks: dict[int, EncodedBlock] = field(default_factory=dict)  # gradients, by block
    aux: Any = None  # JSON values
    nbytes: int = FRAME_BYTES  # with the encoded bytes of its blocks
    full: dict[Key, EncodedBlock] = field(default_factory=dict)  # states and buffers after the step
    differences: dict[Key, tuple[EncodedBlock, int]] = field(default_factory=dict)  # states, relative to earlier steps

    def add(self, frame: ReceivedFrame, blocks: TableBlocks | None) -> None:
        """Add a frame between STEP and COMMIT; `blocks` are those of a table frame."""
        if blocks is None:
            if frame.header.type is FrameType.AUX:
                self.aux = unpack_json(bytes(frame.payload))
            return
        self.nbytes += sum(block.data.nbytes for block in blocks.found)
        for block in blocks.found:
            key = block.block, block.state
            if frame.header.type is FrameType.GRAD:
                self.blocks[block.block] = block
            elif key in self.full or key in self.differences:
                raise BadBytesError(f"a step has block {block.block} twice")
            elif frame.header.type is FrameType.FULL:
                self.full[key] = block
            else:
                self.differences[key] = block, blocks.base_step


@dataclass(frozen=True, slots=True)
class ReceivedDigests:
    """Digests of the job's own states after a step, for one stream."""

    stream: int
    step: int
    digests: list[StateDigest]
    nbytes: int = 0


class StepAssembler:
    """Turns the frames of one stream, offered in order, into complete steps in `ready`. Not thread-safe."""

    def __init__(self, epoch: int, tables: BlockTables, expected: int) -> None:
        """`expected` is the number of the next frame."""
        self.epoch = epoch
        self.tables = tables
        self.expected = expected
        self.ready: deque[ReceivedStep | ReceivedDigests] = deque()
        self.pending_bytes = 0  # of the steps in `ready`
        self.newest: int | None = None  # the newest step of which any frame was received
        self.committed: int | None = None  # the newest step that is complete
        self._sequence = StepSequence()
        self._open_step: ReceivedStep | None = None

    def offer(self, frame: ReceivedFrame) -> bool:
        """Add a frame; False if it was added before. `GapError` if frames before it are missing."""
        header = frame.header
        if (header.epoch, header.stream) != (self.epoch, self.tables.schema.stream):
            raise BadBytesError(f"a frame of epoch {header.epoch}, stream {header.stream}")
        if header.lsn < self.expected:
            return False
        if header.lsn > self.expected:
            raise GapError(self.expected, header.lsn)
        self._take(frame)
        self.expected = header.lsn + 1
        return True

    def pop(self) -> ReceivedStep | ReceivedDigests:
        """Remove and return the oldest item of `ready`."""
        item = self.ready.popleft()
        self.pending_bytes -= item.nbytes
        return item

    def _take(self, frame: ReceivedFrame) -> None:
        header = frame.header
        # Check the frame before changing anything: if it is damaged, it may be read again from the log.
        blocks = frame.blocks
        if header.type not in TABLE_TYPES:
            check_checksum(frame)
        elif blocks is None:
            blocks = self.tables.read(header, frame.payload)
            if self.tables.stream_shard is not None:  # copy, so that the frame's memory can be freed
                found = tuple(replace(block, data=block.data.copy()) for block in blocks.found)
                blocks = TableBlocks(found, blocks.base_step)
        role = self._sequence.add(header, lambda: bytes(frame.payload))
        if role is FrameRole.OPENS_STEP:
            assert self._sequence.open is not None
            self._open_step = ReceivedStep(header.step, self._sequence.open.record)
            self.newest = header.step
        elif role is FrameRole.BETWEEN_STEPS:
            if header.type is FrameType.DIGEST:
                digests = unpack_digests(bytes(frame.payload))
                self._add(ReceivedDigests(header.stream, header.step, digests, header.length))
        elif role is FrameRole.COMMITS_STEP:
            assert self._open_step is not None
            self._add(self._open_step)
            self._open_step = None
            self.committed = header.step
        elif self._open_step is not None:
            self._open_step.add(frame, blocks)

    def _add(self, item: ReceivedStep | ReceivedDigests) -> None:
        self.ready.append(item)
        self.pending_bytes += item.nbytes


def check_checksum(frame: ReceivedFrame) -> None:
    """Check a frame that is not a table."""
    if checksum(frame.payload) != frame.header.checksum:
        raise BadBytesError("the checksum of a payload is wrong")


class LogTail:
    """Reads the growing files of a stream, continuing at the first frame that was not complete the last time."""

    def __init__(self, folder: Path, epoch: int, tables: BlockTables) -> None:
        self.folder = folder
        self.epoch = epoch
        self.tables = tables
        self._hash = tables.schema.hash()
        self._segment: LogSegment | None = None
        self._header: SegmentHeader | None = None
        self._offset = 0
        self._lsn = 0  # of the frame at `_offset`

    def poll(self, wanted: int, take: Callable[[ReceivedFrame], bool], until: int | None = None) -> int:
        """Pass all complete frames `[wanted, until)` to `take`, until it returns False; returns their number.

        `GapError` if the first file starts after frame `wanted`.
        """
        handed = 0
        while self._find(wanted):
            assert self._segment is not None
            try:
                fd = os.open(self._segment.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # dropped or abandoned by the writer
                self._segment = None
                continue
            try:
                while (frame := self._next(fd)) is not None:
                    if until is not None and frame.header.lsn >= until:
                        return handed
                    if frame.header.lsn >= wanted:
                        if not take(frame):
                            return handed
                        wanted = frame.header.lsn + 1
                        handed += 1
                    self._offset, self._lsn = frame.header.end, frame.header.lsn + 1
            except OSError as error:
                raise StorageError(f"{self._segment.path}: cannot be read: {error.strerror}") from error
            finally:
                os.close(fd)
            if not self._has_next(wanted):
                break
        return handed

    def _find(self, wanted: int) -> bool:
        """Move to the file that contains, or will contain, frame `wanted`."""
        if self._segment is not None and self._lsn <= wanted:
            return True
        self._segment = None
        segments = list_segments(self.folder)
        fitting = [segment for segment in segments if segment.first_lsn <= wanted]
        if not fitting:
            if segments:
                raise GapError(wanted, segments[0].first_lsn)
            return False  # no files yet
        return self._enter(fitting[-1])

    def _enter(self, segment: LogSegment) -> bool:
        try:
            with open(segment.path, "rb") as file:
                header = SegmentHeader.unpack(file.read(SEGMENT_BYTES))
        except (FileNotFoundError, BadBytesError):  # dropped, or its header is not complete yet
            return False
        if (header.epoch, header.stream, header.schema_hash) != (self.epoch, self.tables.schema.stream, self._hash):
            raise StorageError(f"{segment.path}: belongs to another stream than the manifest describes")
        self._segment, self._header = segment, header
        self._offset, self._lsn = SEGMENT_BYTES, header.first_lsn
        return True

    def _has_next(self, wanted: int) -> bool:
        """Move to a newer file that contains frame `wanted`, if there is one."""
        assert self._segment is not None
        for segment in reversed(list_segments(self.folder)):
            if self._segment.first_lsn < segment.first_lsn <= wanted:
                return self._enter(segment)
        return False

    def _next(self, fd: int) -> ReceivedFrame | None:
        """The frame at byte `_offset` of the file, or None if it is not complete (yet)."""
        assert self._header is not None
        try:
            data = os.pread(fd, FRAME_BYTES, self._offset)
            header = FrameHeader.unpack_at(data, self._header, self._offset, self._lsn)
            if header.length > self.tables.payload_limit(header.type):
                raise BadBytesError(f"a frame of {header.length} bytes")
            payload = memoryview(read_at(fd, header.offset + FRAME_BYTES, padded(header.length)))
            if len(payload) < padded(header.length):
                raise BadBytesError("the file ends within the payload")
            check_padding(payload, header.length)
            frame = ReceivedFrame(header, payload[: header.length])
            if header.type in TABLE_TYPES:
                self.tables.read(header, frame.payload)
            else:
                check_checksum(frame)
        except BadBytesError:
            return None
        return frame


PARTIAL_FRAME: Final = 128  # frame flag, on the wire only: blocks are left out


def wanted_parts(header: FrameHeader, payload: memoryview, tables: BlockTables) -> list[Buffer] | None:
    """The parts of a table's payload that belong to the shard; None for frames that are sent complete."""
    if header.type not in TABLE_TYPES:
        return None
    size = tables.size_of_table(header, payload)
    table, _ = tables.table(header, payload[:size])
    ranges = ((int(entry["offset"]), int(entry["length"])) for entry in tables.wanted(header.type, table))
    return [payload[:size], *(payload[at : at + length] for at, length in ranges if length)]


def receive_partial(sock: ByteChannel, header: FrameHeader, tables: BlockTables) -> ReceivedFrame:
    """Receive and check the blocks of a partial frame."""
    head = receive(sock, TABLE_HEAD.size)
    size = tables.size_of_table(header, head)
    table, base_step = tables.table(header, b"".join((head, receive(sock, size - len(head)))))
    found = []
    for entry in tables.wanted(header.type, table):
        data = np.frombuffer(receive(sock, int(entry["length"])), np.uint8)
        found.append(tables.block(header.type, entry, data))
    return ReceivedFrame(header, memoryview(b""), TableBlocks(tuple(found), base_step))
