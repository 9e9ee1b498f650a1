"""What one of several shadows holds: a stretch of every stream, so that all of them together hold everything once.

The cuts follow from the manifest and the number of shadows alone, so that they need not talk to each other.

Tables of blocks as they come: gradients, states, buffers. No entry is believed before it was compared with the
stream's schema, and no byte before its checksum.

Frames of one stream, in order, become complete steps. Where they come from does not matter.

Frames from the files of a log that is being written.

Frames of which only some blocks are sent: the whole table, and of the blocks those that are wanted.

Header, table and all checksums are the log's own, so that such a frame stands for the same frame of the log.
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
from ucp.training.shadow.protocol import Buffer, ByteChannel, receive

WHOLE: Final = WorkShard(0, 1)

ElementPosition = tuple[int, int]  # optimizer tensor, element
_Cut = tuple[int, int, int]  # index of the stream, optimizer tensor, element
_NEAR: Final = 0.1  # of a share: a tensor that ends so near to a cut is not cut


@dataclass(frozen=True, slots=True)
class StreamShard:
    """The elements of a stream from `first` on and before `stop`, tensor by tensor."""

    first: ElementPosition
    stop: ElementPosition

    def of_tensor(self, index: int, numel: int) -> tuple[int, int]:
        """The elements `[start, stop)` of an optimizer tensor that are in it."""
        start = numel if index < self.first[0] else self.first[1] if index == self.first[0] else 0
        stop = 0 if index > self.stop[0] else self.stop[1] if index == self.stop[0] else numel
        return start, max(start, min(stop, numel))

    def has(self, block: LogBlock) -> bool:
        """Are elements of a block in it?"""
        return (block.tensor, block.offset) < self.stop and self.first < (block.tensor, block.offset + block.count)

    def to_json(self) -> list[int]:
        return [*self.first, *self.stop]

    @staticmethod
    def from_json(data: Any) -> StreamShard:
        a, b, c, d = map(int, data)
        return StreamShard((a, b), (c, d))


def stream_shards(manifest: EpochManifest, share: WorkShard) -> dict[int, StreamShard]:
    """What a share has of each stream."""
    cuts = _cuts(manifest, share.count)
    low, high = cuts[share.number], cuts[share.number + 1]
    found = {}
    for index, schema in enumerate(manifest.streams):
        end = len(schema.tensors), 0
        first = (0, 0) if low[0] < index else low[1:] if low[0] == index else end
        stop = end if high[0] > index else high[1:] if high[0] == index else (0, 0)
        found[schema.stream] = StreamShard(first, stop)
    return found


def _cuts(manifest: EpochManifest, count: int) -> list[_Cut]:
    """Where shares begin, and where the last ends: between stretches, and between tensors where those are near."""
    ends = [(0, (0, 0, 0), True), *_stretches(manifest.streams)]
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


def _stretches(streams: list[StreamSchema]) -> Iterator[tuple[int, _Cut, bool]]:
    """(Bytes up to here, where the next stretch begins, whether a tensor ends here) for every stretch."""
    done = 0
    for index, schema in enumerate(streams):
        for number, tensor in enumerate(schema.tensors):
            size = BY_NAME[tensor.dtype].itemsize
            for start in range(0, tensor.numel, settings.LOG_BLOCK_ELEMENTS):
                stop = min(start + settings.LOG_BLOCK_ELEMENTS, tensor.numel)
                done += (stop - start) * size
                is_end = stop == tensor.numel
                yield done, (index, number + 1, 0) if is_end else (index, number, stop), is_end


_WIDEST: Final = 8  # bytes of an element
_OF_DIFFERENCES: Final = frozenset({Encoding.UNCHANGED, Encoding.DELTA})


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """The blocks of one table that are wanted, each checked."""

    found: tuple[EncodedBlock, ...]
    base_step: int = -1  # that the differences of a DIFF frame are to

    def copied(self) -> TableBlocks:
        """With bytes of their own, so that the frame that they came in can go."""
        return TableBlocks(tuple(replace(block, data=block.data.copy()) for block in self.found), self.base_step)


class BlockTables:
    """What the tables of a stream may hold, and what of that is wanted."""

    def __init__(self, schema: StreamSchema, kinds: Sequence[str] = FIRST_KINDS, portion: StreamShard | None = None):
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
        own = {number: parse_shaped_kind(name) for number, name in enumerate(kinds)}
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

    def read(self, header: FrameHeader, payload: memoryview) -> TableBlocks:
        """The blocks of a whole payload that are wanted."""
        size = self.size_of_table(header, payload)
        table, base_step = self.table(header, payload[:size])
        found = []
        for entry in self.wanted(header.type, table):
            offset, length = int(entry["offset"]), int(entry["length"])
            found.append(self.block(header.type, entry, np.frombuffer(payload, np.uint8, length, offset)))
        return TableBlocks(tuple(found), base_step)

    def size_of_table(self, header: FrameHeader, head: bytes | bytearray | memoryview) -> int:
        """Bytes of head and entries, from the head of a payload."""
        size = table_size(header, head)
        if header.type not in TABLE_TYPES or size > table_bytes(self._most(header.type)):
            raise BadBytesError("a table of blocks has more entries than the stream has blocks")
        return size

    def table(self, header: FrameHeader, data: bytes | memoryview) -> tuple[Table, int]:
        """(entries, step that differences are to) from head and entries; no entry is there twice."""
        table, base_step = unpack_table(header, data)
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

    def block(self, frame: FrameType, entry: Any, data: Bytes) -> EncodedBlock:
        """A block from its entry and its bytes."""
        number, encoding = int(entry["block"]), int(entry["encoding"])
        if checksum(data.data) != int(entry["checksum"]):
            raise BadBytesError(f"the checksum of block {number} is wrong")
        if (encoding in _OF_DIFFERENCES) != (frame is FrameType.DIFF):
            raise BadBytesError(f"block {number} is encoded as it must not be in a {frame.name} frame")
        dtype = DTYPES[int(entry["dtype"])]
        return EncodedBlock(number, encoding, dtype, int(entry["count"]), data, int(entry["state"]))


Key = tuple[int, int]  # block, state


class GapError(Exception):
    """Frames are missing between what was taken last and what came now."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"frame {got} came where frame {expected} should be")
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame as it came: its payload without padding, or the blocks that came of it, which are checked."""

    header: FrameHeader
    payload: memoryview
    blocks: TableBlocks | None = None


@dataclass(slots=True)
class ReceivedValues:
    """States and buffers after a step: as they are, or as differences to what they were after an earlier one."""

    full: dict[Key, EncodedBlock] = field(default_factory=dict)
    differences: dict[Key, tuple[EncodedBlock, int]] = field(default_factory=dict)  # with the step that they are to

    def add(self, frame: FrameType, blocks: TableBlocks) -> None:
        for block in blocks.found:
            key = block.block, block.state
            if key in self.full or key in self.differences:
                raise BadBytesError(f"block {block.block} is there twice in a step")
            if frame is FrameType.FULL:
                self.full[key] = block
            else:
                self.differences[key] = block, blocks.base_step

    @property
    def nbytes(self) -> int:
        """Bytes as they came."""
        held = (*self.full.values(), *(block for block, _ in self.differences.values()))
        return sum(block.data.nbytes for block in held)


@dataclass(slots=True)
class ReceivedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    blocks: dict[int, EncodedBlock] = field(default_factory=dict)  # gradients, by block
    aux: Any = None  # JSON values
    nbytes: int = 0
    values: ReceivedValues = field(default_factory=ReceivedValues)

    def add(self, frame: ReceivedFrame, blocks: TableBlocks | None) -> None:
        """Add a frame between STEP and COMMIT; `blocks` are those of a table frame."""
        if blocks is None:
            if frame.header.type is FrameType.AUX:
                self.aux = unpack_json(bytes(frame.payload))
        elif frame.header.type is FrameType.GRAD:
            self.blocks.update({block.block: block for block in blocks.found})
        else:
            self.values.add(frame.header.type, blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of its blocks as they came."""
        return sum(block.data.nbytes for block in self.blocks.values()) + self.values.nbytes


