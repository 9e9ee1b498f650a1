"""Read a mapped store: index its newest complete generation, leased while the index exists.

The index is stored as JSON: what never changes in the schema, the rest in the notes of a generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.containers.inert_json import InertEncoder, decode, parameter_from_json, parameter_to_json
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, ParamGroup
from ucp.core.region import Region
from ucp.errors import IntegrityError, UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.store.generations import Generations, notes_of, take_lease
from ucp.formats.store.store_layout import StoreEntry, StoreSchema, round_up

EXTRA: Final = "extra"  # kind of the tensors inside extras


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the newest complete generation of a store, or with a tag that of a step. Rules do not apply."""
    if options.tag is not None and not options.tag.isdecimal():
        raise UsageError(f"--tag {options.tag}: the tag of a store is a step", hint="give a number, or leave it out")
    lease = take_lease(path, None if options.tag is None else int(options.tag))
    header, layout = lease.header, lease.store.layout
    entries = layout.schema.entries
    atoms: list[Atom] = []
    for number, entry in enumerate(entries):
        offset = layout.atom_at(header.slot, number)
        fragment = Fragment(Region.all_of(entry.shape), path.name, offset, entry.dtype)
        atoms.append(Atom(entry.name, entry.kind, entry.shape, entry.dtype, (fragment,)))
    try:
        found = describe(path.parent, layout.schema.about, notes_of(header, path), atoms)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"{path}: its schema or notes are invalid: {error!r}") from None
    written = datetime.fromtimestamp(header.time_ns / 1e9, timezone.utc).isoformat(timespec="seconds")
    found.step, found.lease = header.step, lease
    found.steps = {
        entry.name: record.step
        for entry, record in zip(entries, header.atoms, strict=True)
        if record.step != header.step and entry.kind != EXTRA
    }
    found.notes += _damage_notes(lease.generations, path)
    found.sizes = {path.name: layout.file_bytes}
    found.details |= {
        "generation": header.sequence,
        "written": written,
        "slots": layout.slots,
        "steps": [generation.step for generation in lease.generations.generations],
    }
    return found


def _damage_notes(found: Generations, path: Path) -> list[Note]:
    return [
        *(
            Note("store-torn", f"{path.name}: superblock {number} is torn, as after a crash; the other one is used")
            for number in found.torn
        ),
        *(
            Note(
                "store-damaged",
                f"{path.name}: generation {broken.sequence} (step {broken.step}, slot {broken.slot}) is damaged, so an"
                " older one is used",
            )
            for broken in found.broken
        ),
    ]


def schema_of(source: Checkpoint) -> StoreSchema:
    """The schema of a store for every state of a checkpoint and the tensors in its extras.

    Later generations may have other values, and notes of up to twice the length.
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
        "parameters": [parameter_to_json(parameter) for parameter in source.parameters.values()],
    }
    room = round_up(2 * len(json.dumps(notes)), 64 * settings.KIB) + 64 * settings.KIB
    return StoreSchema(tuple(entries), about, room)


def generation_notes(source: Checkpoint) -> tuple[dict[str, Any], dict[str, Atom]]:
    """The part of an index that changes from generation to generation, and the tensors in its extras."""
    encoder = InertEncoder()
    notes = {
        "groups": [{"hyper": encoder.encode(group.hyper), "names": group.names} for group in source.groups],
        "extras": {file: encoder.encode(tree) for file, tree in source.extras.trees.items()},
        "notes": [[note.id, note.text] for note in source.notes],
    }
    return notes, encoder.tensors


def describe(root: Path, about: Mapping[str, Any], notes: Mapping[str, Any], atoms: list[Atom]) -> Checkpoint:
    """Read what `schema_of` and `generation_notes` wrote. A store with a schema of the user's has parameters only."""
    tensors = {atom.name: atom for atom in atoms if atom.kind == EXTRA}
    listed = about.get("parameters")
    if listed is None:
        parameters = _from_atoms(atoms)
    else:
        parameters = {entry["name"]: parameter_from_json(entry) for entry in listed}
    for atom in atoms:
        if atom.name in parameters and not (atom.kind == EXTRA and listed is not None):
            parameters[atom.name].atoms[atom.kind] = atom
    return Checkpoint(
        format="store",
        root=root,
        mesh=Mesh(**about["mesh"]) if "mesh" in about else Mesh(),
        parameters=parameters,
        framework=str(about.get("framework", "")),
        groups=[ParamGroup(decode(group["hyper"], {}), list(group["names"])) for group in notes.get("groups", ())],
        extras=Extras({file: decode(tree, tensors) for file, tree in notes.get("extras", {}).items()}),
        notes=[Note(str(kind), str(text)) for kind, text in notes.get("notes", ())],
        details=dict(decode(about.get("details", {}), {})),
    )


def _from_atoms(atoms: list[Atom]) -> dict[str, Parameter]:
    """Parameters of a schema that does not describe any: the shape is that of the weight, or of the largest state."""
    states: dict[str, dict[str, Atom]] = {}
    for atom in atoms:
        states.setdefault(atom.name, {})[atom.kind] = atom
    main = {
        name: kinds.get(WEIGHT) or kinds.get(MASTER) or max(kinds.values(), key=lambda atom: atom.numel)
        for name, kinds in states.items()
    }
    return {name: Parameter(name, atom.shape) for name, atom in main.items()}
