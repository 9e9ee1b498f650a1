"""Rules: how one parameter is split over tensor-parallel ranks, and the arithmetic between slices and the whole.

A rule is data: read from the checkpoint, a preset or a rule file, or inferred. `RuleBook` finds the rule for a
parameter name and records where it came from. `rule_to_json` and `rule_from_json` are its form in manifests.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast, get_args

from ucp.core.box import Box, Shape, whole
from ucp.errors import ImpossibleError, InconsistentError, IntegrityError, UnsafeError, UsageError

T = TypeVar("T")
Cut = Literal["replicated", "split", "vocab", "average", "pieces"]

_CORRECT_RULE: Final = "correct the rule with --rules or --preset, or look for a rank file of another run"


class SlicePiece(NamedTuple):
    """A block of the whole parameter (`box`), contiguous in one rank's slice from its element `offset` on."""

    box: Box
    offset: int
    scale: float = 1.0  # stored value = logical value * scale


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is split over tensor-parallel ranks.

    * `replicated`: every rank holds the whole parameter; the copies must be bit-equal.
    * `split`: split along `dim`. With `parts`, that dimension is a concatenation of sub-parameters (fused q, k, v;
      gate and up), each of which is split over the ranks. `parts` are their sizes; `ratio` replaces them if only the
      proportions are known (`(4, 1, 1)`: four query heads per key head); `widths[part][rank]` are the sizes of the
      slices if they are uneven. A negative `dim` counts from the last. `resolve` fills in the sizes that a rule leaves
      open.
    * `vocab`: like `split`, but padded so that the split is even; only `true_size` entries of `dim` are real. (A padded
      table can also be replicated or averaged: `true_size` counts along `dim` in that case, too.)
    * `average`: every rank holds its own version; the atom is their mean.
    * `pieces`: the checkpoint lists, for each rank, which block of the whole is where (`slices`).
    """

    cut: Cut
    dim: int = 0
    parts: tuple[int, ...] | None = None
    ratio: tuple[int, ...] | None = None  # proportions of the parts; never together with `parts`
    widths: tuple[tuple[int, ...], ...] | None = None
    true_size: int | None = None
    logical_shape: Shape | None = None  # `pieces` only
    slices: tuple[tuple[SlicePiece, ...], ...] | None = None  # `pieces` only, one entry per rank

    def __str__(self) -> str:
        if self.cut == "split":
            parts = f", parts={list(self.parts)}" if self.parts else ""
            ratio = f", ratio={list(self.ratio)}" if self.ratio else ""
            return f"split(dim={self.dim}{parts}{ratio})"
        if self.cut == "vocab":
            return f"vocab(dim={self.dim}" + (f", true_size={self.true_size})" if self.true_size else ")")
        return self.cut


REPLICATED = Rule("replicated")


def resolve(rule: Rule, local: Sequence[Shape], name: str) -> Rule:
    """`rule` with all sizes filled in, given the shapes of the slices of all tensor-parallel ranks.

    Ratios become sizes, a negative dimension becomes non-negative, uneven slices get their widths. Raises an error if
    the rule does not fit the slices.
    """
    if rule.cut == "pieces":
        _check_pieces(rule, local, name)
        return rule
    if rule.cut in ("replicated", "average"):
        whole_shape(rule, local, name)
        return rule
    if rule.dim < 0:
        if len(local[0]) + rule.dim < 0:
            raise _no_such_dimension(rule, local[0], name)
        rule = replace(rule, dim=len(local[0]) + rule.dim)
    total = whole_shape(rule, local, name)[rule.dim]
    parts = sizes_of_parts(rule, total, name)
    held = tuple(shape[rule.dim] for shape in local)
    widths = rule.widths
    if widths is None and len(set(held)) > 1:
        widths = _uneven_widths(rule, parts, held, name)
    if widths is not None:
        _check_widths(rule, parts, widths, held, name)
    return replace(rule, parts=parts if rule.parts or rule.ratio else None, ratio=None, widths=widths)


def sizes_of_parts(rule: Rule, total: int, name: str) -> tuple[int, ...]:
    """Sizes of the sub-parameters along the split dimension of `total` entries; one part if nothing is fused."""
    if rule.ratio is None:
        return rule.parts or (total,)
    unit, rest = divmod(total, sum(rule.ratio))
    if rest:
        raise ImpossibleError(
            f"parameter {name}: rule '{rule}' divides dimension {rule.dim} into {sum(rule.ratio)} equal shares,"
            f" but it has {total} entries",
            hint="correct the ratio in the rule, or give the sizes as parts",
        )
    return tuple(share * unit for share in rule.ratio)


def _no_such_dimension(rule: Rule, shape: Shape, name: str) -> ImpossibleError:
    return ImpossibleError(f"parameter {name}: rule '{rule}' does not fit slices of shape {list(shape)}")


def _uneven_widths(rule: Rule, parts: tuple[int, ...], held: tuple[int, ...], name: str) -> tuple[tuple[int, ...], ...]:
    """Widths of the parts on each rank if ranks hold different amounts: the same proportions on every rank."""
    total = sum(held)
    if any(size * part % total for size in held for part in parts):
        raise ImpossibleError(
            f"parameter {name}: the slices along dimension {rule.dim} are uneven, {list(held)}, and rule '{rule}'"
            " does not define how its parts are distributed over them",
            hint="give widths together with parts in a rule file",
        )
    return tuple(tuple(size * part // total for size in held) for part in parts)


def _check_widths(
    rule: Rule, parts: tuple[int, ...], widths: tuple[tuple[int, ...], ...], held: tuple[int, ...], name: str
) -> None:
    fits = (
        len(widths) == len(parts)
        and all(len(shares) == len(held) for shares in widths)
        and all(sum(shares) == part for shares, part in zip(widths, parts, strict=True))
        and tuple(map(sum, zip(*widths, strict=True))) == held
    )
    if not fits:
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' distributes parts {list(parts)} over the ranks as"
            f" {[list(shares) for shares in widths]}, but the slices along dimension {rule.dim} are {list(held)}",
            hint=_CORRECT_RULE,
        )


def _check_pieces(rule: Rule, local: Sequence[Shape], name: str) -> None:
    assert rule.slices is not None
    if len(rule.slices) != len(local):
        raise InconsistentError(
            f"parameter {name}: its rule describes the slices of {len(rule.slices)} tensor-parallel ranks,"
            f" found {len(local)}"
        )
    for rank, (pieces, shape) in enumerate(zip(rule.slices, local, strict=True)):
        described = sum(piece.box.numel for piece in pieces)
        if described != prod(shape):
            raise InconsistentError(
                f"parameter {name}: its rule describes {described} elements on tensor-parallel rank {rank},"
                f" but the slice there has shape {list(shape)}",
                hint="look for a rank file of another run",
            )


def whole_shape(rule: Rule, local: Sequence[Shape], name: str) -> Shape:
    """The shape of the whole parameter, including padding, given the shapes of all tensor-parallel slices."""
    first = local[0]
    if rule.cut == "pieces":
        assert rule.logical_shape is not None
        return rule.logical_shape
    if rule.cut in ("replicated", "average"):
        if any(shape != first for shape in local):
            raise InconsistentError(
                f"parameter {name}: rule '{rule}' needs the same shape on every tensor-parallel rank,"
                f" found {_shape_list(local)}",
                hint=_CORRECT_RULE,
            )
        return first
    dim = rule.dim
    if dim >= len(first):
        raise _no_such_dimension(rule, first, name)
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in local):
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' needs slices that differ along dimension {dim} only,"
            f" found {_shape_list(local)}",
            hint=_CORRECT_RULE,
        )
    total = sum(shape[dim] for shape in local)
    if rule.parts is not None and sum(rule.parts) != total:
        raise InconsistentError(
            f"parameter {name}: the parts of rule '{rule}' add up to {sum(rule.parts)} entries,"
            f" but the slices along dimension {dim} have {total}",
            hint="correct the parts in the rule",
        )
    return (*first[:dim], total, *first[dim + 1 :])


def logical_shape(rule: Rule, padded: Shape) -> Shape:
    """The shape of the atom: the whole parameter without vocabulary padding."""
    if rule.true_size is not None and rule.true_size < padded[rule.dim]:
        return (*padded[: rule.dim], rule.true_size, *padded[rule.dim + 1 :])
    return padded


def slice_pieces(rule: Rule, padded: Shape, tp: int, rank: int, name: str) -> tuple[SlicePiece, ...]:
    """The blocks that tensor-parallel rank `rank` of `tp` holds of a parameter of shape `padded`, in slice order."""
    if rule.cut == "pieces":
        assert rule.slices is not None
        return rule.slices[rank]
    if rule.cut in ("replicated", "average"):
        return (SlicePiece(whole(padded), 0),)
    dim, tail = rule.dim, padded[rule.dim + 1 :]
    parts = sizes_of_parts(rule, padded[dim], name)
    ranges: list[tuple[int, int]] = []  # (start, width) of this rank's share of each part, along dim
    at = 0
    for i, part in enumerate(parts):
        what = f"dimension {dim}" if len(parts) == 1 else f"part {i + 1} of {len(parts)} of dimension {dim}"
        widths = rule.widths[i] if rule.widths else even_widths(part, tp, name, what)
        ranges.append((at + sum(widths[:rank]), widths[rank]))
        at += part
    if len(ranges) == 1:
        start, width = ranges[0]
        return (SlicePiece(Box((0,) * dim + (start,) + (0,) * len(tail), (*padded[:dim], width, *tail)), 0),)
    # Several parts along an inner dimension interleave row by row: one box per row and part.
    pieces: list[SlicePiece] = []
    offset = 0
    for lead in product(*map(range, padded[:dim])):
        for start, width in ranges:
            box = Box((*lead, start, *(0,) * len(tail)), (*(1,) * dim, width, *tail))
            pieces.append(SlicePiece(box, offset))
            offset += box.numel
    return tuple(pieces)


def even_widths(size: int, tp: int, name: str, what: str) -> tuple[int, ...]:
    """`size` divided into `tp` equal widths; an error if it does not divide. `what` describes the dimension."""
    if size % tp:
        raise ImpossibleError(
            f"parameter {name}: {what} has {size} entries, which do not divide over tp={tp}",
            hint=f"choose a tp that divides {size}",
        )
    return (size // tp,) * tp


def _shape_list(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"rank {i}: {list(shape)}" for i, shape in enumerate(shapes))


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule for the names that `pattern` matches (a regular expression, anchored at the start of the name)."""

    pattern: re.Pattern[str]
    rule: Rule
    origin: str  # where it came from, for people: "checkpoint: tp_replicated_parameter_patterns", "file: rules.toml", …
    optional: bool = False  # from a preset, which covers several models: matching no name is not an error


