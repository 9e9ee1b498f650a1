"""Recovery of a stream: which frames are provably whole, and which steps they complete.

A stream is read from its first segment up to the first frame that is not provably whole. Nothing is skipped, so the
result is always a prefix of what was written. `StepSequence` is also what a shadow uses for frames that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Final, Literal

from ucp.errors import storage_errors
from ucp.log.codecs import DTYPES
from ucp.log.frames import (
    BATCH_END,
    FRAME_BYTES,
    FRAME_MAGIC,
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
from ucp.log.payloads import TABLE_HEAD, StepCommit, StepRecord, Table, table_bytes, table_size, unpack_table
from ucp.log.stream_schema import StreamSchema
from ucp.storage.local import RandomAccessFile

SUFFIX: Final = ".ugl"
_READ_BYTES: Final = 1 << 20

DefectKind = Literal["torn", "damaged", "incomplete", "disorder"]


@dataclass(frozen=True, slots=True)
class LogDefect:
    """Why a stream ends earlier than its files do.

    `torn`: a write that never became durable (the end of the last segment). `damaged`: bytes that were durable once.
    `incomplete`: whole frames of a step that has no commit. `disorder`: whole frames that contradict each other.
    """

    kind: DefectKind
    file: Path
    offset: int  # in bytes
    lsn: int  # of the first frame that is lost
    step: int | None  # the last step before it
    reason: str

    def __str__(self) -> str:
        seen = "before any step" if self.step is None else f"after step {self.step}"
        return f"{self.file}: byte {self.offset}, frame {self.lsn}, {seen}: {self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A whole frame and the file that it is in."""

    file: Path
    header: FrameHeader
    name: str  # of the file, without its folder
    payload_offset: int

    @staticmethod
    def of(file: Path, header: FrameHeader) -> FrameRef:
        return FrameRef(file, header, file.name, header.offset + FRAME_BYTES)

    def read(self) -> bytes:
        """The payload of the frame."""
        with SegmentFile(self.file) as file:
            return file.read(self.payload_offset, self.header.length)


@dataclass(slots=True)
class LogSegment:
    """A file of a stream. `end` is the offset after its last whole frame."""

    path: Path
    first_lsn: int
    size: int
    header: SegmentHeader | None = None
    end: int = 0
    frames: int = 0
    first_step: int | None = None
    last_step: int | None = None


@dataclass(slots=True)
class LoggedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    grads: list[FrameRef]
    aux: FrameRef | None
    others: list[FrameRef]  # DIFF, FULL and DIGEST frames inside the step
    commit: FrameRef

    @property
    def nbytes(self) -> int:
        return sum(ref.header.length for ref in self.grads)


@dataclass(slots=True)
class StreamScan:
    """The result of recovery: whole frames, complete steps, and why there are not more of them."""

    folder: Path
    stream: int
    segments: list[LogSegment] = field(default_factory=list)
    steps: dict[int, LoggedStep] = field(default_factory=dict)  # complete ones, in order and without gaps
    loose: list[FrameRef] = field(default_factory=list)  # DIGEST, FULL, DIFF and AUX frames between steps
    defects: list[LogDefect] = field(default_factory=list)
    ended: bool = False  # the writer closed the stream
    next_lsn: int = 0  # of the frame that would follow

    @property
    def last_step(self) -> int | None:
        return next(reversed(self.steps), None)

    def add_defect(self, kind: DefectKind, ref: FrameRef, step: int | None, reason: str) -> None:
        self.defects.append(LogDefect(kind, ref.file, ref.header.offset, ref.header.lsn, step, reason))

    def end_before(self, ref: FrameRef) -> None:
        """Drop a frame and everything after it from `segments`."""
        for number, segment in enumerate(self.segments):
            if segment.path == ref.file:
                segment.end = ref.header.offset
                del self.segments[number + 1 :]
                return


def scan_stream(folder: Path, epoch: int, schema: StreamSchema, check: Literal["all", "tail"] = "all") -> StreamScan:
    """Read a stream's segments. `check` selects the blocks that are read: all, or only those that may not be durable.

    Headers, tables and small frames are always checked; blocks that are not read here are checked when they are used.
    """
    scan = StreamScan(folder, schema.stream)
    frames = _checked(scan, list(_frames(scan, epoch, schema)), check)
    if frames:
        scan.next_lsn = frames[-1].header.lsn + 1
    elif scan.segments:
        scan.next_lsn = scan.segments[0].first_lsn
    _group_steps(scan, frames)
    return scan


def list_segments(folder: Path) -> list[LogSegment]:
    """The segment files of a stream, in order."""
    with storage_errors(folder), suppress(FileNotFoundError):
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdigit())
        return [LogSegment(path, int(path.stem), path.stat().st_size) for path in paths]
    return []


# From frames to steps -----------------------------------------------------------------------------------------------


class FrameRole(Enum):
    """What a frame does in the sequence of steps."""

    OPENS_STEP = auto()
    IN_STEP = auto()
    COMMITS_STEP = auto()
    BETWEEN_STEPS = auto()


