"""The flat buffers of the distributed optimizer: where each parameter lies in them. Arithmetic only.

Parameters go in backwards, each at a multiple of 64 elements, into buckets. Bucket ends are padded in memory; on disk
buckets follow each other without that padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from ucp.formats.megatron.arguments import Arguments

_PARAMETER_ALIGNMENT: Final = 64
_BUCKET_ALIGNMENT: Final = 128
_WIDE_BUCKET_ALIGNMENT: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Resident:
    """A parameter of a buffer. One with `own_bucket` shares its bucket with nobody."""

    numel: int
    own_bucket: bool = False


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a parameter lies: elements `[start, start + numel)` of bucket `bucket`, counted from the bucket's start."""

    bucket: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """`seats` are in the order of the parameters that were given; bucket lengths are in elements."""

    seats: tuple[Seat, ...]
    lengths: tuple[int, ...]  # without the padding at the end
    padded: tuple[int, ...]  # with it

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each bucket starts on disk."""
        at, found = 0, []
        for length in self.lengths:
            found.append(at)
            at += length
        return tuple(found)

    @property
    def numel(self) -> int:
        """Elements on disk."""
        return sum(self.lengths)


def lay_out(residents: Sequence[Resident], bucket_size: int | None, dp: int, *, wide: bool = False) -> BufferLayout:
    """The layout for parameters in the module's order; a bucket closes when it reaches `bucket_size` elements."""
    divisor = lcm(dp, _BUCKET_ALIGNMENT, _WIDE_BUCKET_ALIGNMENT if wide else 1)
    seats: list[Seat] = []
    lengths: list[int] = []
    padded: list[int] = []
    at, opened = 0, False  # next free element of the open bucket, and whether anything is in it

    def close(length: int) -> None:
        nonlocal at, opened
        lengths.append(length)
        padded.append(_round_up(length, divisor))
        at, opened = 0, False

    for resident in reversed(residents):
        at = _round_up(at, _PARAMETER_ALIGNMENT)
        if resident.own_bucket and opened:
            close(at)
        seats.append(Seat(len(lengths), at, resident.numel))
        at, opened = at + resident.numel, True
        if resident.own_bucket or (bucket_size is not None and at >= bucket_size):
            close(at)
    if opened:
        close(at)
    return BufferLayout(tuple(reversed(seats)), tuple(lengths), tuple(padded))


def bucket_size(arguments: Arguments, numel: int) -> int | None:
    """Elements at which a bucket closes; None for one bucket. `numel` counts the parameters of the rank."""
    if not arguments.flag("overlap_grad_reduce"):
        return None
    buckets = arguments.number("ddp_num_buckets", 0)
    if buckets:
        return numel // buckets
    return arguments.number("ddp_bucket_size", max(40_000_000, 1_000_000 * arguments.dp))


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
