"""Inference of missing tensor-parallel rules from the bytes, shapes and names of parameters.

Evidence, strongest first:

1. Slices that are bit-equal on every rank are copies of the whole (`replicated`).
2. Slices of uneven size differ along the dimension that is split.
3. A matrix with one side of the hidden size (the length of replicated vectors such as norms) is split along the other.
4. The name, if a packaged preset has a rule for it. The parts of fused parameters are only known from there.

If the evidence does not decide, the error lists candidates that can be pasted into a rule file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Final, NamedTuple

from ucp import settings
from ucp.core.box import Shape
from ucp.core.checkpoint import Fragment
from ucp.core.rules import REPLICATED, Rule, RuleBook
from ucp.errors import ImpossibleError, InconsistentError
from ucp.formats.sharded.lost_files import SurvivingFiles
from ucp.storage.local import SourceFiles

_FIRST_BLOCK: Final = 4096  # bytes

InferredRule = tuple[Rule, str]

# Names that look like several projections in one tensor. A plain split would scramble such a tensor if its parts follow
# each other, so without a rule of a preset it is not decided.
_FUSED: Final = re.compile(
    r"(.*[._])?(\w*qkv\w*|query_key_value|c_attn|in_proj\w*|kv_proj|key_value|gate_up\w*|w13|w12)([._]|$)"
)

_LAYER_NUMBER: Final = re.compile(r"((?:^|\.)(?:layers?|blocks?|h)\.)\d+(?=\.)")

# Input and output matrix of an MLP: twice as many rows in as columns out means a gate and a projection.
_MLP_SIDES: Final = (("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2"), ("fc1", "fc2"), ("wi", "wo"))

_SHOWN = 12  # undecided names that the error lists with candidates


class SliceEquality(Enum):
    """The result of a comparison of slices."""

    DIFFERENT = "different"
    EQUAL = "equal"
    CONSTANT = "equal, and one value throughout"  # may be copies, or a split of a constant


class LocalSlice(NamedTuple):
    """One tensor-parallel rank's slice of a parameter: its shape, and its bytes in slice order."""

    shape: Shape
    fragments: Sequence[Fragment]


@dataclass(frozen=True, slots=True)
class _UndecidedRule:
    """A parameter for which the evidence does not decide."""

    name: str
    shapes: tuple[Shape, ...]
    why: str
    candidates: tuple[Rule, ...]


