"""What the page says about a checkpoint, as compact JSON. Numbers stand for names that repeat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ucp.checks import CHECKS, Report
from ucp.compare.layers import layer_of
from ucp.errors import UcpError
from ucp.formats.inert_json import Encoder
from ucp.model.checkpoint import STEP, Checkpoint, Parameter
from ucp.reports.partition import Partition
from ucp.reports.statistics import Statistics

SCHEMA: Final = 1
_FINDINGS: Final = 2_000  # on the page; `ucp verify --json` has all
_TEXT: Final = 400  # longest text of a detail


def facts(
    checkpoint: Checkpoint | None,
    report: Report | None,
    statistics: Mapping[tuple[str, str], Statistics | UcpError],
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
    partition = Partition.of(checkpoint)
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
    encoded = Encoder().encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _text(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def _parameters(
    checkpoint: Checkpoint, kinds: list[str], partition: Partition
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
    partition: Partition,
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
    checkpoint: Checkpoint, kinds: list[str], parameters: dict[str, Any], partition: Partition
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
    checkpoint: Checkpoint, kinds: list[str], statistics: Mapping[tuple[str, str], Statistics | UcpError]
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
                0 if found is None else found.to_json() if isinstance(found, Statistics) else _text(found.what)
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
