"""`universal_checkpoint_info`: what a DeepSpeed checkpoint itself says about how its parameters are cut over tp ranks.

What it repeats of AutoEP's layers is read where the model file itself says it (`spread`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.deepspeed.affine import VERSION as AFFINE_VERSION
from ucp.formats.deepspeed.affine import affine_rule
from ucp.model.rules import REPLICATED, NamedRule, Rule, RuleBook

T = TypeVar("T")

DEFAULT_ORIGIN: Final = "checkpoint: default, concatenate on dim 0"

# Pattern lists with one rule for all their names, in DeepSpeed's order of precedence. Sub-parameters stand between the
# two groups.
_BEFORE_SUB_PARAMETERS: Final = (
    ("tp_replicated_parameter_patterns", REPLICATED),
    ("parameter_to_average_patterns", Rule("average")),
    ("parameter_with_2_sub_params_cat_dim_0", Rule("split", 0, ratio=(1, 1))),
)
_AFTER_SUB_PARAMETERS: Final = (("parameter_with_row_parallelism_patterns", Rule("split", 1)),)

_USE_RULES: Final = "say how the parameter is cut in a rule file and give it with --rules"


# Any of these says how tensor-parallel slices combine. An info with none of them was written for one rank.
_SPEAKS_OF_TP: Final = (
    *(key for key, _ in (*_BEFORE_SUB_PARAMETERS, *_AFTER_SUB_PARAMETERS)),
    "parameter_with_sub_params",
    "affine_map",
)


def speaks_of_tp(info: Mapping[str, Any]) -> bool:
    """Whether an info says anything about tensor-parallel slices; where not, its default must not be believed."""
    return any(info.get(key) for key in _SPEAKS_OF_TP)


def rules_from_info(info: Mapping[str, Any], where: str) -> RuleBook:
    """The rules in a `universal_checkpoint_info`; `where` names its file in messages.

    The book answers every name, as DeepSpeed's converter does: what no pattern matches is concatenated on dim 0.
    """
    if not isinstance(info, Mapping):
        raise NotUnderstoodError(f"{where}: universal_checkpoint_info is not a dict")
    book = CheckpointRules(where=where)
    for key, rule in _BEFORE_SUB_PARAMETERS:
        book.add_list(info, key, rule)
    for pattern, rule in _sub_parameters(info, where):
        book.add_indexed(pattern, rule, "checkpoint: parameter_with_sub_params")
    for key, rule in _AFTER_SUB_PARAMETERS:
        book.add_list(info, key, rule)
    for pattern in _patterns(info, "vocabulary_parameter_patterns", where):
        book.vocabulary.add(pattern, None, where)
    size = info.get("original_vocab_size")
    book.vocabulary_size = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
    unsupported = info.get("autotp_unsupported_parameter_patterns") or {}
    for pattern in unsupported:
        book.unsupported.add(pattern, str(unsupported[pattern]) if isinstance(unsupported, Mapping) else "", where)
    _add_affine_map(book, info.get("affine_map"), where)
    return book


class PatternTable(Generic[T]):
    """Values by name pattern (anchored at the start). Patterns that spell out one name cost one look-up, not a scan."""

    def __init__(self) -> None:
        self._exact: dict[str, list[T]] = {}
        self._regular: list[tuple[re.Pattern[str], T]] = []

    def add(self, pattern: str, value: T, where: str) -> None:
        literal = re.sub(r"\\(.)", r"\1", pattern[1:-1])
        if pattern == f"^{re.escape(literal)}$":
            self._exact.setdefault(literal, []).append(value)
            return
        try:
            self._regular.append((re.compile(pattern), value))
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise NotUnderstoodError(f"{where}: {pattern!r} is not a regular expression: {error}") from None

    def find(self, name: str) -> list[T]:
        """The values of every pattern that matches this name; spelled-out ones first."""
        return [*self._exact.get(name, ()), *(value for pattern, value in self._regular if pattern.match(name))]


@dataclass(slots=True)
class CheckpointRules(RuleBook):
    """The checkpoint's own rules. `find` answers every name; it refuses those that the checkpoint cannot describe."""

    where: str = ""
    vocabulary: PatternTable[None] = field(default_factory=PatternTable)
    vocabulary_size: int | None = None
    unsupported: PatternTable[str] = field(default_factory=PatternTable)
    affine: PatternTable[tuple[str, Any]] = field(default_factory=PatternTable)
    index: PatternTable[int] = field(default_factory=PatternTable)  # positions in `rules`

    def add_list(self, info: Mapping[str, Any], key: str, rule: Rule) -> None:
        """Give `rule` to every pattern in the list `key` of the info."""
        for pattern in _patterns(info, key, self.where):
            self.add_indexed(pattern, rule, f"checkpoint: {key}")

    def add_indexed(self, pattern: str, rule: Rule, origin: str) -> None:
        """Append a rule and index its pattern."""
        self.index.add(pattern, len(self.rules), self.where)
        self.add(pattern, rule, origin)

    def find(self, name: str) -> NamedRule:
        """The rule for this parameter name, by DeepSpeed's precedence."""
        for reason in self.unsupported.find(name):
            raise NotUnderstoodError(
                f"{self.where}: the checkpoint says that it cannot describe how parameter {name} is cut ({reason})",
                hint=_USE_RULES,
            )
        matching = sorted(self.index.find(name))
        self.used.update(matching)
        named = self._affine(name)
        if named is None:
            named = self.rules[matching[0]] if matching else NamedRule(re.compile(""), Rule("split", 0), DEFAULT_ORIGIN)
        return self._vocabulary(name, named) if self.vocabulary.find(name) else named

    def _affine(self, name: str) -> NamedRule | None:
        entries = self.affine.find(name)
        if len(entries) > 1:
            raise InconsistentError(f"{self.where}: {len(entries)} affine maps claim parameter {name}", hint=_USE_RULES)
        for pattern, entry in entries:
            rule = affine_rule(entry, f"{self.where}: parameter {name}")
            return NamedRule(re.compile(pattern), rule, "checkpoint: affine_map")
        return None

    def _vocabulary(self, name: str, named: NamedRule) -> NamedRule:
        """The same rule with the rows beyond the vocabulary marked as padding."""
        if self.vocabulary_size is None:
            raise NotUnderstoodError(
                f"{self.where}: parameter {name} is a vocabulary table, but original_vocab_size is missing",
                hint='give it with --rules: cut = "vocab", true_size = …',
            )
        rule = named.rule
        if rule.cut == "split" and rule.dim == 0 and not rule.parts and not rule.ratio:
            rule = replace(rule, cut="vocab", true_size=self.vocabulary_size)
        elif rule.cut in ("replicated", "average"):
            rule = replace(rule, true_size=self.vocabulary_size)
        else:
            raise NotUnderstoodError(
                f"{self.where}: parameter {name} is a vocabulary table cut as '{rule}': its padding cannot be told",
                hint=_USE_RULES,
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
                f"{where}: parameter_with_sub_params holds {str(entry)[:200]} ({error!r})"
            ) from None
    return rules


