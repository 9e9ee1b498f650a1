"""From shards and rules to parameters with atoms: which fragments make the whole, which are copies of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from math import prod

from ucp.core.box import Box, Shape, intersect
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Fragment, Parameter, ParamGroup
from ucp.core.dtypes import scalar_value
from ucp.core.mesh import Rank
from ucp.core.rules import Rule, SlicePiece, logical_shape, slice_pieces, whole_shape
from ucp.formats.deepspeed.read.infer_missing import looks_equal
from ucp.formats.deepspeed.read.optimizer_values import scalar_bytes
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.resolve_rules import ResolvedRule
from ucp.formats.deepspeed.read.shard_table import RankCoord, Shard, ShardTable, StageParamGroup
from ucp.formats.deepspeed.read.stored_shards import RankSlice, StoredShard, fragments_of, scalar_fragments


def assemble(context: ReadContext, rulings: Mapping[str, ResolvedRule], tp: int) -> dict[str, Parameter]:
    """Every parameter in the model's order."""
    shards = context.shards
    aliases: dict[str, list[str]] = {}
    for alias, owner in shards.aliases.items():
        aliases.setdefault(owner, []).append(alias)
    values = _ScalarValues(context)
    parameters: dict[str, Parameter] = {}
    for name, ruling in rulings.items():
        parameters[name] = _parameter(context, name, ruling, tp, values)
        parameters[name].aliases = tuple(aliases.get(name, ()))
    return parameters


def _parameter(context: ReadContext, name: str, ruling: ResolvedRule, tp: int, values: _ScalarValues) -> Parameter:
    shards = context.shards
    row = shards.row(name)
    stages = sorted({coord.pp for coord in row})
    first = [held for coord, held in row.items() if coord.pp == stages[0]]
    padded = whole_shape(ruling.cut, [held.shape for held in first], name)
    shape = logical_shape(ruling.cut, padded)
    number, ep = shards.experts.get(name, (None, None))
    slices = _slices(row, ruling.cut, padded, tp if ruling.spread is None else len(first), name, ep)
    parameter = Parameter(
        name,
        shape,
        shards.roles[name],
        rule=ruling.rule,
        rule_origin=ruling.origin,
        padded_shape=padded if padded != shape else None,
        stages=tuple(stages),
        expert=number,
    )
    strangers = _differing_stages(context, name, row, stages)
    for kind in _kinds(first, row):
        atom = _atom(context, name, kind, shape, ruling.cut, row, slices, values, strangers)
        if atom is not None:
            parameter.atoms[kind] = atom
    return parameter


def _differing_stages(
    context: ReadContext, name: str, row: Mapping[RankCoord, Shard], stages: Sequence[int]
) -> set[int]:
    """Stages whose copy of a tied parameter is none: DeepSpeed ties some weights of a tied module, not all of them.

    The others (Megatron's position embeddings on the last stage) drift apart, and are not used there.
    """
    found: set[int] = set()
    for stage in stages[1:]:
        mine, other = row.get(RankCoord(stages[0], 0)), row.get(RankCoord(stage, 0))
        kind = MASTER if mine is not None and mine.kinds.get(MASTER) else WEIGHT
        if mine is None or other is None or not (mine.kinds.get(kind) and other.kinds.get(kind)):
            continue
        if not looks_equal(context.source, mine.kinds[kind][0], other.kinds[kind][0]):
            found.add(stage)
            context.note(
                "tied-copy-differs",
                f"{name}: stage {stage} holds another version than stage {stages[0]}, whose one was taken (of a tied"
                " module, DeepSpeed keeps only some weights equal)",
            )
    return found


def _kinds(first: Sequence[Shard], row: Mapping[RankCoord, Shard]) -> list[str]:
    """Kinds in the order that people expect: weight, master, then the optimizer's own order."""
    kinds: dict[str, None] = {}
    for held in (*first, *row.values()):
        kinds.update(dict.fromkeys(held.kinds))
    return sorted(kinds, key=lambda kind: (kind != WEIGHT, kind != MASTER))


def _slices(
    row: Mapping[RankCoord, Shard], rule: Rule, padded: Shape, parts: int, name: str, ep: int | None
) -> dict[RankCoord, RankSlice]:
    pieces = [slice_pieces(rule, padded, parts, part, name) for part in range(parts)]
    return {
        coord: RankSlice(
            pieces[coord.part],
            held.shape,
            Rank(coord.pp, coord.tp, 0, coord.ep if coord.ep >= 0 else ep),
        )
        for coord, held in row.items()
    }