@dataclass(slots=True)
class OpenStep:
    """A step whose commit has not been seen yet."""

    step: int
    lsn: int  # of its STEP frame
    record: StepRecord
    grads: list[tuple[int, int]] = field(default_factory=list)  # payload length and checksum of its GRAD frames


class StepSequence:
    """Checks the order of a stream's frames: STEP, all frames of that step, COMMIT, then the next step."""

    def __init__(self) -> None:
        self.open: OpenStep | None = None
        self.last_step: int | None = None  # the newest complete step

    def add(self, header: FrameHeader, payload: Callable[[], bytes]) -> FrameRole:
        """Add the next frame; `payload` is called for STEP and COMMIT frames.

        Raises `BadBytesError` and changes nothing if the frame must not follow the previous ones.
        """
        opened = self.open
        if header.type is FrameType.STEP:
            if opened is not None:
                raise BadBytesError(f"step {header.step} begins before step {opened.step} has ended")
            if self.last_step is not None and header.step != self.last_step + 1:
                raise BadBytesError(f"step {header.step} follows step {self.last_step}")
            self.open = OpenStep(header.step, header.lsn, StepRecord.unpack(payload()))
            return FrameRole.OPENS_STEP
        if opened is None:
            if header.type in (FrameType.GRAD, FrameType.COMMIT):
                raise BadBytesError(f"a {header.type.name} frame outside of a step")
            return FrameRole.BETWEEN_STEPS
        if header.step != opened.step:
            raise BadBytesError(f"a frame of step {header.step} inside step {opened.step}")
        if header.type is FrameType.COMMIT:
            if StepCommit.unpack(payload()) != StepCommit.of(opened.grads, opened.lsn):
                raise BadBytesError(f"the commit of step {opened.step} does not agree with its frames")
            self.open, self.last_step = None, opened.step
            return FrameRole.COMMITS_STEP
        if header.type is FrameType.GRAD:
            opened.grads.append((header.length, header.checksum))
        return FrameRole.IN_STEP


def _group_steps(scan: StreamScan, frames: list[FrameRef]) -> None:
    """Group frames into steps, up to the first frame that is out of order."""
    sequence = StepSequence()
    step: LoggedStep | None = None  # `commit` is its STEP frame until the commit is found
    for ref in frames:
        try:
            role = sequence.add(ref.header, ref.read)
        except BadBytesError as error:
            scan.add_defect("disorder", ref, scan.last_step, str(error))
            scan.end_before(ref)
            scan.next_lsn = ref.header.lsn
            return
        if role is FrameRole.OPENS_STEP:
            assert sequence.open is not None
            step = LoggedStep(ref.header.step, sequence.open.record, [], None, [], ref)
            scan.ended = False
        elif role is FrameRole.BETWEEN_STEPS:
            scan.ended = ref.header.type is FrameType.EPOCH_END
            if not scan.ended:
                scan.loose.append(ref)
        elif step is not None:
            if role is FrameRole.COMMITS_STEP:
                step.commit = ref
                scan.steps[step.step] = step
                step = None
            elif ref.header.type is FrameType.GRAD:
                step.grads.append(ref)
            elif ref.header.type is FrameType.AUX:
                step.aux = ref
            else:
                step.others.append(ref)
    if step is not None:
        scan.add_defect("incomplete", step.commit, scan.last_step, f"step {step.step} has no commit")


# From segments to frames --------------------------------------------------------------------------------------------


def _frames(scan: StreamScan, epoch: int, schema: StreamSchema) -> Iterator[FrameRef]:
    """Frames whose headers, tables and small payloads are whole, up to the first one that is not."""
    scan.segments = list_segments(scan.folder)
    _read_headers(scan, epoch, schema)
    last_step: int | None = None
    expected = scan.segments[0].first_lsn if scan.segments else 0
    for number, segment in enumerate(scan.segments):
        assert segment.header is not None
        following = scan.segments[number + 1].first_lsn if number + 1 < len(scan.segments) else None
        if segment.first_lsn != expected:
            reason = f"the stream continues with frame {segment.first_lsn}, so frames are missing"
            scan.defects.append(LogDefect("damaged", segment.path, 0, expected, last_step, reason))
            return
        segment.end = SEGMENT_BYTES
        with SegmentFile(segment.path) as file:
            while following is None or expected < following:
                try:
                    header = _frame_at(file, segment.header, segment.end, expected)
                except BadBytesError as error:
                    if following is None and file.is_zero(segment.end):
                        return
                    torn = following is None and not _durable_after(file, segment)
                    kind: DefectKind = "torn" if torn else "damaged"
                    reason = str(error)
                    if following is not None and segment.end >= file.size:
                        reason = f"the next file begins with frame {following}, so frames are missing"
                    scan.defects.append(LogDefect(kind, segment.path, segment.end, expected, last_step, reason))
                    return
                segment.end = header.end
                segment.frames += 1
                expected += 1
                last_step = header.step
                segment.first_step = header.step if segment.first_step is None else segment.first_step
                segment.last_step = header.step
                yield FrameRef.of(segment.path, header)


