"""An index as the JSON of a store, and back: what never changes in the schema, the rest in a generation's notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp import tunables
from ucp.formats.inert_json import Encoder, decode
from ucp.model.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Extras, Note, Parameter, ParamGroup
from ucp.model.layout import Mesh
from ucp.model.rule_json import rule_from_json, rule_to_json
from ucp.store.layout import Entry, Schema, rounded

EXTRA: Final = "extra"  # kind of the tensors inside extras


@dataclass(frozen=True, slots=True)
class Described:
    """What a store and one generation of it say, besides bytes."""

    mesh: Mesh
    framework: str
    parameters: dict[str, Parameter]  # with the atoms that were given
    groups: list[ParamGroup]
    extras: Extras
    notes: list[Note]
    details: dict[str, Any]


def schema_of(source: Checkpoint) -> Schema:
    """Room for every state of a checkpoint and for the tensors in its extras.

    Later generations may have other values everywhere, and notes of up to twice the length.
    """
    notes, tensors = generation_notes(source)
    entries = [Entry(atom.name, atom.kind, atom.shape, atom.dtype) for atom in (*source.atoms(), *tensors.values())]
    encoder = Encoder()
    about = {
        "source": source.format,
        "framework": source.framework,
        "mesh": source.mesh.to_json(),
        "details": encoder.encode(source.details),
        "parameters": [_parameter_json(parameter) for parameter in source.parameters.values()],
    }
    room = rounded(2 * len(json.dumps(notes)), 64 * tunables.KIB) + 64 * tunables.KIB
    return Schema(tuple(entries), about, room)


def generation_notes(source: Checkpoint) -> tuple[dict[str, Any], dict[str, Atom]]:
    """What of a checkpoint changes from generation to generation, and the tensors in its extras."""
    encoder = Encoder()
    notes = {
        "groups": [{"hyper": encoder.encode(group.hyper), "names": group.names} for group in source.groups],
        "extras": {file: encoder.encode(tree) for file, tree in source.extras.trees.items()},
        "notes": [[note.id, note.text] for note in source.notes],
    }
    return notes, encoder.tensors


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "role": parameter.role,
        "rule": rule_to_json(parameter.rule),
        "rule_origin": parameter.rule_origin,
        "padded_shape": None if parameter.padded_shape is None else list(parameter.padded_shape),
        "group": parameter.group,
        "aliases": list(parameter.aliases),
        "stages": list(parameter.stages),
        "expert": parameter.expert,
    }


def describe(about: Mapping[str, Any], notes: Mapping[str, Any], atoms: list[Atom]) -> Described:
    """What `schema_of` and `generation_notes` wrote. A store that was made by hand has parameters and nothing else."""
    tensors = {atom.name: atom for atom in atoms if atom.kind == EXTRA}
    told = about.get("parameters")
    if told is None:
        parameters = _from_atoms(atoms)
    else:
        parameters = {entry["name"]: _parameter(entry) for entry in told}
    for atom in atoms:
        if atom.name in parameters and not (atom.kind == EXTRA and told is not None):
            parameters[atom.name].atoms[atom.kind] = atom
    return Described(
        Mesh(**about["mesh"]) if "mesh" in about else Mesh(),
        str(about.get("framework", "")),
        parameters,
        [ParamGroup(decode(group["hyper"], {}), list(group["names"])) for group in notes.get("groups", ())],
        Extras({file: decode(tree, tensors) for file, tree in notes.get("extras", {}).items()}),
        [Note(str(kind), str(text)) for kind, text in notes.get("notes", ())],
        dict(decode(about.get("details", {}), {})),
    )


def _from_atoms(atoms: list[Atom]) -> dict[str, Parameter]:
    """Parameters of a store whose schema says nothing of them: the shape is the weight's, or the largest state's."""
    states: dict[str, dict[str, Atom]] = {}
    for atom in atoms:
        states.setdefault(atom.name, {})[atom.kind] = atom
    made = {}
    for name, kinds in states.items():
        main = kinds.get(WEIGHT) or kinds.get(MASTER) or max(kinds.values(), key=lambda atom: atom.numel)
        made[name] = Parameter(name, main.shape)
    return made


def _parameter(entry: Mapping[str, Any]) -> Parameter:
    return Parameter(
        name=entry["name"],
        shape=tuple(entry["shape"]),
        role=entry["role"],
        rule=rule_from_json(entry["rule"]),
        rule_origin=entry["rule_origin"],
        padded_shape=None if entry["padded_shape"] is None else tuple(entry["padded_shape"]),
        group=entry["group"],
        aliases=tuple(map(str, entry["aliases"])),
        stages=tuple(entry["stages"]),
        expert=entry["expert"],
    )
