"""Which rank holds which part of an atom, said compactly: runs of ranks whose shares follow one another.

A thousand ranks times ten thousand parameters make millions of fragments. But the shares of a parameter are regular,
and parameters of one shape are cut alike: a few runs describe a parameter, and many parameters share a description.

What the page says about a checkpoint, as compact JSON. Numbers stand for names that repeat.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.checks.catalogue import CHECKS
from ucp.checks.verify_report import Report
from ucp.compare.updates import layer_of
from ucp.containers.inert_json import InertEncoder
from ucp.core.box import Box
from ucp.core.checkpoint import STEP, Atom, Checkpoint, Fragment, Parameter
from ucp.core.mesh import Rank
from ucp.errors import UcpError
from ucp.reports.atom_statistics import AtomStatistics

# Of atoms with this many fragments and more, those of one shape, count and first share are taken to be cut alike.
_MANY: Final = 64
_BOXES: Final = 256  # of one region; fused parameters cut along an inner dimension have one a row

# rank, file, boxes, start, length, cover: what is said of one fragment. Lengths do not change along a run.
_Entry = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class PartitionPattern:
    """How an atom is cut: runs of fragments, and the number of elements that each rank holds."""

    runs: tuple[tuple[int, ...], ...]
    held: dict[int, int]


@dataclass(slots=True)
class PartitionMap:
    """Ranks, files, box lists and patterns by number, so that whatever repeats is said once."""

    ranks: list[Rank]
    files: list[str]
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    clipped: dict[int, int] = field(default_factory=dict)  # box list → how many boxes it has in truth
    patterns: list[PartitionPattern] = field(default_factory=list)
    _rank_numbers: dict[Rank, int] = field(default_factory=dict)
    _file_numbers: dict[str, int] = field(default_factory=dict)
    _box_numbers: dict[tuple[Box, ...], int] = field(default_factory=dict)
    _pattern_numbers: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)
    _alike: dict[Any, int] = field(default_factory=dict)

    @staticmethod
    def of(checkpoint: Checkpoint) -> PartitionMap:
        """An empty partition with all ranks of the mesh: tensor-parallel rank fastest, then data, then pipeline."""
        mesh = checkpoint.mesh
        ranks = [Rank(pp, tp, dp) for pp in range(mesh.pp) for dp in range(mesh.dp) for tp in range(mesh.tp)]
        files = sorted(checkpoint.sizes, key=_natural)
        made = PartitionMap(ranks, files)
        made._rank_numbers = {rank: number for number, rank in enumerate(ranks)}
        made._file_numbers = {file: number for number, file in enumerate(files)}
        return made

    def pattern_of(self, atom: Atom) -> int:
        """The number of the pattern that this atom is cut in."""
        covers = (atom.fragments, *atom.replicas)
        if sum(map(len, covers)) < _MANY:
            return self._add(covers)
        first = next(iter(atom.fragments))
        key = (atom.shape, atom.kind, tuple(map(len, covers)), first.rank, first.region, first.file)
        if key not in self._alike:
            self._alike[key] = self._add(covers)
        return self._alike[key]

    def _add(self, covers: Sequence[Sequence[Fragment]]) -> int:
        entries = [self._entry(fragment, number) for number, cover in enumerate(covers) for fragment in cover]
        runs = tuple(_runs(entries))
        if runs not in self._pattern_numbers:
            held: dict[int, int] = {}
            for rank, _, _, _, length, _ in entries:
                held[rank] = held.get(rank, 0) + length
            self._pattern_numbers[runs] = len(self.patterns)
            self.patterns.append(PartitionPattern(runs, held))
        return self._pattern_numbers[runs]

    def _entry(self, fragment: Fragment, cover: int) -> _Entry:
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
        # The expert axis re-uses data-parallel ranks, so it does not make another rank.
        return self._number(Rank(rank.pp, rank.tp, rank.dp), self._rank_numbers, self.ranks)

    def _boxes(self, boxes: tuple[Box, ...]) -> int:
        number = self._number(boxes, self._box_numbers, self.boxes)
        if len(boxes) > _BOXES and number not in self.clipped:
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
        """For the page. A box is `[starts…, lengths…]`; a run is described at `_runs`."""
        return {
            "ranks": [[rank.pp, rank.tp, rank.dp] for rank in self.ranks],
            "files": self.files,
            "boxes": [[[*box.start, *box.shape] for box in boxes[:_BOXES]] for boxes in self.boxes],
            "clipped": {str(number): count for number, count in self.clipped.items()},
            "patterns": [pattern.runs for pattern in self.patterns],
        }


def _runs(entries: Iterable[_Entry]) -> Iterable[tuple[int, ...]]:
    """Fragments as runs: `count`, the six numbers of the first, then what each of them grows by from one to the next.

    A single fragment is a run of seven numbers. Lengths never grow, so a run has 7 or 13.
    """
    run: list[_Entry] = []
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


def _step(one: _Entry, other: _Entry) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, other, strict=True))


def _run(run: Sequence[_Entry], step: tuple[int, ...]) -> tuple[int, ...]:
    return (len(run), *run[0]) if len(run) == 1 else (len(run), *run[0], *step)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: `rank_2` before `rank_10`."""
    words = re.split(r"(\d+)", name)
    return [(1, int(word), "") if word.isdigit() else (0, 0, word) for word in words]


