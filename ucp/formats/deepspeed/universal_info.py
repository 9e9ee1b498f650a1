"""`universal_checkpoint_info`: how a DeepSpeed checkpoint describes the split of its parameters over tp ranks.

Pattern lists map parameter names to rules. An affine map lists the slices of a parameter as strided blocks; one that
is equivalent to a simple rule (replicated, split, split in parts) becomes that rule, so that the parameter can be split
for another number of ranks, and any other is kept as pieces. (AutoEP's layers, which the info repeats, are read from
the model file itself; see `experts`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Generic, TypeVar

from ucp.core.box import Box, Shape, interval_boxes, strides_of, whole
from ucp.core.rules import REPLICATED, NamedRule, Rule, RuleBook, SlicePiece, slice_pieces
from ucp.errors import InconsistentError, NotUnderstoodError

_Value = TypeVar("_Value")

DEFAULT_ORIGIN: Final = "checkpoint: default, concatenate on dim 0"

# Lists of patterns that share one rule, in DeepSpeed's order of precedence. Sub-parameters come between the two groups.
_BEFORE_SUB_PARAMETERS: Final = (
    ("tp_replicated_parameter_patterns", REPLICATED),
    ("parameter_to_average_patterns", Rule("average")),
    ("parameter_with_2_sub_params_cat_dim_0", Rule("split", 0, ratio=(1, 1))),
)
_AFTER_SUB_PARAMETERS: Final = (("parameter_with_row_parallelism_patterns", Rule("split", 1)),)

_RULES_HINT: Final = "describe how the parameter is split in a rule file and pass it with --rules"

# Keys that describe how tensor-parallel slices combine. An info with none of them was written for one rank.
_TP_RULE_KEYS: Final = (
    *(key for key, _ in (*_BEFORE_SUB_PARAMETERS, *_AFTER_SUB_PARAMETERS)),
    "parameter_with_sub_params",
    "affine_map",
)


def has_tp_rules(info: Mapping[str, Any]) -> bool:
    """Whether an info describes tensor-parallel slices. If not, its default rule must not be used."""
    return any(info.get(key) for key in _TP_RULE_KEYS)


def rules_from_info(info: Mapping[str, Any], where: str) -> RuleBook:
    """The rules in a `universal_checkpoint_info`; `where` names its file in messages.

    The book has a rule for every name, as in DeepSpeed's converter: names that no pattern matches are concatenated on
    dim 0.
    """
    if not isinstance(info, Mapping):
        raise NotUnderstoodError(f"{where}: universal_checkpoint_info is not a dict")
    book = CheckpointRules(where=where)
    for key, rule in _BEFORE_SUB_PARAMETERS:
        for pattern in _patterns(info, key, where):
            book.add_indexed(pattern, rule, f"checkpoint: {key}")
    for pattern, rule in _sub_parameters(info, where):
        book.add_indexed(pattern, rule, "checkpoint: parameter_with_sub_params")
    for key, rule in _AFTER_SUB_PARAMETERS:
        for pattern in _patterns(info, key, where):
            book.add_indexed(pattern, rule, f"checkpoint: {key}")
    for pattern in _patterns(info, "vocabulary_parameter_patterns", where):
        book.vocabulary.add(pattern, None, where)
    size = info.get("original_vocab_size")
    book.vocabulary_size = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
    unsupported = info.get("autotp_unsupported_parameter_patterns") or {}
    for pattern in unsupported:
        book.unsupported.add(pattern, str(unsupported[pattern]) if isinstance(unsupported, Mapping) else "", where)
    affine = info.get("affine_map") or {}
    if not isinstance(affine, Mapping) or not isinstance(affine.get("params", {}), Mapping):
        raise NotUnderstoodError(f"{where}: affine_map in universal_checkpoint_info is not a dict")
    if affine.get("version", AFFINE_VERSION) != AFFINE_VERSION:
        raise NotUnderstoodError(
            f"{where}: unsupported affine map version {affine.get('version')} (supported: {AFFINE_VERSION})",
            hint="update ucp, or describe how the parameters are split with --rules",
        )
    for pattern, entry in affine.get("params", {}).items():
        book.affine.add(pattern, (pattern, entry), where)
    return book


class PatternTable(Generic[_Value]):
    """Values by name pattern (anchored at the start). A pattern that matches exactly one name costs a dict look-up."""

    def __init__(self) -> None:
        self._exact: dict[str, list[_Value]] = {}
        self._regular: list[tuple[re.Pattern[str], _Value]] = []

    def add(self, pattern: str, value: _Value, where: str) -> None:
        literal = re.sub(r"\\(.)", r"\1", pattern[1:-1])
        if pattern == f"^{re.escape(literal)}$":
            self._exact.setdefault(literal, []).append(value)
            return
        try:
            self._regular.append((re.compile(pattern), value))
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise NotUnderstoodError(f"{where}: {pattern!r} is not a regular expression: {error}") from None

    def find(self, name: str) -> list[_Value]:
        """The values of all patterns that match this name; exact ones first."""
        return [*self._exact.get(name, ()), *(value for pattern, value in self._regular if pattern.match(name))]


@dataclass(slots=True)
class CheckpointRules(RuleBook):
    """The checkpoint's own rules. `find` has a rule for every name, or raises if the checkpoint cannot describe it."""

    where: str = ""
    vocabulary: PatternTable[None] = field(default_factory=PatternTable)
    vocabulary_size: int | None = None
    unsupported: PatternTable[str] = field(default_factory=PatternTable)
    affine: PatternTable[tuple[str, Any]] = field(default_factory=PatternTable)
    index: PatternTable[int] = field(default_factory=PatternTable)  # positions in `rules`

    def add_indexed(self, pattern: str, rule: Rule, origin: str) -> None:
        """Append a rule and index its pattern."""
        self.index.add(pattern, len(self.rules), self.where)
        self.add(pattern, rule, origin)

    def find(self, name: str) -> NamedRule:
        """The rule for this parameter name, by DeepSpeed's precedence."""
        for reason in self.unsupported.find(name):
            raise NotUnderstoodError(
                f"{self.where}: the checkpoint marks parameter {name} as one whose split it cannot describe ({reason})",
                hint=_RULES_HINT,
            )
        matching = sorted(self.index.find(name))
        self.used.update(matching)
        named = self.rules[matching[0]] if matching else NamedRule(re.compile(""), Rule("split", 0), DEFAULT_ORIGIN)
        affine = self.affine.find(name)
        if len(affine) > 1:
            raise InconsistentError(f"{self.where}: {len(affine)} affine maps claim parameter {name}", hint=_RULES_HINT)
        for pattern, entry in affine:
            rule = affine_rule(entry, f"{self.where}: parameter {name}")
            named = NamedRule(re.compile(pattern), rule, "checkpoint: affine_map")
        return self._vocabulary(name, named) if self.vocabulary.find(name) else named

    def _vocabulary(self, name: str, named: NamedRule) -> NamedRule:
        """The same rule with the rows beyond the vocabulary marked as padding."""
        if self.vocabulary_size is None:
            raise NotUnderstoodError(
                f"{self.where}: parameter {name} is a vocabulary table, but original_vocab_size is missing",
                hint='set it with --rules: cut = "vocab", true_size = …',
            )
        rule = named.rule
        if rule.cut == "split" and rule.dim == 0 and not rule.parts and not rule.ratio:
            rule = replace(rule, cut="vocab", true_size=self.vocabulary_size)
        elif rule.cut in ("replicated", "average"):
            rule = replace(rule, true_size=self.vocabulary_size)
        else:
            raise NotUnderstoodError(
                f"{self.where}: parameter {name} is a vocabulary table split as '{rule}': its padding is unknown",
                hint=_RULES_HINT,
            )
        return NamedRule(named.pattern, rule, "checkpoint: vocabulary_parameter_patterns")


