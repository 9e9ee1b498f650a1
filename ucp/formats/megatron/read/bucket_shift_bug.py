"""What a bug of Megatron's shifts: `fully_reshardable` state of buffers with several buckets, up to release 0.19.0.

On disk buckets follow each other without the padding that they have in memory, but parameters were cut out at their
place in memory: everything past the first bucket comes out late by the padding before it. Weights are not touched.

Puts shifted state back: every element from the place where Megatron's bug left it.

What lay in the gaps between parameters is lost. A lost element of a master is taken from the weight, which is the same
number in fewer bits; lost elements of moments are zero, as at the start of training.

Finds optimizer state that Megatron's bug shifted; refuses to hand it out, or puts it right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ucp.core.box import Box, flat_index, intersect, interval_boxes
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment, Note
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.errors import InconsistentError, NotUnderstoodError, first_few
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.rank_layout import (
    GlobalParam,
    ModuleRank,
    ModuleTensor,
    PackedParam,
    group_by_buffer,
    module_buffer_layout,
    module_tensors,
)
from ucp.formats.megatron.read.sharded_tensors import StateTable
from ucp.storage.local import SourceFiles

_SAMPLE: Final = 256  # elements of a parameter that are compared


@dataclass(frozen=True, slots=True)
class BufferRange:
    """A tensor in a buffer as it should be on disk: elements `[start, start + numel)`, cut `shift` elements late."""

    tensor: ModuleTensor
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class ShiftedBuffer:
    """A buffer with several buckets, first tensor on disk first."""

    rank: ModuleRank
    buffer_ranges: tuple[BufferRange, ...]


def shifted_buffers(model: Mapping[str, GlobalParam], arguments: JobArguments) -> Iterator[ShiftedBuffer]:
    """Every buffer of the job in which the bug moves a parameter."""
    for rank, tensors, expert in _optimizer_parameters(model, arguments):
        for mine in group_by_buffer(tensors):
            layout = module_buffer_layout(mine, tensors, rank, arguments, expert=expert)
            starts, late = layout.starts, [0]
            for length, padded in zip(layout.lengths, layout.padded, strict=True):
                late.append(late[-1] + padded - length)
            held = [
                BufferRange(tensor, starts[seat.bucket] + seat.start, late[seat.bucket])
                for tensor, seat in zip(mine, layout.bucket_ranges, strict=True)
            ]
            if any(buffer_range.shift and not buffer_range.tensor.copy for buffer_range in held):
                yield ShiftedBuffer(rank, tuple(sorted(held, key=lambda buffer_range: buffer_range.start)))


def _optimizer_parameters(
    model: Mapping[str, GlobalParam], arguments: JobArguments
) -> Iterator[tuple[ModuleRank, list[ModuleTensor], bool]]:
    """The parameters of every optimizer of every group of ranks, and whether they are experts with their own ranks."""
    apart = arguments.ep > 1 or arguments.etp != arguments.tp
    for pp in range(arguments.pp):
        for tp in range(arguments.tp):
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
            tensors = module_tensors(rank, model, arguments)
            yield rank, [tensor for tensor in tensors if not (apart and tensor.is_expert)], False
        if not apart:
            continue
        for ep in range(arguments.ep):
            for etp in range(arguments.etp):
                rank = ModuleRank(pp, 0, ep, etp)
                experts = [tensor for tensor in module_tensors(rank, model, arguments) if tensor.is_expert]
                if experts:
                    yield rank, experts, True


def master_differs(files: SourceFiles, weight: Sequence[Fragment], master: Sequence[Fragment]) -> bool:
    """Whether a sample of the master does not round to the weight. Looks where both have one block."""
    for one in weight[:1]:
        for other in master:
            if one.region != other.region or one.strides or other.strides or other.dtype != FLOAT32:
                continue
            count = min(one.region.numel, _SAMPLE)
            kept = files.read(one.file, one.offset, count * one.dtype.itemsize)
            precise = files.read(other.file, other.offset, count * other.dtype.itemsize)
            return round_float32(precise, one.dtype) not in (None, kept)
    return False


def round_float32(data: bytes, dtype: DType) -> bytes | None:
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


StoredFragments = Mapping[str, Sequence[Fragment]]  # name → fragments as stored


@dataclass(frozen=True, slots=True)
class _StoredSpan:
    """Elements `[start, stop)` of a buffer that lie in the stored slice of `lodger`, from its element `at` on."""

    start: int
    stop: int
    packed: PackedParam
    at: int


class BufferRepair:
    """One buffer: where the elements of each of its parameters really are."""

    def __init__(self, buffer: ShiftedBuffer) -> None:
        self._rank = Rank(buffer.rank.pp, buffer.rank.tp)
        self._spans: list[_StoredSpan] = []
        self._homes: dict[str, tuple[int, PackedParam]] = {}
        for buffer_range in buffer.buffer_ranges:
            # Of equal slices and tied copies one was stored, and that one went through another rank's buffer.
            stored = (
                []
                if buffer_range.tensor.copy
                else [item for item in buffer_range.tensor.packed_params if not item.repeats]
            )
            for packed in stored:
                numel = sum(piece.box.numel for piece in packed.pieces)
                start = buffer_range.start + packed.shift
                self._homes[packed.name] = (start, packed)
                if not packed.transposed:
                    late = start + buffer_range.shift
                    self._spans.append(_StoredSpan(late, late + numel, packed, 0))

    @property
    def names(self) -> list[str]:
        return list(self._homes)

    def fragments(
        self, name: str, kind: str, stored: StoredFragments, weight: Sequence[Fragment], dtype: DType
    ) -> tuple[list[Fragment], int]:
        """The state of this rank's slice of a parameter, and how many of its elements are lost."""
        start, packed = self._homes[name]
        home = Region.of(piece.box for piece in packed.pieces)
        made: list[Fragment] = []
        lost = at = 0
        for span in sorted(self._spans, key=lambda span: span.start):
            lo, hi = max(start, span.start) - start, min(start + home.numel, span.stop) - start
            if packed.transposed or lo >= hi or lo < at:
                continue
            lost += self._lose(home, at, lo, kind, weight, dtype, made)
            from_ = span.at + start + lo - span.start
            made += _moved_fragments(
                home, lo, span.packed, from_, from_ + hi - lo, stored[span.packed.name], self._rank
            )
            at = hi
        lost += self._lose(home, at, home.numel, kind, weight, dtype, made)
        return made, lost

    def _lose(
        self, home: Region, lo: int, hi: int, kind: str, weight: Sequence[Fragment], dtype: DType, made: list[Fragment]
    ) -> int:
        for piece in home.cut(lo, hi).pieces():
            if kind == MASTER:
                made += (
                    Fragment(Region.of((box,)), source.file, offset, source.dtype, self._rank)
                    for box, source, offset in _overlapping(piece.box, weight)
                )
            else:
                for i in range(piece.box.numel):
                    for one in interval_boxes(piece.box.shape, i, i + 1):
                        region = Region.of((one.shift(piece.box.start),))
                        made.append(Fragment(region, "", 0, dtype, self._rank, inline=bytes(dtype.itemsize)))
        return max(hi - lo, 0)


