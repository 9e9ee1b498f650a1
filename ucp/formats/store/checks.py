"""Checks of a mapped store: the blocks that determine the valid generation, and the checksums of that generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding
from ucp.errors import IntegrityError
from ucp.formats.registry import FormatChecks, RecordedChecksum
from ucp.formats.store.generations import GenerationLease


class StoreChecks(FormatChecks):
    """`store` and `manifest-checksums`."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Superblocks that do not parse, and a newest generation that cannot be used."""
        del atoms
        lease = checkpoint.lease
        if not isinstance(lease, GenerationLease):
            return
        file = lease.store.path.name
        for number in lease.generations.torn:
            yield Finding(
                "store",
                "warning",
                f"{file}: superblock {number} is torn",
                file,
                subject=f"superblock {number}",
                hint="normal after a crash: the other superblock is used, and the next generation rewrites this one",
            )
        for broken in lease.generations.broken:
            yield Finding(
                "store",
                "error",
                f"{file}: the header of slot {broken.slot} is damaged, so generation {broken.sequence}"
                f" (step {broken.step}) is lost and an older one is used",
                file,
                subject=f"slot {broken.slot}",
                hint="a crash does not cause this: bytes of the file were changed",
                exit_code=IntegrityError.exit_code,
            )

    def checksums(self, checkpoint: Checkpoint) -> Iterator[RecordedChecksum]:
        """The checksum of every atom of the leased generation."""
        lease = checkpoint.lease
        if not isinstance(lease, GenerationLease):
            return
        layout, file = lease.store.layout, lease.store.path.name
        for number, (entry, record) in enumerate(zip(layout.schema.entries, lease.header.atoms, strict=True)):
            start = layout.atom_at(lease.header.slot, number)
            if entry.nbytes:
                yield RecordedChecksum(file, start, start + entry.nbytes, record.digest.hex(), xxhash.xxh3_128)

    def reads_in_order(self, checkpoint: Checkpoint) -> bool:
        """One checksum covers a whole atom."""
        del checkpoint
        return True
