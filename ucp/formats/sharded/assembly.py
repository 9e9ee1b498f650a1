"""From the shards of ranks to parameters with atoms: which fragments make the whole, which are copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from ucp.core.box import Box, Shape, intersect, whole
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Fragment, Parameter, ParamGroup, Rank
from ucp.core.dtypes import scalar_value
from ucp.core.rules import REPLICATED, Rule, SlicePiece, logical_shape, resolve, slice_pieces, whole_shape
from ucp.formats.sharded.rule_inference import LocalSlice, RuleInference
from ucp.formats.sharded.shard_fragments import (
    RankSlice,
    SliceParts,
    StoredShard,
    fragments_of,
    scalar_bytes,
    scalar_fragments,
)
from ucp.formats.sharded.shard_table import Problems, RankCoord, Shard, ShardTable
from ucp.storage.local import SourceFiles

ONE_RANK_ORIGIN: Final = "one tensor-parallel rank"  # of a rule that was not needed: nothing shows how to split


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule with all its sizes known, and its origin for people."""

    rule: Rule
    origin: str
    expert_rule: Rule | None = None  # the split over expert-parallel ranks, of experts stacked in one parameter

    @property
    def of_shards(self) -> Rule:
        """How the ranks' slices make the whole."""
        return self.expert_rule or self.rule


def infer_rules(
    files: SourceFiles, rows: Mapping[str, Sequence[Shard]], note: Callable[[str, str], None]
) -> dict[str, ResolvedRule]:
    """Infer the rules of parameters of which `rows` has one shard per slice. Each inferred rule is noted."""
    if not rows:
        return {}
    slices = {
        name: [LocalSlice(shard.shape, weight_fragments(tp, shard)) for tp, shard in enumerate(row)]
        for name, row in rows.items()
    }
    found: dict[str, ResolvedRule] = {}
    for name, (rule, origin) in RuleInference(files).rules_for(slices).items():
        found[name] = ResolvedRule(resolve(rule, [shard.shape for shard in rows[name]], name), origin)
        note("rule-inferred", f"{name}: {found[name].rule} ({origin})")
    return found


def weight_fragments(tp: int, shard: Shard) -> Sequence[Fragment]:
    """Return the bytes of a rank's local tensor: its weight, or its master if no file has the weight."""
    for kind in (WEIGHT, MASTER):
        if shard.kinds.get(kind):
            local = RankSlice((SlicePiece(whole(shard.shape), 0),), shard.shape, Rank(tp=tp))
            return fragments_of(WEIGHT, [(local, shard.kinds[kind][0])])
    return ()


