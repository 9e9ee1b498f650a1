"""Payloads of frames: the scalars of a step, tables of blocks, commits, JSON notes, digests."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ucp.log.codecs import BYTES_PER_ELEMENT, UNKNOWN
from ucp.log.frames import FRAME_BYTES, BadBytesError, FrameHeader, checksum, padded

_STEP: Final = struct.Struct("<BBBBIQIIqQ")
_GROUP: Final = struct.Struct("<IBBHdddddddq")
_COMMIT: Final = struct.Struct("<IIQQQ")

_GROUP_FLAGS: Final = (1, 2, 4, 8)  # maximize, amsgrad, nesterov, the optimizer was called with this group
_SKIPPED: Final = 1


class GradientStage(IntEnum):
    """At which stage of a step the gradient is logged."""

    CONSUMED = 0  # exactly what the optimizer was given
    REDUCED = 1  # averaged over ranks, before unscaling and clipping: the optimizer was given this times `scale`


class LrKind(IntEnum):
    """The type of the job's learning rate: optimizers round differently with each."""

    FLOAT = 0  # a Python number
    TENSOR32 = 1  # a float32 tensor
    TENSOR64 = 2


@dataclass(frozen=True, slots=True)
class GroupScalars:
    """One param group when the optimizer was called. NaN if the optimizer has no such hyper-parameter."""

    group: int  # index into the manifest's groups
    lr: float
    beta1: float = math.nan
    beta2: float = math.nan
    eps: float = math.nan
    weight_decay: float = math.nan
    momentum: float = math.nan
    dampening: float = math.nan
    lr_kind: LrKind = LrKind.FLOAT
    maximize: bool = False
    amsgrad: bool = False
    nesterov: bool = False
    opt_step: int = -1  # the optimizer's step count before this update (largest of the group); -1: it has none
    stepped: bool = True  # the optimizer was called with this group in this step


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All scalars of one step.

    The optimizer was given `float32(gradient) * scale` (one float32 multiplication), or the gradient itself if `scale`
    is None. A skipped step changed no state.
    """

    groups: tuple[GroupScalars, ...] = ()
    stage: GradientStage = GradientStage.CONSUMED
    scale: np.float32 | None = None
    skipped: bool = False
    micro_batches: int = 1
    consumed_samples: int = -1  # -1: unknown
    time_ns: int = 0  # wall clock when the step was recorded

    def group(self, number: int) -> GroupScalars:
        """The scalars of a group by its index in the manifest."""
        return {group.group: group for group in self.groups}[number]

    def pack(self) -> bytes:
        bits = 0 if self.scale is None else int(np.float32(self.scale).view(np.uint32))
        scaled = int(self.scale is not None)
        flags = _SKIPPED if self.skipped else 0
        numbers = len(self.groups), bits, self.micro_batches, 0, self.consumed_samples, self.time_ns
        head = _STEP.pack(self.stage, scaled, scaled, flags, *numbers)
        return head + b"".join(map(_pack_group, self.groups))

    @staticmethod
    def unpack(data: bytes) -> StepRecord:
        try:
            stage, op, kind, flags, count, bits, micro, _, samples, time_ns = _STEP.unpack_from(data)
            if len(data) != _STEP.size + count * _GROUP.size:
                raise BadBytesError("a STEP frame has the wrong length")
            if op not in (0, 1) or kind != op or stage not in GradientStage._value2member_map_:
                raise BadBytesError(f"a STEP frame with unknown stage {stage} or scale {op}, {kind}")
            if bits >> 32:
                raise BadBytesError("a STEP frame whose scale is not a float32")
            groups = tuple(_unpack_group(data, _STEP.size + i * _GROUP.size) for i in range(count))
        except struct.error as error:
            raise BadBytesError("a STEP frame ends early") from error
        scale = np.uint32(bits).view(np.float32) if op else None
        return StepRecord(groups, GradientStage(stage), scale, bool(flags & _SKIPPED), micro, samples, time_ns)


def _pack_group(group: GroupScalars) -> bytes:
    switches = (group.maximize, group.amsgrad, group.nesterov, group.stepped)
    flags = sum(flag for flag, is_set in zip(_GROUP_FLAGS, switches, strict=True) if is_set)
    numbers = (group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, group.momentum, group.dampening)
    return _GROUP.pack(group.group, group.lr_kind, flags, 0, *numbers, group.opt_step)


def _unpack_group(data: bytes, at: int) -> GroupScalars:
    number, kind, flags, _, lr, beta1, beta2, eps, decay, momentum, dampening, step = _GROUP.unpack_from(data, at)
    if kind not in LrKind._value2member_map_:
        raise BadBytesError(f"a STEP frame with an unknown kind of learning rate {kind}")
    maximize, amsgrad, nesterov, stepped = (bool(flags & flag) for flag in _GROUP_FLAGS)
    switches = (maximize, amsgrad, nesterov)
    return GroupScalars(
        number, lr, beta1, beta2, eps, decay, momentum, dampening, LrKind(kind), *switches, step, stepped
    )


# Tables of blocks: GRAD, DIFF, FULL ---------------------------------------------------------------------------------

TABLE_HEAD: Final = struct.Struct("<IIq")  # entries, zero, step that a DIFF starts from (-1)
ENTRY: Final = np.dtype(
    [
        ("block", "<u4"),
        ("encoding", "u1"),
        ("dtype", "u1"),
        ("state", "<u2"),  # index into the manifest's state kinds; 0 is the gradient
        ("count", "<u4"),  # elements
        ("zero", "<u4"),
        ("offset", "<u8"),  # from the start of the payload, a multiple of 64
        ("length", "<u8"),  # bytes
        ("checksum", "<u8"),  # XXH3-64 of the bytes
    ]
)
Table = npt.NDArray[np.void]


def table_bytes(entries: int) -> int:
    """Length of the table (head and entries) in bytes; the payload checksum of a table frame covers only these."""
    return TABLE_HEAD.size + entries * ENTRY.itemsize


def data_start(entries: int) -> int:
    """Offset of the first block in a payload with this number of entries."""
    return padded(table_bytes(entries))


def pack_table(entries: Table, base_step: int = -1) -> bytes:
    """Head, entries, and zeros up to the first block."""
    head = TABLE_HEAD.pack(len(entries), 0, base_step) + entries.tobytes()
    return head.ljust(data_start(len(entries)), b"\0")


def table_size(header: FrameHeader, head: bytes | bytearray | memoryview) -> int:
    """`table_bytes` of a frame, from the first bytes of its payload."""
    if min(len(head), header.length) < TABLE_HEAD.size:
        raise BadBytesError("a table of blocks ends early")
    size = table_bytes(TABLE_HEAD.unpack_from(head)[0])
    if size > header.length:
        raise BadBytesError("a table of blocks is longer than its frame")
    return size


def unpack_table(header: FrameHeader, data: bytes | memoryview) -> tuple[Table, int]:
    """(entries, base step) from the first `table_size` bytes of a payload.

    The checksum is compared, and every entry is checked to lie in the frame; the blocks themselves are not read.
    """
    if checksum(data) != header.checksum:
        raise BadBytesError("the checksum of a table of blocks is wrong")
    length = header.length
    count, zero, base_step = TABLE_HEAD.unpack_from(data)
    if zero or table_bytes(count) > len(data):
        raise BadBytesError("a table of blocks ends early")
    table: Table = np.frombuffer(data, ENTRY, count, TABLE_HEAD.size)
    sizes = BYTES_PER_ELEMENT[table["encoding"], table["dtype"]]
    _check(table, (table["zero"] == 0) & (sizes != UNKNOWN), "has an unknown dtype or encoding")
    # Before they are added up: a sum of wrong lengths may overflow to the right one.
    _check(table, table["length"] <= length, "is not where it should be")
    lengths = table["length"].astype(np.int64)
    ends = data_start(count) + np.cumsum(lengths + -lengths % FRAME_BYTES)
    starts = ends - lengths - -lengths % FRAME_BYTES
    placed = (table["offset"].astype(np.int64) == starts) & ((sizes < 0) | (sizes * table["count"] == lengths))
    _check(table, placed, "is not where it should be")
    end = int(ends[-1]) if count else data_start(0)
    if end != length:
        raise BadBytesError(f"the blocks of a frame end at byte {end} of {length}")
    return table, base_step


def _check(table: Table, good: npt.NDArray[np.bool_], wrong: str) -> None:
    if not good.all():
        raise BadBytesError(f"block {table['block'][np.argmin(good)]} {wrong}")


# Commits, notes, digests --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCommit:
    """What a step consists of. A step without a commit, or that disagrees with it, does not count."""

    frames: int  # GRAD frames
    nbytes: int  # of their payloads
    digest: int  # XXH3-64 over their payload checksums, 8 bytes each, in order
    step_lsn: int  # number of the STEP frame

    def pack(self) -> bytes:
        return _COMMIT.pack(self.frames, 0, self.nbytes, self.digest, self.step_lsn)

    @staticmethod
    def unpack(data: bytes) -> StepCommit:
        if len(data) != _COMMIT.size:
            raise BadBytesError("a COMMIT frame has the wrong length")
        frames, _, size, digest, lsn = _COMMIT.unpack(data)
        return StepCommit(frames, size, digest, lsn)

    @staticmethod
    def of(grads: Sequence[tuple[int, int]], step_lsn: int) -> StepCommit:
        """The commit of GRAD frames given as (payload length, payload checksum)."""
        sums = b"".join(struct.pack("<Q", total) for _, total in grads)
        return StepCommit(len(grads), sum(length for length, _ in grads), checksum(sums), step_lsn)


def pack_json(value: Any) -> bytes:
    """AUX, DIGEST and EPOCH_END: JSON in UTF-8, without spaces."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def unpack_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadBytesError("a frame of JSON is not valid JSON") from error


@dataclass(frozen=True, slots=True)
class StateDigest:
    """XXH3-128 (hex) of one state of an optimizer tensor after a step: its blocks end to end, without padding."""

    tensor: int
    kind: str
    value: str


def pack_digests(digests: Sequence[StateDigest]) -> bytes:
    return pack_json([[d.tensor, d.kind, d.value] for d in digests])


def unpack_digests(data: bytes) -> list[StateDigest]:
    value = unpack_json(data)
    try:
        return [StateDigest(int(tensor), str(kind), str(digest)) for tensor, kind, digest in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise BadBytesError("a DIGEST frame does not contain digests") from error
