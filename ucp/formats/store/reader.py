"""Reading a mapped store: the newest whole generation, held as it is for as long as the index lives."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from ucp.errors import IntegrityError, UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.store.description import EXTRA, describe
from ucp.model.checkpoint import Atom, Checkpoint, Fragment, Note
from ucp.model.region import Region
from ucp.store.leases import Lease, take_lease
from ucp.store.survey import Survey, notes_of


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
        notes=[*told.notes, *_complaints(lease.survey, path)],
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


def _atom(lease: Lease, number: int, file: str) -> Atom:
    layout = lease.shape.layout
    entry = layout.schema.entries[number]
    fragment = Fragment(Region.all_of(entry.shape), file, layout.atom_at(lease.header.slot, number), entry.dtype)
    return Atom(entry.name, entry.kind, entry.shape, entry.dtype, (fragment,))


def _steps(lease: Lease) -> dict[str, int]:
    """The parameters whose states are of another step than the generation."""
    header, entries = lease.header, lease.shape.layout.schema.entries
    return {
        entry.name: record.step
        for entry, record in zip(entries, header.atoms, strict=True)
        if record.step != header.step and entry.kind != EXTRA
    }


def _complaints(found: Survey, path: Path) -> list[Note]:
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