def fused_rule(dim: int, sizes: Any, widths: Any) -> Rule:
    """A split in parts: sizes of the parts, or (as old checkpoints wrote it) the number of equal parts."""
    if isinstance(sizes, int):
        return Rule("split", dim, ratio=(1,) * sizes if sizes > 1 else None)
    parts = tuple(int(size) for size in sizes)
    if widths is None:
        return Rule("split", dim, parts=parts)
    shares = tuple(tuple(int(width) for width in row) for row in widths)
    even = all(len(set(row)) == 1 for row in shares)
    return Rule("split", dim, parts=parts, widths=None if even else shares)


def _add_affine_map(book: CheckpointRules, affine: Any, where: str) -> None:
    if not affine:
        return
    if not isinstance(affine, Mapping) or not isinstance(affine.get("params", {}), Mapping):
        raise NotUnderstoodError(f"{where}: affine_map in universal_checkpoint_info is not a dict")
    if affine.get("version", AFFINE_VERSION) != AFFINE_VERSION:
        raise NotUnderstoodError(
            f"{where}: affine map of version {affine.get('version')}, this ucp knows version {AFFINE_VERSION}",
            hint="update ucp, or say how the parameters are cut with --rules",
        )
    for pattern, entry in affine.get("params", {}).items():
        book.affine.add(pattern, (pattern, entry), where)
