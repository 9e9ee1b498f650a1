"""Apply a table of names: the same bytes, seen as the parameters of another framework's model.

Every entry of a table is a list of parts, each a matrix of some rows. A side has the rows of each part somewhere in its
tensors: its row segments. Where segments of both sides overlap, there is a tile: a block of one side's tensors that is
a block of the other side's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Final

from ucp.core.box import Box, Shape, whole
from ucp.core.checkpoint import Atom, Checkpoint, Note, Parameter, ParamGroup
from ucp.core.remap import BlockMap, remapped_atom
from ucp.core.rules import REPLICATED, Rule
from ucp.errors import ImpossibleError, InconsistentError
from ucp.formats.translate.model_config import ModelConfig
from ucp.names.name_tables import TableEntry, TableMatch, TableSide

HF: Final = "hf"
MEGATRON: Final = "megatron"  # a side of every packaged table


@dataclass(slots=True)
class _TargetParameter:
    """A parameter of the other side, under construction."""

    name: str
    shape: Shape
    tiles: list[BlockMap]
    entry: TableEntry
    side: TableSide
    sizes: tuple[int, ...]  # rows of the parts
    lead: int  # number of leading axes (experts)
    numbers: dict[str, int]
    key: tuple[int, ...]  # sort key: the position in the target's model


def apply_table(checkpoint: Checkpoint, match: TableMatch) -> Checkpoint:
    """The checkpoint with the names of the other side of the table. `match` must be complete."""
    return _Renaming(checkpoint, match).checkpoint()


class _Renaming:
    def __init__(self, checkpoint: Checkpoint, match: TableMatch) -> None:
        self._source = checkpoint
        self._match = match
        self._model = match.model
        self._from = match.side
        self._to = match.table.other(match.side)
        self._order = _entry_positions(match)
        # Parameters of one module stay together, at the position of the module's first parameter.
        self._modules: dict[str, tuple[int, int]] = {}
        for number, entry in enumerate(match.table.entries):
            for position, pattern in enumerate(entry.sides[self._to].names):
                self._modules.setdefault(pattern.text.rpartition(".")[0], (number, position))

    def checkpoint(self) -> Checkpoint:
        targets = sorted(self._targets(), key=lambda target: target.key)
        parameters = {target.name: self._parameter(target) for target in targets}
        if len(parameters) != len(targets):
            names = [target.name for target in targets]
            duplicate = min(name for name in names if names.count(name) > 1)
            raise ImpossibleError(f"two parameters would both be called {duplicate}", hint="correct the table of names")
        renamed: dict[str, list[str]] = {}
        for target in targets:
            for source in dict.fromkeys(tile.name for tile in target.tiles):
                renamed.setdefault(source, []).append(target.name)
        groups = []
        for group in self._source.groups:
            members = {new for name in group.names for new in renamed.get(name, ())}
            groups.append(ParamGroup(group.hyper, [name for name in parameters if name in members]))
        notes = list(self._source.notes)
        if self._match.computed:
            listed = ", ".join(self._match.computed[:5]) + (" …" if len(self._match.computed) > 5 else "")
            notes.append(Note("names-computed", f"left out, because the model computes them itself: {listed}"))
        details = {
            **{key: value for key, value in self._source.details.items() if key != "pipeline"},
            "names": f"{self._to} (table {self._match.table.name})",
        }
        return replace(self._source, parameters=parameters, groups=groups, notes=notes, details=details)

    def _targets(self) -> list[_TargetParameter]:
        """The parameters of the other side, entry by entry and layer by layer."""
        # (entry, numbers) → (expert or -1, position among the side's names) → name
        gathered: dict[tuple[int, tuple[tuple[str, int], ...]], dict[tuple[int, int], str]] = {}
        for name, found in self._match.found.items():
            entry = self._match.table.entries[found.entry]
            numbers = dict(found.numbers)
            expert = -1  # the expert in the name, if the other side has all experts in one tensor
            if "expert" in entry.sides[self._from].counters - entry.sides[self._to].counters:
                expert = numbers.pop("expert")
            gathered.setdefault((found.entry, tuple(sorted(numbers.items()))), {})[expert, found.position] = name
        targets: list[_TargetParameter] = []
        for (number, in_names), names in gathered.items():
            targets.extend(self._targets_of_entry(number, dict(in_names), names))
        return targets

    def _targets_of_entry(
        self, number: int, numbers: dict[str, int], names: Mapping[tuple[int, int], str]
    ) -> list[_TargetParameter]:
        entry = self._match.table.entries[number]
        one, other = entry.sides[self._from], entry.sides[self._to]
        experts = sorted({expert for expert, _ in names})
        self._check_complete(one, numbers, names, experts)
        first = self._source.parameters[next(iter(names.values()))]
        if not first.shape and len(names) == len(one.names) == len(other.names) == 1:
            scalar = self._target(number, entry, other, 0, numbers, (), (1,), 0)
            scalar.tiles.append(BlockMap(first.name, whole(()), whole(())))
            return [scalar]
        # The source's first axis counts experts that are separate parameters on the other side; or the reverse.
        split_axis = first.shape[:1] if other.counters - one.counters else ()
        stacked = experts if experts != [-1] else []
        sources = [[self._source.parameters[names[expert, i]] for i in range(len(one.names))] for expert in experts]
        matrices = [[matrix_of(one, p.shape, len(split_axis), p.name) for p in row] for row in sources]
        if any(row != matrices[0] for row in matrices) or len({matrix.rest for matrix in matrices[0]}) > 1:
            raise InconsistentError(
                f"parameter {first.name}: shape {list(first.shape)} differs from those it is stored with on the other"
                " side"
            )
        sizes = self._sizes(entry, one, matrices[0], first.name)
        here, there = (list(row_segments(side, sizes, self._model.query_groups)) for side in (one, other))
        rest = matrices[0][0].rest
        targets: dict[tuple[int, int], _TargetParameter] = {}
        for expert in range(split_axis[0]) if split_axis else (-1,):
            own = {**numbers, "expert": expert} if expert >= 0 else numbers
            for i in range(len(other.names)):
                rows = sum(segment.rows for segment in there if segment.tensor == i)
                shape = side_shape(other, rows, rest, (len(stacked),) if stacked else ())
                targets[expert, i] = self._target(number, entry, other, i, own, shape, sizes, bool(stacked))
        if stacked and stacked != list(range(len(stacked))):
            raise InconsistentError(f"parameter {first.name}: only experts {stacked} are there, others are missing")
        for a, b in overlapping_segments(here, there):
            for row, index in zip(sources, experts, strict=True):
                for expert in range(split_axis[0]) if split_axis else (-1,):
                    source = segment_box(a, one, rest, (expert,) if split_axis else ())
                    target = segment_box(b, other, rest, (index,) if stacked else ())
                    tile = BlockMap(row[a.tensor].name, source, target, one.transposed != other.transposed)
                    targets[expert, b.tensor].tiles.append(tile)
        return [_merge_tiles(target, self._source) for target in targets.values()]

    def _target(
        self,
        number: int,
        entry: TableEntry,
        side: TableSide,
        position: int,
        numbers: dict[str, int],
        shape: Shape,
        sizes: tuple[int, ...],
        lead: int,
    ) -> _TargetParameter:
        name = side.names[position].write(numbers, self._model.layers)
        outer, inner = self._order[number]
        module = self._modules[side.names[position].text.rpartition(".")[0]]
        key = (outer, numbers.get("layer", -1), inner, numbers.get("expert", -1), *module, number, position)
        return _TargetParameter(name, shape, [], entry, side, sizes, int(lead), numbers, key)

    def _sizes(self, entry: TableEntry, side: TableSide, matrices: Sequence[PartMatrix], name: str) -> tuple[int, ...]:
        """The rows of the parts, from the tensors that one side has."""
        if len(side.names) == 1:
            return part_rows(entry, self._model, matrices[0].rows, name)
        sizes = tuple(matrix.rows for matrix in matrices)
        if sizes != part_rows(entry, self._model, sum(sizes), name):
            ratio = ":".join(map(str, part_ratio(entry, self._model, name)))
            raise InconsistentError(
                f"parameter {name} and those that are fused with it have {list(sizes)} rows, not in the ratio {ratio}",
                hint="check the head counts: --model-config FILE corrects them",
            )
        return sizes

    def _check_complete(
        self, side: TableSide, numbers: Mapping[str, int], names: Mapping[tuple[int, int], str], experts: Sequence[int]
    ) -> None:
        for expert in experts:
            for i, pattern in enumerate(side.names):
                if (expert, i) not in names:
                    all_numbers = {**numbers, "expert": expert} if expert >= 0 else numbers
                    raise InconsistentError(
                        f"parameter {pattern.write(all_numbers, self._model.layers)} is missing, and"
                        f" {next(iter(names.values()))} is fused with it",
                        hint="leave --include and --exclude out: the parts of one parameter are mapped together",
                    )

    def _parameter(self, target: _TargetParameter) -> Parameter:
        sources = [self._source.parameters[name] for name in dict.fromkeys(tile.name for tile in target.tiles)]
        first = sources[0]
        for other in sources[1:]:
            if other.role != first.role or other.group != first.group or other.atoms.keys() != first.atoms.keys():
                raise InconsistentError(
                    f"parameter {target.name} is made of {first.name} ({_training_of(first)}) and {other.name}"
                    f" ({_training_of(other)}), which are trained differently",
                    hint="take only the weights with --only weights",
                )
        is_plain = len(target.tiles) == 1 and target.tiles[0].covers(first.shape, target.shape)
        padded, vocabulary = first.padded_shape, None
        if target.entry.rule.cut == "vocab":
            vocabulary = first.rule.true_size if first.rule.cut == "vocab" else first.shape[0]
            known = self._model.vocabulary
            if is_plain and vocabulary is None and known is not None and known < first.shape[0]:
                vocabulary, padded = known, first.shape
                target.shape = (known, *first.shape[1:])
        is_expert = self._to != HF and "expert" in target.side.counters
        return Parameter(
            target.name,
            target.shape,
            first.role,
            {kind: self._atom(target, kind, sources, is_plain) for kind in first.atoms},
            side_rule(target.entry, target.side, target.sizes, target.lead, vocabulary),
            f"names: {self._match.table.name}",
            padded if is_plain and self._to != HF else None,
            first.group,
            self._aliases(first) or self._tied_aliases(target),
            tuple(sorted({stage for source in sources for stage in source.stages})),
            target.numbers.get("expert") if is_expert else None,
        )

    def _atom(self, target: _TargetParameter, kind: str, sources: Sequence[Parameter], is_plain: bool) -> Atom:
        atoms = {source.name: source.atoms[kind] for source in sources}
        first = sources[0].atoms[kind]
        if is_plain:
            shape = target.shape if first.shape == sources[0].shape else first.shape  # without vocabulary padding
            return replace(first, name=target.name, shape=shape)
        if all(not atom.shape and source.shape for atom, source in zip(atoms.values(), sources, strict=True)):
            # A scalar per parameter (a step): take that of the first part; those of the others must be equal.
            copies = [cover for atom in atoms.values() for cover in (atom.fragments, *atom.replicas)]
            return replace(first, name=target.name, replicas=tuple(copies[1:]))
        odd = next((source for source in sources if source.atoms[kind].shape != source.shape), None)
        if odd is not None:
            raise ImpossibleError(
                f"parameter {odd.name}: '{kind}' has shape {list(odd.atoms[kind].shape)}, which cannot be rearranged"
                f" like the parameter's {list(odd.shape)}",
                hint="leave the optimizer out with --only weights",
            )
        return remapped_atom(target.name, target.tiles, target.shape, atoms)

    def _aliases(self, parameter: Parameter) -> tuple[str, ...]:
        found: list[str] = []
        for alias in parameter.aliases:
            for _, entry in self._match.entries:
                side = entry.sides[self._from]
                numbers = side.names[0].read(alias, self._model.layers) if len(side.names) == 1 else None
                if numbers is not None and len(entry.sides[self._to].names) == 1:
                    found.append(entry.sides[self._to].names[0].write(numbers, self._model.layers))
                    break
        return tuple(found)

    def _tied_aliases(self, target: _TargetParameter) -> tuple[str, ...]:
        """The name of the output layer, for the embedding of a model that ties the two and stores it once."""
        if not self._model.tied or target.entry.rule.cut != "vocab" or self._to not in (HF, MEGATRON):
            return ()
        stored = {found.entry for found in self._match.found.values()}
        others = [entry for i, entry in self._match.entries if entry.rule.cut == "vocab" and i not in stored]
        return tuple(e.sides[self._to].names[0].write({}, self._model.layers) for e in others if not e.when)


def _merge_tiles(target: _TargetParameter, source: Checkpoint) -> _TargetParameter:
    """Replace the tiles by one if together they map a whole parameter to another, row by row."""
    names = {tile.name for tile in target.tiles}
    if len(names) == 1 and all(tile.source == tile.target and not tile.transposed for tile in target.tiles):
        parameter = source.parameters[names.pop()]
        if parameter.shape == target.shape and sum(t.target.numel for t in target.tiles) == prod(target.shape):
            target.tiles[:] = [BlockMap(parameter.name, whole(target.shape), whole(target.shape))]
    return target


def _training_of(parameter: Parameter) -> str:
    group = "no group" if parameter.group is None else f"group {parameter.group}"
    return f"{parameter.role}, {group}, {' '.join(parameter.atoms)}"


def _entry_positions(match: TableMatch) -> list[tuple[int, int]]:
    """For every entry its section of the model (before, in or after the layers) and its section of the layer.

    Parameters are sorted by section, then by layer and expert, so that each layer and each expert stays together.
    """
    found: list[tuple[int, int]] = []
    outer = inner = 0
    last: frozenset[str] | None = None
    for entry in match.table.entries:
        counters = entry.sides[match.table.other(match.side)].counters
        if last is not None and ("layer" in counters) != ("layer" in last):
            outer += 1
        if last is not None and ("expert" in counters) != ("expert" in last):
            inner += 1
        found.append((outer, inner))
        last = counters
    return found


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Rows `[start, start + rows)` of a part, stored from row `at` on in the side's tensor number `tensor`."""

    tensor: int
    part: int
    start: int
    rows: int
    at: int


