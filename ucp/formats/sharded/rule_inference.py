"""Inference of missing rules: how parameters are cut over tensor-parallel ranks, from their bytes, shapes and names.

Evidence, strongest first:

1. Slices that are bit-equal on every rank are copies of the whole (`replicated`).
2. Slices of uneven size differ along the dimension that is cut.
3. A matrix with one side of the hidden size (the length of replicated vectors such as norms) is cut along the other.
4. The name, through the packaged presets. Parts of fused parameters come from there only: bytes do not show them.

Whatever stays open is an error that shows the candidates, ready to be pasted into a rule file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ucp.core.box import Shape
from ucp.core.checkpoint import Fragment
from ucp.core.rules import REPLICATED, Rule, RuleBook
from ucp.errors import InconsistentError, UsageError
from ucp.formats.sharded.rule_files import format_rule, load_preset, preset_names
from ucp.formats.sharded.slice_equality import SliceEquality, compare_slices
from ucp.storage.local import SourceFiles

InferredRule = tuple[Rule, str]

# Names that look like several projections in one tensor. A plain split of such a tensor would scramble it if its parts
# lie side by side, so without a preset's word it stays open.
_FUSED: Final = re.compile(
    r"(.*[._])?(\w*qkv\w*|query_key_value|c_attn|in_proj\w*|kv_proj|key_value|gate_up\w*|w13|w12)([._]|$)"
)

# Input and output side of an MLP: twice as many rows in as columns out shows a gate beside the projection.
_MLP_SIDES: Final = (("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2"), ("fc1", "fc2"), ("wi", "wo"))

_SHOWN = 12  # open names that the error spells out


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """What one tensor-parallel rank holds of a parameter: its shape there, and its bytes in slice order."""

    shape: Shape
    fragments: Sequence[Fragment]


@dataclass(frozen=True, slots=True)
class _UndecidedRule:
    """A name for which evidence does not decide."""

    name: str
    shapes: tuple[Shape, ...]
    why: str
    candidates: tuple[Rule, ...]


class RuleInference:
    """Rules for a whole checkpoint at once, because the hidden size shows in other parameters.

    `presets` are consulted for names, first to last; by default all packaged ones, the generic one last.
    """

    def __init__(self, files: SourceFiles, presets: Sequence[str] | None = None) -> None:
        self._files = files
        names = presets if presets is not None else [n for n in preset_names() if n != "generic-hf"] + ["generic-hf"]
        self._presets: list[tuple[str, RuleBook]] = [(name, load_preset(name)) for name in names]

    def rules_for(self, slices: Mapping[str, Sequence[LocalSlice]]) -> dict[str, InferredRule]:
        """For each parameter its rule and, for people, what it rests on. `slices[name][rank]`; at least two ranks.

        Reads slices until they differ, in blocks of bounded size. All names that stay open are reported in one error.
        """
        if not slices:
            return {}
        found: dict[str, InferredRule] = {}
        later: dict[str, SliceEquality] = {}
        for name, held in slices.items():
            _check_ranks(name, held)
            same = compare_slices(self._files, [(s.shape, s.fragments) for s in held])
            if same is SliceEquality.EQUAL:
                found[name] = (REPLICATED, f"inferred: bit-equal on {len(held)} ranks")
            else:
                later[name] = same
        hidden = self._hidden_sizes(slices, found, later)
        still_open: list[_UndecidedRule] = []
        # Weights before biases: what decides for a weight decides for a constant bias beside it.
        for name, same in sorted(later.items(), key=lambda item: item[1] is SliceEquality.CONSTANT):
            verdict = self._judge(name, slices, same, hidden, found)
            if isinstance(verdict, _UndecidedRule):
                still_open.append(verdict)
            else:
                found[name] = verdict
        if still_open:
            order = {name: i for i, name in enumerate(slices)}
            raise _ambiguous(sorted(still_open, key=lambda item: order[item.name]))
        return {name: found[name] for name in slices}

    def _hidden_sizes(
        self,
        slices: Mapping[str, Sequence[LocalSlice]],
        replicated: Mapping[str, InferredRule],
        others: Mapping[str, SliceEquality],
    ) -> set[int]:
        """Lengths of the vectors that every rank holds whole; of constant ones only where a preset knows the name."""
        vouched = {
            name
            for name, same in others.items()
            if same is SliceEquality.CONSTANT
            and any(rule.cut in ("replicated", "average") for _, rule in self._named(name, slices[name][0].shape))
        }
        shapes = (slices[name][0].shape for name in (*replicated, *vouched))
        return {shape[0] for shape in shapes if len(shape) == 1 and shape[0] > 1}

    def _judge(
        self,
        name: str,
        slices: Mapping[str, Sequence[LocalSlice]],
        same: SliceEquality,
        hidden: set[int],
        found: Mapping[str, InferredRule],
    ) -> InferredRule | _UndecidedRule:
        held = slices[name]
        shapes = tuple(s.shape for s in held)
        if same is SliceEquality.CONSTANT:
            return self._constant(name, shapes, found)
        if not shapes[0]:
            return _UndecidedRule(name, shapes, "a scalar that differs between ranks", (Rule("average"), REPLICATED))
        dims = _differing_dims(shapes)
        if len(dims) > 1:
            raise InconsistentError(
                f"parameter {name}: slices of tensor-parallel ranks differ along {len(dims)} dimensions: "
                + ", ".join(f"rank {i}: {list(shape)}" for i, shape in enumerate(shapes)),
                hint="look for a rank file of another run",
            )
        if dims:
            return self._with_parts(name, slices, dims[0], hidden, "inferred: slices of uneven size")
        if len(shapes[0]) == 1:
            return self._with_parts(name, slices, 0, hidden, "inferred: a vector that differs between ranks")
        dim = _dim_beside_hidden(shapes[0], hidden)
        if dim is not None:
            size = shapes[0][1 - dim]
            return self._with_parts(name, slices, dim, hidden, f"inferred: the side that is not the hidden size {size}")
        known = [(preset, rule) for preset, rule in self._named(name, shapes[0]) if rule.cut in ("split", "vocab")]
        if known and len({rule.dim for _, rule in known}) == 1:
            return self._with_parts(name, slices, known[0][1].dim, hidden, "inferred: by name")
        candidates = tuple(Rule("split", dim) for dim in range(len(shapes[0])))
        why = "its shape fits a cut along either dimension" if hidden else "no replicated vector shows the hidden size"
        return _UndecidedRule(name, shapes, why, candidates)

    def _constant(self, name: str, shapes: tuple[Shape, ...], found: Mapping[str, InferredRule]) -> InferredRule:
        """Equal slices of one repeated value (untouched biases, norms of ones) may be copies or cuts: look at names."""
        weight = found.get(f"{name.removesuffix('bias')}weight") if name.endswith(".bias") else None
        if weight is not None and len(shapes[0]) == 1 and weight[0].cut in ("split", "vocab"):
            if weight[0].dim == 0:
                return replace(weight[0], true_size=None), "inferred: cut like the weight beside it"
            return REPLICATED, "inferred: equal on all ranks, beside a weight cut along its inputs"
        for preset, rule in self._named(name, shapes[0]):
            return (REPLICATED if rule.cut == "average" else rule), f"inferred: by name, preset {preset}"
        return REPLICATED, "inferred: equal on all ranks, but one repeated value, which a cut would show too"

    def _with_parts(
        self, name: str, slices: Mapping[str, Sequence[LocalSlice]], dim: int, hidden: set[int], why: str
    ) -> InferredRule | _UndecidedRule:
        """A split along `dim`, with the parts that a preset knows for this name where its dimension agrees."""
        shapes = tuple(s.shape for s in slices[name])
        total = sum(shape[dim] for shape in shapes)
        plain = Rule("split", dim)
        gated = _gate_beside(name, slices)
        if gated is not None:
            seen = "twice the columns of the MLP's other side, so gate and up" if gated else "an MLP without gate"
            return (Rule("split", dim, ratio=(1, 1)) if gated else plain), f"{why}; {seen}"
        known = [
            (preset, rule)
            for preset, rule in self._named(name, shapes[0])
            if rule.cut in ("split", "vocab") and rule.dim == dim
        ]
        if known and len({rule.ratio for _, rule in known}) > 1:
            candidates = tuple({rule.ratio: replace(rule, cut="split") for _, rule in known}.values())
            return _UndecidedRule(name, shapes, "presets disagree on its parts", candidates)
        for preset, rule in known[:1]:
            if rule.ratio == (1, 1, 1) and not _is_three_hidden(total, hidden):
                return _UndecidedRule(
                    name, shapes, "fused q, k and v of unknown sizes", _qkv_candidates(dim, total, hidden)
                )
            if rule.ratio is None or all(shape[dim] % sum(rule.ratio) == 0 for shape in shapes):
                return rule, f"{why}; preset {preset}"
        if _FUSED.match(name):
            candidates = (plain, Rule("split", dim, ratio=(1, 1, 1)), Rule("split", dim, ratio=(1, 1)))
            return _UndecidedRule(name, shapes, "its name suggests fused parts, which no preset knows", candidates)
        return plain, why

    def _named(self, name: str, shape: Shape) -> Iterator[tuple[str, Rule]]:
        """What presets say of this name, with the dimension counted from the first."""
        for preset, book in self._presets:
            known = book.find(name)
            if known is None:
                continue
            dim = known.rule.dim + len(shape) if known.rule.dim < 0 else known.rule.dim
            if known.rule.cut not in ("split", "vocab") or 0 <= dim < len(shape):
                yield preset, replace(known.rule, dim=dim)


def _check_ranks(name: str, held: Sequence[LocalSlice]) -> None:
    ranks = {len(s.shape) for s in held}
    if len(ranks) > 1:
        raise InconsistentError(
            f"parameter {name}: slices have {sorted(ranks)} dimensions on different tensor-parallel ranks",
            hint="look for a rank file of another run",
        )


def _differing_dims(shapes: Sequence[Shape]) -> list[int]:
    return [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _dim_beside_hidden(shape: Shape, hidden: set[int]) -> int | None:
    """The cut dimension of a matrix of which exactly one side is a known hidden size."""
    if len(shape) != 2:
        return None
    rows, columns = shape
    if columns in hidden and rows not in hidden:
        return 0
    if rows in hidden and columns not in hidden:
        return 1
    return None


def _gate_beside(name: str, slices: Mapping[str, Sequence[LocalSlice]]) -> bool | None:
    """Whether the input side of an MLP carries a gate, where the output side is there to compare with."""
    for first, second in _MLP_SIDES:
        stem, found, rest = name.rpartition(f".{first}.")
        other = slices.get(f"{stem}.{second}.weight") if found else None
        if other is None or len(other[0].shape) != 2 or rest not in ("weight", "bias"):
            continue
        rows, columns = slices[name][0].shape[0], other[0].shape[1]
        if rows in (columns, 2 * columns):
            return rows == 2 * columns
    return None


def _is_three_hidden(total: int, hidden: set[int]) -> bool:
    return any(total == 3 * size for size in hidden)


def _qkv_candidates(dim: int, total: int, hidden: set[int]) -> tuple[Rule, ...]:
    grouped = [
        Rule("split", dim, parts=(size, (total - size) // 2, (total - size) // 2))
        for size in sorted(hidden)
        if size < total < 3 * size and (total - size) % 2 == 0
    ]
    return (*grouped, Rule("split", dim, ratio=(1, 1, 1)), Rule("split", dim))


def _ambiguous(still_open: Sequence[_UndecidedRule]) -> UsageError:
    lines = [f"the rules of {len(still_open)} parameters cannot be inferred"]
    for item in still_open[:_SHOWN]:
        ranks = ", ".join(f"rank {i}: {list(shape)}" for i, shape in enumerate(item.shapes))
        lines.append(f"{item.name} ({ranks}): {item.why}. Candidates:")
        lines += [f"    {line}" for rule in item.candidates for line in format_rule(item.name, rule).splitlines()]
    if len(still_open) > _SHOWN:
        lines.append(f"… and {len(still_open) - _SHOWN} more: " + ", ".join(item.name for item in still_open[_SHOWN:]))
    return UsageError(
        "\n  ".join(lines),
        hint="put one candidate for each into a TOML file and give it with --rules, or name the model with --preset",
    )
