"""Which region of an atom this tensor-parallel rank holds, from the parameter's rule and its shape in the job."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import Parameter
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, RuleBook, resolve, slice_pieces, whole_shape
from ucp.errors import UsageError

# Rule origin of a checkpoint saved with tp=1, which does not show how the parameter is split.
_UNKNOWN: Final = "one tensor-parallel rank"

# Names of fused projections: shapes alone do not show how these are split.
_FUSED: Final = re.compile(r"(.*[._])?(\w*qkv\w*|query_key_value|c_attn|in_proj\w*|kv_proj|gate_up\w*|w13|w12)([._]|$)")


@dataclass(frozen=True, slots=True)
class TensorParallelSlicer:
    """Finds the slices of one tensor-parallel rank: by the user's rules, then the checkpoint's, then shapes."""

    tp: int
    rank: int
    book: RuleBook | None = None

    def region(self, parameter: Parameter, local: Shape, live: Any = None) -> Region:
        """The region of the atom that is this rank's slice of shape `local`; `live` is the parameter object.

        The region may extend past the atom's shape if a vocabulary is padded for the new tp degree.
        """
        name = parameter.name
        rule = self._rule(parameter, local, live)
        if rule.cut == "pieces":
            return self._explicit_slice(parameter, rule, local)
        rule = resolve(replace(rule, true_size=None), [local] * self.tp, name)
        padded = whole_shape(rule, [local] * self.tp, name)
        if not _fits(parameter.shape, padded, rule if rule.cut == "vocab" else parameter.rule):
            raise UsageError(
                f"parameter {name}: shape is {list(parameter.shape)} in the checkpoint, but {list(padded)} in the job"
                + (f" (slices of {list(local)} over tp={self.tp}, rule '{rule}')" if self.tp > 1 else ""),
                hint="build the model as it was when the checkpoint was saved"
                + (", or correct the rule with rules= or preset=" if self.tp > 1 else ""),
            )
        return Region.of(piece.box for piece in slice_pieces(rule, padded, self.tp, self.rank, name))

    def _rule(self, parameter: Parameter, local: Shape, live: Any) -> Rule:
        given = self.book.find(parameter.name) if self.book is not None else None
        if self.tp == 1:
            # The rank holds the whole parameter, whatever the rule; only the padding of a vocabulary matters.
            rule = given.rule if given is not None else parameter.rule
            return Rule("vocab", rule.dim) if rule.cut == "vocab" else REPLICATED
        if given is not None:
            return given.rule
        if parameter.rule_origin != _UNKNOWN and parameter.role != "buffer":
            rule = parameter.rule
            uneven = rule.widths is not None and any(len(widths) != self.tp for widths in rule.widths)
            return replace(rule, widths=None) if uneven else rule
        return _infer_rule(parameter, local, live, self.tp)

    def _explicit_slice(self, parameter: Parameter, rule: Rule, local: Shape) -> Region:
        """The slice of a rule that lists the blocks of every rank; such a rule is valid for its own tp degree only."""
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
                f"parameter {parameter.name}: the checkpoint lists the slices of another degree than tp={self.tp}"
                f" ({parameter.rule_origin})",
                hint="pass a rule for it with rules=",
            )
        return region


def _fits(shape: Shape, padded: Shape, rule: Rule) -> bool:
    """Whether a tensor of shape `padded` can hold an atom of `shape`: equal, except for the padding of a vocabulary."""
    if shape == padded:
        return True
    if rule.cut != "vocab" and rule.true_size is None:
        return False
    dim = rule.dim
    same = len(shape) == len(padded) and shape[:dim] + shape[dim + 1 :] == padded[:dim] + padded[dim + 1 :]
    return same and shape[dim] < padded[dim]


def _infer_rule(parameter: Parameter, local: Shape, live: Any, tp: int) -> Rule:
    """Infer a rule from shapes and Megatron's attributes if neither the user nor the checkpoint has one."""
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
        f"parameter {name}: no rule for splitting it over tp={tp} (whole {list(shape)}, slice {list(local)})",
        hint="pass preset= or rules=; `ucp inspect --rules` shows the rules of the checkpoint",
    )


def atom_region(slice_region: Region, part: Region, shape: Shape, name: str) -> Region:
    """The region of the atom that a part of this rank's tensor-parallel slice covers.

    `part` is relative to the slice, which has `shape`: an interval of all of it (ZeRO), or a box (DTensor).
    """
    if part.boxes == (whole(shape),):
        return slice_region.cut(part.start, part.stop)
    if slice_region == Region.all_of(shape):
        return part
    raise UsageError(f"parameter {name}: DTensors of a tensor-parallel slice are not supported")