@dataclass(frozen=True, slots=True)
class PartMatrix:
    """The shape of a part: its rows, and the shape of a row."""

    rows: int
    rest: Shape


def part_rows(entry: TableEntry, model: ModelConfig, rows: int, name: str) -> tuple[int, ...]:
    """The rows of each part of an entry, in a tensor of `rows` rows that holds all of them."""
    ratio = part_ratio(entry, model, name)
    unit, remainder = divmod(rows, sum(ratio))
    if remainder or (entry.rule.parts and unit != 1):
        raise InconsistentError(
            f"parameter {name}: {rows} rows do not divide in the ratio {':'.join(map(str, ratio))}",
            hint="check the head counts: `ucp inspect SRC` shows them, --model-config FILE corrects them",
        )
    return tuple(share * unit for share in ratio)


def part_ratio(entry: TableEntry, model: ModelConfig, name: str) -> tuple[int, ...]:
    """The ratio of the sizes of an entry's parts."""
    if entry.ratio == "qkv":
        if model.heads is None or model.query_groups is None:
            raise ImpossibleError(
                f"parameter {name}: the checkpoint does not contain the numbers of query heads and key heads",
                hint="give the model's config.json with --model-config FILE,"
                ' or {"num_attention_heads": …, "num_key_value_heads": …}',
            )
        if model.heads % model.query_groups:
            raise ImpossibleError(
                f"parameter {name}: {model.heads} query heads do not divide over {model.query_groups} key heads",
                hint="--model-config FILE corrects them",
            )
        return model.heads, model.query_groups, model.query_groups
    if entry.ratio == "gated":
        if model.gated is None:
            raise ImpossibleError(
                f"parameter {name}: the checkpoint does not contain whether the MLP has a gate",
                hint='put {"swiglu": true} or {"swiglu": false} into a --model-config FILE',
            )
        return (1, 1) if model.gated else (1,)
    return entry.rule.ratio or entry.rule.parts or (1,)