def _atom(
    context: ReadContext,
    name: str,
    kind: str,
    shape: Shape,
    rule: Rule,
    row: Mapping[RankCoord, Shard],
    slices: Mapping[RankCoord, RankSlice],
    values: _ScalarValues,
    strangers: Set[int],
) -> Atom | None:
    coords = [coord for coord, held in row.items() if held.kinds.get(kind)]
    own_shape = next((row[coord].shapes[kind] for coord in coords if kind in row[coord].shapes), None)
    dtype = row[coords[0]].kinds[kind][0].dtype
    if strange := {s.dtype for coord in coords for s in row[coord].kinds[kind] if s.dtype is not dtype} - {dtype}:
        listed = ", ".join(sorted(map(str, {dtype, *strange})))
        context.problems.add(f"parameter {name}: '{kind}' has a different dtype on different ranks: {listed}")
    if own_shape == ():
        first, *others = values.copies(
            name, kind, [(slices[coord].rank, stored) for coord in coords for stored in row[coord].kinds[kind]]
        )
        return Atom(name, kind, (), dtype, first, tuple(others))
    if own_shape is not None:
        return _odd_shaped_atom(context, name, kind, own_shape, coords, row, slices)
    stage = coords[0].pp
    if rule.cut == "average":
        # Copies on another stage are the same versions again: they do not belong into the mean.
        sets = [fragments_of(kind, [(slices[h], row[h].kinds[kind][0])]) for h in coords if h.pp == stage]
        return Atom(name, kind, shape, dtype, sets[0], tuple(sets[1:]), "average")
    main, rest = _split_copies(kind, rule, [coord for coord in coords if coord.pp == stage], row, slices)
    replicas: list[Sequence[Fragment]] = [fragments_of(kind, parts) for parts in rest]
    for other in sorted({coord.pp for coord in coords} - {stage} - strangers):
        again, more = _split_copies(kind, rule, [coord for coord in coords if coord.pp == other], row, slices)
        replicas += [fragments_of(kind, parts) for parts in (again, *more)]
    for coord in coords:
        if coord.pp not in strangers:
            replicas += [fragments_of(kind, [(slices[coord], stored)]) for stored in row[coord].kinds[kind][1:]]
    return Atom(name, kind, shape, dtype, fragments_of(kind, main), tuple(replicas))


SliceParts = list[tuple[RankSlice, StoredShard]]


def _split_copies(
    kind: str,
    rule: Rule,
    coords: Sequence[RankCoord],
    row: Mapping[RankCoord, Shard],
    slices: Mapping[RankCoord, RankSlice],
) -> tuple[SliceParts, list[SliceParts]]:
    """The parts that make the whole, and further sets that repeat some of it, for the coords of one stage."""
    parts = [(slices[coord], row[coord].kinds[kind][0]) for coord in coords]
    if rule.cut == "replicated":
        return parts[:1], [[part] for part in parts[1:]]
    if rule.cut != "pieces":
        return parts, []
    main: SliceParts = []
    rest: list[SliceParts] = []
    seen: list[Box] = []
    for part, stored in parts:
        told = [apart for piece in part.pieces for apart in _split_piece(piece, seen)]
        new = tuple(piece for piece, fresh in told if fresh)
        old = tuple(piece for piece, fresh in told if not fresh)
        seen.extend(piece.box for piece in new)
        if new:
            main.append((RankSlice(new, part.shape, part.rank), stored))
        if old:
            rest.append([(RankSlice(old, part.shape, part.rank), stored)])
    return main, rest


def _split_piece(piece: SlicePiece, seen: Sequence[Box]) -> Iterator[tuple[SlicePiece, bool]]:
    """Cut a piece into pieces that are new and pieces of boxes seen before; each is contiguous in the slice."""
    common = [both for box in seen if (both := intersect(piece.box, box)) is not None]
    if not common or piece.box in common:
        yield piece, not common
        return
    box = piece.box
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    low, high = box.start[dim], box.start[dim] + box.shape[dim]
    cuts = {edge for both in common for edge in (both.start[dim], both.start[dim] + both.shape[dim])}
    edges = sorted({low, high, *cuts})
    if len(edges) == 2:
        edges = list(range(low, high + 1))  # the boxes part ways further in: look at every row
    row = prod(box.shape[dim + 1 :])
    for start, stop in pairwise(edges):
        inner = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.shape[:dim], stop - start, *box.shape[dim + 1 :])
        )
        yield from _split_piece(SlicePiece(inner, piece.offset + (start - low) * row, piece.scale), seen)


