"""Targets: output files as values, with their known bytes and the write items that fill the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.core.checkpoint import Atom
from ucp.core.region import Region

# What is on disk of each file of a target: (offset, nbytes, XXH3-128 in hex), in order of offset.
Digests = Sequence[Sequence[tuple[int, int, str]]]


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A region of an atom that goes to an output file, contiguous from byte `offset` on.

    If the region extends past the atom's shape (padding of a vocabulary), the file gets zeros there.
    """

    atom: Atom
    region: Region
    offset: int

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.atom.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        region = self.region
        return {
            "name": self.atom.name,
            "kind": self.atom.kind,
            "offset": self.offset,
            "bytes": self.nbytes,
            "region": {"boxes": region.boxes, "start": region.start, "stop": region.stop},
        }


@dataclass(frozen=True, slots=True)
class LiteralBytes:
    """Bytes of an output file that are known in advance: headers, pickles, JSON."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ZeroRange:
    """Bytes `[offset, offset + nbytes)` of an output file that are zero: padding of flat buffers."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """Bytes of an output file that depend on the CRC-32 of other bytes of it, like the directory of a zip archive.

    Each of the `spans` (offset, nbytes) is tiled by whole literals, write items and zero ranges of the file. When these
    are written, `build` is called with the CRC-32 of each span, in order, and returns the literals that fill the rest
    of the file: always the same ranges, whatever the checksums.
    """

    spans: tuple[tuple[int, int], ...]
    build: Callable[[Sequence[int]], Sequence[LiteralBytes]]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write; `path` is relative to the target folder.

    `literals`, `items`, `zeros` and the literals of the `trailer` tile it exactly.
    """

    path: str
    size: int
    literals: tuple[LiteralBytes, ...] = ()
    items: tuple[WriteItem, ...] = ()
    zeros: tuple[ZeroRange, ...] = ()
    trailer: Trailer | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Every output file of a conversion, in a fixed order."""

    files: tuple[OutputFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def __repr__(self) -> str:
        return f"<{len(self.files)} files, {self.nbytes} bytes>"

    def to_json(self) -> dict[str, Any]:
        """The files with their sizes and write items (`holes`)."""
        return {
            "schema": 1,
            "bytes": self.nbytes,
            "files": [
                {"path": file.path, "bytes": file.size, "holes": [item.to_json() for item in file.items]}
                for file in self.files
            ],
        }
