"""A checkpoint under other names: the same bytes, seen as the parameters of another framework's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import Atom, Checkpoint, Note, Parameter, ParamGroup
from ucp.core.remap import BlockMap, remapped_atom
from ucp.errors import InconsistentError, UsageError
from ucp.formats.translate.model_config import ModelConfig
from ucp.names.fused_layout import (
    PartMatrix,
    matrix_of,
    overlapping_segments,
    part_ratio,
    part_rows,
    row_segments,
    segment_box,
    segment_tile,
    side_rule,
    side_shape,
)
from ucp.names.name_matching import TableMatch
from ucp.names.name_tables import TableEntry, TableSide

Key = tuple[int, ...]

HF: Final = "hf"
MEGATRON: Final = "megatron"  # the side that all tables know


@dataclass(slots=True)
class _TargetParameter:
    """A parameter that is being made."""

    name: str
    shape: Shape
    tiles: list[BlockMap]
    entry: TableEntry
    side: TableSide
    sizes: tuple[int, ...]
    lead: int
    numbers: dict[str, int]
    key: Key  # place in the target's model


def apply_table(checkpoint: Checkpoint, match: TableMatch) -> Checkpoint:
    """The checkpoint with the names of the other side of the table. `match` is whole."""
    return _Renaming(checkpoint, match).checkpoint()


class _Renaming:
    def __init__(self, checkpoint: Checkpoint, match: TableMatch) -> None:
        self._source = checkpoint
        self._match = match
        self._facts: ModelConfig = match.facts
        self._from = match.side
        self._to = match.table.other(match.side)
        self._order = _entry_positions(match)
        self._modules: dict[str, tuple[int, int]] = {}  # a module's parameters stand together, where its first one does
        for number, entry in enumerate(match.table.entries):
            for position, pattern in enumerate(entry.sides[self._to].names):
                self._modules.setdefault(pattern.text.rpartition(".")[0], (number, position))

    def checkpoint(self) -> Checkpoint:
        made = sorted(self._made(), key=lambda new: new.key)
        parameters = {new.name: self._parameter(new) for new in made}
        if len(parameters) != len(made):
            twice = sorted({new.name for new in made if sum(other.name == new.name for other in made) > 1})
            raise UsageError(f"two parameters would both be called {twice[0]}", hint="correct the table of names")
        heirs: dict[str, list[str]] = {}
        for new in made:
            for source in dict.fromkeys(t.name for t in new.tiles):
                heirs.setdefault(source, []).append(new.name)
        groups = [ParamGroup(group.hyper, self._heirs(group.names, heirs, parameters)) for group in self._source.groups]
        notes = list(self._source.notes)
        if self._match.computed:
            listed = ", ".join(self._match.computed[:5]) + (" …" if len(self._match.computed) > 5 else "")
            notes.append(Note("names-computed", f"left out, because the model computes them itself: {listed}"))
        details = {
            **{key: value for key, value in self._source.details.items() if key != "pipeline"},
            "names": f"{self._to} (table {self._match.table.name})",
        }
        return replace(self._source, parameters=parameters, groups=groups, notes=notes, details=details)

    def _heirs(self, names: Sequence[str], heirs: Mapping[str, list[str]], order: Mapping[str, Parameter]) -> list[str]:
        """What the parameters of a group became, in the model's order."""
        found = {heir for name in names for heir in heirs.get(name, ())}
        return [name for name in order if name in found]

    def _made(self) -> list[_TargetParameter]:
        """The parameters of the other side, entry by entry and layer by layer."""
        gathered: dict[tuple[int, tuple[tuple[str, int], ...]], dict[tuple[int, int], str]] = {}
        for name, found in self._match.found.items():
            entry = self._match.table.entries[found.entry]
            numbers = dict(found.numbers)
            axis = -1  # the expert that the name says, where the other side has experts in one tensor
            if "expert" in entry.sides[self._from].places - entry.sides[self._to].places:
                axis = numbers.pop("expert")
            gathered.setdefault((found.entry, tuple(sorted(numbers.items()))), {})[axis, found.position] = name
        made: list[_TargetParameter] = []
        for (number, said), names in gathered.items():
            made.extend(self._entry(number, dict(said), names))
        return made

    def _entry(
        self, number: int, numbers: dict[str, int], names: Mapping[tuple[int, int], str]
    ) -> list[_TargetParameter]:
        entry = self._match.table.entries[number]
        one, other = entry.sides[self._from], entry.sides[self._to]
        axes = sorted({axis for axis, _ in names})
        self._check_all(one, numbers, names, axes)
        first = self._source.parameters[next(iter(names.values()))]
        if not first.shape and len(names) == len(one.names) == len(other.names) == 1:
            new = self._new(number, entry, other, 0, numbers, (), (1,), 0)
            new.tiles.append(BlockMap(first.name, whole(()), whole(())))
            return [new]
        stacked = other.places - one.places  # the source's first axis counts experts
        lead = first.shape[:1] if stacked else ()
        parts = [[self._source.parameters[names[axis, i]] for i in range(len(one.names))] for axis in axes]
        matrices = [[matrix_of(one, p.shape, len(lead), p.name) for p in row] for row in parts]
        if any(row != matrices[0] for row in matrices) or len({m.rest for m in matrices[0]}) > 1:
            raise InconsistentError(
                f"parameter {first.name}: has shape {list(first.shape)}, which is not that of its like"
            )
        sizes = self._sizes(entry, one, matrices[0], first.name)
        here, there = (list(row_segments(side, sizes, self._facts.query_groups)) for side in (one, other))
        rest = matrices[0][0].rest
        counted = axes if axes != [-1] else []
        made: dict[tuple[int, int], _TargetParameter] = {}
        for expert in range(lead[0]) if lead else (-1,):
            own = {**numbers, "expert": expert} if expert >= 0 else numbers
            for i in range(len(other.names)):
                rows = sum(segment.rows for segment in there if segment.tensor == i)
                shape = side_shape(other, rows, rest, (len(counted),) if counted else ())
                made[expert, i] = self._new(number, entry, other, i, own, shape, sizes, bool(counted))
        if counted and counted != list(range(len(counted))):
            raise InconsistentError(f"parameter {first.name}: experts {counted} are there, and others are missing")
        for a, b in overlapping_segments(here, there):
            for row, axis in zip(parts, axes, strict=True):
                for expert in range(lead[0]) if lead else (-1,):
                    source = segment_box(a, one, PartMatrix(a.rows, rest), (expert,) if lead else ())
                    target = segment_box(b, other, PartMatrix(b.rows, rest), (axis,) if counted else ())
                    made[expert, b.tensor].tiles.append(segment_tile(row[a.tensor].name, source, target, one, other))
        return [_merge_tiles(new, self._source) for new in made.values()]

    def _new(
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
        name = side.names[position].write(numbers, self._facts.layers)
        outer, inner = self._order[number]
        module = self._modules[side.names[position].text.rpartition(".")[0]]
        key = (outer, numbers.get("layer", -1), inner, numbers.get("expert", -1), *module, number, position)
        return _TargetParameter(name, shape, [], entry, side, sizes, int(lead), numbers, key)

    def _sizes(self, entry: TableEntry, side: TableSide, matrices: Sequence[PartMatrix], name: str) -> tuple[int, ...]:
        proportions = part_ratio(entry, self._facts, name)
        if len(side.names) == 1:
            return part_rows(proportions, matrices[0].rows, name)
        sizes = tuple(matrix.rows for matrix in matrices)
        part_rows(proportions, sum(sizes), name)  # whole heads
        if any(rows * proportions[0] != sizes[0] * share for rows, share in zip(sizes, proportions, strict=True)):
            raise InconsistentError(
                f"parameter {name} and what is fused with it have {list(sizes)} rows, which are no parts of"
                f" {':'.join(map(str, proportions))}",
                hint="check the head counts: --model-config FILE corrects them",
            )
        return sizes

    def _check_all(
        self, side: TableSide, numbers: Mapping[str, int], names: Mapping[tuple[int, int], str], axes: Sequence[int]
    ) -> None:
        for axis in axes:
            for i, pattern in enumerate(side.names):
                if (axis, i) not in names:
                    said = {**numbers, "expert": axis} if axis >= 0 else numbers
                    raise InconsistentError(
                        f"parameter {pattern.write(said, self._facts.layers)} is missing, and"
                        f" {next(iter(names.values()))} is fused with it",
                        hint="leave --include and --exclude out: parts of one parameter are mapped together",
                    )

    def _parameter(self, new: _TargetParameter) -> Parameter:
        names = list(dict.fromkeys(t.name for t in new.tiles))
        sources = [self._source.parameters[name] for name in names]
        first = sources[0]
        for other in sources[1:]:
            if other.role != first.role or other.group != first.group or other.atoms.keys() != first.atoms.keys():
                raise InconsistentError(
                    f"parameter {new.name} is made of {first.name} ({_state(first)}) and {other.name}"
                    f" ({_state(other)}), which are not trained alike",
                    hint="take the weights alone with --only weights",
                )
        plain = len(new.tiles) == 1 and new.tiles[0].covers(first.shape, new.shape)
        padded, vocabulary = first.padded_shape, None
        if new.entry.cut == "vocab":
            vocabulary = first.rule.true_size if first.rule.cut == "vocab" else first.shape[0]
            known = self._facts.vocabulary
            if plain and vocabulary is None and known is not None and known < first.shape[0]:
                vocabulary, padded = known, first.shape
                new.shape = (known, *first.shape[1:])
        numbered = new.numbers.get("expert") if self._to != HF and "expert" in new.side.places else None
        return Parameter(
            new.name,
            new.shape,
            first.role,
            {kind: self._atom(new, kind, sources, plain) for kind in first.atoms},
            side_rule(new.entry, new.side, new.sizes, new.lead, vocabulary),
            f"names: {self._match.table.name}",
            padded if plain and self._to != HF else None,
            first.group,
            self._aliases(first) or self._tied(new),
            tuple(sorted({stage for source in sources for stage in source.stages})),
            numbered,
        )

    def _atom(self, new: _TargetParameter, kind: str, sources: Sequence[Parameter], plain: bool) -> Atom:
        atoms = {source.name: source.atoms[kind] for source in sources}
        first = sources[0].atoms[kind]
        if plain:
            shape = new.shape if first.shape == sources[0].shape else first.shape  # without a vocabulary's padding
            return replace(first, name=new.name, shape=shape)
        if all(not atom.shape and source.shape for atom, source in zip(atoms.values(), sources, strict=True)):
            # One number for the parameter: that of its first part, and the others say the same.
            copies = [cover for a in atoms.values() for cover in (a.fragments, *a.replicas)]
            return replace(first, name=new.name, replicas=tuple(copies[1:]))
        odd = next((s for s in sources if s.atoms[kind].shape != s.shape), None)
        if odd is not None:
            raise UsageError(
                f"parameter {odd.name}: '{kind}' has shape {list(odd.atoms[kind].shape)}, which cannot be rearranged"
                f" like the parameter's {list(odd.shape)}",
                hint="leave the optimizer out with --only weights",
            )
        return remapped_atom(new.name, new.tiles, new.shape, atoms)

    def _aliases(self, parameter: Parameter) -> tuple[str, ...]:
        found: list[str] = []
        for alias in parameter.aliases:
            for _, entry in self._match.entries:
                side = entry.sides[self._from]
                numbers = side.names[0].read(alias, self._facts.layers) if len(side.names) == 1 else None
                if numbers is not None and len(entry.sides[self._to].names) == 1:
                    found.append(entry.sides[self._to].names[0].write(numbers, self._facts.layers))
                    break
        return tuple(found)

    def _tied(self, new: _TargetParameter) -> tuple[str, ...]:
        """The output layer's name for the embedding of a model that ties them and does not store it twice."""
        if not self._facts.tied or new.entry.cut != "vocab" or self._to not in (HF, MEGATRON):
            return ()
        stored = {found.entry for found in self._match.found.values()}
        others = [entry for i, entry in self._match.entries if entry.cut == "vocab" and i not in stored]
        return tuple(e.sides[self._to].names[0].write({}, self._facts.layers) for e in others if not e.when)


def _merge_tiles(new: _TargetParameter, source: Checkpoint) -> _TargetParameter:
    """One tile where many make a whole parameter another one, row by row."""
    names = {t.name for t in new.tiles}
    if len(names) == 1 and all(t.source == t.target and not t.transposed for t in new.tiles):
        parameter = source.parameters[names.pop()]
        if parameter.shape == new.shape and sum(t.target.numel for t in new.tiles) == prod(new.shape):
            new.tiles[:] = [BlockMap(parameter.name, whole(new.shape), whole(new.shape))]
    return new


def _state(parameter: Parameter) -> str:
    group = "no group" if parameter.group is None else f"group {parameter.group}"
    return f"{parameter.role}, {group}, {' '.join(parameter.atoms)}"


def _entry_positions(match: TableMatch) -> list[tuple[int, int]]:
    """For every entry its block in the model (before, in or after the layers), and its block in the layer."""
    found: list[tuple[int, int]] = []
    outer = inner = 0
    last: frozenset[str] | None = None
    for entry in match.table.entries:
        places = entry.sides[match.table.other(match.side)].places
        if last is not None and ("layer" in places) != ("layer" in last):
            outer += 1
        if last is not None and ("expert" in places) != ("expert" in last):
            inner += 1
        found.append((outer, inner))
        last = places
    return found