def row_segments(side: TableSide, sizes: Sequence[int], groups: int | None) -> Iterator[RowSegment]:
    """Where each part is on a side, in the order of the tensors; `sizes` are the rows of the parts."""
    if len(side.names) > 1:
        for part, rows in enumerate(sizes):
            yield RowSegment(part, part, 0, rows, 0)
    elif not side.grouped:
        starts = accumulate(sizes, initial=0)
        for part, (rows, at) in enumerate(zip(sizes, starts, strict=False)):
            yield RowSegment(0, part, 0, rows, at)
    else:
        assert groups is not None
        at = 0
        for group in range(groups):
            for part, rows in enumerate(sizes):
                per_group = rows // groups
                yield RowSegment(0, part, group * per_group, per_group, at)
                at += per_group


def overlapping_segments(a: Sequence[RowSegment], b: Sequence[RowSegment]) -> Iterator[tuple[RowSegment, RowSegment]]:
    """The rows that segments of two sides have in common, as segments of both."""
    for one in a:
        for other in b:
            if one.part != other.part:
                continue
            start = max(one.start, other.start)
            rows = min(one.start + one.rows, other.start + other.rows) - start
            if rows > 0:
                yield (
                    RowSegment(one.tensor, one.part, start, rows, one.at + start - one.start),
                    RowSegment(other.tensor, other.part, start, rows, other.at + start - other.start),
                )