@dataclass(slots=True)
class RuleBook:
    """Ordered rules; the first one whose pattern matches a name applies. Records which rules were used."""

    rules: list[NamedRule] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def add(self, pattern: str, rule: Rule, origin: str, *, optional: bool = False) -> None:
        """Append a rule. Raises an error if the pattern is invalid or could take exponential time to match."""
        try:
            self.rules.append(NamedRule(compile_pattern(pattern, origin), rule, origin, optional))
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
        """Rules that were never the first match for a name."""
        return [named for i, named in enumerate(self.rules) if i not in self.used]


_FIELDS = frozenset({"cut", "dim", "parts", "ratio", "widths", "true_size", "logical_shape", "slices"})


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """The rule as a JSON object without its default fields; the inverse of `rule_from_json`."""
    out: dict[str, Any] = {"cut": rule.cut}
    if rule.cut in ("split", "vocab") or rule.dim:
        out["dim"] = rule.dim
    for name in ("parts", "ratio", "widths", "true_size", "logical_shape"):
        value = getattr(rule, name)
        if value is not None:
            out[name] = value if isinstance(value, int) else [n if isinstance(n, int) else list(n) for n in value]
    if rule.slices is not None:
        out["slices"] = [[_piece_to_json(piece) for piece in pieces] for pieces in rule.slices]
    return out