def _moved_fragments(
    home: Region, to: int, packed: PackedParam, start: int, stop: int, stored: Sequence[Fragment], rank: Rank
) -> Iterator[Fragment]:
    """Elements [start, stop) of the stored slice of `lodger`, as elements `to` and following of another slice."""
    for piece in Region.of(piece.box for piece in packed.pieces).cut(start, stop).pieces():
        for box, source, offset in _overlapping(piece.box, stored):
            # Blocks are whole slices or whole parts of them, so that what is found is in the order of the piece.
            first = to + piece.offset + flat_index(_relative_start(box, piece.box), piece.box.shape)
            yield Fragment(home.cut(first, first + box.numel), source.file, offset, source.dtype, rank)


def _overlapping(box: Box, stored: Sequence[Fragment]) -> Iterator[tuple[Box, Fragment, int]]:
    """The stored blocks that hold `box`, each with the part that it holds and where that starts, in bytes."""
    for fragment in stored:
        held = fragment.region.boxes[0]
        common = intersect(held, box)
        if common is not None:
            if fragment.strides is not None or not _is_run(common, held):
                raise NotUnderstoodError(f"{fragment.file}: {held} is not a slice as the optimizer had it")
            at = flat_index(_relative_start(common, held), held.shape)
            yield common, fragment, fragment.offset + at * fragment.dtype.itemsize


