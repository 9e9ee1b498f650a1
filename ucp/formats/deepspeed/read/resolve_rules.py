"""The rule of every parameter of a DeepSpeed checkpoint, and the parameters that its shards then make.

A rule comes from the user, from the checkpoint itself, or from what bytes, shapes and names show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Parameter, ParamGroup
from ucp.core.rules import REPLICATED, NamedRule, RuleBook, resolve, whole_shape
from ucp.errors import InconsistentError, UsageError
from ucp.formats.deepspeed.read.infer_missing import looks_equal
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, has_tp_rules, rules_from_info
from ucp.formats.sharded.assembly import (
    ONE_RANK_ORIGIN,
    Assembler,
    ResolvedRule,
    infer_rules,
    merge_groups,
    weight_fragments,
)
from ucp.formats.sharded.rule_inference import SliceEquality, compare_slices
from ucp.formats.sharded.shard_table import RankCoord, Shard

_BUFFER_ORIGIN: Final = "buffer: rank 0's copy counts"


def check_ranks(context: ReadContext, tp: int) -> None:
    """Report parameters that a tensor-parallel rank of a stage lacks, or an expert-parallel rank."""
    table = context.shards
    for name in table.roles:
        row = table.row(name)
        placement = table.placements.get(name)
        kind, ranks = ("tensor", tp) if placement is None else ("expert", placement.degree)
        for pp in sorted({coord.pp for coord in row}):
            expected = [RankCoord(pp, rank) if placement is None else RankCoord(pp, 0, rank) for rank in range(ranks)]
            missing = [str(rank) for rank, coord in enumerate(expected) if coord not in row]
            if missing:
                context.problems.add(
                    f"parameter {name} of stage {pp} is missing on {kind}-parallel rank {', '.join(missing)}"
                )


def resolve_all(
    context: ReadContext, tp: int, user: RuleBook | None, info: Mapping[str, Any] | None, where: str
) -> dict[str, ResolvedRule]:
    """Return the rule of every parameter. `info` is the `universal_checkpoint_info` of the file `where`."""
    table = context.shards
    own = rules_from_info(info, where) if info else None
    describes_tp = info is not None and has_tp_rules(info)
    found: dict[str, ResolvedRule] = {}
    rows: dict[str, list[Shard]] = {}  # of parameters whose rule must be inferred
    for name, role in table.roles.items():
        if name not in table:
            continue
        shards = table.first_stage(name)
        shapes = [shard.shape for shard in shards]
        named = _with_true_size(user.find(name) if user is not None else None, own, name)
        of_checkpoint = own if role != "buffer" else None
        if name in table.placements:
            # Stacked AutoEP experts, on one tensor-parallel rank: `shapes` are those of the expert-parallel ranks.
            over_ranks = resolve(table.placements[name].rule(shapes[0]), shapes, name)
            single = _rule_on_one_rank(name, whole_shape(over_ranks, shapes, name), named)
            found[name] = replace(single, expert_rule=over_ranks)
        elif tp == 1:
            found[name] = _rule_on_one_rank(name, shapes[0], named or _stored_rule(of_checkpoint, name, describes_tp))
        elif named is not None:
            found[name] = ResolvedRule(resolve(named.rule, shapes, name), named.origin)
        elif role == "buffer" and len(set(shapes)) == 1:
            found[name] = ResolvedRule(REPLICATED, _BUFFER_ORIGIN)
        elif describes_tp and (stored := _stored_rule(of_checkpoint, name, describes_tp)) is not None:
            found[name] = _default_or_bit_equal(context, name, shards, stored)
        else:
            rows[name] = shards
    found.update(infer_rules(context.source, rows, context.note))
    books = [user] if user is not None else []
    if own is not None and tp > 1 and describes_tp:
        books.append(own)
    for unused in (rule for book in books for rule in book.unused()):
        if not unused.optional and not any(unused.pattern.match(name) for name in found):
            context.note("pattern-unused", f"{unused.pattern.pattern!r} ({unused.origin}) matches no parameter")
    return found


def _with_true_size(named: NamedRule | None, own: RuleBook | None, name: str) -> NamedRule | None:
    """Complete a user's rule for a vocabulary without `true_size` by that of the checkpoint's own rule."""
    if named is None or named.rule.cut != "vocab" or named.rule.true_size is not None or own is None:
        return named
    stored = own.find(name)
    return replace(named, rule=replace(named.rule, true_size=stored.rule.true_size)) if stored is not None else named


def _stored_rule(own: RuleBook | None, name: str, describes_tp: bool) -> NamedRule | None:
    """Return the checkpoint's own rule. An info that was written for one rank only describes vocabularies."""
    stored = own.find(name) if own is not None else None
    return stored if stored is not None and (describes_tp or stored.rule.true_size is not None) else None