def _patterns(info: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    found = info.get(key) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(pattern, str) for pattern in found):
        raise NotUnderstoodError(f"{where}: {key} in universal_checkpoint_info is not a list of patterns")
    return found


def _sub_parameters(info: Mapping[str, Any], where: str) -> list[tuple[str, Rule]]:
    """(pattern, rule) of every fused parameter."""
    rules: list[tuple[str, Rule]] = []
    all_widths = info.get("sub_param_shard_widths") or {}
    for entry in info.get("parameter_with_sub_params") or ():
        try:
            for pattern in entry["patterns"]:
                shape, dim = entry["shape"], int(entry["partition_dim"])
                dim = dim + len(shape) if dim < 0 else dim
                rules.append((pattern, fused_rule(dim, shape[dim], all_widths.get(pattern))))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise NotUnderstoodError(
                f"{where}: invalid entry in parameter_with_sub_params: {str(entry)[:200]} ({error!r})"
            ) from None
    return rules


def fused_rule(dim: int, sizes: Any, widths: Any) -> Rule:
    """A split in parts; `sizes` has the sizes of the parts or (old checkpoints) is the number of equal parts."""
    if isinstance(sizes, int):
        return Rule("split", dim, ratio=(1,) * sizes if sizes > 1 else None)
    parts = tuple(int(size) for size in sizes)
    if widths is None:
        return Rule("split", dim, parts=parts)
    shares = tuple(tuple(int(width) for width in row) for row in widths)
    even = all(len(set(row)) == 1 for row in shares)
    return Rule("split", dim, parts=parts, widths=None if even else shares)


AFFINE_VERSION: Final = 1
_MAX_PIECES: Final = 1 << 20  # of one slice; no real layout needs more


@dataclass(frozen=True, slots=True)
class _AffineAxis:
    """One dimension of a strided block: its length and its steps in the whole and in the slice, in elements."""

    length: int
    source: int
    dest: int


