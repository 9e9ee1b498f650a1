"""Which rule applies to each parameter: the user's, the checkpoint's own, or what its bytes, shapes and names show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment
from ucp.core.mesh import Rank
from ucp.core.rules import REPLICATED, NamedRule, Rule, RuleBook, SlicePiece, resolve, whole_shape
from ucp.errors import InconsistentError, UsageError
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.shard_table import RankCoord, Shard, ShardTable
from ucp.formats.deepspeed.read.stored_shards import RankSlice, StoredShard, fragments_of
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, has_tp_rules, rules_from_info
from ucp.formats.sharded.slice_equality import SliceEquality, compare_slices

ONE_RANK_ORIGIN: Final = "one tensor-parallel rank"
_BUFFER_ORIGIN: Final = "buffer: rank 0's copy counts"


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule with its sizes named, and where it came from."""

    rule: Rule
    origin: str
    spread: Rule | None = None  # how it is cut over expert-parallel ranks, where AutoEP spreads it over them

    @property
    def cut(self) -> Rule:
        """How the coords' slices make the whole."""
        return self.spread or self.rule


def first_row(shards: ShardTable, name: str) -> list[Shard]:
    """The shards of the first pipeline stage that has the parameter, by tensor-parallel rank."""
    row = shards.row(name)
    first = min(coord.pp for coord in row)
    return [held for coord, held in row.items() if coord.pp == first]


def resolve_all(
    context: ReadContext, tp: int, user: RuleBook | None, info: Mapping[str, Any] | None, where: str
) -> dict[str, ResolvedRule]:
    """A ruling for every parameter. `info` is the checkpoint's universal_checkpoint_info, from the file `where`."""
    own = rules_from_info(info, where) if info else None
    speaks = info is not None and has_tp_rules(info)
    found: dict[str, ResolvedRule] = {}
    missing: list[str] = []
    for name, role in context.shards.roles.items():
        if name not in context.shards:
            continue
        held = first_row(context.shards, name)
        shapes = [holding.shape for holding in held]
        named = _with_true_size(user.find(name) if user is not None else None, own, name)
        if name in context.shards.placements:
            found[name] = _autoep_rule(context, name, shapes, named)
        elif tp == 1:
            found[name] = _rule_on_one_rank(
                name, shapes[0], named or (_checkpoint_rule(own, name, speaks) if role != "buffer" else None)
            )
        elif named is not None:
            found[name] = ResolvedRule(resolve(named.rule, shapes, name), named.origin)
        elif role == "buffer" and len(set(shapes)) == 1:
            found[name] = ResolvedRule(REPLICATED, _BUFFER_ORIGIN)
        elif own is not None and speaks and role != "buffer" and (said := own.find(name)) is not None:
            found[name] = _default_or_bit_equal(context, name, held, said)
        else:
            missing.append(name)
    if missing:
        found.update(_infer_rules(context, missing))
    books = [user] if user is not None else []
    if own is not None and tp > 1 and speaks:
        books.append(own)
    for unused in (rule for book in books for rule in book.unused()):
        if not unused.optional and not any(unused.pattern.match(name) for name in found):
            context.note("pattern-unused", f"{unused.pattern.pattern!r} ({unused.origin}) matches no parameter")
    return found


def _with_true_size(named: NamedRule | None, own: RuleBook | None, name: str) -> NamedRule | None:
    """A user's rule for a vocabulary; where it leaves the true size open, the checkpoint's own word on it counts."""
    if named is None or named.rule.cut != "vocab" or named.rule.true_size is not None or own is None:
        return named
    said = own.find(name)
    return replace(named, rule=replace(named.rule, true_size=said.rule.true_size)) if said is not None else named


def _checkpoint_rule(own: RuleBook | None, name: str, speaks: bool) -> NamedRule | None:
    """The checkpoint's own rule for a name. An info written for one rank knows vocabularies and nothing else."""
    said = own.find(name) if own is not None else None
    return said if said is not None and (speaks or said.rule.true_size is not None) else None


