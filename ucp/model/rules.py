"""Rules: how one parameter is cut over tensor-parallel ranks, and the arithmetic between slices and the whole.

A rule is data. It is read from the checkpoint, from a preset, from a file, or inferred; `RuleBook` finds the one
that applies to a name and remembers where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from ucp.errors import InconsistentError, UsageError
from ucp.model.box import Box, Shape, whole

Cut = Literal["replicated", "split", "vocab", "average", "pieces"]


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """A block of the whole (`box`) that lies contiguous in one rank's slice, `offset` elements from its start."""

    box: Box
    offset: int
    scale: float = 1.0  # stored value = logical value * scale


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is cut over `tp` ranks.

    * `replicated`: every rank holds the whole; copies must be bit-equal.
    * `split`: cut along `dim`. With `parts`, the dimension is several sub-parameters side by side (fused q, k, v;
      gate and up), each cut over the ranks on its own. `parts` are whole sizes; `widths[part][rank]` are the slices'
      sizes where they are uneven.
    * `vocab`: `split` whose whole was padded to come out even; only `true_size` entries of `dim` are real.
    * `average`: every rank holds its own version; the atom is their mean.
    * `pieces`: the checkpoint spells out, rank by rank, which block of the whole lies where (`slices`).
    """

    cut: Cut
    dim: int = 0
    parts: tuple[int, ...] | None = None
    widths: tuple[tuple[int, ...], ...] | None = None
    true_size: int | None = None
    logical_shape: Shape | None = None  # `pieces` only
    slices: tuple[tuple[SlicePiece, ...], ...] | None = None  # `pieces` only, one entry a rank

    def __str__(self) -> str:
        if self.cut == "split":
            return f"split(dim={self.dim}" + (f", parts={list(self.parts)})" if self.parts else ")")
        if self.cut == "vocab":
            return f"vocab(dim={self.dim}, true_size={self.true_size})"
        return self.cut


REPLICATED = Rule("replicated")


def whole_shape(rule: Rule, local: Sequence[Shape], name: str) -> Shape:
    """The shape of the whole, padding included, from the shapes of the slices of every tp rank."""
    first = local[0]
    if rule.cut == "pieces":
        assert rule.logical_shape is not None
        return rule.logical_shape
    if rule.cut in ("replicated", "average"):
        if any(shape != first for shape in local):
            raise InconsistentError(
                f"parameter {name}: rule '{rule}' needs the same shape on every tensor-parallel rank, found {_list(local)}",
                hint="correct the rule with --rules or --preset, or look for a rank file of another run",
            )
        return first
    dim = rule.dim
    if dim >= len(first):
        raise UsageError(f"parameter {name}: rule '{rule}' names dimension {dim}, but its slices have shape {list(first)}")
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in local):
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' needs slices that differ along dimension {dim} only, found {_list(local)}",
            hint="correct the rule with --rules or --preset, or look for a rank file of another run",
        )
    total = sum(shape[dim] for shape in local)
    if rule.parts is not None and sum(rule.parts) != total:
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' names parts of {sum(rule.parts)} in all, but the slices along dimension {dim}"
            f" have {total}",
            hint="correct the parts in the rule",
        )
    return (*first[:dim], total, *first[dim + 1 :])


def logical_shape(rule: Rule, padded: Shape) -> Shape:
    """The shape of the atom: the whole without its vocabulary padding."""
    if rule.cut == "vocab" and rule.true_size is not None and rule.true_size < padded[rule.dim]:
        return (*padded[: rule.dim], rule.true_size, *padded[rule.dim + 1 :])
    return padded


def slice_pieces(rule: Rule, padded: Shape, tp: int, rank: int, name: str) -> tuple[SlicePiece, ...]:
    """What tp rank `rank` of `tp` holds of a whole of shape `padded`: contiguous blocks, in the order of its slice."""
    if rule.cut == "pieces":
        assert rule.slices is not None
        return rule.slices[rank]
    if rule.cut in ("replicated", "average"):
        return (SlicePiece(whole(padded), 0),)
    pieces: list[SlicePiece] = []
    offset = 0
    for box in _split_boxes(rule, padded, tp, rank, name):
        pieces.append(SlicePiece(box, offset))
        offset += box.numel
    return tuple(pieces)


def _split_boxes(rule: Rule, padded: Shape, tp: int, rank: int, name: str) -> Iterator[Box]:
    dim = rule.dim
    parts = rule.parts or (padded[dim],)
    ranges: list[tuple[int, int]] = []  # (start, width) of this rank's share of each part, along dim
    at = 0
    for i, part in enumerate(parts):
        widths = rule.widths[i] if rule.widths else even_widths(part, tp, name, dim)
        ranges.append((at + sum(widths[:rank]), widths[rank]))
        at += part
    if len(ranges) == 1:
        (start, width), tail = ranges[0], padded[dim + 1 :]
        yield Box((0,) * dim + (start,) + (0,) * len(tail), (*padded[:dim], width, *tail))
        return
    # Several parts along an inner dimension interleave row by row: one box a row and part.
    tail = padded[dim + 1 :]
    for lead in product(*(range(n) for n in padded[:dim])):
        for start, width in ranges:
            yield Box((*lead, start, *(0,) * len(tail)), (*(1,) * dim, width, *tail))


def even_widths(size: int, tp: int, name: str, dim: int) -> tuple[int, ...]:
    """`size` cut into `tp` equal widths; refused with the numbers where it does not divide."""
    if size % tp:
        raise UsageError(f"parameter {name}: dimension {dim} has {size} entries, which do not divide over tp={tp}")
    return (size // tp,) * tp


def _list(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"rank {i}: {list(shape)}" for i, shape in enumerate(shapes))


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule for the names that `pattern` matches (a regular expression, anchored at the start of the name)."""

    pattern: re.Pattern[str]
    rule: Rule
    origin: str  # where it came from, for people: "checkpoint: tp_replicated_parameter_patterns", "file: rules.toml", …


@dataclass(slots=True)
class RuleBook:
    """Ordered rules; the first whose pattern matches a name applies to it. Remembers which patterns were ever used."""

    rules: list[NamedRule] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def add(self, pattern: str, rule: Rule, origin: str) -> None:
        """Append a rule; a pattern that is no regular expression is refused."""
        try:
            self.rules.append(NamedRule(re.compile(pattern), rule, origin))
        except re.error as error:
            raise UsageError(f"{origin}: {pattern!r} is not a regular expression: {error}") from None

    def find(self, name: str) -> NamedRule | None:
        """The rule for this parameter name, or None."""
        for i, named in enumerate(self.rules):
            if named.pattern.match(name):
                self.used.add(i)
                return named
        return None

    def unused(self) -> list[NamedRule]:
        """Rules whose pattern matched no name that was looked up."""
        return [named for i, named in enumerate(self.rules) if i not in self.used]
