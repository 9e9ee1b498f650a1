"""Targets: output files as values, with the bytes that are known and the holes that atoms will fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.core.checkpoint import Atom
from ucp.core.region import Region

# What is on disk of each file of a target: (offset, nbytes, XXH3-128 hex), in order of offset.
Digests = Sequence[Sequence[tuple[int, int, str]]]


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A range of an output file that a region of an atom fills: contiguous from byte `offset`.

    Where the region reaches past the atom's shape (padding of a vocabulary), the file gets zeros.
    """

    atom: Atom
    region: Region
    offset: int

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.atom.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of an output file that are known in advance: headers, skeletons, JSON."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ZeroRange:
    """Bytes `[offset, offset + nbytes)` of an output file that are zero: padding of flat buffers."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """What of an output file depends on the CRC-32 of other bytes of it, as the directory of a zip archive does.

    Each of the `spans` (offset, nbytes) is tiled by whole literals, holes and zero ranges of the file. When all of
    these are written, `close` gets the CRC-32 of each span, in order, and gives the literals that fill the rest of the
    file: always the same ranges, whatever the numbers.
    """

    spans: tuple[tuple[int, int], ...]
    close: Callable[[Sequence[int]], Sequence[Literal]]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write; `path` is relative to the target folder.

    `literals`, `holes`, `zeros` and what `seal` gives in the end tile it exactly.
    """

    path: str
    size: int
    literals: tuple[Literal, ...] = ()
    holes: tuple[WriteItem, ...] = ()
    zeros: tuple[ZeroRange, ...] = ()
    seal: Trailer | None = None


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
        """The target for people and scripts: files with their bytes and holes."""
        return {
            "schema": 1,
            "bytes": self.nbytes,
            "files": [
                {
                    "path": file.path,
                    "bytes": file.size,
                    "holes": [
                        {"name": hole.atom.name, "kind": hole.atom.kind, "offset": hole.offset, "bytes": hole.nbytes}
                        for hole in file.holes
                    ],
                }
                for file in self.files
            ],
        }