class RuleInference:
    """Infers the rules of a whole checkpoint at once, because other parameters show the hidden size.

    `presets` are tried for names in this order; by default all packaged ones, the generic one last.
    """

    def __init__(self, files: SourceFiles, presets: Sequence[str] | None = None) -> None:
        # Loading presets takes longer than comparing slices, which other modules do without them.
        from ucp.formats.sharded.rule_files import load_preset, preset_names

        self._files = files
        names = presets if presets is not None else [n for n in preset_names() if n != "generic-hf"] + ["generic-hf"]
        self._presets: list[tuple[str, RuleBook]] = [(name, load_preset(name)) for name in names]

    def rules_for(self, slices: Mapping[str, Sequence[LocalSlice]]) -> dict[str, InferredRule]:
        """Return the rule of each parameter and its evidence, for people. `slices[name][rank]`; at least two ranks.

        Reads slices until they differ, in blocks of bounded size. One error reports all undecided names.
        """
        found: dict[str, InferredRule] = {}
        later: dict[str, SliceEquality] = {}
        for name, of_ranks in slices.items():
            counts = {len(s.shape) for s in of_ranks}
            if len(counts) > 1:
                raise InconsistentError(
                    f"parameter {name}: slices have {sorted(counts)} dimensions on different tensor-parallel ranks",
                    hint="look for a rank file of another run",
                )
            same = compare_slices(self._files, of_ranks)
            if same is SliceEquality.EQUAL:
                found[name] = (REPLICATED, f"inferred: bit-equal on {len(of_ranks)} ranks")
            else:
                later[name] = same
        _check_layers_alike(slices, found, later)
        hidden = self._hidden_sizes(slices, found, later)
        undecided: list[_UndecidedRule] = []
        # Weights before biases: the rule of a weight decides for a constant bias of the same module.
        for name, same in sorted(later.items(), key=lambda item: item[1] is SliceEquality.CONSTANT):
            decided = self._decide(name, slices, same, hidden, found)
            if isinstance(decided, _UndecidedRule):
                undecided.append(decided)
            else:
                found[name] = decided
        if undecided:
            order = {name: i for i, name in enumerate(slices)}
            raise _ambiguous(sorted(undecided, key=lambda item: order[item.name]))
        return {name: found[name] for name in slices}

    def _hidden_sizes(
        self,
        slices: Mapping[str, Sequence[LocalSlice]],
        replicated: Mapping[str, InferredRule],
        others: Mapping[str, SliceEquality],
    ) -> set[int]:
        """Return the lengths of replicated vectors; of constant vectors only if a preset has a rule for the name."""
        by_preset = {
            name
            for name, same in others.items()
            if same is SliceEquality.CONSTANT
            and any(rule.cut in ("replicated", "average") for _, rule in self._named(name, slices[name][0].shape))
        }
        shapes = (slices[name][0].shape for name in (*replicated, *by_preset))
        return {shape[0] for shape in shapes if len(shape) == 1 and shape[0] > 1}

    def _decide(
        self,
        name: str,
        slices: Mapping[str, Sequence[LocalSlice]],
        same: SliceEquality,
        hidden: set[int],
        found: Mapping[str, InferredRule],
    ) -> InferredRule | _UndecidedRule:
        shapes = tuple(s.shape for s in slices[name])
        if same is SliceEquality.CONSTANT:
            return self._constant(name, shapes, found)
        if not shapes[0]:
            return _UndecidedRule(name, shapes, "a scalar that differs between ranks", (Rule("average"), REPLICATED))
        dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
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
        for dim, size in enumerate(shapes[0][::-1]) if len(shapes[0]) == 2 else ():
            if size in hidden and shapes[0][dim] not in hidden:
                why = f"inferred: the side that is not the hidden size {size}"
                return self._with_parts(name, slices, dim, hidden, why)
        known = [(preset, rule) for preset, rule in self._named(name, shapes[0]) if rule.cut in ("split", "vocab")]
        if known and len({rule.dim for _, rule in known}) == 1:
            return self._with_parts(name, slices, known[0][1].dim, hidden, "inferred: by name")
        candidates = tuple(Rule("split", dim) for dim in range(len(shapes[0])))
        why = "its shape fits a split along any dimension" if hidden else "no replicated vector shows the hidden size"
        return _UndecidedRule(name, shapes, why, candidates)

    def _constant(self, name: str, shapes: tuple[Shape, ...], found: Mapping[str, InferredRule]) -> InferredRule:
        """Equal slices of one repeated value (zero biases, norms of ones) may be copies or a split: decide by name."""
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
        """Return a split along `dim`, with the parts that a preset has for this name if its dimension agrees."""
        shapes = tuple(s.shape for s in slices[name])
        total = sum(shape[dim] for shape in shapes)
        plain = Rule("split", dim)
        gated = _has_gate(name, slices)
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
            if rule.ratio == (1, 1, 1) and total not in {3 * size for size in hidden}:
                return _UndecidedRule(
                    name, shapes, "fused q, k and v of unknown sizes", _qkv_candidates(dim, total, hidden)
                )
            if rule.ratio is None or all(shape[dim] % sum(rule.ratio) == 0 for shape in shapes):
                return rule, f"{why}; preset {preset}"
        if _FUSED.match(name):
            candidates = (plain, Rule("split", dim, ratio=(1, 1, 1)), Rule("split", dim, ratio=(1, 1)))
            return _UndecidedRule(
                name, shapes, "its name suggests fused parts, for which no preset has a rule", candidates
            )
        return plain, why

    def _named(self, name: str, shape: Shape) -> Iterator[tuple[str, Rule]]:
        """Yield the rules that presets have for this name, with non-negative dimensions."""
        for preset, book in self._presets:
            known = book.find(name)
            if known is None:
                continue
            dim = known.rule.dim + len(shape) if known.rule.dim < 0 else known.rule.dim
            if known.rule.cut not in ("split", "vocab") or 0 <= dim < len(shape):
                yield preset, replace(known.rule, dim=dim)


def _check_layers_alike(
    slices: Mapping[str, Sequence[LocalSlice]],
    equal: Mapping[str, InferredRule],
    others: Mapping[str, SliceEquality],
) -> None:
    """Report a parameter whose slices are equal although those of other layers differ: one overwrote the other."""
    differing: dict[tuple[str, Shape], str] = {}
    for name, same in others.items():
        if same is not SliceEquality.CONSTANT:
            differing.setdefault((_LAYER_NUMBER.sub(r"\1*", name), slices[name][0].shape), name)
    for name in equal:
        other = differing.get((_LAYER_NUMBER.sub(r"\1*", name), slices[name][0].shape))
        if other is not None:
            raise InconsistentError(
                f"parameter {name}: equal on all tensor-parallel ranks, but {other} differs between them",
                hint="one rank's slice was copied over another's: restore it; if it is replicated, say so in a file for"
                " --rules",
            )


def _has_gate(name: str, slices: Mapping[str, Sequence[LocalSlice]]) -> bool | None:
    """Whether the input matrix of an MLP has a gate; None without an output matrix to compare with."""
    for first, second in _MLP_SIDES:
        stem, found, rest = name.rpartition(f".{first}.")
        other = slices.get(f"{stem}.{second}.weight") if found else None
        if other is None or len(other[0].shape) != 2 or rest not in ("weight", "bias"):
            continue
        rows, columns = slices[name][0].shape[0], other[0].shape[1]
        if rows in (columns, 2 * columns):
            return rows == 2 * columns
    return None


