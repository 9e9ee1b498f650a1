"""Frames of one stream, in order, become complete steps. Where they come from does not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ucp import tunables
from ucp.log.codecs import DTYPES, Bytes
from ucp.log.frames import FRAME_BYTES, TABLE_TYPES, BadBytesError, FrameHeader, FrameType, checksum, padded
from ucp.log.payloads import (
    TABLE_HEAD,
    Commit,
    Digest,
    StepRecord,
    data_start,
    table_bytes,
    unpack_digests,
    unpack_json,
    unpack_table,
)
from ucp.log.reader import StoredBlock
from ucp.log.schema import StreamSchema
from ucp.records import dataclass, field, replace
from ucp.shadow.portions import Portion


class GapError(Exception):
    """Frames are missing between what was taken last and what came now."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"frame {got} came where frame {expected} should be")
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it came: its payload without padding, or the blocks that came of it, which are checked."""

    header: FrameHeader
    payload: memoryview
    blocks: Mapping[int, StoredBlock] | None = None


@dataclass(slots=True)
class ArrivedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    blocks: Mapping[int, StoredBlock]  # gradients, by block
    aux: Any  # JSON values, or None
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArrivedDigests:
    """Digests that the job took of its own states after a step, of one stream."""

    stream: int
    step: int
    digests: list[Digest]
    nbytes: int = 0


def payload_limit(kind: FrameType, schema: StreamSchema) -> int:
    """The most bytes that a payload of this kind can have in a stream: what claims more is not read."""
    if kind in TABLE_TYPES:
        widest = 8  # bytes of an element
        kinds = 1 if kind is FrameType.GRAD else 8  # states of a block in one frame
        data = sum(padded(block.count * widest) for block in schema.blocks)
        return kinds * (data_start(len(schema.blocks)) + data)
    if kind is FrameType.STEP:
        return tunables.SHADOW_STEP_BYTES
    return tunables.SHADOW_NOTE_BYTES


class Intake:
    """One stream. `offer` frames in order; complete steps come out of `ready`. Not thread-safe."""

    def __init__(
        self, epoch: int, schema: StreamSchema, expected: int | None = None, portion: Portion | None = None
    ) -> None:
        """`expected` is the number of the next frame; None takes the first that comes, if it begins a step.

        Of gradients only those in the `portion` are kept.
        """
        self.epoch = epoch
        self.schema = schema
        self.portion = portion
        self.expected = expected
        self.ready: deque[ArrivedStep | ArrivedDigests] = deque()
        self.pending_bytes = 0  # of steps in `ready`, and of the one that is coming
        self.newest: int | None = None  # the newest step of which any frame has come
        self.committed: int | None = None  # the newest step that is complete
        self._opened: _Opened | None = None

    def offer(self, frame: Frame) -> bool:
        """Take a frame; False for one that was taken before. `GapError` where frames are missing before it."""
        header = frame.header
        if (header.epoch, header.stream) != (self.epoch, self.schema.stream):
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

    def pop(self) -> ArrivedStep | ArrivedDigests:
        """The oldest of `ready`."""
        item = self.ready.popleft()
        self.pending_bytes -= item.nbytes
        return item

    def _take(self, frame: Frame) -> None:
        header, opened = frame.header, self._opened
        if header.type is FrameType.STEP:
            if opened is not None:
                raise BadBytesError(f"step {header.step} begins before step {opened.step} has ended")
            check_small(frame)
            self._opened = _Opened(header.step, header.lsn, StepRecord.unpack(bytes(frame.payload)))
            self.newest = header.step
        elif opened is None:
            if header.type in (FrameType.GRAD, FrameType.COMMIT):
                raise BadBytesError(f"a {header.type.name} frame outside of a step")
            if header.type is FrameType.DIGEST:
                check_small(frame)
                digests = unpack_digests(bytes(frame.payload))
                self._add(ArrivedDigests(header.stream, header.step, digests, header.length))
        elif header.step != opened.step:
            raise BadBytesError(f"a frame of step {header.step} inside step {opened.step}")
        elif header.type is FrameType.GRAD:
            opened.blocks.update(self._blocks(frame))
            opened.grads.append((header.length, header.checksum))
        elif header.type is FrameType.AUX:
            check_small(frame)
            opened.aux = unpack_json(bytes(frame.payload))
        elif header.type is FrameType.COMMIT:
            check_small(frame)
            if Commit.unpack(bytes(frame.payload)) != Commit.of(opened.grads, opened.lsn):
                raise BadBytesError(f"the commit of step {opened.step} does not agree with its frames")
            size = FRAME_BYTES + sum(block.data.nbytes for block in opened.blocks.values())
            self._add(ArrivedStep(opened.step, opened.record, opened.blocks, opened.aux, size))
            self._opened = None
            self.committed = header.step

    def _blocks(self, frame: Frame) -> Mapping[int, StoredBlock]:
        if frame.blocks is not None:
            return frame.blocks
        if self.portion is None:
            return blocks_of(frame, self.schema)
        found = blocks_of(frame, self.schema, self.portion)
        # Copied, so that the rest of the frame can go.
        return {number: replace(block, data=block.data.copy()) for number, block in found.items()}

    def _add(self, item: ArrivedStep | ArrivedDigests) -> None:
        self.ready.append(item)
        self.pending_bytes += item.nbytes


@dataclass(slots=True)
class _Opened:
    """A step that is coming."""

    step: int
    lsn: int
    record: StepRecord
    blocks: dict[int, StoredBlock] = field(default_factory=dict)
    grads: list[tuple[int, int]] = field(default_factory=list)
    aux: Any = None


def check(frame: Frame, schema: StreamSchema) -> None:
    """Are all bytes of a frame there and right? `BadBytesError` where not."""
    if frame.header.type is FrameType.GRAD:
        blocks_of(frame, schema)
    elif frame.header.type not in TABLE_TYPES:
        check_small(frame)


def check_small(frame: Frame) -> None:
    """The checksum of a frame that is no table."""
    if checksum(frame.payload) != frame.header.checksum:
        raise BadBytesError("the checksum of a payload is wrong")


def blocks_of(frame: Frame, schema: StreamSchema, portion: Portion | None = None) -> dict[int, StoredBlock]:
    """The blocks of a GRAD frame (in a portion), each checked: its place, its size in the schema, its checksum."""
    payload, header = frame.payload, frame.header
    if len(payload) < TABLE_HEAD.size:
        raise BadBytesError("a table of blocks ends early")
    count = TABLE_HEAD.unpack_from(payload)[0]
    size = table_bytes(count)
    if count > len(schema.blocks) or size > len(payload):
        raise BadBytesError("a table of blocks is longer than its frame, or than the stream has blocks")
    if checksum(payload[:size]) != header.checksum:
        raise BadBytesError("the checksum of a table of blocks is wrong")
    table, _ = unpack_table(payload[:size], header.length)
    found: dict[int, StoredBlock] = {}
    for entry in table:
        offset, length = int(entry["offset"]), int(entry["length"])
        block = stored_block(entry, np.frombuffer(payload, np.uint8, length, offset), schema, portion)
        if block is None:
            continue
        if block.block in found:
            raise BadBytesError(f"block {block.block} is there twice")
        found[block.block] = block
    return found


def stored_block(entry: Any, data: Bytes, schema: StreamSchema, portion: Portion | None = None) -> StoredBlock | None:
    """A block from its entry in a table and its bytes; None where it is not in the portion."""
    block, elements = int(entry["block"]), int(entry["count"])
    if block >= len(schema.blocks) or elements != schema.blocks[block].count:
        raise BadBytesError(f"block {block} of {elements} elements is none of the stream")
    if portion is not None and not portion.has(schema.blocks[block]):
        return None
    if checksum(data.data) != int(entry["checksum"]):
        raise BadBytesError(f"the checksum of block {block} is wrong")
    dtype = DTYPES[int(entry["dtype"])]
    return StoredBlock(block, int(entry["state"]), int(entry["encoding"]), dtype, elements, data)