@dataclass(frozen=True, slots=True)
class ReceivedDigests:
    """Digests that the job took of its own states after a step, of one stream."""

    stream: int
    step: int
    digests: list[StateDigest]
    nbytes: int = 0


def payload_limit(kind: FrameType, tables: BlockTables) -> int:
    """The most bytes that a payload of this kind can have in a stream: what claims more is not read."""
    if kind in TABLE_TYPES:
        return tables.limit(kind)
    if kind is FrameType.STEP:
        return settings.SHADOW_STEP_BYTES
    return settings.SHADOW_FRAME_BYTES


class StepAssembler:
    """One stream. `offer` frames in order; complete steps come out of `ready`. Not thread-safe."""

    def __init__(self, epoch: int, tables: BlockTables, expected: int | None = None) -> None:
        """`expected` is the number of the next frame; None takes the first that comes, if it begins a step."""
        self.epoch = epoch
        self.tables = tables
        self.expected = expected
        self.ready: deque[ReceivedStep | ReceivedDigests] = deque()
        self.pending_bytes = 0  # of steps in `ready`, and of the one that is coming
        self.newest: int | None = None  # the newest step of which any frame has come
        self.committed: int | None = None  # the newest step that is complete
        self._sequence = StepSequence()
        self._coming: ReceivedStep | None = None

    def offer(self, frame: ReceivedFrame) -> bool:
        """Take a frame; False for one that was taken before. `GapError` where frames are missing before it."""
        header = frame.header
        if (header.epoch, header.stream) != (self.epoch, self.tables.schema.stream):
            raise BadBytesError(f"a frame of epoch {header.epoch}, stream {header.stream}")
        if self.expected is not None:
            if header.lsn < self.expected:
                return False
            if header.lsn > self.expected:
                raise GapError(self.expected, header.lsn)
        elif header.type in (FrameType.GRAD, FrameType.COMMIT):
            raise BadBytesError("frames begin inside a step")
        self._take(frame)
        self.expected = header.lsn + 1
        return True

    def pop(self) -> ReceivedStep | ReceivedDigests:
        """The oldest of `ready`."""
        item = self.ready.popleft()
        self.pending_bytes -= item.nbytes
        return item

    def _take(self, frame: ReceivedFrame) -> None:
        header = frame.header
        # Nothing changes before the frame is known to be right: after damage, it may be read again from elsewhere.
        blocks = self._blocks(frame) if header.type in TABLE_TYPES else None
        if blocks is None:
            check_checksum(frame)
        role = self._sequence.add(header, lambda: bytes(frame.payload))
        if role is FrameRole.OPENS_STEP:
            assert self._sequence.open is not None
            self._coming = ReceivedStep(header.step, self._sequence.open.record)
            self.newest = header.step
        elif role is FrameRole.BETWEEN_STEPS:
            if header.type is FrameType.DIGEST:
                digests = unpack_digests(bytes(frame.payload))
                self._add(ReceivedDigests(header.stream, header.step, digests, header.length))
        elif role is FrameRole.COMMITS_STEP:
            assert self._coming is not None
            self._coming.nbytes = FRAME_BYTES + self._coming.block_bytes
            self._add(self._coming)
            self._coming = None
            self.committed = header.step
        elif self._coming is not None:
            self._coming.add(frame, blocks)

    def _blocks(self, frame: ReceivedFrame) -> TableBlocks:
        if frame.blocks is not None:
            return frame.blocks
        found = self.tables.read(frame.header, frame.payload)
        return found if self.tables.portion is None else found.copied()

    def _add(self, item: ReceivedStep | ReceivedDigests) -> None:
        self.ready.append(item)
        self.pending_bytes += item.nbytes