def _read_headers(scan: StreamScan, epoch: int, schema: StreamSchema) -> None:
    """Read the header of every segment; segments from the first bad header on are dropped."""
    for number, segment in enumerate(scan.segments):
        try:
            with SegmentFile(segment.path) as file:
                header = SegmentHeader.unpack(file.read(0, SEGMENT_BYTES))
            if (header.epoch, header.stream, header.first_lsn) != (epoch, scan.stream, segment.first_lsn):
                raise BadBytesError(
                    f"the header is of epoch {header.epoch}, stream {header.stream}, frame {header.first_lsn}"
                )
            if header.schema_hash != schema.hash():
                raise BadBytesError("the header names another block schema than the manifest")
        except BadBytesError as error:
            is_last = number + 1 == len(scan.segments)
            with SegmentFile(segment.path) as file:
                kind: DefectKind = "torn" if is_last and file.find_frame(0) < 0 else "damaged"
            scan.defects.append(LogDefect(kind, segment.path, 0, segment.first_lsn, None, str(error)))
            del scan.segments[number:]
            return
        segment.header = header


def _checked(scan: StreamScan, frames: list[FrameRef], check: Literal["all", "tail"]) -> list[FrameRef]:
    """Read blocks; returns the frames up to the first whose blocks are damaged."""
    first = 0
    if check == "tail":
        ends = [i for i, ref in enumerate(frames[:-1]) if ref.header.flags & BATCH_END]
        first = ends[-1] + 1 if ends else 0
    with ExitStack() as stack:
        file: SegmentFile | None = None
        for number, ref in enumerate(frames):
            if number < first or ref.header.type not in TABLE_TYPES:
                continue
            if file is None or file.path != ref.file:
                stack.close()
                file = stack.enter_context(SegmentFile(ref.file))
            try:
                _check_blocks(file, ref.header)
            except BadBytesError as error:
                is_last = ref.file == scan.segments[-1].path
                durable = any(other.header.flags & BATCH_END for other in frames[number:-1])
                scan.defects.clear()
                scan.add_defect("torn" if is_last and not durable else "damaged", ref, ref.header.step, str(error))
                scan.end_before(ref)
                return frames[:number]
    return frames


def _durable_after(file: SegmentFile, segment: LogSegment) -> bool:
    """Do later bytes of the segment prove that the bad bytes at `segment.end` were durable once?

    The writer syncs after a frame with BATCH_END, before it writes the next one: so such a frame followed by another
    is the proof.
    """
    assert segment.header is not None
    at, batch_ended = segment.end, False
    while (at := file.find_frame(at)) >= 0:
        try:
            header = FrameHeader.unpack(file.read(at, FRAME_BYTES), segment.header.salt)
        except BadBytesError:
            at += 1
            continue
        if header.offset == at:
            if batch_ended:
                return True
            batch_ended = bool(header.flags & BATCH_END)
        at += 1
    return False


# One file -----------------------------------------------------------------------------------------------------------


class SegmentFile(RandomAccessFile):
    """A segment open for positional reads."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes, or fewer at the end of the file."""
        data = self.read_at_most(offset, size)
        if len(data) < size and offset + size <= self.size:
            raise BadBytesError(f"the file ends at byte {offset + len(data)}")
        return data

    def is_zero(self, offset: int) -> bool:
        """Are all bytes from `offset` on zero? True if there are none."""
        while data := self.read(offset, min(_READ_BYTES, max(self.size - offset, 0))):
            if data.count(0) != len(data):
                return False
            offset += len(data)
        return True

    def find_frame(self, offset: int) -> int:
        """The next offset at which bytes look like the start of a frame, or -1."""
        at = padded(offset)
        while data := self.read(at, min(_READ_BYTES, max(self.size - at, 0))):
            found = data.find(FRAME_MAGIC)
            while found >= 0 and found % FRAME_BYTES:
                found = data.find(FRAME_MAGIC, found + 1)
            if found >= 0:
                return at + found
            at += len(data)
        return -1


def _frame_at(file: SegmentFile, segment: SegmentHeader, offset: int, lsn: int) -> FrameHeader:
    """The frame at `offset`, which must be the stream's frame `lsn`. Blocks are not read."""
    header = FrameHeader.unpack_at(file.read(offset, FRAME_BYTES), segment, offset, lsn)
    if header.end > file.size:
        raise BadBytesError(f"the file ends at byte {file.size}, inside a frame that ends at {header.end}")
    if header.type in TABLE_TYPES:
        _read_table(file, header)
    else:
        payload = file.read(offset + FRAME_BYTES, padded(header.length))
        if checksum(payload[: header.length]) != header.checksum:
            raise BadBytesError("the checksum of a payload is wrong")
        check_padding(payload, header.length)
    return header


def _read_table(file: SegmentFile, header: FrameHeader) -> Table:
    """The entries of a table frame, checked."""
    start = header.offset + FRAME_BYTES
    size = table_size(header, file.read(start, TABLE_HEAD.size))
    return unpack_table(header, file.read(start, size))[0]


def _check_blocks(file: SegmentFile, header: FrameHeader) -> None:
    """Read every block of a table frame and compare checksums; the bytes between blocks must be zero."""
    table = _read_table(file, header)
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
