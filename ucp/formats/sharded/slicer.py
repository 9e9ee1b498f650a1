"""What each tensor-parallel rank of the target holds of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ucp.core.box import Shape
from ucp.core.checkpoint import Checkpoint, Parameter
from ucp.core.region import Region
from ucp.core.rules import Rule, logical_shape, slice_pieces
from ucp.errors import UsageError, first_few

# The origin of a rule that was never asked for: with one tensor-parallel rank nothing shows how to cut.
UNKNOWN_ORIGIN: Final = "one tensor-parallel rank"


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """One rank's slice of a parameter: its name in that rank's files, its shape, and what of the atom it is."""

    name: str
    parameter: Parameter
    shape: Shape
    region: Region

    @property
    def numel(self) -> int:
        return self.region.numel


class ParamSlicer:
    """Cuts parameters for `tp` ranks.

    `vocab` is the padded size of vocabulary dimensions, where the user says it; else it is that of the checkpoint
    `like`, or by Megatron's rule a multiple of `tp * multiple`.
    """

    def __init__(
        self,
        source: Checkpoint,
        tp: int,
        vocab: int | None = None,
        like: Checkpoint | None = None,
        multiple: int | None = None,
    ) -> None:
        self.source = source
        self.tp = tp
        self.vocab = vocab
        self.like = like
        self.multiple = multiple
        self._rules: dict[str, tuple[Rule, Shape]] = {}

    def check(self) -> None:
        """Refuse a degree for which a parameter has no rule or does not divide, naming all of them."""
        if self.tp == 1:
            return
        unknown = [p.name for p in self.source.parameters.values() if _is_unknown(p) and self.source.mesh.tp == 1]
        if unknown:
            raise UsageError(
                f"no rule says how to cut {first_few(unknown, 5)} over tp={self.tp}",
                hint="give --preset NAME or --rules FILE; `ucp inspect --rules` shows what is known",
            )
        for parameter in self.source.parameters.values():
            self._rule(parameter)
            self.local(parameter, 0)

    def local(self, parameter: Parameter, rank: int, name: str | None = None) -> TargetSlice:
        """The slice of tensor-parallel rank `rank`, called `name` in its files."""
        rule, padded = self._rule(parameter)
        pieces = slice_pieces(rule, padded, self.tp, rank, parameter.name)
        at = 0
        for piece in pieces:
            if piece.offset != at or piece.scale != 1.0:
                raise UsageError(
                    f"parameter {parameter.name}: its slices are cut in a way that cannot be written again"
                    f" ({parameter.rule_origin})",
                    hint="give a rule for it with --rules",
                )
            at += piece.box.numel
        region = Region.of(piece.box for piece in pieces)
        return TargetSlice(name or parameter.name, parameter, self._shape(rule, padded, rank), region)

    def _shape(self, rule: Rule, padded: Shape, rank: int) -> Shape:
        if rule.cut in ("replicated", "average"):
            return padded
        if rule.cut == "pieces":
            raise UsageError("slices spelled out piece by piece have no shape to write")
        parts = rule.parts or (padded[rule.dim],)
        width = sum(rule.widths[i][rank] if rule.widths else part // self.tp for i, part in enumerate(parts))
        return (*padded[: rule.dim], width, *padded[rule.dim + 1 :])

    def _rule(self, parameter: Parameter) -> tuple[Rule, Shape]:
        known = self._rules.get(parameter.name)
        if known is None:
            known = self._rules[parameter.name] = self._resolve(parameter)
        return known

    def _resolve(self, parameter: Parameter) -> tuple[Rule, Shape]:
        rule = parameter.rule
        if rule.cut == "pieces" and self.tp == 1:
            rule = Rule("replicated")
        if self.tp != self.source.mesh.tp:
            rule = replace(rule, widths=None)
        if rule.cut != "vocab":
            return rule, _padded(parameter)
        size = self._vocab_size(parameter, rule)
        padded = (*parameter.shape[: rule.dim], size, *parameter.shape[rule.dim + 1 :])
        if logical_shape(rule, padded) != parameter.shape:
            raise UsageError(
                f"parameter {parameter.name}: a vocabulary of {parameter.shape[rule.dim]} does not fit a size of {size}"
            )
        return rule, padded

    def _vocab_size(self, parameter: Parameter, rule: Rule) -> int:
        """The padded size for the new degree: as the user says, by Megatron's rule, or the source's."""
        twin = self.like.parameters.get(parameter.name) if self.like is not None else None
        asked = self.vocab or (_padded(twin)[rule.dim] if twin is not None else None)
        if asked and asked % self.tp:
            raise UsageError(f"parameter {parameter.name}: a vocabulary of {asked} does not divide over tp={self.tp}")
        if asked is None and self.multiple is not None:
            return _round_up(parameter.shape[rule.dim], self.multiple * self.tp)
        return asked or _round_up(_padded(parameter)[rule.dim], self.tp)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(parameter: Parameter) -> Shape:
    return parameter.padded_shape or parameter.shape


def _is_unknown(parameter: Parameter) -> bool:
    return parameter.role != "buffer" and parameter.rule.cut == "replicated" and parameter.rule_origin == UNKNOWN_ORIGIN
