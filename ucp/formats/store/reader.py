"""Reading a mapped store: the newest whole generation, held as it is for as long as the index lives.

An index as the JSON of a store, and back: what never changes in the schema, the rest in a generation's notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.containers.inert_json import InertEncoder, decode
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Extras, Fragment, Note, Parameter, ParamGroup
from ucp.core.mesh import Mesh
from ucp.core.region import Region
from ucp.core.rules import rule_from_json, rule_to_json
from ucp.errors import IntegrityError, UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.store.generations import GenerationLease, Generations, notes_of, take_lease
from ucp.formats.store.store_layout import StoreEntry, StoreSchema, round_up


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the newest whole generation of a store, or with a tag that of a step. Rules do not apply."""
    if options.tag is not None and not options.tag.isdecimal():
        raise UsageError(f"--tag {options.tag}: a store has generations by step", hint="give a number, or leave it out")
    lease = take_lease(path, None if options.tag is None else int(options.tag))
    header, layout = lease.header, lease.shape.layout
    atoms = [_atom(lease, number, path.name) for number in range(len(layout.schema.entries))]
    try:
        told = describe(layout.schema.about, notes_of(header, path), atoms)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"{path}: an entry cannot be understood: {error!r}") from None
    written = datetime.fromtimestamp(header.time_ns / 1e9, timezone.utc).isoformat(timespec="seconds")
    return Checkpoint(
        format="store",
        root=path.parent,
        mesh=told.mesh,
        parameters=told.parameters,
        framework=told.framework,
        step=header.step,
        steps=_steps(lease),
        groups=told.groups,
        extras=told.extras,
        notes=[*told.notes, *_damage_notes(lease.survey, path)],
        sizes={path.name: layout.file_bytes},
        details={
            **told.details,
            "generation": header.sequence,
            "written": written,
            "slots": layout.slots,
            "steps": [generation.step for generation in lease.survey.generations],
        },
        lease=lease,
    )


def _atom(lease: GenerationLease, number: int, file: str) -> Atom:
    layout = lease.shape.layout
    entry = layout.schema.entries[number]
    fragment = Fragment(Region.all_of(entry.shape), file, layout.atom_at(lease.header.slot, number), entry.dtype)
    return Atom(entry.name, entry.kind, entry.shape, entry.dtype, (fragment,))


def _steps(lease: GenerationLease) -> dict[str, int]:
    """The parameters whose states are of another step than the generation."""
    header, entries = lease.header, lease.shape.layout.schema.entries
    return {
        entry.name: record.step
        for entry, record in zip(entries, header.atoms, strict=True)
        if record.step != header.step and entry.kind != EXTRA
    }


def _damage_notes(found: Generations, path: Path) -> list[Note]:
    return [
        *(
            Note("store-torn", f"{path.name}: superblock {number} is torn, as after a crash; the other one counts")
            for number in found.torn
        ),
        *(
            Note(
                "store-damaged",
                f"{path.name}: generation {broken.sequence} (step {broken.step}, slot {broken.slot}) is damaged, so an"
                " older one counts",
            )
            for broken in found.broken
        ),
    ]


EXTRA: Final = "extra"  # kind of the tensors inside extras


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """What a store and one generation of it say, besides bytes."""

    mesh: Mesh
    framework: str
    parameters: dict[str, Parameter]  # with the atoms that were given
    groups: list[ParamGroup]
    extras: Extras
    notes: list[Note]
    details: dict[str, Any]


def schema_of(source: Checkpoint) -> StoreSchema:
    """Room for every state of a checkpoint and for the tensors in its extras.

    Later generations may have other values everywhere, and notes of up to twice the length.
    """
    notes, tensors = generation_notes(source)
    entries = [
        StoreEntry(atom.name, atom.kind, atom.shape, atom.dtype) for atom in (*source.atoms(), *tensors.values())
    ]
    encoder = InertEncoder()
    about = {
        "source": source.format,
        "framework": source.framework,
        "mesh": source.mesh.to_json(),
        "details": encoder.encode(source.details),
        "parameters": [_parameter_json(parameter) for parameter in source.parameters.values()],
    }
    room = round_up(2 * len(json.dumps(notes)), 64 * settings.KIB) + 64 * settings.KIB
    return StoreSchema(tuple(entries), about, room)


def generation_notes(source: Checkpoint) -> tuple[dict[str, Any], dict[str, Atom]]:
    """What of a checkpoint changes from generation to generation, and the tensors in its extras."""
    encoder = InertEncoder()
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


def describe(about: Mapping[str, Any], notes: Mapping[str, Any], atoms: list[Atom]) -> StoreDescription:
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
    return StoreDescription(
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
