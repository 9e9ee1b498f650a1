"""Appending frames to the segments of a stream. One thread, no queue: the bytes, and when they are durable.

A step as frames: STEP, its gradient blocks, notes, COMMIT.

States and buffers after a step, as they go into a log: differences to the step before, or absolute values.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ucp import settings
from ucp.core.dtypes import DType
from ucp.errors import StorageError
from ucp.log.codecs import DTYPE_CODES, Bits, Bytes, Encoding, encode, encode_difference
from ucp.log.frames import (
    BATCH_END,
    COMPRESSED,
    FRAME_BYTES,
    SEGMENT_BYTES,
    TABLE_TYPES,
    FrameHeader,
    FrameType,
    SegmentHeader,
    checksum,
    padded,
)
from ucp.log.payloads import ENTRY, StepCommit, StepRecord, Table, data_start, pack_json, pack_table, table_bytes
from ucp.log.stream_recovery import SUFFIX
from ucp.storage.local import sync

Buffer = bytes | memoryview
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, a file: is full
_IOVECS = 512  # of one call; the system's limit is 1,024


def segment_path(folder: Path, first_lsn: int) -> Path:
    """A segment is named by the number of its first frame."""
    return folder / f"{first_lsn:012d}{SUFFIX}"


class SegmentWriter:
    """The open segment of a stream. Errors are plain OSErrors: the caller decides what becomes of the stream."""

    def __init__(self, folder: Path, epoch: int, stream: int, schema_hash: bytes, next_lsn: int = 0) -> None:
        self.folder = folder
        self.epoch = epoch
        self.stream = stream
        self.schema_hash = schema_hash
        self.next_lsn = next_lsn
        self.path: Path | None = None
        self.end = SEGMENT_BYTES  # where the next frame goes
        self.tap: Callable[[FrameHeader, Sequence[Buffer]], None] | None = None  # sees every frame that was written
        self._fd = -1
        self._salt = 0
        self._reserved = 0

    def append(self, kind: FrameType, step: int, parts: Sequence[Buffer], *, flags: int = 0) -> tuple[int, int]:
        """Write a frame whose payload is `parts` end to end; gives (length, checksum) of the payload."""
        length = sum(len(part) for part in parts)
        total = checksum(parts[0]) if len(parts) == 1 else checksum(b"".join(parts))
        self._write(kind, step, parts, length, total, flags)
        return length, total

    def append_table(
        self, kind: FrameType, step: int, table: Table, blocks: Sequence[Buffer], *, flags: int = 0, base_step: int = -1
    ) -> tuple[int, int]:
        """Write a GRAD, DIFF or FULL frame. `blocks` is everything after the table, in order, padding included."""
        assert kind in TABLE_TYPES
        head = pack_table(table, base_step)
        total = checksum(memoryview(head)[: table_bytes(len(table))])
        length = len(head) + sum(len(block) for block in blocks)
        self._write(kind, step, [head, *blocks], length, total, flags)
        return length, total

    def _write(self, kind: FrameType, step: int, parts: Sequence[Buffer], length: int, total: int, flags: int) -> None:
        if self._fd < 0:
            self.open_segment()
        header = FrameHeader(kind, flags, self.stream, self.epoch, self.next_lsn, step, length, total, self.end)
        size = header.end - header.offset
        self._reserve(self.end + size)
        tail = bytes(padded(length) - length)
        self._write_at(self.end, [header.pack(self._salt), *parts, tail] if tail else [header.pack(self._salt), *parts])
        self.end = header.end
        self.next_lsn += 1
        if self.tap is not None:
            self.tap(header, parts)

    def open_segment(self) -> None:
        """Begin a file for frames from `next_lsn` on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = segment_path(self.folder, self.next_lsn)
        self._salt = secrets.randbits(64)
        header = SegmentHeader(self.epoch, self.stream, self.next_lsn, self._salt, self.schema_hash, time.time_ns())
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._reserved = 0
        self._reserve(SEGMENT_BYTES + FRAME_BYTES)
        self._write_at(0, [header.pack()])
        self.end = SEGMENT_BYTES
        os.fsync(self._fd)
        sync(self.folder)

    def sync(self) -> None:
        """Wait until everything that was appended is on the disk."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close_segment(self) -> None:
        """End the open file where its last frame ends, durably. The next frame opens another."""
        if self._fd < 0:
            return
        os.ftruncate(self._fd, self.end)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.end = SEGMENT_BYTES  # where the next file's first frame goes

    def abandon(self, next_lsn: int) -> None:
        """Give up the open file, after an error; frames from `next_lsn` on will be written again, into another."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
        self.next_lsn = next_lsn
        self.end = SEGMENT_BYTES
        if self.path is not None and self.path == segment_path(self.folder, next_lsn):
            # Nothing of it counts, and its name is needed again.
            self.path.rename(self.path.with_suffix(f".{time.time_ns()}.failed"))

    def _reserve(self, size: int) -> None:
        """Have the file system find room for the file's first `size` bytes, and for some more where there is more."""
        if size <= self._reserved:
            return
        step = settings.LOG_RESERVE_BYTES
        generous = -(-size // step) * step
        try:
            self._allocate(generous)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._allocate(size)
            generous = size
        self._reserved = generous

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(self._fd, size)

    def _write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write parts end to end. Calls end at multiples of `WRITE_BYTES`, see there."""
        pending = [memoryview(part).cast("B") for part in parts if len(part)]
        pending.reverse()  # the next part is the last of the list
        while pending:
            room = settings.WRITE_BYTES - offset % settings.WRITE_BYTES
            some: list[memoryview] = []
            while pending and room and len(some) < _IOVECS:
                part = pending.pop()
                if len(part) > room:
                    pending.append(part[room:])
                    part = part[:room]
                some.append(part)
                room -= len(part)
            offset += self._write_some(offset, some)

    def _write_some(self, offset: int, parts: list[memoryview]) -> int:
        size = sum(map(len, parts))
        done = os.pwritev(self._fd, parts, offset)
        while done < size:  # rare: a signal, or a file system that is almost full
            whole = b"".join(parts)
            done += os.pwrite(self._fd, whole[done:], offset + done)
        return size


class FileLessWriter(SegmentWriter):
    """Frames that go to the tap alone, and into no file."""

    def __init__(self, epoch: int, stream: int, schema_hash: bytes) -> None:
        super().__init__(Path(), epoch, stream, schema_hash)

    def _write(self, kind: FrameType, step: int, parts: Sequence[Buffer], length: int, total: int, flags: int) -> None:
        header = FrameHeader(kind, flags, self.stream, self.epoch, self.next_lsn, step, length, total, self.end)
        self.end = header.end
        self.next_lsn += 1
        if self.tap is not None:
            self.tap(header, parts)


def log_write_error(path: Path, error: OSError) -> StorageError:
    """What a user is told when the system refuses a write of the log."""
    todo = "make room" if error.errno in NO_ROOM else "see to the disk, or give another folder,"
    return StorageError(
        f"{path}: the log cannot be written: {error.strerror or error}",
        hint=f"what was durable before is safe; {todo} and start recording again",
    )


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block as it goes into a file."""

    block: int
    encoding: Encoding
    dtype: DType
    count: int  # elements
    data: Bytes
    state: int = 0  # index into the manifest's state kinds; 0 is the gradient


@dataclass(frozen=True, slots=True)
class StateFrames:
    """States and buffers of a step: absolute values, and differences to the values after `base_step`."""

    full: Sequence[EncodedBlock]
    differences: Sequence[EncodedBlock]
    base_step: int


def encode_block(
    block: int, bits: Bits, dtype: DType, *, compress: bool = False, sparse: bool = False, state: int = 0
) -> EncodedBlock:
    """A block in its cheapest form."""
    encoding, data = encode(bits, dtype, compress=compress, sparse=sparse)
    return EncodedBlock(block, encoding, dtype, len(bits), data, state)


def append_step(
    appender: SegmentWriter,
    step: int,
    record: StepRecord,
    blocks: Sequence[EncodedBlock] = (),
    *,
    states: StateFrames | None = None,
    aux: Any = None,
    batch_end: bool = False,
) -> int:
    """Append a whole step; gives the bytes that it took. `batch_end` promises a `sync` before the next frame."""
    begin = appender.end
    step_lsn = appender.next_lsn
    appender.append(FrameType.STEP, step, [record.pack()])
    grads = [append_blocks(appender, FrameType.GRAD, step, some) for some in split_into_frames(blocks)]
    if states is not None:
        for some in split_into_frames(states.full):
            append_blocks(appender, FrameType.FULL, step, some)
        for some in split_into_frames(states.differences):
            append_blocks(appender, FrameType.DIFF, step, some, base_step=states.base_step)
    if aux is not None:
        appender.append(FrameType.AUX, step, [pack_json(aux)])
    commit = StepCommit.of(grads, step_lsn).pack()
    appender.append(FrameType.COMMIT, step, [commit], flags=BATCH_END if batch_end else 0)
    return appender.end - begin


def append_blocks(
    appender: SegmentWriter, kind: FrameType, step: int, blocks: Sequence[EncodedBlock], *, base_step: int = -1
) -> tuple[int, int]:
    """Append one table frame; gives (length, checksum) of its payload."""
    table, parts = build_table(blocks)
    plain = all(block.encoding == Encoding.RAW for block in blocks)
    return appender.append_table(kind, step, table, parts, flags=0 if plain else COMPRESSED, base_step=base_step)


def split_into_frames(blocks: Sequence[EncodedBlock]) -> Iterator[Sequence[EncodedBlock]]:
    """Blocks for one frame after the other, each of about `LOG_FRAME_BYTES`."""
    some: list[EncodedBlock] = []
    size = 0
    for block in blocks:
        if some and size + block.data.nbytes > settings.LOG_FRAME_BYTES:
            yield some
            some, size = [], 0
        some.append(block)
        size += block.data.nbytes
    if some:
        yield some


def build_table(blocks: Sequence[EncodedBlock]) -> tuple[Table, list[memoryview | bytes]]:
    """The table of some blocks, and what follows it in the payload: each block and zeros up to a multiple of 64."""
    rows: list[tuple[int, ...]] = []  # of the table: to fill one in field by field takes several times as long
    parts: list[memoryview | bytes] = []
    at = data_start(len(blocks))
    for block in blocks:
        data = block.data.data
        length = len(data)
        code = DTYPE_CODES[block.dtype.name]
        rows.append((block.block, block.encoding, code, block.state, block.count, 0, at, length, checksum(data)))
        parts.append(data)
        size = padded(length)
        if size != length:
            parts.append(bytes(size - length))
        at += size
    table = np.array(rows, ENTRY)
    return table, parts


@dataclass(frozen=True, slots=True)
class StateValue:
    """A state of a block, or a buffer, after a step."""

    block: int
    state: int  # index into the manifest's state kinds
    dtype: DType
    bits: Bits
    chained: bool = True  # logged with every step, so that a difference to the step before leads to it


class StateEncoder:
    """Knows the values of the step before. For one thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Bits] = {}
        self._step = -1
        self._packs = importlib.util.find_spec("zstandard") is not None

    def begin_with(self, step: int, values: Sequence[StateValue]) -> None:
        """These are the values that the base has; copied."""
        self._step = step
        self._before = {(value.block, value.state): value.bits.copy() for value in values if value.chained}

    def encode(self, step: int, values: Sequence[StateValue], *, compress: bool) -> StateFrames:
        """All values of a step, each in its smaller form. A value that was not there before is absolute."""
        full: list[EncodedBlock] = []
        differences: list[EncodedBlock] = []
        for value in values:
            made = self._difference(value)
            if made is not None:
                differences.append(made)
            else:
                encoding, data = encode(value.bits, value.dtype, compress=compress)
                full.append(_block(value, encoding, data))
            if value.chained:
                self._remember(value)
        frames = StateFrames(full, differences, self._step)
        self._step = step
        return frames

    def _difference(self, value: StateValue) -> EncodedBlock | None:
        before = self._before.get((value.block, value.state)) if value.chained and self._packs else None
        if before is None or before.shape != value.bits.shape or before.dtype != value.bits.dtype:
            return None
        encoding, data = encode_difference(before, value.bits)
        return _block(value, encoding, data) if data.nbytes < value.bits.nbytes else None

    def _remember(self, value: StateValue) -> None:
        if not self._packs:
            return
        key = value.block, value.state
        before = self._before.get(key)
        if before is None or before.shape != value.bits.shape or before.dtype != value.bits.dtype:
            self._before[key] = value.bits.copy()
        else:
            np.copyto(before, value.bits)


def _block(value: StateValue, encoding: Encoding, data: Bytes) -> EncodedBlock:
    return EncodedBlock(value.block, encoding, value.dtype, len(value.bits), data, value.state)
