"""What this tensor-parallel rank holds of a parameter: a region of the atom, from a rule and the live shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import Parameter
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, RuleBook, resolve, slice_pieces, whole_shape
from ucp.errors import UsageError

# The origin of a rule that was never asked for: with one tensor-parallel rank nothing shows how to cut.
_UNKNOWN: Final = "one tensor-parallel rank"

# Names that look like several projections in one tensor: shapes alone do not say how such a one is cut.
_FUSED: Final = re.compile(r"(.*[._])?(\w*qkv\w*|query_key_value|c_attn|in_proj\w*|kv_proj|gate_up\w*|w13|w12)([._]|$)")


@dataclass(frozen=True, slots=True)
class TensorParallelSlicer:
    """Cuts parameters for one tensor-parallel rank. The user's rules win, then the checkpoint's, then what is live."""

    tp: int
    rank: int
    book: RuleBook | None = None

    def region(self, parameter: Parameter, local: Shape, live: Any = None) -> Region:
        """The region of the atom that is this rank's slice, whose shape is `local`; `live` is the parameter object.

        The region may reach past the atom's shape: a vocabulary is padded for the new degree.
        """
        name = parameter.name
        rule = self._rule(parameter, local, live)
        if rule.cut == "pieces":
            return self._spelled_out(parameter, rule, local)
        rule = resolve(replace(rule, true_size=None), [local] * self.tp, name)
        padded = whole_shape(rule, [local] * self.tp, name)
        if not _fits(parameter.shape, padded, rule if rule.cut == "vocab" else parameter.rule):
            raise UsageError(
                f"parameter {name}: its shape is {list(parameter.shape)} in the checkpoint,"
                f" but {list(padded)} in the job"
                + (f" (slices of {list(local)} over tp={self.tp}, rule '{rule}')" if self.tp > 1 else ""),
                hint="build the model as it was when the checkpoint was saved"
                + (", or correct the rule with rules= or preset=" if self.tp > 1 else ""),
            )
        return Region.of(piece.box for piece in slice_pieces(rule, padded, self.tp, self.rank, name))

    def _rule(self, parameter: Parameter, local: Shape, live: Any) -> Rule:
        told = self.book.find(parameter.name) if self.book is not None else None
        if self.tp == 1:
            # One rank holds the whole, whatever the rule; only a padded vocabulary matters.
            rule = told.rule if told is not None else parameter.rule
            return Rule("vocab", rule.dim) if rule.cut == "vocab" else REPLICATED
        if told is not None:
            return told.rule
        if parameter.rule_origin != _UNKNOWN and parameter.role != "buffer":
            rule = parameter.rule
            uneven = rule.widths is not None and any(len(widths) != self.tp for widths in rule.widths)
            return replace(rule, widths=None) if uneven else rule
        return _infer_rule(parameter, local, live, self.tp)

    def _spelled_out(self, parameter: Parameter, rule: Rule, local: Shape) -> Region:
        """A rule of blocks rank by rank serves only for as many ranks as it was written for."""
        pieces = rule.slices[self.rank] if rule.slices is not None and len(rule.slices) == self.tp else ()
        at = 0
        for piece in pieces:
            if piece.offset != at or piece.scale != 1.0:
                pieces = ()
                break
            at += piece.box.numel
        region = Region.of(piece.box for piece in pieces)
        if region.numel != whole(local).numel:
            raise UsageError(
                f"parameter {parameter.name}: the checkpoint spells its slices out for other ranks than tp={self.tp}"
                f" ({parameter.rule_origin})",
                hint="give a rule for it with rules=",
            )
        return region


def _fits(shape: Shape, padded: Shape, rule: Rule) -> bool:
    """May a tensor of `padded` hold an atom of `shape`? Equal, but for the padding of a vocabulary."""
    if shape == padded:
        return True
    if rule.cut != "vocab" and rule.true_size is None:
        return False
    dim = rule.dim
    same = len(shape) == len(padded) and shape[:dim] + shape[dim + 1 :] == padded[:dim] + padded[dim + 1 :]
    return same and shape[dim] < padded[dim]


def _infer_rule(parameter: Parameter, local: Shape, live: Any, tp: int) -> Rule:
    """The rule of a parameter of which neither user nor checkpoint say how it is cut."""
    name, shape = parameter.name, parameter.shape
    if local == shape:
        return REPLICATED
    dims = [d for d, (n, m) in enumerate(zip(local, shape, strict=False)) if n != m]
    dim = dims[0] if len(local) == len(shape) and len(dims) == 1 else None
    if _FUSED.match(name):
        dim = None
    elif getattr(live, "tensor_model_parallel", False) and getattr(live, "partition_stride", 1) == 1:
        dim = int(live.partition_dim)
    if dim is not None and local[dim] * tp == shape[dim]:
        return Rule("split", dim)
    raise UsageError(
        f"parameter {name}: no rule says how it is cut over tp={tp} (whole {list(shape)}, slice {list(local)})",
        hint="give preset= or rules=; `ucp inspect --rules` shows what the checkpoint knows",
    )


def atom_region(slice_region: Region, share: Region, shape: Shape, name: str) -> Region:
    """The region of the atom that a share of this rank's slice is.

    `share` counts in the slice, which has `shape`: an interval of all of it (ZeRO), or a box (DTensor).
    """
    if share.boxes == (whole(shape),):
        return slice_region.cut(share.start, share.stop)
    if slice_region == Region.all_of(shape):
        return share
    raise UsageError(f"parameter {name}: a DTensor of a tensor-parallel slice cannot be placed in the whole")
