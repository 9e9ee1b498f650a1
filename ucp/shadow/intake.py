"""Frames of one stream, in order, become complete steps. Where they come from does not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ucp import tunables
from ucp.log.frames import FRAME_BYTES, TABLE_TYPES, BadBytesError, FrameHeader, FrameType, checksum
from ucp.log.payloads import Commit, Digest, StepRecord, unpack_digests, unpack_json
from ucp.log.reader import StoredBlock
from ucp.shadow.tables import Blocks, Tables

Key = tuple[int, int]  # block, state


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
    blocks: Blocks | None = None


@dataclass(slots=True)
class Values:
    """States and buffers after a step: as they are, or as differences to what they were after an earlier one."""

    full: dict[Key, StoredBlock] = field(default_factory=dict)
    differences: dict[Key, tuple[StoredBlock, int]] = field(default_factory=dict)  # with the step that they are to

    def add(self, frame: FrameType, blocks: Blocks) -> None:
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
class ArrivedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    blocks: Mapping[int, StoredBlock]  # gradients, by block
    aux: Any  # JSON values, or None
    nbytes: int
    values: Values = field(default_factory=Values)


@dataclass(frozen=True, slots=True)
class ArrivedDigests:
    """Digests that the job took of its own states after a step, of one stream."""

    stream: int
    step: int
    digests: list[Digest]
    nbytes: int = 0


def payload_limit(kind: FrameType, tables: Tables) -> int:
    """The most bytes that a payload of this kind can have in a stream: what claims more is not read."""
    if kind in TABLE_TYPES:
        return tables.limit(kind)
    if kind is FrameType.STEP:
        return tunables.SHADOW_STEP_BYTES
    return tunables.SHADOW_NOTE_BYTES


class Intake:
    """One stream. `offer` frames in order; complete steps come out of `ready`. Not thread-safe."""

    def __init__(self, epoch: int, tables: Tables, expected: int | None = None) -> None:
        """`expected` is the number of the next frame; None takes the first that comes, if it begins a step."""
        self.epoch = epoch
        self.tables = tables
        self.expected = expected
        self.ready: deque[ArrivedStep | ArrivedDigests] = deque()
        self.pending_bytes = 0  # of steps in `ready`, and of the one that is coming
        self.newest: int | None = None  # the newest step of which any frame has come
        self.committed: int | None = None  # the newest step that is complete
        self._opened: _Opened | None = None

    def offer(self, frame: Frame) -> bool:
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
            elif frame.blocks is None:
                check(frame, self.tables)  # nothing of it is used, but its number counts: it must be the job's
        elif header.step != opened.step:
            raise BadBytesError(f"a frame of step {header.step} inside step {opened.step}")
        elif header.type is FrameType.GRAD:
            opened.blocks.update({block.block: block for block in self._blocks(frame).found})
            opened.grads.append((header.length, header.checksum))
        elif header.type in (FrameType.FULL, FrameType.DIFF):
            opened.values.add(header.type, self._blocks(frame))
        elif header.type is FrameType.AUX:
            check_small(frame)
            opened.aux = unpack_json(bytes(frame.payload))
        elif header.type is FrameType.COMMIT:
            check_small(frame)
            if Commit.unpack(bytes(frame.payload)) != Commit.of(opened.grads, opened.lsn):
                raise BadBytesError(f"the commit of step {opened.step} does not agree with its frames")
            size = FRAME_BYTES + sum(block.data.nbytes for block in opened.blocks.values()) + opened.values.nbytes
            self._add(ArrivedStep(opened.step, opened.record, opened.blocks, opened.aux, size, opened.values))
            self._opened = None
            self.committed = header.step

    def _blocks(self, frame: Frame) -> Blocks:
        if frame.blocks is not None:
            return frame.blocks
        found = self.tables.read(frame.header, frame.payload)
        return found if self.tables.portion is None else found.copied()

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
    values: Values = field(default_factory=Values)
    aux: Any = None


def check(frame: Frame, tables: Tables) -> None:
    """Are all bytes of a frame there and right? `BadBytesError` where not."""
    if frame.header.type in TABLE_TYPES:
        tables.read(frame.header, frame.payload)
    else:
        check_small(frame)


def check_small(frame: Frame) -> None:
    """The checksum of a frame that is no table."""
    if checksum(frame.payload) != frame.header.checksum:
        raise BadBytesError("the checksum of a payload is wrong")
