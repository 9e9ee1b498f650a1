"""Recovery: which frames of a stream are provably whole, and which steps they make complete.

A stream is read from its first segment on, and only up to the first frame that is not provably whole: nothing is ever
skipped. So what is found is always a prefix of what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from ucp.errors import StorageError
from ucp.log.found import Defect, DefectKind, FrameRef, LoggedStep, Segment, StreamScan, forget_from
from ucp.log.frames import (
    BATCH_END,
    FRAME_BYTES,
    SEGMENT_BYTES,
    TABLE_TYPES,
    BadBytesError,
    FrameHeader,
    SegmentHeader,
)
from ucp.log.grouping import group_steps
from ucp.log.schema import StreamSchema
from ucp.log.segmentfile import SegmentFile, check_blocks, frame_at

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


def list_segments(folder: Path) -> list[Segment]:
    """The segment files of a stream, in order."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdigit())
        return [Segment(path, int(path.stem), path.stat().st_size) for path in paths]
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
            scan.defects.append(Defect("damaged", segment.path, 0, expected, last_step, reason))
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
                    scan.defects.append(Defect(kind, segment.path, segment.end, expected, last_step, reason))
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
            scan.defects.append(Defect(kind, segment.path, 0, segment.first_lsn, None, str(error)))
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
                defect = Defect(kind, ref.file, header.offset, header.lsn, header.step, str(error))
                scan.defects = [defect]
                forget_from(scan, ref)
                return frames[:number]
    finally:
        _close(files)
    return frames


def _durable_after(file: SegmentFile, segment: Segment) -> bool:
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


__all__ = [
    "SUFFIX",
    "Defect",
    "FrameRef",
    "LoggedStep",
    "Segment",
    "StreamScan",
    "list_segments",
    "scan_stream",
]