def rule_from_json(data: Any) -> Rule:
    """The rule that `rule_to_json` wrote; raises IntegrityError for anything else."""
    if not isinstance(data, Mapping) or data.get("cut") not in get_args(Cut) or data.keys() - _FIELDS:
        raise _bad(data)
    parsers: dict[str, Callable[[Any], Any]] = {
        "dim": _int,
        "parts": _sizes,
        "ratio": _sizes,
        "widths": partial(_tuple, _sizes),
        "true_size": _int,
        "logical_shape": _sizes,
        "slices": partial(_tuple, partial(_tuple, _piece_from_json)),
    }
    fields = {name: parse(data[name]) for name, parse in parsers.items() if data.get(name) is not None}
    return Rule(cut=cast(Cut, data["cut"]), **fields)


def _piece_to_json(piece: SlicePiece) -> dict[str, Any]:
    out: dict[str, Any] = {"start": list(piece.box.start), "shape": list(piece.box.shape), "offset": piece.offset}
    if piece.scale != 1.0:
        out["scale"] = piece.scale
    return out


def _piece_from_json(data: Any) -> SlicePiece:
    if not isinstance(data, Mapping) or data.keys() - {"start", "shape", "offset", "scale"}:
        raise _bad(data)
    start, shape, scale = _sizes(data.get("start")), _sizes(data.get("shape")), data.get("scale", 1.0)
    if len(start) != len(shape) or not isinstance(scale, int | float):
        raise _bad(data)
    return SlicePiece(Box(start, shape), _int(data.get("offset")), float(scale))