SCHEMA: Final = 1
_FINDINGS: Final = 2_000  # on the page; `ucp verify --json` has all
_TEXT: Final = 400  # longest text of a detail


def page_data(
    checkpoint: Checkpoint | None,
    report: Report | None,
    statistics: Mapping[tuple[str, str], AtomStatistics | UcpError],
    *,
    source: str,
    version: str,
    sample: int | None,
) -> dict[str, Any]:
    """Everything on the page. Without a checkpoint, only what the checks found."""
    said: dict[str, Any] = {"schema": SCHEMA, "version": version, "source": source, "checks": _checks(report)}
    if checkpoint is None:
        return said
    kinds = list(dict.fromkeys(atom.kind for atom in checkpoint.atoms()))
    partition = PartitionMap.of(checkpoint)
    parameters, unplaced = _parameters(checkpoint, kinds, partition)
    said |= {
        "format": checkpoint.format,
        "framework": checkpoint.framework,
        "step": checkpoint.step,
        "mesh": checkpoint.mesh.to_json(),
        "world": checkpoint.mesh.world,
        "totals": _totals(checkpoint),
        "details": _details(checkpoint),
        "groups": _groups(checkpoint),
        "notes": [note.text for note in checkpoint.notes],
        "kinds": kinds,
        "parameters": parameters,
        "partition": partition.to_json(),
        "unplaced": unplaced,
        "held": _held(checkpoint, kinds, parameters, partition),
        "statistics": _statistics(checkpoint, kinds, statistics),
        "sampled": sample,
    }
    return said


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
    shown = []
    for group in checkpoint.groups:
        hyper = {}
        for key, value in group.hyper.items():
            try:
                hyper[str(key)] = _text(_plainly(value))
            except UcpError:
                continue
        shown.append({"parameters": len(group.names), "hyper": hyper})
    return shown


def _plainly(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    encoded = InertEncoder().encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _text(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def _parameters(
    checkpoint: Checkpoint, kinds: list[str], partition: PartitionMap
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Columns, one entry a parameter; `states` has for each kind a column of `[dtype, pattern]` (0 where absent).

    Where a state has another shape than its parameter (`step`), the shape is the third entry. What cannot be located
    has pattern -1, and a line in the second value: parameter, kind, why.
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
    said = [dtypes.setdefault(atom.dtype.name, len(dtypes)), pattern]
    return said if atom.shape == parameter.shape else [*said, shapes.setdefault(atom.shape, len(shapes))]


def _held(
    checkpoint: Checkpoint, kinds: list[str], parameters: dict[str, Any], partition: PartitionMap
) -> list[list[int]]:
    """For each kind a column of bytes, one entry a rank."""
    itemsizes: Counter[tuple[int, int]] = Counter()  # (kind, pattern) → of all atoms that are cut so, together
    for number, parameter in enumerate(checkpoint.parameters.values()):
        for kind, column in enumerate(parameters["states"]):
            if column[number] and column[number][1] >= 0:
                itemsizes[kind, column[number][1]] += parameter.atoms[kinds[kind]].dtype.itemsize
    held = [[0] * len(partition.ranks) for _ in kinds]
    for (kind, pattern), itemsize in itemsizes.items():
        for rank, elements in partition.patterns[pattern].held.items():
            held[kind][rank] += elements * itemsize
    return held


def _statistics(
    checkpoint: Checkpoint, kinds: list[str], statistics: Mapping[tuple[str, str], AtomStatistics | UcpError]
) -> list[list[Any]] | None:
    """For each kind a column: 0 where nothing was measured, a text where it could not be read."""
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
    said = report.to_json()
    meanings = {check.id: check.meaning for check in CHECKS}
    said["checks"] = [{**check, "meaning": meanings.get(check["id"], "")} for check in said["checks"]]
    said["omitted"] = max(0, len(said["findings"]) - _FINDINGS)
    said["findings"] = said["findings"][:_FINDINGS]
    return said


def shown_kinds(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(parameter, kind) of all states whose numbers are worth measuring: not the counts of steps."""
    return [(atom.name, atom.kind) for atom in checkpoint.atoms() if atom.kind != STEP and atom.numel]
