"""A bug of Megatron up to release 0.19.0, which shifts `fully_reshardable` state of buffers with several buckets.

On disk, buckets follow each other without the padding that they have in memory, but parameters were sliced at their
positions in memory: everything after the first bucket is late by the padding before it. Weights are not affected.

Damaged state is found by comparing masters with weights. By default, reading it is an error. With `repair`, every
element is taken from the position where the bug put it. Elements in the gaps between parameters are lost: those of
masters are taken from the weights, which are the same numbers in fewer bits, and those of moments are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ucp.core.box import Box, flat_index, intersect, interval_boxes, is_contiguous_in
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment, Note, Rank
from ucp.core.dtypes import FLOAT32, DType
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
from ucp.formats.sharded.shard_fragments import round_elements
from ucp.storage.local import SourceFiles

_SAMPLE: Final = 256  # elements of a parameter that are compared
_SHOWN: Final = 8
_WHY: Final = (
    "releases of Megatron up to 0.19.0 shift this state when a buffer has several buckets (tied embeddings with"
    " pipeline stages, or overlapped gradient reduction)"
)

StoredFragments = Mapping[str, Sequence[Fragment]]  # parameter → fragments as stored


def handle_shifted_state(
    root: Path, model: Mapping[str, GlobalParam], states: StateTable, arguments: JobArguments, *, repair: bool
) -> list[Note]:
    """Find shifted state, and replace its fragments in `states`: by an error, or with `repair` by the right ones."""
    try:
        buffers = list(shifted_buffers(model, arguments))
    except NotUnderstoodError as error:
        return [Note("buckets-unknown", f"it is unknown whether optimizer state is shifted: {error.what}")]
    ranges = [item for buffer in buffers for item in buffer.buffer_ranges if item.shift and not item.tensor.copy]
    suspects = dict.fromkeys(packed.name for item in ranges for packed in item.tensor.packed_params)
    names = [name for name in suspects if MASTER in states[name]]
    with SourceFiles(root) as files:
        damaged = any(
            master_differs(files, list(states[name][WEIGHT].fragments()), list(states[name][MASTER].fragments()))
            for name in names
        )
    if not damaged:
        return []
    if repair:
        return _repair(buffers, names, states)
    for name in names:
        for kind in states[name]:
            if kind != WEIGHT:
                states[name][kind].replace(partial(_refuse, f"{root}: {name}|{kind}"), 1)
    text = f"masters and moments of {len(names)} of {len(states)} parameters are damaged ({first_few(names, _SHOWN)})"
    return [Note("optimizer-state-shifted", f"{text}: {_WHY}; weights are intact")]


def _refuse(where: str) -> Iterator[Fragment]:
    raise InconsistentError(
        f"{where} has values of its neighbours: {_WHY}",
        hint="repair it with --repair, or take the weights alone with --only weights",
    )


def _repair(buffers: list[ShiftedBuffer], names: list[str], states: StateTable) -> list[Note]:
    repairs = [BufferRepair(buffer) for buffer in buffers]
    involved = {name for repair in repairs for name in repair.names}
    kinds = list(dict.fromkeys(kind for name in names for kind in states[name] if kind != WEIGHT))
    lost: dict[str, int] = {}
    made: dict[tuple[str, str], list[Fragment]] = {}
    for kind in kinds:
        stored = {name: list(states[name][kind].fragments()) for name in involved if kind in states[name]}
        for repair in repairs:
            for name in (name for name in names if name in repair.names):
                weight = list(states[name][WEIGHT].fragments())
                found, missing = repair.fragments(name, kind, stored, weight, states[name][kind].dtype)
                made.setdefault((name, kind), []).extend(found)
                if kind != MASTER and missing:
                    lost[name] = max(lost.get(name, 0), missing)
    for (name, kind), fragments in made.items():
        states[name][kind].replace(partial(iter, fragments), len(fragments))
    notes = [Note("optimizer-state-repaired", f"masters and moments of {len(names)} parameters were repaired: {_WHY}")]
    if lost:
        listed = ", ".join(f"{name} {count}" for name, count in lost.items())
        then = "masters were taken from the weights there, moments are zero"
        notes.append(Note("optimizer-state-lost", f"elements that no file holds, by parameter: {listed}; {then}"))
    return notes


@dataclass(frozen=True, slots=True)
class BufferRange:
    """A tensor in a buffer: correct on disk at element `start`, but sliced `shift` elements later."""

    tensor: ModuleTensor
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class ShiftedBuffer:
    """A buffer with several buckets; tensors are in the order on disk."""

    rank: ModuleRank
    buffer_ranges: tuple[BufferRange, ...]


def shifted_buffers(model: Mapping[str, GlobalParam], arguments: JobArguments) -> Iterator[ShiftedBuffer]:
    """Yield every buffer of the job in which the bug shifts a parameter."""
    for rank, tensors, expert in _optimizer_parameters(model, arguments):
        for mine in group_by_buffer(tensors):
            layout = module_buffer_layout(mine, tensors, rank, arguments, expert=expert)
            starts, shifts = layout.starts, [0]
            for length, padded in zip(layout.lengths, layout.padded, strict=True):
                shifts.append(shifts[-1] + padded - length)
            ranges = [
                BufferRange(tensor, starts[position.bucket] + position.start, shifts[position.bucket])
                for tensor, position in zip(mine, layout.bucket_ranges, strict=True)
            ]
            if any(item.shift and not item.tensor.copy for item in ranges):
                yield ShiftedBuffer(rank, tuple(sorted(ranges, key=lambda item: item.start)))


def _optimizer_parameters(
    model: Mapping[str, GlobalParam], arguments: JobArguments
) -> Iterator[tuple[ModuleRank, list[ModuleTensor], bool]]:
    """Yield the parameters of every optimizer of every group of ranks, and whether they are experts."""
    has_expert_ranks = arguments.has_expert_ranks
    for pp in range(arguments.pp):
        for tp in range(arguments.tp):
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
            tensors = module_tensors(rank, model, arguments)
            yield rank, [tensor for tensor in tensors if not (has_expert_ranks and tensor.is_expert)], False
        if not has_expert_ranks:
            continue
        for ep in range(arguments.ep):
            for etp in range(arguments.etp):
                rank = ModuleRank(pp, 0, ep, etp)
                experts = [tensor for tensor in module_tensors(rank, model, arguments) if tensor.is_expert]
                if experts:
                    yield rank, experts, True


def master_differs(files: SourceFiles, weight: Sequence[Fragment], master: Sequence[Fragment]) -> bool:
    """Whether a sample of the master does not round to the weight, for the first block that both store."""
    for one in weight[:1]:
        for other in master:
            if one.region != other.region or one.strides or other.strides or other.dtype != FLOAT32:
                continue
            count = min(one.region.numel, _SAMPLE)
            kept = files.read(one.file, one.offset, count * one.dtype.itemsize)
            precise = files.read(other.file, other.offset, count * other.dtype.itemsize)
            return round_elements(precise, other.dtype, one.dtype) not in (b"", kept)
    return False


@dataclass(frozen=True, slots=True)
class _StoredSpan:
    """Elements `[start, stop)` of a buffer, which are stored as the slice of parameter `packed`."""

    start: int
    stop: int
    packed: PackedParam


class BufferRepair:
    """Finds where the elements of each parameter of a buffer are stored."""

    def __init__(self, buffer: ShiftedBuffer) -> None:
        self._rank = Rank(buffer.rank.pp, buffer.rank.tp)
        self._spans: list[_StoredSpan] = []
        self._homes: dict[str, tuple[int, PackedParam]] = {}
        for buffer_range in buffer.buffer_ranges:
            # Of equal slices and tied copies only one was stored, which came from another rank's buffer.
            for packed in buffer_range.tensor.packed_params:
                if packed.repeats or buffer_range.tensor.copy:
                    continue
                numel = sum(piece.box.numel for piece in packed.pieces)
                start = buffer_range.start + packed.shift
                self._homes[packed.name] = (start, packed)
                if not packed.transposed:
                    late = start + buffer_range.shift
                    self._spans.append(_StoredSpan(late, late + numel, packed))

    @property
    def names(self) -> list[str]:
        return list(self._homes)

    def fragments(
        self, name: str, kind: str, stored: StoredFragments, weight: Sequence[Fragment], dtype: DType
    ) -> tuple[list[Fragment], int]:
        """Return the fragments of this rank's slice of a parameter, and how many of its elements are lost."""
        start, packed = self._homes[name]
        home = Region.of(piece.box for piece in packed.pieces)
        made: list[Fragment] = []
        lost = at = 0
        for span in sorted(self._spans, key=lambda span: span.start):
            lo, hi = max(start, span.start) - start, min(start + home.numel, span.stop) - start
            if packed.transposed or lo >= hi or lo < at:
                continue
            lost += self._replace_lost(home, at, lo, kind, weight, dtype, made)
            skip = start + lo - span.start
            region = Region.of(piece.box for piece in span.packed.pieces).cut(skip, skip + hi - lo)
            for piece in region.pieces():
                for box, source, offset in _overlapping(piece.box, stored[span.packed.name]):
                    # Blocks are whole slices or whole parts of them, so overlaps are in the order of the piece.
                    first = lo + piece.offset + flat_index(_relative_start(box, piece.box), piece.box.shape)
                    moved = home.cut(first, first + box.numel)
                    made.append(Fragment(moved, source.file, offset, source.dtype, self._rank))
            at = hi
        lost += self._replace_lost(home, at, home.numel, kind, weight, dtype, made)
        return made, lost

    def _replace_lost(
        self, home: Region, lo: int, hi: int, kind: str, weight: Sequence[Fragment], dtype: DType, made: list[Fragment]
    ) -> int:
        """Add fragments for lost elements [lo, hi) of a slice to `made`; returns their number."""
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


def _overlapping(box: Box, stored: Sequence[Fragment]) -> Iterator[tuple[Box, Fragment, int]]:
    """Yield the overlaps of stored blocks with `box`: overlap, block, and its byte offset in the file."""
    for fragment in stored:
        block = fragment.region.boxes[0]
        common = intersect(block, box)
        if common is not None:
            if fragment.strides is not None or not is_contiguous_in(common, block.shape):
                raise NotUnderstoodError(f"{fragment.file}: {block} is not a slice of the optimizer's buffer")
            at = flat_index(_relative_start(common, block), block.shape)
            yield common, fragment, fragment.offset + at * fragment.dtype.itemsize


def _relative_start(box: Box, base: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(box.start, base.start, strict=True))