def _is_run(box: Box, of: Box) -> bool:
    """Whether the elements of `box` lie side by side in the block `of`."""
    inner = [n != extent for n, extent in zip(box.shape, of.shape, strict=True)]
    cut = max((i for i, differs in enumerate(inner) if differs), default=0)
    return all(n == 1 for n in box.shape[:cut])


def _relative_start(box: Box, base: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(box.start, base.start, strict=True))


_SHOWN: Final = 8
_WHY: Final = (
    "releases of Megatron up to 0.19.0 shift this state when a buffer has several buckets (tied embeddings with"
    " pipeline stages, or overlapped gradient reduction)"
)


def handle_shifted_state(
    root: Path, model: Mapping[str, GlobalParam], pieces: StateTable, arguments: JobArguments, *, repair: bool
) -> list[Note]:
    """Look whether the state of buffers with several buckets is shifted; `pieces` then refuse, or give it repaired."""
    try:
        buffers = list(shifted_buffers(model, arguments))
    except NotUnderstoodError as error:
        return [Note("buckets-unknown", f"whether optimizer state is shifted cannot be told: {error.what}")]
    suspects = [name for buffer in buffers for name in _shifted_names(buffer) if MASTER in pieces[name]]
    names = list(dict.fromkeys(suspects))
    with SourceFiles(root) as files:
        damaged = any(
            master_differs(files, list(pieces[name][WEIGHT].fragments()), list(pieces[name][MASTER].fragments()))
            for name in names
        )
    if not damaged:
        return []
    if repair:
        return _repair(buffers, names, pieces)
    for name in names:
        for kind in pieces[name]:
            if kind != WEIGHT:
                pieces[name][kind].replace(_DamagedFragments(root, name, kind), 1)
    return [
        Note(
            "optimizer-state-shifted",
            f"masters and moments of {len(names)} of {len(pieces)} parameters are damaged"
            f" ({first_few(names, _SHOWN)}): {_WHY};"
            " weights are intact",
        )
    ]


class _DamagedFragments:
    """Stands for the fragments of a damaged state."""

    def __init__(self, root: Path, name: str, kind: str) -> None:
        self._root = root
        self._name = name
        self._kind = kind

    def __call__(self) -> Iterator[Fragment]:
        raise InconsistentError(
            f"{self._root}: {self._name}|{self._kind} holds numbers of its neighbours: {_WHY}",
            hint="put it right with --repair, or take the weights alone with --only weights",
        )


def _shifted_names(buffer: ShiftedBuffer) -> Iterator[str]:
    for buffer_range in buffer.buffer_ranges:
        if buffer_range.shift and not buffer_range.tensor.copy:
            yield from (packed.name for packed in buffer_range.tensor.packed_params)


def _repair(buffers: list[ShiftedBuffer], names: list[str], pieces: StateTable) -> list[Note]:
    repairs = [BufferRepair(buffer) for buffer in buffers]
    involved = {name for repair in repairs for name in repair.names}
    kinds = list(dict.fromkeys(kind for name in names for kind in pieces[name] if kind != WEIGHT))
    lost: dict[str, int] = {}
    made: dict[tuple[str, str], list[Fragment]] = {}
    for kind in kinds:
        stored = {name: list(pieces[name][kind].fragments()) for name in involved if kind in pieces[name]}
        for repair in repairs:
            for name in (name for name in names if name in repair.names):
                weight = list(pieces[name][WEIGHT].fragments())
                found, gone = repair.fragments(name, kind, stored, weight, pieces[name][kind].dtype)
                made.setdefault((name, kind), []).extend(found)
                if kind != MASTER and gone:
                    lost[name] = max(lost.get(name, 0), gone)
    for (name, kind), fragments in made.items():
        pieces[name][kind].replace(partial(iter, fragments), len(fragments))
    notes = [Note("optimizer-state-repaired", f"masters and moments of {len(names)} parameters were put right: {_WHY}")]
    if lost:
        listed = ", ".join(f"{name} {count}" for name, count in lost.items())
        notes.append(
            Note(
                "optimizer-state-lost",
                f"elements that no file holds, by parameter: {listed}; masters were taken from the weights there,"
                " moments are zero",
            )
        )
    return notes