class Assembler:
    """Makes the parameters of a checkpoint from its shard table.

    `numbers` reads scalar states to compare their copies; without it they are not compared. `untied` lists, by
    parameter, the pipeline stages whose shards are not copies of those of the first stage.
    """

    def __init__(
        self,
        table: ShardTable,
        numbers: SourceFiles | None = None,
        untied: Mapping[str, Set[int]] | None = None,
    ) -> None:
        self.unplaced_states: dict[str, str] = {}  # optimizer state → why it has no atom
        self._table = table
        self._problems = table.problems
        self._scalars = _ScalarStates(table.problems, numbers)
        self._untied = untied or {}

    def parameters(self, rules: Mapping[str, ResolvedRule]) -> dict[str, Parameter]:
        """Return every parameter, in the order of `rules`."""
        aliases: dict[str, list[str]] = {}
        for alias, owner in self._table.aliases.items():
            aliases.setdefault(owner, []).append(alias)
        parameters: dict[str, Parameter] = {}
        for name, rule in rules.items():
            parameters[name] = self._parameter(name, rule)
            parameters[name].aliases = tuple(aliases.get(name, ()))
        return parameters

    def _parameter(self, name: str, resolved: ResolvedRule) -> Parameter:
        table, rule = self._table, resolved.of_shards
        row = table.row(name)
        first = table.first_stage(name)
        padded = whole_shape(rule, [shard.shape for shard in first], name)
        shape = logical_shape(rule, padded)
        expert, ep = table.experts.get(name, (None, None))
        indices = {coord: table.slice_index(name, coord) for coord in row}
        count = 1 + max(indices.values())
        pieces = [slice_pieces(rule, padded, count, index, name) for index in range(count)]
        slices: dict[RankCoord, RankSlice] = {}
        for coord, shard in row.items():
            rank = Rank(coord.pp, coord.tp, 0, coord.ep if coord.ep >= 0 else ep)
            slices[coord] = RankSlice(pieces[indices[coord]], shard.shape, rank)
        parameter = Parameter(
            name,
            shape,
            table.roles[name],
            rule=resolved.rule,
            rule_origin=resolved.origin,
            padded_shape=padded if padded != shape else None,
            stages=tuple(sorted({coord.pp for coord in row})),
            expert=expert,
        )
        states = _ParameterStates(name, rule, row, slices, indices, self._untied.get(name, frozenset()))
        kinds = dict.fromkeys(kind for shard in (*first, *row.values()) for kind in shard.kinds)
        for kind in sorted(kinds, key=lambda kind: (kind != WEIGHT, kind != MASTER)):  # then as the optimizer has them
            atom = self._atom(states, kind, shape)
            if atom is not None:
                parameter.atoms[kind] = atom
        return parameter

    def _atom(self, states: _ParameterStates, kind: str, shape: Shape) -> Atom | None:
        name, row = states.name, states.row
        coords = [coord for coord, shard in row.items() if shard.kinds.get(kind)]
        own_shape = next((row[coord].shapes[kind] for coord in coords if kind in row[coord].shapes), None)
        dtype = row[coords[0]].kinds[kind][0].dtype
        if others := {s.dtype for coord in coords for s in row[coord].kinds[kind] if s.dtype is not dtype} - {dtype}:
            listed = ", ".join(sorted(map(str, {dtype, *others})))
            self._problems.add(f"parameter {name}: '{kind}' has a different dtype on different ranks: {listed}")
        if own_shape == ():
            stored = [(states.slices[coord].rank, item) for coord in coords for item in row[coord].kinds[kind]]
            first, *copies = self._scalars.copies(name, kind, stored)
            return Atom(name, kind, (), dtype, first, tuple(copies))
        if own_shape is not None:
            return self._odd_shaped_atom(states, kind, own_shape, coords)
        if states.rule.cut == "average":
            # Shards of another stage are the same versions again: they do not belong in the mean.
            sets = [fragments_of(kind, [states.part(coord, kind)]) for coord in coords if coord.pp == coords[0].pp]
            return Atom(name, kind, shape, dtype, sets[0], tuple(sets[1:]), "average")
        main, replicas = states.split_copies(kind, coords)
        return Atom(name, kind, shape, dtype, fragments_of(kind, main), tuple(replicas))

    def _odd_shaped_atom(
        self, states: _ParameterStates, kind: str, shape: Shape, coords: Sequence[RankCoord]
    ) -> Atom | None:
        """Make the atom of a state with a shape of its own (factored moments), if the parameter is not split."""
        row, first = states.row, coords[0]
        if len({states.indices[coord] for coord in coords}) > 1:
            self.unplaced_states.setdefault(
                kind, f"shape {list(shape)} for a parameter of shape {list(row[first].shape)}"
            )
            return None
        stored = row[first].kinds[kind][0]
        pieces = slice_pieces(REPLICATED, shape, 1, 0, states.name)
        local = RankSlice(pieces, shape, states.slices[first].rank)
        return Atom(states.name, kind, shape, stored.dtype, fragments_of(kind, [(local, stored)]))


@dataclass(frozen=True, slots=True)
class _ParameterStates:
    """The shards of one parameter, with the slice of the whole that each rank has."""

    name: str
    rule: Rule
    row: Mapping[RankCoord, Shard]
    slices: Mapping[RankCoord, RankSlice]
    indices: Mapping[RankCoord, int]
    untied: Set[int]

    def part(self, coord: RankCoord, kind: str) -> tuple[RankSlice, StoredShard]:
        return self.slices[coord], self.row[coord].kinds[kind][0]

    def split_copies(self, kind: str, coords: Sequence[RankCoord]) -> tuple[SliceParts, list[Sequence[Fragment]]]:
        """Return the parts that make the whole, and the replicas, for the ranks that store `kind`."""
        stages = list(dict.fromkeys(coord.pp for coord in coords))
        main, copies = self._split_stage(kind, [coord for coord in coords if coord.pp == stages[0]])
        for stage in stages[1:]:
            if stage not in self.untied:
                again, more = self._split_stage(kind, [coord for coord in coords if coord.pp == stage])
                copies += [again, *more]
        for coord in coords:
            if coord.pp not in self.untied:
                copies += [[(self.slices[coord], stored)] for stored in self.row[coord].kinds[kind][1:]]
        return main, [fragments_of(kind, parts) for parts in copies]

    def _split_stage(self, kind: str, coords: Sequence[RankCoord]) -> tuple[SliceParts, list[SliceParts]]:
        if self.rule.cut == "pieces":
            return _split_pieces([self.part(coord, kind) for coord in coords])
        main: dict[int, tuple[RankSlice, StoredShard]] = {}
        copies: list[SliceParts] = []
        for coord in coords:
            index = 0 if self.rule.cut == "replicated" else self.indices[coord]
            if index in main:
                copies.append([self.part(coord, kind)])
            else:
                main[index] = self.part(coord, kind)
        return list(main.values()), copies