def _qkv_candidates(dim: int, total: int, hidden: set[int]) -> tuple[Rule, ...]:
    grouped = [
        Rule("split", dim, parts=(size, (total - size) // 2, (total - size) // 2))
        for size in sorted(hidden)
        if size < total < 3 * size and (total - size) % 2 == 0
    ]
    return (*grouped, Rule("split", dim, ratio=(1, 1, 1)), Rule("split", dim))


def _ambiguous(undecided: Sequence[_UndecidedRule]) -> ImpossibleError:
    from ucp.formats.sharded.rule_files import format_rule

    lines = [f"the rules of {len(undecided)} parameters cannot be inferred"]
    for item in undecided[:_SHOWN]:
        ranks = ", ".join(f"rank {i}: {list(shape)}" for i, shape in enumerate(item.shapes))
        lines.append(f"{item.name} ({ranks}): {item.why}. Candidates:")
        lines += [f"    {line}" for rule in item.candidates for line in format_rule(item.name, rule).splitlines()]
    if len(undecided) > _SHOWN:
        lines.append(f"… and {len(undecided) - _SHOWN} more: " + ", ".join(item.name for item in undecided[_SHOWN:]))
    return ImpossibleError(
        "\n  ".join(lines),
        hint="put one candidate for each into a TOML file and pass it with --rules, or choose a --preset",
    )


def compare_slices(files: SourceFiles, slices: Sequence[tuple[Shape, Sequence[Fragment]]]) -> SliceEquality:
    """Compare the bytes of slices, given as shape and fragments in slice order. One element is never CONSTANT."""
    if isinstance(files, SurvivingFiles):
        slices = [(shape, held) for shape, held in slices if not any(f.file in files.lost.reasons for f in held)]
        if len(slices) < 2:
            return SliceEquality.CONSTANT  # nothing to compare with: names decide
    first_shape, first_fragments = slices[0]
    dtypes = {fragment.dtype for _, fragments in slices for fragment in fragments}
    if any(shape != first_shape for shape, _ in slices) or len(dtypes) > 1:
        return SliceEquality.DIFFERENT
    if not dtypes:
        return SliceEquality.EQUAL if 0 in first_shape else SliceEquality.DIFFERENT  # without bytes nothing is known
    itemsize = dtypes.pop().itemsize
    others = [_blocks(files, fragments, itemsize) for _, fragments in slices[1:]]
    element: bytes | None = None
    constant, total = True, 0
    for data in _blocks(files, first_fragments, itemsize):
        for other in others:
            if next(other, b"") != data:
                return SliceEquality.DIFFERENT
        element = element or bytes(data[:itemsize])
        constant = constant and data == element * (len(data) // itemsize)
        total += len(data)
    if any(next(other, None) is not None for other in others):
        return SliceEquality.DIFFERENT
    return SliceEquality.CONSTANT if constant and total > itemsize else SliceEquality.EQUAL


def _blocks(files: SourceFiles, fragments: Sequence[Fragment], itemsize: int) -> Iterator[bytearray]:
    """Yield the bytes of fragments in blocks of whole elements, which grow because most differences come early."""
    pending = bytearray()
    size = min(_FIRST_BLOCK, settings.SLAB_BYTES) // itemsize * itemsize
    for fragment in fragments:
        for offset, nbytes in _runs(fragment):
            done = 0
            while done < nbytes:
                take = min(size - len(pending), nbytes - done)
                if fragment.inline is not None:
                    pending += fragment.inline[done : done + take]
                else:
                    pending += files.read(fragment.file, offset + done, take)
                done += take
                if len(pending) == size:
                    yield pending
                    pending = bytearray()
                    size = max(size, min(8 * size, settings.SLAB_BYTES // itemsize * itemsize))
    if pending:
        yield pending


def _runs(fragment: Fragment) -> Iterator[tuple[int, int]]:
    """Yield the contiguous byte ranges (offset, length) of a fragment, in the order of its region."""
    if fragment.strides is None:
        yield fragment.offset, fragment.nbytes
        return
    # A strided fragment is a single box. Its rows are runs if the innermost dimension is contiguous.
    shape, itemsize = fragment.region.boxes[0].shape, fragment.dtype.itemsize
    dense = bool(shape) and fragment.strides[-1] == 1
    outer = len(shape) - 1 if dense else len(shape)
    length = (shape[-1] if dense else 1) * itemsize
    for index in product(*(range(n) for n in shape[:outer])):
        step = sum(i * stride for i, stride in zip(index, fragment.strides, strict=False))
        yield fragment.offset + step * itemsize, length