def affine_rule(entry: Any, where: str) -> Rule:
    """The rule that one entry of an affine map describes; `where` names file and parameter in messages."""
    try:
        logical = _shape(entry["logical_shape"])
        ranks = {int(rank): described for rank, described in entry["ranks"].items()}
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ValueError(f"ranks {sorted(ranks)}")
        slices = tuple(_rank_pieces(ranks[rank], logical) for rank in range(len(ranks)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUnderstoodError(f"{where}: invalid affine map ({error})") from None
    return _simple_rule(logical, slices) or Rule("pieces", logical_shape=logical, slices=slices)


def _rank_pieces(entry: Mapping[str, Any], logical: Shape) -> tuple[SlicePiece, ...]:
    """The pieces of one rank's slice by offset, checked to cover the slice without gap or overlap."""
    pieces: list[SlicePiece] = []
    for piece in entry["pieces"]:
        shape = _shape(piece["shape"])
        source, source_strides = piece["source"]
        dest, dest_strides = piece["dest"]
        scale = float(piece.get("scale", 1.0))
        if 0 in shape:
            continue
        axes = [
            _AffineAxis(length, _non_negative(s), _non_negative(d))
            for length, s, d in zip(shape, source_strides, dest_strides, strict=True)
            if length > 1
        ]
        if (
            _non_negative(source) + sum((axis.length - 1) * axis.source for axis in axes) >= prod(logical)
            or scale == 0.0
        ):
            raise ValueError(f"a piece of shape {list(shape)} reaches outside the parameter")
        axes.sort(key=lambda axis: -axis.dest)
        for box, offset in _contiguous_blocks(axes, source, _non_negative(dest), logical):
            pieces.append(SlicePiece(box, offset, scale))
            if len(pieces) > _MAX_PIECES:
                raise ValueError(f"more than {_MAX_PIECES} pieces in one slice")
    pieces.sort(key=lambda piece: piece.offset)
    at = 0
    for piece in pieces:
        if piece.offset != at:
            times = "twice" if piece.offset < at else "not at all"
            raise ValueError(f"element {min(at, piece.offset)} of a slice is described {times}")
        at += piece.box.numel
    if at != prod(_shape(entry["shard_shape"])):
        raise ValueError(f"pieces of {at} elements for a slice of shape {entry['shard_shape']}")
    return tuple(_join_pieces(pieces))


def _contiguous_blocks(
    axes: Sequence[_AffineAxis], source: int, dest: int, logical: Shape
) -> Iterator[tuple[Box, int]]:
    """Cut a strided block (outermost slice step first) into boxes of the whole that are contiguous in the slice."""
    boxes = _source_boxes(axes, source, logical) if _is_dense([(axis.length, axis.dest) for axis in axes]) else None
    if boxes is not None:
        for box in boxes:
            yield box, dest
            dest += box.numel
        return
    outer, inner = axes[0], axes[1:]
    for i in range(outer.length):
        yield from _contiguous_blocks(inner, source + i * outer.source, dest + i * outer.dest, logical)


def _source_boxes(axes: Sequence[_AffineAxis], source: int, logical: Shape) -> list[Box] | None:
    """The boxes of the whole that a strided block covers, in its own row-major order; None if it is not a block."""
    if _is_dense([(axis.length, axis.source) for axis in axes]):
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


def _is_dense(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether (length, step) pairs, outermost first, count consecutive elements in row-major order."""
    expected = 1
    for length, step in reversed(steps):
        if step != expected:
            return False
        expected *= length
    return True


def _join_pieces(pieces: Sequence[SlicePiece]) -> Iterator[SlicePiece]:
    """Join neighbouring pieces that together are one box."""
    last: SlicePiece | None = None
    for piece in pieces:
        box = _join_boxes(last.box, piece.box) if last is not None and last.scale == piece.scale else None
        if last is not None and box is not None:
            last = SlicePiece(box, last.offset, last.scale)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _join_boxes(first: Box, second: Box) -> Box | None:
    """The box whose row-major elements are those of `first`, then those of `second`; None if there is none."""
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


def _simple_rule(logical: Shape, slices: Sequence[tuple[SlicePiece, ...]]) -> Rule | None:
    """The simple rule that produces exactly these slices, if there is one."""
    if 0 in logical or any(piece.scale != 1.0 for pieces in slices for piece in pieces):
        return None
    if all(pieces == (SlicePiece(whole(logical), 0),) for pieces in slices):
        return REPLICATED
    rules = (_split_rule(logical, slices, dim) for dim in range(len(logical)))
    return next((rule for rule in rules if rule is not None), None)


def _split_rule(logical: Shape, slices: Sequence[tuple[SlicePiece, ...]], dim: int) -> Rule | None:
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
    fits = all(tuple(_join_pieces(slice_pieces(rule, logical, tp, rank, ""))) == slices[rank] for rank in range(tp))
    return rule if fits else None


def _shape(value: Any) -> Shape:
    return tuple(_non_negative(size) for size in value)


def _non_negative(value: Any) -> int:
    number = int(value)
    if number < 0 or number != value:
        raise ValueError(f"{value!r} is not a size")
    return number
