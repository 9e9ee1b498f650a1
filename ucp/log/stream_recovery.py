"""One file of a stream, open for reading: whether a frame at some place is provably whole.

What recovery finds in a stream: whole frames, complete steps, and why there are no more of them.

From frames to steps: which are complete, and where the order breaks.

Recovery: which frames of a stream are provably whole, and which steps they make complete.

A stream is read from its first segment on, and only up to the first frame that is not provably whole: nothing is ever
skipped. So what is found is always a prefix of what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ucp.errors import StorageError
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
    checksum,
    padded,
)
from ucp.log.payloads import TABLE_HEAD, StepCommit, StepRecord, Table, table_bytes, unpack_table
from ucp.log.stream_schema import StreamSchema
from ucp.storage.local import RandomAccessFile

CHUNK: Final = 1 << 20


class SegmentFile(RandomAccessFile):
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
    step: int | None  # the last step that was seen before
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
        """The payload of a frame."""
        with SegmentFile(self.file) as file:
            return file.read(self.payload_offset, self.header.length)


@dataclass(slots=True)
class LogSegment:
    """A file of a stream: `end` is the offset behind its last whole frame."""

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
    others: list[FrameRef]  # DIFF, FULL and DIGEST inside the step
    commit: FrameRef

    @property
    def nbytes(self) -> int:
        return sum(ref.header.length for ref in self.grads)


@dataclass(slots=True)
class StreamScan:
    """What recovery found in a stream."""

    folder: Path
    stream: int
    segments: list[LogSegment] = field(default_factory=list)
    steps: dict[int, LoggedStep] = field(default_factory=dict)  # complete ones, in order and without gaps
    loose: list[FrameRef] = field(default_factory=list)  # DIGEST, FULL, DIFF, AUX after the commit of their step
    defects: list[LogDefect] = field(default_factory=list)
    ended: bool = False  # the writer closed the stream
    next_lsn: int = 0  # of the frame that would come next


def drop_frames_from(scan: StreamScan, ref: FrameRef) -> None:
    """Forget everything from a frame on."""
    for number, segment in enumerate(scan.segments):
        if segment.path == ref.file:
            segment.end = ref.header.offset
            del scan.segments[number + 1 :]
            return


def group_steps(scan: StreamScan, frames: list[FrameRef]) -> None:
    """Group frames into steps; stop at the first that is out of order."""
    opened: LoggedStep | None = None
    opening: FrameRef | None = None
    for ref in frames:
        header = ref.header
        try:
            if header.type == FrameType.STEP:
                if opened is not None:
                    raise BadBytesError(f"step {header.step} begins before step {opened.step} has ended")
                if scan.steps and header.step != next(reversed(scan.steps)) + 1:
                    raise BadBytesError(f"step {header.step} follows step {next(reversed(scan.steps))}")
                opened, opening = LoggedStep(header.step, StepRecord.unpack(ref.read()), [], None, [], ref), ref
                scan.ended = False
            elif opened is None or opening is None:
                if header.type in (FrameType.GRAD, FrameType.COMMIT):
                    raise BadBytesError(f"a {header.type.name} frame outside of a step")
                scan.ended = header.type == FrameType.EPOCH_END
                if not scan.ended:
                    scan.loose.append(ref)
            elif header.step != opened.step:
                raise BadBytesError(f"a frame of step {header.step} inside step {opened.step}")
            elif header.type == FrameType.COMMIT:
                told = StepCommit.unpack(ref.read())
                grads = [(grad.header.length, grad.header.checksum) for grad in opened.grads]
                if told != StepCommit.of(grads, opening.header.lsn):
                    raise BadBytesError(f"the commit of step {opened.step} does not agree with its frames")
                opened.commit = ref
                scan.steps[opened.step] = opened
                opened = opening = None
            elif header.type == FrameType.GRAD:
                opened.grads.append(ref)
            elif header.type == FrameType.AUX:
                opened.aux = ref
            else:
                opened.others.append(ref)
        except BadBytesError as error:
            defect = LogDefect("disorder", ref.file, header.offset, header.lsn, _last(scan), str(error))
            scan.defects.append(defect)
            drop_frames_from(scan, ref)
            scan.next_lsn = header.lsn
            return
    if opening is not None:
        reason = f"step {opening.header.step} has no commit"
        header = opening.header
        scan.defects.append(LogDefect("incomplete", opening.file, header.offset, header.lsn, _last(scan), reason))


def _last(scan: StreamScan) -> int | None:
    return next(reversed(scan.steps), None)


SUFFIX: Final = ".ugl"


def scan_stream(folder: Path, epoch: int, schema: StreamSchema, check: Literal["all", "tail"] = "all") -> StreamScan:
    """Walk a stream's segments. `check` says whose blocks are read: all, or only those that may not be durable.

    Headers, tables and small frames are always checked. Blocks that are not read here are checked when they are.
    """
    scan = StreamScan(folder, schema.stream)
    frames = list(_frames(scan, epoch, schema))
    frames = _checked(scan, frames, check)
    if frames:
        scan.next_lsn = frames[-1].header.lsn + 1
    elif scan.segments:
        scan.next_lsn = scan.segments[0].first_lsn
    group_steps(scan, frames)
    return scan


def list_segments(folder: Path) -> list[LogSegment]:
    """The segment files of a stream, in order."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdigit())
        return [LogSegment(path, int(path.stem), path.stat().st_size) for path in paths]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Frames


