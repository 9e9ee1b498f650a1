"""Mapped stores: the blocks that say which generation is valid, and the checksums of the one that is."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from ucp.checks.findings import Finding
from ucp.checks.spans import ChecksumSpan, FileMap
from ucp.checks.tasks import CheckContext
from ucp.core.checkpoint import Checkpoint
from ucp.errors import IntegrityError
from ucp.formats.store.generations import GenerationLease


def run_check(context: CheckContext) -> Iterator[Finding]:
    """Superblocks that do not parse, and a newest generation that cannot be used."""
    lease = context.checkpoint.lease
    if not isinstance(lease, GenerationLease):
        return
    file = lease.shape.path.name
    for number in lease.survey.torn:
        yield Finding(
            "store",
            "warning",
            f"{file}: superblock {number} is torn",
            file,
            subject=f"superblock {number}",
            hint="normal after a crash: the other one counts, and the next generation makes it new",
        )
    for broken in lease.survey.broken:
        yield Finding(
            "store",
            "error",
            f"{file}: the header of slot {broken.slot} is damaged, so generation {broken.sequence} (step {broken.step})"
            " is lost; an older one counts",
            file,
            subject=f"slot {broken.slot}",
            hint="no crash does this: bytes of the file were changed",
            exit_code=IntegrityError.exit_code,
        )


def store_spans(checkpoint: Checkpoint, held: FileMap) -> Iterator[ChecksumSpan]:
    """What the held generation has checksums of."""
    lease = checkpoint.lease
    if not isinstance(lease, GenerationLease):
        return
    layout, file = lease.shape.layout, lease.shape.path.name
    for number, (entry, record) in enumerate(zip(layout.schema.entries, lease.header.atoms, strict=True)):
        start = layout.atom_at(lease.header.slot, number)
        stop = start + entry.nbytes
        if start < stop:
            title = f"bytes [{start}, {stop})"
            states = held.between(file, start, stop)
            yield ChecksumSpan(
                "manifest-checksums", file, start, stop, title, record.digest.hex(), xxhash.xxh3_128, states
            )
