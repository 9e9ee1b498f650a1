"""Data files to write: archives end to end, one a chunk or object, and where each came to lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucp.files.torchzip_writer import Fill, TorchSkeleton, Zeros, new_tensor
from ucp.formats.dcp.cutting import cut
from ucp.formats.dcp.metadata import Item
from ucp.formats.dcp.tensors_in_trees import replace_leaves
from ucp.model.box import Box, Shape
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Region
from ucp.model.target import Hole, Literal, OutputFile, Seal, ZeroRange

_STEM = "archive"  # torch's name for an archive that is not written to a named file
_Close = Callable[[Sequence[int]], Sequence[Literal]]


@dataclass(slots=True)
class _DataFile:
    """A file that grows archive by archive."""

    name: str
    size: int = 0
    literals: list[Literal] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    zeros: list[ZeroRange] = field(default_factory=list)
    seals: list[tuple[int, tuple[tuple[int, int], ...], _Close]] = field(default_factory=list)  # base, spans, close

    def add(self, archive: OutputFile) -> Item:
        """Append an archive that was laid out to start at byte 0."""
        base = self.size
        self.literals.extend(Literal(base + literal.offset, literal.data) for literal in archive.literals)
        self.holes.extend(Hole(hole.atom, hole.region, base + hole.offset) for hole in archive.holes)
        self.zeros.extend(ZeroRange(base + zero.offset, zero.nbytes) for zero in archive.zeros)
        if archive.seal is not None:
            self.seals.append((base, archive.seal.spans, archive.seal.close))
        self.size += archive.size
        return Item(self.name, base, self.size)

    def output(self, folder: str) -> OutputFile:
        spans = tuple((base + offset, nbytes) for base, own, _ in self.seals for offset, nbytes in own)
        seal = Seal(spans, self._close) if spans else None
        return OutputFile(
            folder + self.name, self.size, tuple(self.literals), tuple(self.holes), tuple(self.zeros), seal
        )

    def _close(self, crcs: Sequence[int]) -> list[Literal]:
        """The ends of all archives, given the CRC-32 of every span of the file."""
        literals: list[Literal] = []
        at = 0
        for base, spans, close in self.seals:
            ends = close(crcs[at : at + len(spans)])
            literals.extend(Literal(base + end.offset, end.data) for end in ends)
            at += len(spans)
        return literals


class DataFiles:
    """The data files of one folder."""

    def __init__(self, count: int, where: str) -> None:
        self._files = [_DataFile(f"__{number}_0.distcp") for number in range(count)]
        self._where = where
        self._blank: dict[tuple[DType, Shape], OutputFile] = {}  # archives of zeros

    def tensor(self, atom: Atom) -> list[tuple[Box, Item]]:
        """Lay out a tensor; gives its chunks and where they lie."""
        return [
            (box, self._choose(number).add(self._chunk(atom, box)))
            for number, box in cut(atom.shape, atom.dtype.itemsize, len(self._files))
        ]

    def value(self, value: Any) -> Item:
        """Lay out an object; atoms inside it become tensors."""
        tree = replace_leaves(value, Atom, lambda atom, _: new_tensor(atom.dtype, atom.shape, _fill(atom)))
        return self._files[0].add(TorchSkeleton(_STEM, tree, self._where).output_file(""))

    def outputs(self, folder: str) -> list[OutputFile]:
        """The files that got something."""
        return [file.output(folder) for file in self._files if file.size]

    def _choose(self, number: int | None) -> _DataFile:
        return min(self._files, key=lambda file: file.size) if number is None else self._files[number]

    def _chunk(self, atom: Atom, box: Box) -> OutputFile:
        """The archive of one chunk. All chunks of one shape have the same archive but for their elements."""
        blank = self._blank.get((atom.dtype, box.shape))
        if blank is None:
            tree = new_tensor(atom.dtype, box.shape, Zeros(box.numel))
            blank = TorchSkeleton(_STEM, tree, self._where).output_file("")
            self._blank[atom.dtype, box.shape] = blank
        holes = tuple(Hole(atom, Region.of((box,)), zero.offset) for zero in blank.zeros)
        return replace(blank, holes=holes, zeros=())


def _fill(atom: Atom) -> Fill | Zeros:
    return Fill(atom, Region.all_of(atom.shape)) if atom.numel else Zeros(0)
