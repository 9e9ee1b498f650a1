"""Frames from the files of a log that is being written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ucp.errors import StorageError
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, BadBytesError, FrameHeader, SegmentHeader, padded
from ucp.log.walk import Segment, list_segments
from ucp.shadow.intake import Frame, GapError, check, payload_limit
from ucp.shadow.tables import Tables


class Tail:
    """Reads a stream's files from where it stopped the last time. What was not whole then is read again."""

    def __init__(self, folder: Path, epoch: int, tables: Tables) -> None:
        self.folder = folder
        self.epoch = epoch
        self.tables = tables
        self._hash = tables.schema.hash()
        self._segment: Segment | None = None
        self._header: SegmentHeader | None = None
        self._offset = 0
        self._lsn = 0  # of the frame at `_offset`

    def poll(self, wanted: int, take: Callable[[Frame], bool], until: int | None = None) -> int:
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

    def _enter(self, segment: Segment) -> bool:
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

    def _next(self, fd: int) -> Frame | None:
        """The frame at byte `_offset` of the file, or None where it is not whole (yet)."""
        assert self._header is not None
        try:
            header = FrameHeader.unpack(os.pread(fd, FRAME_BYTES, self._offset), self._header.salt)
            if (header.offset, header.lsn) != (self._offset, self._lsn):
                raise BadBytesError(f"frame {header.lsn} where frame {self._lsn} should be")
            if header.length > payload_limit(header.type, self.tables):
                raise BadBytesError(f"a frame of {header.length} bytes")
            payload = _read(fd, padded(header.length), header.offset + FRAME_BYTES)
            if payload[header.length :].tobytes().strip(b"\0"):
                raise BadBytesError("the bytes after a payload are not zero")
            frame = Frame(header, payload[: header.length])
            check(frame, self.tables)
        except BadBytesError:
            return None
        return frame


def _read(fd: int, size: int, offset: int) -> memoryview:
    data = memoryview(bytearray(size))
    done = 0
    while done < size:
        got = os.preadv(fd, [data[done:]], offset + done)
        if got == 0:
            raise BadBytesError(f"the file ends at byte {offset + done}")
        done += got
    return data
