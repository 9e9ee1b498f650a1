"""DeepSpeed's affine maps: a parameter's slices spelled out as strided blocks, turned into rules.

A map that amounts to a plain rule (replicated, split, split in parts) becomes that rule, so that it can be cut again
for another number of ranks. Anything else stays as pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from ucp.errors import NotUnderstoodError
from ucp.model.box import Box, Shape, interval_boxes, strides_of, whole
from ucp.model.rules import REPLICATED, Rule, SlicePiece, slice_pieces

VERSION: Final = 1
_MAX_PIECES: Final = 1 << 20  # of one slice; a map that needs more describes no layout that anyone uses


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of a strided block: its length and its steps in the whole and in the slice, in elements."""

    length: int
    source: int
    dest: int


def affine_rule(entry: Any, where: str) -> Rule:
    """The rule that one entry of an affine map describes; `where` names file and parameter in messages."""
    try:
        logical = _shape(entry["logical_shape"])
        ranks = {int(rank): held for rank, held in entry["ranks"].items()}
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ValueError(f"ranks {sorted(ranks)}")
        slices = tuple(_slice(ranks[rank], logical) for rank in range(len(ranks)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUnderstoodError(f"{where}: an affine map that cannot be followed ({error})") from None
    return _simplified(logical, slices) or Rule("pieces", logical_shape=logical, slices=slices)


def _slice(held: Mapping[str, Any], logical: Shape) -> tuple[SlicePiece, ...]:
    """The pieces of one rank's slice by offset, checked to fill the slice without gap or overlap."""
    pieces: list[SlicePiece] = []
    for piece in held["pieces"]:
        shape = _shape(piece["shape"])
        source, source_strides = piece["source"]
        dest, dest_strides = piece["dest"]
        scale = float(piece.get("scale", 1.0))
        if 0 in shape:
            continue
        axes = [
            _Axis(length, _natural(s), _natural(d))
            for length, s, d in zip(shape, source_strides, dest_strides, strict=True)
            if length > 1
        ]
        if _natural(source) + sum((axis.length - 1) * axis.source for axis in axes) >= prod(logical) or scale == 0.0:
            raise ValueError(f"a piece of shape {list(shape)} reaches outside the parameter")
        axes.sort(key=lambda axis: -axis.dest)
        for box, offset in _blocks(axes, source, _natural(dest), logical):
            pieces.append(SlicePiece(box, offset, scale))
            if len(pieces) > _MAX_PIECES:
                raise ValueError(f"more than {_MAX_PIECES} pieces in one slice")
    pieces.sort(key=lambda piece: piece.offset)
    at = 0
    for piece in pieces:
        if piece.offset != at:
            raise ValueError(
                f"element {min(at, piece.offset)} of a slice is described {'twice' if piece.offset < at else 'nowhere'}"
            )
        at += piece.box.numel
    if at != prod(_shape(held["shard_shape"])):
        raise ValueError(f"pieces of {at} elements for a slice of shape {held['shard_shape']}")
    return tuple(_joined(pieces))


def _blocks(axes: Sequence[_Axis], source: int, dest: int, logical: Shape) -> Iterator[tuple[Box, int]]:
    """Cut a strided block (outermost slice step first) into boxes of the whole that lie contiguous in the slice."""
    boxes = _source_boxes(axes, source, logical) if _dense([(axis.length, axis.dest) for axis in axes]) else None
    if boxes is not None:
        for box in boxes:
            yield box, dest
            dest += box.numel
        return
    outer, inner = axes[0], axes[1:]
    for i in range(outer.length):
        yield from _blocks(inner, source + i * outer.source, dest + i * outer.dest, logical)


def _source_boxes(axes: Sequence[_Axis], source: int, logical: Shape) -> list[Box] | None:
    """The boxes of the whole that a strided block is, in its own row-major order; None where it is not a block."""
    if _dense([(axis.length, axis.source) for axis in axes]):
        return list(interval_boxes(logical, source, source + prod(axis.length for axis in axes)))
    strides = strides_of(logical)
    start = [source // stride % size for stride, size in zip(strides, logical, strict=True)]
    shape = [1] * len(logical)
    dim = -1
    for axis in axes:
        dim = next(
            (d for d in range(dim + 1, len(logical)) if strides[d] == axis.source and logical[d] > 1), len(logical)
        )
        if dim == len(logical) or start[dim] + axis.length > logical[dim]:
            return None
        shape[dim] = axis.length
    return [Box(tuple(start), tuple(shape))]


def _dense(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether (length, step) pairs, outermost first, count consecutive elements in row-major order."""
    expected = 1
    for length, step in reversed(steps):
        if step != expected:
            return False
        expected *= length
    return True


def _joined(pieces: Sequence[SlicePiece]) -> Iterator[SlicePiece]:
    """Pieces with neighbours joined where together they are one box."""
    last: SlicePiece | None = None
    for piece in pieces:
        box = _join(last.box, piece.box) if last is not None and last.scale == piece.scale else None
        if last is not None and box is not None:
            last = SlicePiece(box, last.offset, last.scale)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _join(first: Box, second: Box) -> Box | None:
    """The box whose row-major elements are those of `first`, then those of `second`; None where there is none."""
    for dim in range(first.ndim):
        if first.start[dim] == second.start[dim] and first.shape[dim] == second.shape[dim] == 1:
            continue
        after = slice(dim + 1, None)
        if first.start[after] != second.start[after] or first.shape[after] != second.shape[after]:
            return None
        if first.start[dim] + first.shape[dim] != second.start[dim]:
            return None
        return Box(first.start, (*first.shape[:dim], first.shape[dim] + second.shape[dim], *first.shape[after]))
    return None


def _simplified(logical: Shape, slices: Sequence[tuple[SlicePiece, ...]]) -> Rule | None:
    """The plain rule that cuts exactly these slices, if there is one."""
    if 0 in logical or any(piece.scale != 1.0 for pieces in slices for piece in pieces):
        return None
    if all(pieces == (SlicePiece(whole(logical), 0),) for pieces in slices):
        return REPLICATED
    for dim in range(len(logical)):
        rule = _split(logical, slices, dim)
        if rule is not None:
            return rule
    return None


def _split(logical: Shape, slices: Sequence[tuple[SlicePiece, ...]], dim: int) -> Rule | None:
    rows = prod(logical[:dim])
    counts = {1 if len(pieces) == 1 else len(pieces) // rows for pieces in slices}
    if len(counts) != 1 or not all(len(pieces) in (1, rows * max(counts)) for pieces in slices):
        return None
    widths = tuple(tuple(pieces[part].box.shape[dim] for pieces in slices) for part in range(counts.pop()))
    parts = tuple(map(sum, widths))
    if sum(parts) != logical[dim]:
        return None
    even = all(len(set(shares)) == 1 for shares in widths)
    rule = Rule("split", dim, parts=parts if len(parts) > 1 else None, widths=None if even else widths)
    tp = len(slices)
    fits = all(tuple(_joined(slice_pieces(rule, logical, tp, rank, ""))) == slices[rank] for rank in range(tp))
    return rule if fits else None


def _shape(value: Any) -> Shape:
    return tuple(_natural(size) for size in value)


def _natural(value: Any) -> int:
    number = int(value)
    if number < 0 or number != value:
        raise ValueError(f"{value!r} where a size belongs")
    return number
