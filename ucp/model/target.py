"""Targets: output files as values, with the bytes that are known and the holes that atoms will fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ucp.model.checkpoint import Atom
from ucp.model.region import Region

# What is on disk of each file of a target: (offset, nbytes, XXH3-128 hex), in order of offset.
Digests = Sequence[Sequence[tuple[int, int, str]]]


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of an output file that a region of an atom fills: contiguous from byte `offset`."""

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
class OutputFile:
    """One file to write. `literals` and `holes` tile it exactly; `path` is relative to the target folder."""

    path: str
    size: int
    literals: tuple[Literal, ...] = ()
    holes: tuple[Hole, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Every output file of a conversion, in a fixed order."""

    files: tuple[OutputFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

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
