"""The contents of the HTML page as compact JSON. Names that repeat are listed once and referred to by number.

A thousand ranks times ten thousand parameters are millions of fragments. But the shards of a parameter are regular, and
parameters of one shape are split in the same way: `PartitionMap` describes a parameter by a few runs of fragments, and
many parameters share a description.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.checks.catalogue import CHECKS
from ucp.checks.verify_report import Report
from ucp.compare.comparison import Comparison, json_float, layer_of
from ucp.containers.inert_json import InertEncoder
from ucp.core.box import Box
from ucp.core.checkpoint import STEP, Atom, Checkpoint, Fragment, Parameter, Rank
from ucp.errors import UcpError
from ucp.reports.atom_statistics import AtomStatistics
from ucp.storage.paths import natural_order

# Atoms with at least this many fragments are assumed to be split alike if shape, count and first fragment are equal.
_MANY_FRAGMENTS: Final = 64
_MAX_BOXES: Final = 256  # of one region on the page; fused parameters split along an inner dimension have one per row

# A fragment: numbers of its rank, file and boxes; start and length in the boxes; cover (0, or number of the replica).
_FragmentEntry = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class PartitionPattern:
    """How an atom is split: runs of fragments, the number of elements on each rank, and how many are lost."""

    runs: tuple[tuple[int, ...], ...]
    elements: dict[int, int]
    lost: int = 0  # elements of which no copy is in a file that can be read


@dataclass(slots=True)
class PartitionMap:
    """Numbered ranks, files, lists of boxes, and patterns in which atoms are split."""

    ranks: list[Rank]
    files: list[str]
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    clipped: dict[int, int] = field(default_factory=dict)  # list of boxes → full length, if too long for the page
    patterns: list[PartitionPattern] = field(default_factory=list)
    experts: dict[int, int] = field(default_factory=dict)  # rank → its expert-parallel rank, if a file states it
    lost: dict[int, set[int]] = field(default_factory=dict)  # file that cannot be read → ranks whose data it held
    is_numbered: bool = False  # fragments have the number of the process that wrote them in place of coordinates
    _rank_numbers: dict[Rank, int] = field(default_factory=dict)
    _file_numbers: dict[str, int] = field(default_factory=dict)
    _box_numbers: dict[tuple[Box, ...], int] = field(default_factory=dict)
    _pattern_numbers: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)
    _patterns_of_large: dict[Any, int] = field(default_factory=dict)

    @staticmethod
    def of(checkpoint: Checkpoint) -> PartitionMap:
        """An empty map with all ranks of the mesh: tensor-parallel rank fastest, then data, then pipeline."""
        mesh = checkpoint.mesh
        ranks = [Rank(pp, tp, dp) for pp in range(mesh.pp) for dp in range(mesh.dp) for tp in range(mesh.tp)]
        files = sorted({*checkpoint.sizes, *checkpoint.lost}, key=natural_order)
        partition = PartitionMap(ranks, files, is_numbered=checkpoint.format == "torch-dist")
        partition.lost = {number: set() for number, file in enumerate(files) if file in checkpoint.lost}
        partition._rank_numbers = {rank: number for number, rank in enumerate(ranks)}
        partition._file_numbers = {file: number for number, file in enumerate(files)}
        return partition

    def pattern_of(self, atom: Atom) -> int:
        """Number of the pattern in which this atom is split."""
        covers = (atom.fragments, *atom.replicas)
        if sum(map(len, covers)) < _MANY_FRAGMENTS:
            return self._add(covers)
        first = next(iter(atom.fragments))
        key = (atom.shape, atom.kind, tuple(map(len, covers)), first.rank, first.region, first.file)
        if key not in self._patterns_of_large:
            self._patterns_of_large[key] = self._add(covers)
        return self._patterns_of_large[key]

    def _add(self, covers: Sequence[Sequence[Fragment]]) -> int:
        entries = [self._entry(fragment, number) for number, cover in enumerate(covers) for fragment in cover]
        runs = tuple(_runs(entries))
        if runs not in self._pattern_numbers:
            elements: dict[int, int] = {}
            for rank, _, _, _, length, _ in entries:
                elements[rank] = elements.get(rank, 0) + length
            self._pattern_numbers[runs] = len(self.patterns)
            self.patterns.append(PartitionPattern(runs, elements, self._lost_elements(entries) if self.lost else 0))
        return self._pattern_numbers[runs]

    def _lost_elements(self, entries: Sequence[_FragmentEntry]) -> int:
        """Elements in lost files, except those that another replica holds too."""
        lost: list[_FragmentEntry] = []
        damaged: set[int] = set()  # covers with a lost fragment
        for entry in entries:
            if entry[1] in self.lost:
                self.lost[entry[1]].add(entry[0])
                lost.append(entry)
                damaged.add(entry[5])
        if 0 not in damaged:
            return 0
        sizes = Counter[int]()
        for entry in entries:
            sizes[entry[5]] += entry[4]
        if any(sizes[cover] == sizes[0] for cover in sizes if cover not in damaged):
            return 0
        copies = {entry[2:5] for entry in entries if entry[5] and entry[1] not in self.lost}
        return sum(entry[4] for entry in lost if entry[5] == 0 and entry[2:5] not in copies)

    def _entry(self, fragment: Fragment, cover: int) -> _FragmentEntry:
        region = fragment.region
        return (
            self._rank(fragment.rank),
            self._number(fragment.file, self._file_numbers, self.files),
            self._boxes(region.boxes),
            region.start,
            region.numel,
            cover,
        )

    def _rank(self, rank: Rank) -> int:
        if self.is_numbered and rank.dp < len(self.ranks):
            return rank.dp  # Megatron numbers processes in the order of `ranks`
        # Expert parallelism re-uses data-parallel ranks, so it does not make another rank.
        number = self._number(Rank(rank.pp, rank.tp, rank.dp), self._rank_numbers, self.ranks)
        if rank.ep is not None:
            self.experts.setdefault(number, rank.ep)
        return number

    def _boxes(self, boxes: tuple[Box, ...]) -> int:
        number = self._number(boxes, self._box_numbers, self.boxes)
        if len(boxes) > _MAX_BOXES and number not in self.clipped:
            self.clipped[number] = len(boxes)
        return number

    @staticmethod
    def _number(value: Any, numbers: dict[Any, int], values: list[Any]) -> int:
        number = numbers.get(value)
        if number is None:
            number = numbers[value] = len(values)
            values.append(value)
        return number

    def to_json(self) -> dict[str, Any]:
        """For the page. A box is `[starts…, lengths…]`; `_runs` describes a run."""
        return {
            "ranks": [[rank.pp, rank.tp, rank.dp] for rank in self.ranks],
            "experts": {str(number): ep for number, ep in self.experts.items()},
            "files": self.files,
            "boxes": [[[*box.start, *box.shape] for box in boxes[:_MAX_BOXES]] for boxes in self.boxes],
            "clipped": {str(number): count for number, count in self.clipped.items()},
            "patterns": [pattern.runs for pattern in self.patterns],
        }


def _runs(entries: Iterable[_FragmentEntry]) -> Iterable[tuple[int, ...]]:
    """Join fragments into runs: their count, the six numbers of the first, and by how much each number increases.

    The length does not change within a run. A single fragment is a run of 7 numbers, any other of 13.
    """
    run: list[_FragmentEntry] = []
    step: tuple[int, ...] = ()
    for entry in entries:
        if len(run) > 1 and _step(run[-1], entry) == step:
            run.append(entry)
            continue
        if len(run) == 1 and entry[4] == run[0][4]:
            step = _step(run[0], entry)
            run.append(entry)
            continue
        if run:
            yield _run(run, step)
        run = [entry]
    if run:
        yield _run(run, step)


def _step(one: _FragmentEntry, other: _FragmentEntry) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, other, strict=True))


def _run(run: Sequence[_FragmentEntry], step: tuple[int, ...]) -> tuple[int, ...]:
    return (len(run), *run[0]) if len(run) == 1 else (len(run), *run[0], *step)


SCHEMA: Final = 1
_MAX_FINDINGS: Final = 2_000  # on the page; `ucp verify --json` has all
_MAX_TEXT: Final = 400  # characters of a detail


def page_data(
    checkpoint: Checkpoint | None,
    report: Report | None,
    statistics: Mapping[tuple[str, str], AtomStatistics | UcpError],
    *,
    source: str,
    version: str,
    sample: int | None,
    comparison: Comparison | None = None,
    remarks: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything on the page. Without a checkpoint, only the findings of the checks.

    `comparison` is with another checkpoint; `remarks` are about how the page was made.
    """
    data: dict[str, Any] = {"schema": SCHEMA, "version": version, "source": source, "checks": _checks(report)}
    if checkpoint is None:
        return data
    kinds = list(dict.fromkeys(atom.kind for atom in checkpoint.atoms()))
    partition = PartitionMap.of(checkpoint)
    parameters, unplaced = _parameters(checkpoint, kinds, partition)
    data |= {
        "root": str(checkpoint.root),
        "format": checkpoint.format,
        "framework": checkpoint.framework,
        "step": checkpoint.step,
        "mesh": checkpoint.mesh.to_json(),
        "world": checkpoint.mesh.world,
        "totals": _totals(checkpoint),
        "details": _details(checkpoint),
        "groups": _groups(checkpoint),
        "notes": [*remarks, *(note.text for note in checkpoint.notes)],
        "kinds": kinds,
        "parameters": parameters,
        "partition": partition.to_json(),
        "unplaced": unplaced,
        "lost": _lost(checkpoint, kinds, parameters, partition),
        "held": _bytes_by_rank(checkpoint, kinds, parameters, partition),
        "statistics": _statistics(checkpoint, kinds, statistics),
        "sampled": sample,
        "comparison": None if comparison is None else _comparison(comparison, checkpoint, kinds),
    }
    return data


