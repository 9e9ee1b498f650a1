"""From a table's entry to tiles: which block of which tensor of one side is which block of the other's.

Every entry is a list of parts, each a matrix of some rows. A side says where the rows of each part lie in its tensors:
its segments. Where segments of both sides meet, there is a tile.
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
    """Rows `[start, start + rows)` of a part, at row `at` of the tensor with this index among the side's names."""

    tensor: int
    part: int
    start: int
    rows: int
    at: int


@dataclass(frozen=True, slots=True)
class PartMatrix:
    """The shape of a part: its rows, and what every row has."""

    rows: int
    rest: Shape


def part_ratio(entry: TableEntry, facts: ModelConfig, name: str) -> tuple[int, ...]:
    """The proportions of an entry's parts."""
    if entry.parts == "qkv":
        if facts.heads is None or facts.query_groups is None:
            raise UsageError(
                f"parameter {name}: how many query heads and key heads the model has is not in the checkpoint",
                hint="give the model's config.json with --model-config FILE,"
                ' or {"num_attention_heads": …, "num_key_value_heads": …}',
            )
        if facts.heads % facts.query_groups:
            raise UsageError(
                f"parameter {name}: {facts.heads} query heads do not divide over {facts.query_groups} key heads",
                hint="--model-config FILE corrects them",
            )
        return facts.heads, facts.query_groups, facts.query_groups
    if entry.parts == "gated":
        if facts.gated is None:
            raise UsageError(
                f"parameter {name}: whether the MLP has a gate is not in the checkpoint",
                hint='say {"swiglu": true} or {"swiglu": false} in a --model-config FILE',
            )
        return (1, 1) if facts.gated else (1,)
    return entry.parts if isinstance(entry.parts, tuple) else (1,)


def part_rows(proportions: Sequence[int], rows: int, name: str) -> tuple[int, ...]:
    """The rows of each part, of a tensor that has all of them."""
    unit, over = divmod(rows, sum(proportions))
    if over:
        raise InconsistentError(
            f"parameter {name}: {rows} rows are no parts of {':'.join(map(str, proportions))}",
            hint="check the head counts: `ucp inspect SRC` shows them, --model-config FILE corrects them",
        )
    return tuple(share * unit for share in proportions)


def row_segments(side: TableSide, sizes: Sequence[int], groups: int | None) -> Iterator[RowSegment]:
    """Where each part lies on a side, in the order of the tensors."""
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
                share = rows // groups
                yield RowSegment(0, part, group * share, share, at)
                at += share


def overlapping_segments(a: Sequence[RowSegment], b: Sequence[RowSegment]) -> Iterator[tuple[RowSegment, RowSegment]]:
    """The rows that segments of two sides share, as segments of both."""
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
    """The rows of a segment as a block of the side's tensor; `lead` are the numbers that its first axes count."""
    start: tuple[int, ...] = (segment.at, *(0,) * len(matrix.rest))
    shape: tuple[int, ...] = (segment.rows, *matrix.rest)
    if side.transposed:
        start, shape = start[::-1], shape[::-1]
    return Box((*lead, *start), (*(1,) * len(lead), *shape))


def side_shape(side: TableSide, rows: int, rest: Shape, lead: Shape) -> Shape:
    """The shape of a side's tensor with so many rows; `lead` are the lengths of its first axes."""
    shape = (rows, *rest)
    return (*lead, *(shape[::-1] if side.transposed else shape))


def matrix_of(side: TableSide, shape: Shape, lead: int, name: str) -> PartMatrix:
    """Rows and columns of a side's tensor of this shape, whose first `lead` axes count something."""
    inner = shape[lead:]
    if len(shape) <= lead or (side.transposed and len(inner) != 2):
        raise InconsistentError(f"parameter {name}: has shape {list(shape)}, which is not what the table says of it")
    if side.transposed:
        inner = inner[::-1]
    return PartMatrix(inner[0], inner[1:])


def segment_tile(name: str, source: Box, target: Box, one: TableSide, other: TableSide) -> BlockMap:
    return BlockMap(name, source, target, one.transposed != other.transposed)


def side_rule(entry: TableEntry, side: TableSide, sizes: Sequence[int], lead: int, vocabulary: int | None) -> Rule:
    """How a side's tensor is cut over tensor-parallel ranks."""
    if entry.cut == "whole":
        return REPLICATED
    if entry.cut == "vocab":
        return Rule("vocab", lead, true_size=vocabulary)
    if entry.cut == "columns":
        return Rule("split", lead + (0 if side.transposed else 1))
    fused = len(side.names) == 1 and len(sizes) > 1 and not side.grouped
    return Rule("split", lead + (1 if side.transposed else 0), parts=tuple(sizes) if fused else None)