def _sizes(value: Any) -> tuple[int, ...]:
    return _tuple(_int, value)


def _tuple(parse: Callable[[Any], T], value: Any) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise _bad(value)
    return tuple(map(parse, value))


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(value)
    return value


def _bad(value: Any) -> IntegrityError:
    return IntegrityError(
        f"not a rule: {str(value)[:200]}", hint="the manifest was damaged or written by a newer version of ucp"
    )


if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

_MAX_REPEATS: Final = 6
_MAX_PATTERN_LENGTH: Final = 10_000  # characters
_REPEAT_OPCODES: Final = ("MAX_REPEAT", "MIN_REPEAT")


def compile_pattern(text: str, origin: str) -> re.Pattern[str]:
    """Compile a regular expression from a checkpoint or rule file; `origin` names the source in messages.

    Python's matcher backtracks over every way in which repeats can divide a text: exponentially many for a repeat
    inside a repeat (`(a+b?)+!`), a power of the text's length for several in a row. Such patterns are refused with
    UnsafeError; no pattern for parameter names needs them. Raises `re.error` for an invalid expression.
    """
    if len(text) > _MAX_PATTERN_LENGTH:
        raise _unsafe_pattern(text, origin, f"has {len(text)} characters")
    pattern = re.compile(text)
    repeats = list(_repeats(parser.parse(text), inside=False))
    if any(inside for inside in repeats):
        raise _unsafe_pattern(text, origin, "has repeats or alternatives inside a repeat")
    if len(repeats) > _MAX_REPEATS:
        raise _unsafe_pattern(text, origin, f"has {len(repeats)} repeats (at most {_MAX_REPEATS} are allowed)")
    return pattern


def _unsafe_pattern(text: str, origin: str, why: str) -> UnsafeError:
    excerpt = text if len(text) <= 100 else text[:100] + "…"
    return UnsafeError(
        f"{origin}: the pattern {excerpt!r} {why}: matching it could take exponential time",
        hint="simplify the pattern, or pass your own rules with --rules",
    )


def _repeats(tree: Any, *, inside: bool) -> Iterator[bool]:
    """For each repeat of variable length, and each alternative inside one: whether it is inside another repeat."""
    for code, argument in tree:
        name = str(code)
        if name in _REPEAT_OPCODES:
            least, most, what = argument
            is_open = int(most) > 1 and most != least
            if is_open:
                yield inside
            yield from _repeats(what, inside=inside or is_open)
            continue
        if name == "BRANCH" and inside:
            yield True
        yield from _inner(argument, inside=inside)


def _inner(argument: Any, *, inside: bool) -> Iterator[bool]:
    """The repeats inside an operator of the parsed expression: groups, alternatives, assertions."""
    if isinstance(argument, parser.SubPattern):
        yield from _repeats(argument, inside=inside)
    elif isinstance(argument, (list, tuple)):
        for value in argument:
            yield from _inner(value, inside=inside)