def _totals(checkpoint: Checkpoint) -> dict[str, Any]:
    roles = Counter(parameter.role for parameter in checkpoint.parameters.values())
    return {
        "parameters": len(checkpoint.parameters),
        "roles": dict(roles),
        "elements": sum(p.numel for p in checkpoint.parameters.values() if p.role != "buffer"),
        "bytes": checkpoint.nbytes,
        "files": len(checkpoint.sizes),
        "file_bytes": sum(checkpoint.sizes.values()),
    }


def _details(checkpoint: Checkpoint) -> list[list[str]]:
    return [
        [str(key).replace("_", " "), _text(value if isinstance(value, str) else json.dumps(value))]
        for key, value in checkpoint.details.items()
    ]


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    groups = []
    for group in checkpoint.groups:
        hyper = {}
        for key, value in group.hyper.items():
            try:
                hyper[str(key)] = _text(_hyper_text(value))
            except UcpError:
                continue
        groups.append({"parameters": len(group.names), "hyper": hyper})
    return groups


def _hyper_text(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    encoded = InertEncoder().encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _parameters(
    checkpoint: Checkpoint, kinds: list[str], partition: PartitionMap
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Columns with one entry per parameter; `states` has a column of `[dtype, pattern]` per kind (0 if absent).

    If a state has another shape than its parameter (`step`), the shape is the third entry. States that cannot be
    located have pattern -1, and are in the second result: parameter, kind, reason.
    """
    shapes: dict[tuple[int, ...], int] = {}
    layers: dict[str, int] = {}
    rules: dict[str, int] = {}
    origins: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        key: [] for key in ("name", "shape", "layer", "rule", "origin", "role", "group", "aliases", "expert")
    }
    states: list[list[Any]] = [[] for _ in kinds]
    unplaced: list[list[Any]] = []
    for number, parameter in enumerate(checkpoint.parameters.values()):
        columns["name"].append(parameter.name)
        columns["shape"].append(shapes.setdefault(parameter.shape, len(shapes)))
        columns["layer"].append(layers.setdefault(layer_of(parameter.name), len(layers)))
        columns["rule"].append(rules.setdefault(_text(str(parameter.rule)), len(rules)))
        columns["origin"].append(origins.setdefault(_text(parameter.rule_origin), len(origins)))
        columns["role"].append(("trained", "frozen", "buffer").index(parameter.role))
        columns["group"].append(-1 if parameter.group is None else parameter.group)
        columns["aliases"].append(list(parameter.aliases) or 0)
        columns["expert"].append(-1 if parameter.expert is None else parameter.expert)
        for kind, column in zip(kinds, states, strict=True):
            column.append(_state(parameter, kind, number, partition, dtypes, shapes, unplaced))
    return {
        **columns,
        "shapes": [list(shape) for shape in shapes],
        "layers": list(layers),
        "rules": list(rules),
        "origins": list(origins),
        "dtypes": list(dtypes),
        "states": states,
    }, unplaced


def _state(
    parameter: Parameter,
    kind: str,
    number: int,
    partition: PartitionMap,
    dtypes: dict[str, int],
    shapes: dict[tuple[int, ...], int],
    unplaced: list[list[Any]],
) -> list[int] | int:
    atom = parameter.atoms.get(kind)
    if atom is None:
        return 0
    try:
        pattern = partition.pattern_of(atom)
    except UcpError as error:
        pattern = -1
        unplaced.append([number, kind, error.what])
    entry = [dtypes.setdefault(atom.dtype.name, len(dtypes)), pattern]
    return entry if atom.shape == parameter.shape else [*entry, shapes.setdefault(atom.shape, len(shapes))]


def _bytes_by_rank(
    checkpoint: Checkpoint, kinds: list[str], parameters: dict[str, Any], partition: PartitionMap
) -> list[list[int]]:
    """A column per kind, with the bytes on each rank."""
    itemsizes: Counter[tuple[int, int]] = Counter()  # (kind, pattern) → sum over the atoms that are split in it
    for number, parameter in enumerate(checkpoint.parameters.values()):
        for kind, column in enumerate(parameters["states"]):
            if column[number] and column[number][1] >= 0:
                itemsizes[kind, column[number][1]] += parameter.atoms[kinds[kind]].dtype.itemsize
    columns = [[0] * len(partition.ranks) for _ in kinds]
    for (kind, pattern), itemsize in itemsizes.items():
        for rank, elements in partition.patterns[pattern].elements.items():
            columns[kind][rank] += elements * itemsize
    return columns


def _lost(
    checkpoint: Checkpoint, kinds: list[str], parameters: dict[str, Any], partition: PartitionMap
) -> dict[str, Any] | None:
    """The files that cannot be read, with their ranks, and the states that lost elements: parameter, kind, elements."""
    if not checkpoint.lost:
        return None
    states = []
    for number in range(len(checkpoint.parameters)):
        for kind in range(len(kinds)):
            entry = parameters["states"][kind][number]
            if entry and entry[1] >= 0 and (elements := partition.patterns[entry[1]].lost):
                states.append([number, kind, elements])
    files = [
        [file, _text(checkpoint.lost[partition.files[file]]), sorted(partition.lost[file])] for file in partition.lost
    ]
    return {"files": files, "states": states}


def _comparison(comparison: Comparison, checkpoint: Checkpoint, kinds: list[str]) -> dict[str, Any]:
    """The differences from another checkpoint. Parameters and kinds of the first one are numbers."""
    parameters = {name: number for number, name in enumerate(checkpoint.parameters)}
    kind_numbers = {kind: number for number, kind in enumerate(kinds)}
    other = comparison.b
    differences = []
    for atom in comparison.atoms:
        said = atom.to_json()
        numbers = [said[key] for key in ("elements", "differing", "max_abs", "max_rel", "max_ulp", "one_sided_nan")]
        layout = [said["shape"], said["dtype"]] if atom.differing is None or len(set(atom.dtypes)) > 1 else []
        place = [parameters[atom.name], kind_numbers[atom.kind]]
        differences.append([*place, *numbers, said["first"], said["worst"], *layout])
    moved = comparison.updates.parameters if comparison.updates is not None else ()
    return {
        "root": str(other.root),
        "format": other.format,
        "framework": other.framework,
        "mesh": other.mesh.to_json(),
        "world": other.mesh.world,
        "step": other.step,
        "parameters": len(other.parameters),
        "same": comparison.same,
        "atoms": comparison.compared,
        "differences": differences,
        "moved": [[parameters[one.name], json_float(float(f"{one.relative:.4g}"))] for one in moved],
        "only_a": [list(one) for one in comparison.only_a],
        "only_b": [list(one) for one in comparison.only_b],
        "settings": [
            [one.key, _text(json.dumps(one.a)), _text(json.dumps(one.b)), len(one.names)] for one in comparison.settings
        ],
        "extras": [[one.path, _text(json.dumps(one.a)), _text(json.dumps(one.b))] for one in comparison.counted_extras],
        "notes": [note.text for note in comparison.notes],
    }


def _statistics(
    checkpoint: Checkpoint, kinds: list[str], statistics: Mapping[tuple[str, str], AtomStatistics | UcpError]
) -> list[list[Any]] | None:
    """A column per kind: statistics, 0 if not measured, or the error if it could not be read."""
    if not statistics:
        return None
    columns: list[list[Any]] = []
    for kind in kinds:
        column: list[Any] = []
        for name in checkpoint.parameters:
            found = statistics.get((name, kind))
            column.append(
                0 if found is None else found.to_json() if isinstance(found, AtomStatistics) else _text(found.what)
            )
        columns.append(column)
    return columns


def _checks(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    data = report.to_json()
    meanings = {check.id: check.meaning for check in CHECKS}
    data["checks"] = [{**check, "meaning": meanings.get(check["id"], "")} for check in data["checks"]]
    data["omitted"] = max(0, len(data["findings"]) - _MAX_FINDINGS)
    data["findings"] = data["findings"][:_MAX_FINDINGS]
    return data


def measured_states(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(parameter, kind) of all states to compute statistics of: all but step counts, and what is lost in part."""
    states = [atom for atom in checkpoint.atoms() if atom.kind != STEP and atom.numel]
    return [(atom.name, atom.kind) for atom in states if not (checkpoint.lost and _is_in_files(atom, checkpoint.lost))]


def _is_in_files(atom: Atom, files: Container[str]) -> bool:
    try:
        return any(fragment.file in files for fragment in atom.fragments)
    except UcpError:
        return True