def _split_pieces(parts: SliceParts) -> tuple[SliceParts, list[SliceParts]]:
    """Split slices that may overlap in any way into parts that cover the whole once, and copies."""
    main: list[tuple[RankSlice, StoredShard]] = []
    copies: list[SliceParts] = []
    seen: list[Box] = []
    for rank_slice, stored in parts:
        split = [item for piece in rank_slice.pieces for item in _split_piece(piece, seen)]
        new = tuple(piece for piece, is_new in split if is_new)
        old = tuple(piece for piece, is_new in split if not is_new)
        seen.extend(piece.box for piece in new)
        if new:
            main.append((RankSlice(new, rank_slice.shape, rank_slice.rank), stored))
        if old:
            copies.append([(RankSlice(old, rank_slice.shape, rank_slice.rank), stored)])
    return main, copies


def _split_piece(piece: SlicePiece, seen: Sequence[Box]) -> Iterator[tuple[SlicePiece, bool]]:
    """Split a piece into new pieces (True) and pieces of boxes in `seen` (False), each contiguous in the slice."""
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
        edges = list(range(low, high + 1))  # the boxes differ in an inner dimension: look at every row
    row = prod(box.shape[dim + 1 :])
    for start, stop in pairwise(edges):
        inner = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.shape[:dim], stop - start, *box.shape[dim + 1 :])
        )
        yield from _split_piece(SlicePiece(inner, piece.offset + (start - low) * row, piece.scale), seen)


class _ScalarStates:
    """Reads each stored number once, and makes its fragments once: all parameters of a group share it."""

    def __init__(self, problems: Problems, files: SourceFiles | None) -> None:
        self._problems = problems
        self._files = files
        self._bytes: dict[int, tuple[StoredShard, bytes]] = {}
        self._copies: dict[tuple[tuple[Rank, int], ...], list[Sequence[Fragment]]] = {}

    def copies(self, name: str, kind: str, stored: Sequence[tuple[Rank, StoredShard]]) -> list[Sequence[Fragment]]:
        """Return the fragments of every copy. Copies that differ are reported for the first parameter that has them."""
        key = tuple((rank, id(item)) for rank, item in stored)
        found = self._copies.get(key)
        if found is None:
            (_, first), *others = stored
            for _, other in others if self._files is not None else ():
                if self._read(other) != self._read(first):  # their files are from different steps
                    runs = [next(iter(item.runs())) for item in (first, other)]
                    numbers = [scalar_value(self._read(item), item.dtype) for item in (first, other)]
                    self._problems.add(
                        f"'{kind}' is {numbers[0]} in {runs[0].file}, but {numbers[1]} in {runs[1].file}:"
                        f" files of different steps are mixed (parameter {name})"
                    )
            found = self._copies[key] = [scalar_fragments(rank, item) for rank, item in stored]
        return found

    def _read(self, stored: StoredShard) -> bytes:
        known = self._bytes.get(id(stored))
        if known is None:
            assert self._files is not None
            known = self._bytes[id(stored)] = (stored, scalar_bytes(stored, self._files))
        return known[1]


def merge_groups(
    ranks: Sequence[Sequence[ParamGroup]], parameters: Mapping[str, Parameter], *, by_position: bool
) -> list[ParamGroup]:
    """Merge the parameter groups of several ranks, and set the group of every parameter.

    Groups are the same if they have the same position, or else if they have the same hyper-parameters.
    """
    merged: list[ParamGroup] = []
    for groups in ranks:
        for position, group in enumerate(groups):
            at = position
            if not by_position:
                at = next((i for i, known in enumerate(merged) if known.hyper == group.hyper), len(merged))
            if at >= len(merged):
                merged.append(ParamGroup(dict(group.hyper), []))
            merged[at].names = list(dict.fromkeys((*merged[at].names, *group.names)))
    for index, merged_group in enumerate(merged):
        for name in merged_group.names:
            if name in parameters and parameters[name].group is None:
                parameters[name].group = index
    return merged
