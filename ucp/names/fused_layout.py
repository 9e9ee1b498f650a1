"""From an entry of a table to tiles: which block of one side's tensors is which block of the other side's.

Every entry is a list of parts, each a matrix of some rows. A side has the rows of each part somewhere in its tensors:
its row segments. Where segments of both sides overlap, there is a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucp.core.box import Box, Shape
from ucp.core.remap import BlockMap
from ucp.core.rules import REPLICATED, Rule
from ucp.errors import InconsistentError, UsageError
from ucp.formats.translate.model_config import ModelConfig
from ucp.names.name_tables import TableEntry, TableSide


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Rows `[start, start + rows)` of a part, stored from row `at` on in the side's tensor number `tensor`."""

    tensor: int
    part: int
    start: int
    rows: int
    at: int


@dataclass(frozen=True, slots=True)
class PartMatrix:
    """The shape of a part: its rows, and the shape of a row."""

    rows: int
    rest: Shape


def part_rows(entry: TableEntry, model: ModelConfig, rows: int, name: str) -> tuple[int, ...]:
    """The rows of each part of an entry, in a tensor of `rows` rows that holds all of them."""
    ratio = part_ratio(entry, model, name)
    unit, remainder = divmod(rows, sum(ratio))
    if remainder or (entry.rule.parts and unit != 1):
        raise InconsistentError(
            f"parameter {name}: {rows} rows do not divide in the ratio {':'.join(map(str, ratio))}",
            hint="check the head counts: `ucp inspect SRC` shows them, --model-config FILE corrects them",
        )
    return tuple(share * unit for share in ratio)


def part_ratio(entry: TableEntry, model: ModelConfig, name: str) -> tuple[int, ...]:
    """The ratio of the sizes of an entry's parts."""
    if entry.ratio == "qkv":
        if model.heads is None or model.query_groups is None:
            raise UsageError(
                f"parameter {name}: the checkpoint does not contain the numbers of query heads and key heads",
                hint="give the model's config.json with --model-config FILE,"
                ' or {"num_attention_heads": …, "num_key_value_heads": …}',
            )
        if model.heads % model.query_groups:
            raise UsageError(
                f"parameter {name}: {model.heads} query heads do not divide over {model.query_groups} key heads",
                hint="--model-config FILE corrects them",
            )
        return model.heads, model.query_groups, model.query_groups
    if entry.ratio == "gated":
        if model.gated is None:
            raise UsageError(
                f"parameter {name}: the checkpoint does not contain whether the MLP has a gate",
                hint='put {"swiglu": true} or {"swiglu": false} into a --model-config FILE',
            )
        return (1, 1) if model.gated else (1,)
    return entry.rule.ratio or entry.rule.parts or (1,)


def row_segments(side: TableSide, sizes: Sequence[int], groups: int | None) -> Iterator[RowSegment]:
    """Where each part is on a side, in the order of the tensors; `sizes` are the rows of the parts."""
    if len(side.names) > 1:
        for part, rows in enumerate(sizes):
            yield RowSegment(part, part, 0, rows, 0)
    elif not side.grouped:
        starts = accumulate(sizes, initial=0)
        for part, (rows, at) in enumerate(zip(sizes, starts, strict=False)):
            yield RowSegment(0, part, 0, rows, at)
    else:
        assert groups is not None
        at = 0
        for group in range(groups):
            for part, rows in enumerate(sizes):
                per_group = rows // groups
                yield RowSegment(0, part, group * per_group, per_group, at)
                at += per_group


def overlapping_segments(a: Sequence[RowSegment], b: Sequence[RowSegment]) -> Iterator[tuple[RowSegment, RowSegment]]:
    """The rows that segments of two sides have in common, as segments of both."""
    for one in a:
        for other in b:
            if one.part != other.part:
                continue
            start = max(one.start, other.start)
            rows = min(one.start + one.rows, other.start + other.rows) - start
            if rows > 0:
                yield (
                    RowSegment(one.tensor, one.part, start, rows, one.at + start - one.start),
                    RowSegment(other.tensor, other.part, start, rows, other.at + start - other.start),
                )


def segment_box(segment: RowSegment, side: TableSide, matrix: PartMatrix, lead: Shape) -> Box:
    """The rows of a segment as a box of the side's tensor; `lead` are its indices along leading axes (experts)."""
    start: tuple[int, ...] = (segment.at, *(0,) * len(matrix.rest))
    shape: tuple[int, ...] = (segment.rows, *matrix.rest)
    if side.transposed:
        start, shape = start[::-1], shape[::-1]
    return Box((*lead, *start), (*(1,) * len(lead), *shape))


def segment_tile(name: str, source: Box, target: Box, one: TableSide, other: TableSide) -> BlockMap:
    return BlockMap(name, source, target, one.transposed != other.transposed)


def side_shape(side: TableSide, rows: int, rest: Shape, lead: Shape) -> Shape:
    """The shape of a side's tensor of this many rows; `lead` are the lengths of its leading axes."""
    shape = (rows, *rest)
    return (*lead, *(shape[::-1] if side.transposed else shape))


def matrix_of(side: TableSide, shape: Shape, lead: int, name: str) -> PartMatrix:
    """Rows and columns of a side's tensor of this shape, without its `lead` leading axes."""
    inner = shape[lead:]
    if len(shape) <= lead or (side.transposed and len(inner) != 2):
        raise InconsistentError(f"parameter {name}: shape {list(shape)} does not fit the table of names")
    if side.transposed:
        inner = inner[::-1]
    return PartMatrix(inner[0], inner[1:])


def side_rule(entry: TableEntry, side: TableSide, sizes: Sequence[int], lead: int, vocabulary: int | None) -> Rule:
    """How a side's tensor is split over tensor-parallel ranks; `lead` counts its leading axes."""
    if entry.rule.cut == "replicated":
        return REPLICATED
    if entry.rule.cut == "vocab":
        return Rule("vocab", lead, true_size=vocabulary)
    dim = lead + (1 - entry.rule.dim if side.transposed else entry.rule.dim)
    is_fused = entry.rule.dim == 0 and len(side.names) == 1 and len(sizes) > 1 and not side.grouped
    return Rule("split", dim, parts=tuple(sizes) if is_fused else None)