def check_frame(frame: ReceivedFrame, tables: BlockTables) -> None:
    """Are all bytes of a frame there and right? `BadBytesError` where not."""
    if frame.header.type in TABLE_TYPES:
        tables.read(frame.header, frame.payload)
    else:
        check_checksum(frame)


def check_checksum(frame: ReceivedFrame) -> None:
    """The checksum of a frame that is no table."""
    if checksum(frame.payload) != frame.header.checksum:
        raise BadBytesError("the checksum of a payload is wrong")


class LogTail:
    """Reads a stream's files from where it stopped the last time. What was not whole then is read again."""

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
        """Hand over all whole frames from number `wanted` (below `until`) on; gives how many.

        Ends early when `take` says False. `GapError` where the files begin after the frame that is wanted.
        """
        handed = 0
        while self._find(wanted):
            assert self._segment is not None
            try:
                fd = os.open(self._segment.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # dropped, or given up by the writer
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
        """Be in the file that has, or will have, the frame that is wanted."""
        if self._segment is not None and self._lsn <= wanted:
            return True
        self._segment = None
        segments = list_segments(self.folder)
        fitting = [segment for segment in segments if segment.first_lsn <= wanted]
        if not fitting:
            if segments:
                raise GapError(wanted, segments[0].first_lsn)
            return False  # it has no files yet
        return self._enter(fitting[-1])

    def _enter(self, segment: LogSegment) -> bool:
        try:
            with open(segment.path, "rb") as file:
                header = SegmentHeader.unpack(file.read(SEGMENT_BYTES))
        except (FileNotFoundError, BadBytesError):  # dropped, or its header is not whole yet
            return False
        if (header.epoch, header.stream, header.schema_hash) != (self.epoch, self.tables.schema.stream, self._hash):
            raise StorageError(f"{segment.path}: is of another stream than the manifest's")
        self._segment, self._header = segment, header
        self._offset, self._lsn = SEGMENT_BYTES, header.first_lsn
        return True

    def _has_next(self, wanted: int) -> bool:
        """Go to a newer file that has the frame that is wanted, where there is one."""
        assert self._segment is not None
        for segment in reversed(list_segments(self.folder)):
            if self._segment.first_lsn < segment.first_lsn <= wanted:
                return self._enter(segment)
        return False

    def _next(self, fd: int) -> ReceivedFrame | None:
        """The frame at byte `_offset` of the file, or None where it is not whole (yet)."""
        assert self._header is not None
        try:
            data = os.pread(fd, FRAME_BYTES, self._offset)
            header = FrameHeader.unpack_at(data, self._header, self._offset, self._lsn)
            if header.length > payload_limit(header.type, self.tables):
                raise BadBytesError(f"a frame of {header.length} bytes")
            payload = _read_exactly(fd, padded(header.length), header.offset + FRAME_BYTES)
            check_padding(payload, header.length)
            frame = ReceivedFrame(header, payload[: header.length])
            check_frame(frame, self.tables)
        except BadBytesError:
            return None
        return frame


def _read_exactly(fd: int, size: int, offset: int) -> memoryview:
    data = memoryview(bytearray(size))
    done = 0
    while done < size:
        got = os.preadv(fd, [data[done:]], offset + done)
        if got == 0:
            raise BadBytesError(f"the file ends at byte {offset + done}")
        done += got
    return data


PARTIAL_FRAME: Final = 128  # frame flag, on the wire only: blocks are left out


def wanted_parts(header: FrameHeader, payload: memoryview, tables: BlockTables) -> list[Buffer] | None:
    """What is sent of the payload of a table; None where a frame is sent whole."""
    if header.type not in TABLE_TYPES:
        return None
    size = tables.size_of_table(header, payload)
    table, _ = tables.table(header, payload[:size])
    places = ((int(entry["offset"]), int(entry["length"])) for entry in tables.wanted(header.type, table))
    return [payload[:size], *(payload[at : at + length] for at, length in places if length)]


def partial_header(header: FrameHeader) -> FrameHeader:
    """The header that says so."""
    return replace(header, flags=header.flags | PARTIAL_FRAME)


def receive_partial(sock: ByteChannel, header: FrameHeader, tables: BlockTables) -> ReceivedFrame:
    """A table without the blocks that are not wanted; those that came are checked."""
    head = receive(sock, TABLE_HEAD.size)
    size = tables.size_of_table(header, head)
    table, base_step = tables.table(header, b"".join((head, receive(sock, size - len(head)))))
    found = []
    for entry in tables.wanted(header.type, table):
        data = np.frombuffer(receive(sock, int(entry["length"])), np.uint8)
        found.append(tables.block(header.type, entry, data))
    return ReceivedFrame(header, memoryview(b""), TableBlocks(tuple(found), base_step))