def _rule_on_one_rank(name: str, shape: Shape, named: NamedRule | None) -> ResolvedRule:
    """On one rank nothing is split; a rule only describes a later split, and the true size of a vocabulary."""
    if named is None or named.rule.cut == "pieces":
        return ResolvedRule(REPLICATED, ONE_RANK_ORIGIN)
    try:
        return ResolvedRule(resolve(named.rule, [shape], name), named.origin)
    except (InconsistentError, UsageError):
        return ResolvedRule(REPLICATED, ONE_RANK_ORIGIN)  # it cannot be split like that, and need not be


def _default_or_bit_equal(context: ReadContext, name: str, shards: Sequence[Shard], stored: NamedRule) -> ResolvedRule:
    """Resolve the checkpoint's own rule.

    Its default, for names that no pattern matches, is only used if the slices differ: Megatron-DeepSpeed forgets a
    pattern for position embeddings, and DeepSpeed would stack their copies.
    """
    if stored.origin == DEFAULT_ORIGIN:
        slices = [(shard.shape, weight_fragments(tp, shard)) for tp, shard in enumerate(shards)]
        if compare_slices(context.source, slices) is SliceEquality.EQUAL:
            context.note(
                "rule-inferred", f"{name}: replicated (no pattern matches it, and all ranks have the same bytes)"
            )
            return ResolvedRule(REPLICATED, "bit-equal on all tensor-parallel ranks")
    return ResolvedRule(resolve(stored.rule, [shard.shape for shard in shards], name), stored.origin)


def assemble(context: ReadContext, rules: Mapping[str, ResolvedRule]) -> dict[str, Parameter]:
    """Return every parameter, in the order of the model."""
    untied = {name: stages for name in rules if (stages := _untied_stages(context, name))}
    assembler = Assembler(context.shards, context.source, untied)
    parameters = assembler.parameters(rules)
    for kind, why in assembler.unplaced_states.items():
        context.unplaced_states.setdefault(kind, why)
    return parameters


def _untied_stages(context: ReadContext, name: str) -> set[int]:
    """Return the stages whose shard of a tied parameter is not a copy of that on the first stage.

    DeepSpeed ties some weights of a tied module, not all of them. The others (Megatron's position embeddings on the
    last stage) drift apart, and are not used there.
    """
    row = context.shards.row(name)
    first, *others = sorted({coord.pp for coord in row})
    untied: set[int] = set()
    for stage in others:
        mine, other = row.get(RankCoord(first, 0)), row.get(RankCoord(stage, 0))
        kind = MASTER if mine is not None and mine.kinds.get(MASTER) else WEIGHT
        if mine is None or other is None or not (mine.kinds.get(kind) and other.kinds.get(kind)):
            continue
        if not looks_equal(context.source, mine.kinds[kind][0], other.kinds[kind][0]):
            untied.add(stage)
            context.note(
                "tied-copy-differs",
                f"{name}: stage {stage} has other values than stage {first}, which were used (DeepSpeed keeps only some"
                " weights of a tied module equal)",
            )
    return untied


def merge_stage_groups(context: ReadContext, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
    """Merge the parameter groups of all pipeline stages, and set the group of every parameter.

    Groups of different stages belong together by position if all stages have equally many, else by hyper-parameters.
    """
    stages: dict[int, list[ParamGroup]] = {}
    for coord, groups in sorted(context.shards.groups.items()):
        stages.setdefault(coord.pp, groups)
    by_position = len({len(groups) for groups in stages.values()}) == 1
    return merge_groups(list(stages.values()), parameters, by_position=by_position)


def order_names(names: Iterable[str], experts: Collection[str]) -> list[str]:
    """Return the names in the order of the model, with every expert after the last parameter of its layer."""
    dense: list[str] = []
    layers: dict[str, list[str]] = {}
    for name in names:
        if name in experts:
            # The common start of names in a mixture of experts: DeepSpeed-MoE's module, or the one AutoEP replaced.
            head, found, _ = name.partition("deepspeed_moe.")
            layers.setdefault(head if found else name.rpartition(".experts.")[0] + ".", []).append(name)
        else:
            dense.append(name)
    for layer, members in layers.items():
        last = max((i for i, name in enumerate(dense) if name.startswith(layer)), default=len(dense) - 1)
        dense[last + 1 : last + 1] = members
    return dense