def _rule_on_one_rank(name: str, shape: Shape, named: NamedRule | None) -> ResolvedRule:
    """With one tensor-parallel rank nothing is cut: a rule says how it would be, and what of a vocabulary is real."""
    if named is None or named.rule.cut == "pieces":
        return ResolvedRule(REPLICATED, ONE_RANK_ORIGIN)
    try:
        return ResolvedRule(resolve(named.rule, [shape], name), named.origin)
    except (InconsistentError, UsageError):
        return ResolvedRule(REPLICATED, ONE_RANK_ORIGIN)  # it cannot be cut like that, and need not be


def _autoep_rule(context: ReadContext, name: str, shapes: Sequence[Shape], named: NamedRule | None) -> ResolvedRule:
    """Experts that AutoEP stacks and spreads, on one tensor-parallel rank. `shapes` are those of the ep ranks."""
    over_ranks = resolve(context.shards.placements[name].rule(shapes[0]), shapes, name)
    single = _rule_on_one_rank(name, whole_shape(over_ranks, shapes, name), named)
    return replace(single, spread=over_ranks)


def _default_or_bit_equal(context: ReadContext, name: str, held: Sequence[Shard], said: NamedRule) -> ResolvedRule:
    """The checkpoint's own rule. Its default, for names that no pattern matches, gives way to what the bytes show:
    Megatron-DeepSpeed forgets a pattern for position embeddings, and DeepSpeed would stack their copies."""
    shapes = [holding.shape for holding in held]
    if said.origin == DEFAULT_ORIGIN:
        slices = [(holding.shape, _evidence(tp, holding)) for tp, holding in enumerate(held)]
        if compare_slices(context.source, slices) is SliceEquality.EQUAL:
            context.note(
                "rule-inferred", f"{name}: replicated (no pattern matches it, and all ranks hold the same bytes)"
            )
            return ResolvedRule(REPLICATED, "bit-equal on all tensor-parallel ranks")
    return ResolvedRule(resolve(said.rule, shapes, name), said.origin)


def _infer_rules(context: ReadContext, names: Sequence[str]) -> dict[str, ResolvedRule]:
    """Rulings for parameters that nobody speaks of, each told in a note."""
    from ucp.formats.sharded.rule_inference import (  # few checkpoints need it, and it brings all presets
        LocalSlice,
        RuleInference,
    )

    rows = {name: first_row(context.shards, name) for name in names}
    slices = {
        name: [LocalSlice(holding.shape, _evidence(tp, holding)) for tp, holding in enumerate(row)]
        for name, row in rows.items()
    }
    found: dict[str, ResolvedRule] = {}
    for name, (rule, origin) in RuleInference(context.source).rules_for(slices).items():
        found[name] = ResolvedRule(resolve(rule, [holding.shape for holding in rows[name]], name), origin)
        context.note("rule-inferred", f"{name}: {found[name].rule} ({origin})")
    return found


def _evidence(tp: int, holding: Shard) -> Sequence[Fragment]:
    """What a tensor-parallel rank holds, for inference: its weight, or its master where no file has the weight."""
    stored = _weight_or_master(holding)
    if stored is None:
        return ()
    piece = SlicePiece(whole(holding.shape), 0)
    return fragments_of(WEIGHT, [(RankSlice((piece,), holding.shape, Rank(tp=tp)), stored)])


def _weight_or_master(holding: Shard) -> StoredShard | None:
    for kind in (WEIGHT, MASTER):
        if holding.kinds.get(kind):
            return holding.kinds[kind][0]
    return None


def check_ranks(context: ReadContext, tp: int) -> None:
    """Report parameters that some tensor-parallel rank of a stage lacks, or some expert-parallel one."""
    shards = context.shards
    for name in shards.roles:
        row = shards.row(name)
        spread = shards.placements.get(name)
        kind, ranks = ("tensor", tp) if spread is None else ("expert", spread.degree)
        for pp in sorted({coord.pp for coord in row}):
            wanted = [RankCoord(pp, rank) if spread is None else RankCoord(pp, 0, rank) for rank in range(ranks)]
            lacking = [str(coord.part) for coord in wanted if coord not in row]
            if lacking:
                context.problems.add(
                    f"parameter {name} of stage {pp} is missing on {kind}-parallel rank {', '.join(lacking)}"
                )
