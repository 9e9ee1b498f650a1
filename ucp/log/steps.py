"""A step as frames: STEP, its gradient blocks, notes, COMMIT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucp import tunables
from ucp.log.append import Appender
from ucp.log.codecs import DTYPE_CODES, Bits, Bytes, Encoding, encode
from ucp.log.frames import BATCH_END, COMPRESSED, FrameType, checksum, padded
from ucp.log.payloads import ENTRY, Commit, StepRecord, Table, data_start, pack_json
from ucp.model.dtypes import DType


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
    appender: Appender,
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
    grads = [append_blocks(appender, FrameType.GRAD, step, some) for some in frame_fulls(blocks)]
    if states is not None:
        for some in frame_fulls(states.full):
            append_blocks(appender, FrameType.FULL, step, some)
        for some in frame_fulls(states.differences):
            append_blocks(appender, FrameType.DIFF, step, some, base_step=states.base_step)
    if aux is not None:
        appender.append(FrameType.AUX, step, [pack_json(aux)])
    commit = Commit.of(grads, step_lsn).pack()
    appender.append(FrameType.COMMIT, step, [commit], flags=BATCH_END if batch_end else 0)
    return appender.end - begin


def append_blocks(
    appender: Appender, kind: FrameType, step: int, blocks: Sequence[EncodedBlock], *, base_step: int = -1
) -> tuple[int, int]:
    """Append one table frame; gives (length, checksum) of its payload."""
    table, parts = lay_out(blocks)
    plain = all(block.encoding == Encoding.RAW for block in blocks)
    return appender.append_table(kind, step, table, parts, flags=0 if plain else COMPRESSED, base_step=base_step)


def frame_fulls(blocks: Sequence[EncodedBlock]) -> Iterator[Sequence[EncodedBlock]]:
    """Blocks for one frame after the other, each of about `LOG_FRAME_BYTES`."""
    some: list[EncodedBlock] = []
    size = 0
    for block in blocks:
        if some and size + block.data.nbytes > tunables.LOG_FRAME_BYTES:
            yield some
            some, size = [], 0
        some.append(block)
        size += block.data.nbytes
    if some:
        yield some


def lay_out(blocks: Sequence[EncodedBlock]) -> tuple[Table, list[memoryview | bytes]]:
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
