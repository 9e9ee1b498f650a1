"""Rules: how one parameter is cut over tensor-parallel ranks, and the arithmetic between slices and the whole.

A rule is data. It is read from the checkpoint, from a preset, from a file, or inferred; `RuleBook` finds the one
that applies to a name and remembers where it came from.

Rules as JSON values, for manifests and metadata. Fields that say nothing are left out.

Regular expressions that checkpoints bring along: compiled only where matching a name cannot take for ever.

Python's matcher goes back over every way in which repeats can share out a text. A repeat inside a repeat has
exponentially many (`(\\w+\\.?)+!`), several in a row a power of the text's length. No pattern for names of parameters
needs either.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from ucp.core.box import Box, Shape, whole
from ucp.errors import InconsistentError, IntegrityError, UnsafeError, UsageError

Cut = Literal["replicated", "split", "vocab", "average", "pieces"]


class SlicePiece(NamedTuple):
    """A block of the whole (`box`) that lies contiguous in one rank's slice, `offset` elements from its start."""

    box: Box
    offset: int
    scale: float = 1.0  # stored value = logical value * scale


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is cut over `tp` ranks.

    * `replicated`: every rank holds the whole; copies must be bit-equal.
    * `split`: cut along `dim`. With `parts`, the dimension is several sub-parameters side by side (fused q, k, v;
      gate and up), each cut over the ranks on its own. `parts` are whole sizes; `ratio` stands for them where only
      their proportions are known (`(4, 1, 1)`: four query heads a key head); `widths[part][rank]` are the slices' sizes
      where they are uneven. A negative `dim` counts from the last. `resolve` turns a rule that leaves sizes open into
      one that names them.
    * `vocab`: `split` whose whole was padded to come out even; only `true_size` entries of `dim` are real. (A padded
      table may be replicated or averaged too: `true_size` then counts along `dim` all the same.)
    * `average`: every rank holds its own version; the atom is their mean.
    * `pieces`: the checkpoint spells out, rank by rank, which block of the whole lies where (`slices`).
    """

    cut: Cut
    dim: int = 0
    parts: tuple[int, ...] | None = None
    ratio: tuple[int, ...] | None = None  # proportions of the parts; never together with `parts`
    widths: tuple[tuple[int, ...], ...] | None = None
    true_size: int | None = None
    logical_shape: Shape | None = None  # `pieces` only
    slices: tuple[tuple[SlicePiece, ...], ...] | None = None  # `pieces` only, one entry a rank

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
    """`rule` with every size named, from the shapes of the slices of every tp rank.

    Proportions become sizes, a negative dimension becomes a positive one, slices of uneven size get their widths. A
    rule that cannot hold for these slices is refused.
    """
    if rule.cut == "pieces":
        _check_pieces(rule, local, name)
        return rule
    if rule.cut in ("replicated", "average"):
        whole_shape(rule, local, name)
        return rule
    if rule.dim < 0:
        rule = replace(rule, dim=_positive(rule, local[0], name))
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
    """Whole sizes of the sub-parameters along the cut dimension of `total` entries; one part where nothing is fused."""
    if rule.ratio is None:
        return rule.parts or (total,)
    unit, rest = divmod(total, sum(rule.ratio))
    if rest:
        raise UsageError(
            f"parameter {name}: rule '{rule}' wants dimension {rule.dim} in {sum(rule.ratio)} equal shares,"
            f" but it has {total} entries",
            hint="correct the ratio in the rule, or name the sizes with parts",
        )
    return tuple(share * unit for share in rule.ratio)


def _positive(rule: Rule, shape: Shape, name: str) -> int:
    if len(shape) + rule.dim < 0:
        raise _no_such_dimension(rule, shape, name)
    return len(shape) + rule.dim


def _no_such_dimension(rule: Rule, shape: Shape, name: str) -> UsageError:
    return UsageError(f"parameter {name}: rule '{rule}' does not fit slices of shape {list(shape)}")


def _uneven_widths(rule: Rule, parts: tuple[int, ...], held: tuple[int, ...], name: str) -> tuple[tuple[int, ...], ...]:
    """Widths of the parts on each rank, where ranks hold different amounts: in the same proportions on every rank."""
    total = sum(held)
    if any(size * part % total for size in held for part in parts):
        raise UsageError(
            f"parameter {name}: the slices along dimension {rule.dim} are uneven, {list(held)}, and rule '{rule}'"
            " does not say how its parts are spread over them",
            hint="give widths beside parts in a rule file",
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
            f"parameter {name}: rule '{rule}' spreads parts {list(parts)} over the ranks as"
            f" {[list(shares) for shares in widths]}, but the slices along dimension {rule.dim} are {list(held)}",
            hint="correct the rule with --rules or --preset, or look for a rank file of another run",
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
    """The shape of the whole, padding included, from the shapes of the slices of every tp rank."""
    first = local[0]
    if rule.cut == "pieces":
        assert rule.logical_shape is not None
        return rule.logical_shape
    if rule.cut in ("replicated", "average"):
        if any(shape != first for shape in local):
            raise InconsistentError(
                f"parameter {name}: rule '{rule}' needs the same shape on every tensor-parallel rank,"
                f" found {_shape_list(local)}",
                hint="correct the rule with --rules or --preset, or look for a rank file of another run",
            )
        return first
    dim = rule.dim
    if dim >= len(first):
        raise _no_such_dimension(rule, first, name)
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in local):
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' needs slices that differ along dimension {dim} only,"
            f" found {_shape_list(local)}",
            hint="correct the rule with --rules or --preset, or look for a rank file of another run",
        )
    total = sum(shape[dim] for shape in local)
    if rule.parts is not None and sum(rule.parts) != total:
        raise InconsistentError(
            f"parameter {name}: rule '{rule}' names parts of {sum(rule.parts)} in all,"
            f" but the slices along dimension {dim} have {total}",
            hint="correct the parts in the rule",
        )
    return (*first[:dim], total, *first[dim + 1 :])


def logical_shape(rule: Rule, padded: Shape) -> Shape:
    """The shape of the atom: the whole without its vocabulary padding."""
    if rule.true_size is not None and rule.true_size < padded[rule.dim]:
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
    parts = sizes_of_parts(rule, padded[dim], name)
    ranges: list[tuple[int, int]] = []  # (start, width) of this rank's share of each part, along dim
    at = 0
    for i, part in enumerate(parts):
        what = f"dimension {dim}" if len(parts) == 1 else f"part {i + 1} of {len(parts)} of dimension {dim}"
        widths = rule.widths[i] if rule.widths else even_widths(part, tp, name, what)
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


def even_widths(size: int, tp: int, name: str, what: str) -> tuple[int, ...]:
    """`size` cut into `tp` equal widths; refused with the numbers where it does not divide. `what` has this size."""
    if size % tp:
        raise UsageError(
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
    optional: bool = False  # of a preset, which speaks of more models than one


@dataclass(slots=True)
class RuleBook:
    """Ordered rules; the first whose pattern matches a name applies to it. Remembers which patterns were ever used."""

    rules: list[NamedRule] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def add(self, pattern: str, rule: Rule, origin: str, *, optional: bool = False) -> None:
        """Append a rule; a pattern that is no regular expression, or one that takes for ever, is refused."""
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
        """Rules whose pattern matched no name that was looked up."""
        return [named for i, named in enumerate(self.rules) if i not in self.used]


_FIELDS = frozenset({"cut", "dim", "parts", "ratio", "widths", "true_size", "logical_shape", "slices"})


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """All that a rule says, as a JSON object; `rule_from_json` gives the equal rule back."""
    out: dict[str, Any] = {"cut": rule.cut}
    if rule.cut in ("split", "vocab") or rule.dim:
        out["dim"] = rule.dim
    if rule.parts is not None:
        out["parts"] = list(rule.parts)
    if rule.ratio is not None:
        out["ratio"] = list(rule.ratio)
    if rule.widths is not None:
        out["widths"] = [list(shares) for shares in rule.widths]
    if rule.true_size is not None:
        out["true_size"] = rule.true_size
    if rule.logical_shape is not None:
        out["logical_shape"] = list(rule.logical_shape)
    if rule.slices is not None:
        out["slices"] = [[_piece_to_json(piece) for piece in pieces] for pieces in rule.slices]
    return out


def rule_from_json(data: Any) -> Rule:
    """The rule that `rule_to_json` wrote; anything else is refused."""
    if not isinstance(data, Mapping) or data.get("cut") not in get_args(Cut) or data.keys() - _FIELDS:
        raise _bad(data)
    slices = data.get("slices")
    return Rule(
        cut=cast(Cut, data["cut"]),
        dim=_require_int(data.get("dim", 0)),
        parts=_sizes(data.get("parts")),
        ratio=_sizes(data.get("ratio")),
        widths=_rows(data.get("widths")),
        true_size=None if data.get("true_size") is None else _require_int(data["true_size"]),
        logical_shape=_sizes(data.get("logical_shape")),
        slices=None
        if slices is None
        else tuple(tuple(map(_piece_from_json, _require_list(held))) for held in _require_list(slices)),
    )


def _piece_to_json(piece: SlicePiece) -> dict[str, Any]:
    out: dict[str, Any] = {"start": list(piece.box.start), "shape": list(piece.box.shape), "offset": piece.offset}
    if piece.scale != 1.0:
        out["scale"] = piece.scale
    return out


def _piece_from_json(data: Any) -> SlicePiece:
    if not isinstance(data, Mapping) or data.keys() - {"start", "shape", "offset", "scale"}:
        raise _bad(data)
    start, shape, scale = _sizes(data.get("start")), _sizes(data.get("shape")), data.get("scale", 1.0)
    if start is None or shape is None or len(start) != len(shape) or not isinstance(scale, int | float):
        raise _bad(data)
    return SlicePiece(Box(start, shape), _require_int(data.get("offset")), float(scale))


def _sizes(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(_require_int(size) for size in _require_list(value))


def _rows(value: Any) -> tuple[tuple[int, ...], ...] | None:
    return (
        None
        if value is None
        else tuple(tuple(_require_int(size) for size in _require_list(row)) for row in _require_list(value))
    )


def _require_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(value)
    return value


def _require_int(value: Any) -> int:
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

_MOST_REPEATS: Final = 6
_LONGEST: Final = 10_000  # characters
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT")


def compile_pattern(text: str, origin: str) -> re.Pattern[str]:
    """Compile `text`; `origin` names where it is from. Raises `re.error` where it is no regular expression."""
    if len(text) > _LONGEST:
        raise _refused(text, origin, f"has {len(text)} characters")
    pattern = re.compile(text)
    repeats = list(_repeats(parser.parse(text), inside=False))
    if any(inside for inside in repeats):
        raise _refused(text, origin, "repeats what has repeats or choices in it")
    if len(repeats) > _MOST_REPEATS:
        raise _refused(text, origin, f"has {len(repeats)} repeats, the limit is {_MOST_REPEATS}")
    return pattern


def _refused(text: str, origin: str, why: str) -> UnsafeError:
    shown = text if len(text) <= 100 else text[:100] + "…"
    return UnsafeError(
        f"{origin}: the pattern {shown!r} {why}: matching it may take for ever",
        hint="write it without, or give rules of your own with --rules",
    )


def _repeats(tree: Any, *, inside: bool) -> Iterator[bool]:
    """For every repeat of open length, and every choice inside of one: whether it is inside of another."""
    for code, argument in tree:
        name = str(code)
        if name in _REPEATS:
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
    """The repeats of whatever an operator of the parsed expression holds: groups, choices, assertions."""
    if isinstance(argument, parser.SubPattern):
        yield from _repeats(argument, inside=inside)
    elif isinstance(argument, (list, tuple)):
        for value in argument:
            yield from _inner(value, inside=inside)