def _frames(scan: StreamScan, epoch: int, schema: StreamSchema) -> Iterator[FrameRef]:
    """Frames whose headers, tables and small payloads are whole; the rest of a broken stream is left out."""
    scan.segments = list_segments(scan.folder)
    _read_headers(scan, epoch, schema)
    last_step: int | None = None
    expected = scan.segments[0].first_lsn if scan.segments else 0
    for number, segment in enumerate(scan.segments):
        assert segment.header is not None
        following = scan.segments[number + 1].first_lsn if number + 1 < len(scan.segments) else None
        if segment.first_lsn != expected:
            reason = f"the stream goes on with frame {segment.first_lsn}, so frames are missing"
            scan.defects.append(LogDefect("damaged", segment.path, 0, expected, last_step, reason))
            return
        segment.end = SEGMENT_BYTES
        with SegmentFile(segment.path) as file:
            while following is None or expected < following:
                try:
                    header = frame_at(file, segment.header, segment.end, expected)
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
    """Give segments their headers; what follows a segment without a good one is not looked at."""
    for number, segment in enumerate(scan.segments):
        try:
            with SegmentFile(segment.path) as file:
                header = SegmentHeader.unpack(file.read(0, SEGMENT_BYTES))
            if (header.epoch, header.stream, header.first_lsn) != (epoch, scan.stream, segment.first_lsn):
                raise BadBytesError(
                    f"the header is of epoch {header.epoch}, stream {header.stream}, frame {header.first_lsn}"
                )
            if header.schema_hash != schema.hash():
                raise BadBytesError("the header names another block schema than the manifest's")
        except BadBytesError as error:
            last = number + 1 == len(scan.segments)
            with SegmentFile(segment.path) as file:
                kind: DefectKind = "torn" if last and file.frame_after(0) < 0 else "damaged"
            scan.defects.append(LogDefect(kind, segment.path, 0, segment.first_lsn, None, str(error)))
            del scan.segments[number:]
            return
        segment.header = header


def _checked(scan: StreamScan, frames: list[FrameRef], check: Literal["all", "tail"]) -> list[FrameRef]:
    """The frames up to the first whose blocks are damaged."""
    first = 0
    if check == "tail":
        ends = [i for i, ref in enumerate(frames[:-1]) if ref.header.flags & BATCH_END]
        first = ends[-1] + 1 if ends else 0
    files: dict[Path, SegmentFile] = {}
    try:
        for number, ref in enumerate(frames):
            if number < first or ref.header.type not in TABLE_TYPES:
                continue
            if ref.file not in files:
                _close(files)
                files[ref.file] = SegmentFile(ref.file)
            try:
                check_blocks(files[ref.file], ref.header)
            except BadBytesError as error:
                last = ref.file == scan.segments[-1].path
                durable = any(other.header.flags & BATCH_END for other in frames[number:-1])
                kind: DefectKind = "torn" if last and not durable else "damaged"
                header = ref.header
                defect = LogDefect(kind, ref.file, header.offset, header.lsn, header.step, str(error))
                scan.defects = [defect]
                drop_frames_from(scan, ref)
                return frames[:number]
    finally:
        _close(files)
    return frames


def _durable_after(file: SegmentFile, segment: LogSegment) -> bool:
    """Do later bytes of the segment prove that what is broken at `segment.end` was durable once?

    The writer waits for the disk after a frame with BATCH_END, before it writes the next: so such a frame with another
    one behind it proves it.
    """
    assert segment.header is not None
    at, batch_ended = segment.end, False
    while (at := file.frame_after(at)) >= 0:
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


def _close(files: dict[Path, SegmentFile]) -> None:
    for file in files.values():
        file.close()
    files.clear()
