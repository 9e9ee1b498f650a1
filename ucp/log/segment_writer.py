"""Writing frames to the segments of a stream. No queue and no thread: only the bytes, and when they are durable."""

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
from ucp.log.codecs import DTYPE_CODES, Bits, EncodedBlock, Encoding, encode, encode_difference
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
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IOVECS: Final = 512  # buffers per write call; the system's limit is 1,024


def segment_path(folder: Path, first_lsn: int) -> Path:
    """A segment is named by the number of its first frame."""
    return folder / f"{first_lsn:012d}{SUFFIX}"


class SegmentWriter:
    """The open segment of a stream. Raises plain `OSError`s: the caller decides whether the stream can continue."""

    def __init__(self, folder: Path, epoch: int, stream: int, schema_hash: bytes, next_lsn: int = 0) -> None:
        self.folder = folder
        self.epoch = epoch
        self.stream = stream
        self.schema_hash = schema_hash
        self.next_lsn = next_lsn
        self.path: Path | None = None
        self.end = SEGMENT_BYTES  # offset of the next frame
        self.on_frame: Callable[[FrameHeader, Sequence[Buffer]], None] | None = None  # called after every write
        self._fd = -1
        self._salt = 0
        self._reserved = 0

    def append(self, kind: FrameType, step: int, parts: Sequence[Buffer], *, flags: int = 0) -> tuple[int, int]:
        """Write a frame whose payload is `parts` end to end; returns (length, checksum) of the payload."""
        length = sum(len(part) for part in parts)
        total = checksum(parts[0]) if len(parts) == 1 else checksum(b"".join(parts))
        return self._append(kind, step, parts, length, total, flags)

    def append_table(
        self, kind: FrameType, step: int, table: Table, blocks: Sequence[Buffer], *, flags: int = 0, base_step: int = -1
    ) -> tuple[int, int]:
        """Write a GRAD, DIFF or FULL frame. `blocks` is everything after the table, in order, including padding."""
        assert kind in TABLE_TYPES
        head = pack_table(table, base_step)
        total = checksum(memoryview(head)[: table_bytes(len(table))])
        length = len(head) + sum(len(block) for block in blocks)
        return self._append(kind, step, [head, *blocks], length, total, flags)

    def _append(
        self, kind: FrameType, step: int, parts: Sequence[Buffer], length: int, total: int, flags: int
    ) -> tuple[int, int]:
        if self._fd < 0:
            self.open_segment()
        header = FrameHeader(kind, flags, self.stream, self.epoch, self.next_lsn, step, length, total, self.end)
        self._write_frame(header, parts)
        self.end = header.end
        self.next_lsn += 1
        if self.on_frame is not None:
            self.on_frame(header, parts)
        return length, total

    def _write_frame(self, header: FrameHeader, parts: Sequence[Buffer]) -> None:
        self._reserve(header.end)
        padding = bytes(padded(header.length) - header.length)
        self._write_at(header.offset, [header.pack(self._salt), *parts, *([padding] if padding else [])])

    def open_segment(self) -> None:
        """Start a file for the frames from `next_lsn` on."""
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
        """Truncate the open file after its last frame and make it durable. The next frame opens another file."""
        if self._fd < 0:
            return
        os.ftruncate(self._fd, self.end)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.end = SEGMENT_BYTES

    def abandon(self, next_lsn: int) -> None:
        """Give up the open file after an error; the frames from `next_lsn` on will be written again, to another."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
        self.next_lsn = next_lsn
        self.end = SEGMENT_BYTES
        if self.path is not None and self.path == segment_path(self.folder, next_lsn):
            # None of its frames counts, and its name is needed again.
            self.path.rename(self.path.with_suffix(f".{time.time_ns()}.failed"))

    def _reserve(self, size: int) -> None:
        """Allocate disk space for the first `size` bytes of the file, and for some more if there is enough."""
        if size <= self._reserved:
            return
        step = settings.LOG_RESERVE_BYTES
        generous = -(-size // step) * step
        try:
            self._allocate(generous)
        except OSError as error:
            if error.errno not in NO_SPACE:
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
        """Write parts end to end. Each call ends at a multiple of `WRITE_BYTES` (see settings)."""
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
            end = offset + sum(map(len, some))
            offset += os.pwritev(self._fd, some, offset)
            if offset < end:  # rare: a signal, or a file system that is almost full
                pending.append(memoryview(b"".join(some))[offset - end :])


class FilelessWriter(SegmentWriter):
    """Passes frames to `on_frame` without writing any file."""

    def __init__(self, epoch: int, stream: int, schema_hash: bytes) -> None:
        super().__init__(Path(), epoch, stream, schema_hash)

    def open_segment(self) -> None:
        pass

    def _write_frame(self, header: FrameHeader, parts: Sequence[Buffer]) -> None:
        pass


def log_write_error(path: Path, error: OSError) -> StorageError:
    """The error for a user when the system refuses a write of the log."""
    todo = "make room" if error.errno in NO_SPACE else "check the disk, or choose another folder,"
    return StorageError(
        f"{path}: the log cannot be written: {error.strerror or error}",
        hint=f"what was durable before is safe; {todo} and start recording again",
    )


# A step as frames: STEP, its gradient blocks, states, notes, COMMIT -------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateFrames:
    """States and buffers of a step: absolute values, and differences from the values after `base_step`."""

    full: Sequence[EncodedBlock]
    differences: Sequence[EncodedBlock]
    base_step: int


def encode_block(
    block: int, bits: Bits, dtype: DType, *, compress: bool = False, sparse: bool = False, state: int = 0
) -> EncodedBlock:
    """Encode a block as `encode` does."""
    encoding, data = encode(bits, dtype, compress=compress, sparse=sparse)
    return EncodedBlock(block, encoding, dtype, len(bits), data, state)


def append_step(
    writer: SegmentWriter,
    step: int,
    record: StepRecord,
    blocks: Sequence[EncodedBlock] = (),
    *,
    states: StateFrames | None = None,
    aux: Any = None,
    batch_end: bool = False,
) -> int:
    """Append a whole step; returns its size in bytes. `batch_end` promises a `sync` before the next frame."""
    begin = writer.end
    step_lsn = writer.next_lsn
    writer.append(FrameType.STEP, step, [record.pack()])
    grads = [append_blocks(writer, FrameType.GRAD, step, some) for some in _split_into_frames(blocks)]
    if states is not None:
        for some in _split_into_frames(states.full):
            append_blocks(writer, FrameType.FULL, step, some)
        for some in _split_into_frames(states.differences):
            append_blocks(writer, FrameType.DIFF, step, some, base_step=states.base_step)
    if aux is not None:
        writer.append(FrameType.AUX, step, [pack_json(aux)])
    commit = StepCommit.of(grads, step_lsn).pack()
    writer.append(FrameType.COMMIT, step, [commit], flags=BATCH_END if batch_end else 0)
    return writer.end - begin


def append_blocks(
    writer: SegmentWriter, kind: FrameType, step: int, blocks: Sequence[EncodedBlock], *, base_step: int = -1
) -> tuple[int, int]:
    """Append one table frame; returns (length, checksum) of its payload."""
    table, parts = build_table(blocks)
    plain = all(block.encoding == Encoding.RAW for block in blocks)
    return writer.append_table(kind, step, table, parts, flags=0 if plain else COMPRESSED, base_step=base_step)


def _split_into_frames(blocks: Sequence[EncodedBlock]) -> Iterator[Sequence[EncodedBlock]]:
    """The blocks of one frame after the other, each of about `LOG_FRAME_BYTES`."""
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


def build_table(blocks: Sequence[EncodedBlock]) -> tuple[Table, list[Buffer]]:
    """The table of some blocks, and what follows it in the payload: each block and zeros up to a multiple of 64."""
    rows: list[tuple[int, ...]] = []  # filling the table field by field would take several times as long
    parts: list[Buffer] = []
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
    return np.array(rows, ENTRY), parts


# States and buffers after a step: differences from the previous step, or absolute values ----------------------------


@dataclass(frozen=True, slots=True)
class StateValue:
    """A state of a block, or a buffer, after a step."""

    block: int
    state: int  # index into the manifest's state kinds
    dtype: DType
    bits: Bits
    chained: bool = True  # logged with every step, so that a difference from the previous step is enough


class StateEncoder:
    """Encodes the values of one step after the other; keeps those of the previous step. Not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Bits] = {}
        self._step = -1
        self._can_compress = importlib.util.find_spec("zstandard") is not None

    def set_base_values(self, step: int, values: Sequence[StateValue]) -> None:
        """Set the values that the base has. They are copied."""
        self._step = step
        self._before = {(value.block, value.state): value.bits.copy() for value in values if value.chained}

    def encode(self, step: int, values: Sequence[StateValue], *, compress: bool) -> StateFrames:
        """Encode all values of a step, each in its smaller form. A value without a previous one is absolute."""
        full: list[EncodedBlock] = []
        differences: list[EncodedBlock] = []
        for value in values:
            bits, key = value.bits, (value.block, value.state)
            is_chained = value.chained and self._can_compress
            before = self._before.get(key) if is_chained else None
            if before is not None and (before.shape, before.dtype) != (bits.shape, bits.dtype):
                before = None
            encoding, data = (Encoding.RAW, bits) if before is None else encode_difference(before, bits)
            if before is not None and data.nbytes < bits.nbytes:
                block = EncodedBlock(value.block, encoding, value.dtype, len(bits), data, value.state)
                differences.append(block)
            else:
                full.append(encode_block(value.block, bits, value.dtype, compress=compress, state=value.state))
            if before is not None:
                np.copyto(before, bits)
            elif is_chained:
                self._before[key] = bits.copy()
        frames = StateFrames(full, differences, self._step)
        self._step = step
        return frames
