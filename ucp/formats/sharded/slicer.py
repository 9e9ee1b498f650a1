"""The slice of a parameter that each tensor-parallel rank of the target holds, and the atoms that fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Parameter
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, SlicePiece, slice_pieces
from ucp.errors import ImpossibleError, first_few
from ucp.formats.output_files import missing_weight_error
from ucp.formats.sharded.shard_fragments import contiguous_region


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """One rank's slice of a parameter: its name in the files of that rank, its shape, and its region of the atom."""

    name: str
    parameter: Parameter
    shape: Shape
    region: Region

    @property
    def numel(self) -> int:
        return self.region.numel


class ParamSlicer:
    """Slices the parameters of `source` for `tp` ranks.

    `vocab_size` is the padded size of vocabularies. By default it is that of the checkpoint `like`, or as in Megatron
    the next multiple of `tp * vocab_multiple`, or else of `tp`. `rules` replaces the source's rules by name. Unless
    `grows_vocab`, a vocabulary whose rule has no `true_size` keeps its size.
    """

    def __init__(
        self,
        source: Checkpoint,
        tp: int,
        vocab_size: int | None = None,
        like: Checkpoint | None = None,
        vocab_multiple: int | None = None,
        rules: Mapping[str, Rule] | None = None,
        *,
        grows_vocab: bool = False,
    ) -> None:
        self.source = source
        self.tp = tp
        self._vocab_size = vocab_size
        self._like = like
        self._vocab_multiple = vocab_multiple
        self._source_rules = rules or {}
        self._grows_vocab = grows_vocab
        self._rules: dict[str, tuple[Rule, Shape]] = {}

    def rule(self, parameter: Parameter) -> tuple[Rule, Shape]:
        """Return the rule for the target's ranks, and the shape of the whole with the padding of its vocabulary."""
        known = self._rules.get(parameter.name)
        if known is None:
            known = self._rules[parameter.name] = self._target_rule(parameter)
        return known

    def local(self, parameter: Parameter, rank: int, name: str | None = None) -> TargetSlice:
        """Return the slice of tensor-parallel rank `rank`, called `name` in its files."""
        rule, padded = self.rule(parameter)
        region = region_of(slice_pieces(rule, padded, self.tp, rank, parameter.name), parameter.name)
        shape = padded
        if rule.cut not in ("replicated", "average"):
            parts = rule.parts or (padded[rule.dim],)
            width = sum(rule.widths[i][rank] if rule.widths else part // self.tp for i, part in enumerate(parts))
            shape = (*padded[: rule.dim], width, *padded[rule.dim + 1 :])
        return TargetSlice(name or parameter.name, parameter, shape, region)

    def _target_rule(self, parameter: Parameter) -> tuple[Rule, Shape]:
        rule = self._source_rules.get(parameter.name, parameter.rule)
        if rule.cut == "pieces":
            if self.tp > 1:
                raise ImpossibleError(
                    f"parameter {parameter.name}: its slices are described for the source's ranks only"
                    f" ({parameter.rule_origin})",
                    hint="give a rule for it with --rules",
                )
            rule = REPLICATED
        if self.tp != self.source.mesh.tp:
            rule = replace(rule, widths=None)
        if rule.cut != "vocab":
            return rule, _padded_shape(parameter)
        size, real = self._padded_vocab(parameter, rule), parameter.shape[rule.dim]
        if size < real or (size > real and rule.true_size is None and not self._grows_vocab):
            raise ImpossibleError(f"parameter {parameter.name}: a vocabulary of {real} does not fit a size of {size}")
        return rule, (*parameter.shape[: rule.dim], size, *parameter.shape[rule.dim + 1 :])

    def _padded_vocab(self, parameter: Parameter, rule: Rule) -> int:
        like = self._like.parameters.get(parameter.name) if self._like is not None else None
        size = self._vocab_size or (_padded_shape(like)[rule.dim] if like is not None else None)
        if size is None:
            if self._vocab_multiple is not None:
                return _round_up(parameter.shape[rule.dim], self._vocab_multiple * self.tp)
            return _round_up(_padded_shape(parameter)[rule.dim], self.tp)
        if size % self.tp:
            raise ImpossibleError(
                f"parameter {parameter.name}: a vocabulary of {size} does not divide over tp={self.tp}"
            )
        return size


def no_rule_error(names: Sequence[str], tp: int) -> ImpossibleError:
    """Return the error for parameters that the target splits, if nothing is known about how."""
    return ImpossibleError(
        f"no rule for splitting {first_few(names, 5)} over tp={tp}",
        hint="give --preset NAME or --rules FILE; `ucp inspect --rules` shows what is known",
    )


def region_of(pieces: Sequence[SlicePiece], name: str) -> Region:
    """Return the region of a rank's slice; only unscaled pieces without gaps can be written."""
    region = contiguous_region(pieces)
    if region is None:
        raise ImpossibleError(
            f"parameter {name}: its slices have gaps or scaled pieces, which cannot be written",
            hint="give a rule for it with --rules",
        )
    return region


def weight_atom(parameter: Parameter, dtype: DType) -> Atom | None:
    """Return the weight in `dtype`: as it is stored, or rounded from the master; None if the source has neither."""
    stored = parameter.atoms.get(WEIGHT)
    if stored is not None and stored.dtype == dtype:
        return stored
    precise = parameter.atoms.get(MASTER, stored)
    return None if precise is None else replace(precise, kind=WEIGHT, dtype=dtype)


def master_atom(parameter: Parameter) -> Atom:
    """Return the master weight: as it is stored, or the weight in single precision."""
    stored = parameter.atoms.get(MASTER)
    if stored is not None:
        return stored
    if WEIGHT not in parameter.atoms:
        raise missing_weight_error(parameter)
    return replace(parameter.atoms[WEIGHT], kind=MASTER, dtype=FLOAT32)


def with_vocab_padding(parameter: Parameter, atom: Atom) -> Atom:
    """Return the atom of a vocabulary with its padding rows, if the source's files still have them.

    They take part in the softmax, so training continues bit for bit only with them. Atoms on disk are without them.
    """
    padded = parameter.padded_shape
    if padded is None or atom.shape != parameter.shape:
        return atom
    is_stored = sum(fragment.region.numel for fragment in atom.fragments) >= prod(padded)
    return replace(atom, shape=padded) if is_stored else atom


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded_shape(parameter: Parameter) -> Shape:
    return parameter.padded_shape or parameter.shape