def _odd_shaped_atom(
    context: ReadContext,
    name: str,
    kind: str,
    shape: Shape,
    coords: Sequence[RankCoord],
    row: Mapping[RankCoord, Shard],
    slices: Mapping[RankCoord, RankSlice],
) -> Atom | None:
    """A state with a shape of its own (factored moments): whole where nothing is cut, else not to be placed."""
    if len({coord.part for coord in coords}) > 1:
        context.unplaced_states.setdefault(
            kind, f"shape {list(shape)} for a parameter of shape {list(row[coords[0]].shape)}"
        )
        return None
    stored = row[coords[0]].kinds[kind][0]
    whole = slice_pieces(Rule("replicated"), shape, 1, 0, name)
    part = RankSlice(whole, shape, slices[coords[0]].rank)
    return Atom(name, kind, shape, stored.dtype, fragments_of(kind, [(part, stored)]))


class _ScalarValues:
    """Reads each stored number once, and makes its fragments once: all parameters of a group share it."""

    def __init__(self, context: ReadContext) -> None:
        self._context = context
        self._bytes: dict[int, tuple[StoredShard, bytes]] = {}
        self._copies: dict[tuple[tuple[Rank, int], ...], list[Sequence[Fragment]]] = {}

    def copies(self, name: str, kind: str, held: Sequence[tuple[Rank, StoredShard]]) -> list[Sequence[Fragment]]:
        """The fragments of every copy. Copies that differ are reported, for the first parameter that has them."""
        key = tuple((rank, id(stored)) for rank, stored in held)
        found = self._copies.get(key)
        if found is None:
            self._compare(name, kind, [stored for _, stored in held])
            found = self._copies[key] = [scalar_fragments(rank, stored) for rank, stored in held]
        return found

    def _compare(self, name: str, kind: str, stored: Sequence[StoredShard]) -> None:
        """Report numbers that differ between the coords of one parameter: their files are from different steps."""
        first, *others = stored
        for other in others:
            if self._read(other) != self._read(first):
                runs = [next(iter(item.runs())) for item in (first, other)]
                numbers = [scalar_value(self._read(item), item.dtype) for item in (first, other)]
                self._context.problems.add(
                    f"'{kind}' is {numbers[0]} in {runs[0].file}, but {numbers[1]} in {runs[1].file}:"
                    f" files of different steps are mixed (parameter {name})"
                )

    def _read(self, stored: StoredShard) -> bytes:
        known = self._bytes.get(id(stored))
        if known is None:
            known = self._bytes[id(stored)] = (stored, scalar_bytes(stored, self._context.source))
        return known[1]


def merge_groups(shards: ShardTable, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
    """Parameter groups over all pipeline stages, and each parameter's group.

    Groups of different stages belong together by position where all stages have as many, else by hyper-parameters.
    """
    merged: list[ParamGroup] = []
    by_stage = _groups_by_stage(shards)
    by_position = len({len(groups) for groups in by_stage}) == 1
    for groups in by_stage:
        for position, group in enumerate(groups):
            at = (
                position
                if by_position
                else next((i for i, m in enumerate(merged) if m.hyper == group.hyper), len(merged))
            )
            if at >= len(merged):
                merged.append(ParamGroup(dict(group.hyper), []))
            known = set(merged[at].names)
            merged[at].names.extend(name for name in group.names if name not in known)
    for index, merged_group in enumerate(merged):
        for name in merged_group.names:
            if name in parameters and parameters[name].group is None:
                parameters[name].group = index
    return merged


def _groups_by_stage(shards: ShardTable) -> list[list[StageParamGroup]]:
    stages: dict[int, list[StageParamGroup]] = {}
    for coord, groups in sorted(shards.groups.items()):
        stages.setdefault(coord.pp, groups)
    return list(stages.values())


def order_names(names: Iterator[str], experts: Collection[str]) -> list[str]:
    """The model's order with every expert after the last parameter of the layer that it belongs to."""
    dense: list[str] = []
    layers: dict[str, list[str]] = {}
    for name in names:
        if name in experts:
            layers.setdefault(_layer_of(name), []).append(name)
        else:
            dense.append(name)
    for layer, members in layers.items():
        last = max((i for i, name in enumerate(dense) if name.startswith(layer)), default=len(dense) - 1)
        dense[last + 1 : last + 1] = members
    return dense


def _layer_of(name: str) -> str:
    """What names of the same mixture of experts begin with: DeepSpeed-MoE's module, or the one that AutoEP replaced."""
    head, found, _ = name.partition("deepspeed_moe.")
    return head if found else name.rpartition(".experts.")[0] + "."
