"""What a bug of Megatron's shifts: `fully_reshardable` state of buffers with several buckets, up to release 0.19.0.

On disk buckets follow each other without the padding that they have in memory, but parameters were cut out at their
place in memory: everything past the first bucket comes out late by the padding before it. Weights are not touched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ucp.files.local import SourceFiles
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.local_module import (
    ModuleRank,
    ModuleTensor,
    Whole,
    buffers_of_module,
    layout_of_buffer,
    module_of,
)
from ucp.model.checkpoint import Fragment
from ucp.model.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType

_SAMPLE: Final = 256  # elements of a parameter that are compared


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A tensor in a buffer as it should be on disk: elements `[start, start + numel)`, cut `shift` elements late."""

    tensor: ModuleTensor
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class ShiftedBuffer:
    """A buffer with several buckets, first tensor on disk first."""

    rank: ModuleRank
    tenancies: tuple[Tenancy, ...]


def shifted_buffers(model: Mapping[str, Whole], arguments: Arguments) -> Iterator[ShiftedBuffer]:
    """Every buffer of the job in which the bug moves a parameter."""
    for rank, tensors, expert in _optimizers(model, arguments):
        for mine in buffers_of_module(tensors):
            layout = layout_of_buffer(mine, tensors, rank, arguments, expert=expert)
            starts, late = layout.starts, [0]
            for length, padded in zip(layout.lengths, layout.padded, strict=True):
                late.append(late[-1] + padded - length)
            held = [
                Tenancy(tensor, starts[seat.bucket] + seat.start, late[seat.bucket])
                for tensor, seat in zip(mine, layout.seats, strict=True)
            ]
            if any(tenancy.shift and not tenancy.tensor.copy for tenancy in held):
                yield ShiftedBuffer(rank, tuple(sorted(held, key=lambda tenancy: tenancy.start)))


def _optimizers(
    model: Mapping[str, Whole], arguments: Arguments
) -> Iterator[tuple[ModuleRank, list[ModuleTensor], bool]]:
    """The parameters of every optimizer of every group of ranks, and whether they are experts with their own ranks."""
    apart = arguments.ep > 1 or arguments.etp != arguments.tp
    for pp in range(arguments.pp):
        for tp in range(arguments.tp):
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
            tensors = module_of(rank, model, arguments)
            yield rank, [tensor for tensor in tensors if not (apart and tensor.is_expert)], False
        if not apart:
            continue
        for ep in range(arguments.ep):
            for etp in range(arguments.etp):
                rank = ModuleRank(pp, 0, ep, etp)
                experts = [tensor for tensor in module_of(rank, model, arguments) if tensor.is_expert]
                if experts:
                    yield rank, experts, True


def disagree(files: SourceFiles, weight: Sequence[Fragment], master: Sequence[Fragment]) -> bool:
    """Whether a sample of the master does not round to the weight. Looks where both have one block."""
    for one in weight[:1]:
        for other in master:
            if one.region != other.region or one.strides or other.strides or other.dtype != FLOAT32:
                continue
            count = min(one.region.numel, _SAMPLE)
            kept = files.read(one.file, one.offset, count * one.dtype.itemsize)
            precise = files.read(other.file, other.offset, count * other.dtype.itemsize)
            return rounded(precise, one.dtype) not in (None, kept)
    return False


def rounded(data: bytes, dtype: DType) -> bytes | None:
    """Little-endian float32 numbers rounded to nearest even; None for a type that is not known here."""
    if dtype == FLOAT32:
        return data
    if dtype == BFLOAT16:
        words = struct.unpack(f"<{len(data) // 4}I", data)
        return struct.pack(f"<{len(words)}H", *(_to_bfloat16(word) for word in words))
    if dtype == FLOAT16:
        numbers = struct.unpack(f"<{len(data) // 4}f", data)
        try:
            return struct.pack(f"<{len(numbers)}e", *numbers)
        except OverflowError:
            return None
    return None


def _to_bfloat16(word: int) -> int:
    if word & 0x7F800000 == 0x7F800000:
        return word >> 16
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16