def segment_box(segment: RowSegment, side: TableSide, rest: Shape, lead: Shape) -> Box:
    """The rows of a segment as a box of the side's tensor.

    `rest` is the shape of a row, `lead` are the indices along leading axes (experts).
    """
    start: tuple[int, ...] = (segment.at, *(0,) * len(rest))
    shape: tuple[int, ...] = (segment.rows, *rest)
    if side.transposed:
        start, shape = start[::-1], shape[::-1]
    return Box((*lead, *start), (*(1,) * len(lead), *shape))


def side_shape(side: TableSide, rows: int, rest: Shape, lead: Shape) -> Shape:
    """The shape of a side's tensor of this many rows; `lead` are the lengths of its leading axes."""
    shape = (rows, *rest)
    return (*lead, *(shape[::-1] if side.transposed else shape))


def matrix_of(side: TableSide, shape: Shape, lead: int, name: str) -> PartMatrix:
    """Rows and columns of a side's tensor of this shape, without its `lead` leading axes."""
    inner = shape[lead:]
    if len(shape) <= lead or (side.transposed and len(inner) != 2):
        raise InconsistentError(f"parameter {name}: shape {list(shape)} does not fit the table of names")
    if side.transposed:
        inner = inner[::-1]
    return PartMatrix(inner[0], inner[1:])


def side_rule(entry: TableEntry, side: TableSide, sizes: Sequence[int], lead: int, vocabulary: int | None) -> Rule:
    """How a side's tensor is split over tensor-parallel ranks; `lead` counts its leading axes."""
    if entry.rule.cut == "replicated":
        return REPLICATED
    if entry.rule.cut == "vocab":
        return Rule("vocab", lead, true_size=vocabulary)
    dim = lead + (1 - entry.rule.dim if side.transposed else entry.rule.dim)
    is_fused = entry.rule.dim == 0 and len(side.names) == 1 and len(sizes) > 1 and not side.grouped
    return Rule("split", dim, parts=tuple(sizes) if is_fused else None)
