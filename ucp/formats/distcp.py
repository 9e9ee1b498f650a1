"""Data files of torch's distributed checkpoints to write: archives one after the other, and where each came to lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import PurePosixPath
from typing import Any, Final

from ucp import tunables
from ucp.files.torchzip_writer import Fill, TorchSkeleton, Zeros, new_tensor
from ucp.formats.torchtrees import with_tensors
from ucp.model.box import Shape
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Region
from ucp.model.target import Hole, Literal, OutputFile, Seal, ZeroRange

_STEM: Final = "archive"  # torch's name for an archive that is not written to a named file
_DATA_FILE: Final = re.compile(r"__(\d+)_\d+\.distcp")
_Close = Callable[[Sequence[int]], Sequence[Literal]]


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes [start, stop) of a data file (relative to the checkpoint's root): one archive of `torch.save`."""

    file: str
    start: int
    stop: int

    @property
    def rank(self) -> int:
        """The rank that wrote it, by the name of the file; 0 where the name does not say."""
        found = _DATA_FILE.fullmatch(PurePosixPath(self.file).name)
        return int(found[1]) if found else 0


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
        """Append an archive that was laid out to start at byte 0.

        Elements of a large one begin a page, with zeros before it: copying to odd addresses takes half as long again.
        Readers go by the index and do not see what lies between two archives.
        """
        is_large = archive.size >= tunables.ALIGNED_ARCHIVE_BYTES and archive.holes
        gap = -(self.size + archive.holes[0].offset) % tunables.DATA_ALIGNMENT if is_large else 0
        if gap:
            self.zeros.append(ZeroRange(self.size, gap))
        base = self.size + gap
        self.literals.extend(Literal(base + literal.offset, literal.data) for literal in archive.literals)
        self.holes.extend(Hole(hole.atom, hole.region, base + hole.offset) for hole in archive.holes)
        self.zeros.extend(ZeroRange(base + zero.offset, zero.nbytes) for zero in archive.zeros)
        if archive.seal is not None:
            self.seals.append((base, archive.seal.spans, archive.seal.close))
        self.size = base + archive.size
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


class ArchiveFiles:
    """The data files of one folder, one for each of `count` ranks. `where` names them in messages."""

    def __init__(self, count: int, where: str) -> None:
        self._files = [_DataFile(f"__{number}_0.distcp") for number in range(count)]
        self._where = where
        self._blank: dict[tuple[DType, Shape], OutputFile] = {}  # archives of zeros

    def __len__(self) -> int:
        return len(self._files)

    def chunk(self, number: int | None, atom: Atom, region: Region, shape: Shape) -> Item:
        """Lay out a region of an atom as a tensor of `shape` in file `number`, or in the smallest one."""
        return self.filled(number, atom.dtype, shape, (Fill(atom, region),))

    def filled(self, number: int | None, dtype: DType, shape: Shape, contents: Sequence[Fill | Zeros]) -> Item:
        """Lay out a tensor of these contents, end to end, in file `number`, or in the smallest one.

        All tensors of one shape have the same archive but for their elements.
        """
        blank = self._blank.get((dtype, shape))
        if blank is None:
            tree = new_tensor(dtype, shape, Zeros(prod(shape)))
            blank = self._blank[dtype, shape] = TorchSkeleton(_STEM, tree, self._where).output_file("")
        holes: list[Hole] = []
        zeros: list[ZeroRange] = []
        at = blank.zeros[0].offset if blank.zeros else 0  # a tensor without elements has no storage to fill
        for content in contents:
            nbytes = content.numel * dtype.itemsize
            if isinstance(content, Fill) and nbytes:
                holes.append(Hole(content.atom, content.region, at))
            elif nbytes:
                zeros.append(ZeroRange(at, nbytes))
            at += nbytes
        return self._choose(number).add(replace(blank, holes=tuple(holes), zeros=tuple(zeros)))

    def value(self, value: Any, number: int = 0) -> Item:
        """Lay out an object; atoms inside it become tensors."""
        return self._files[number].add(TorchSkeleton(_STEM, with_tensors(value), self._where).output_file(""))

    def outputs(self, folder: str) -> list[OutputFile]:
        """The files that got something."""
        return [file.output(folder) for file in self._files if file.size]

    def _choose(self, number: int | None) -> _DataFile:
        return min(self._files, key=lambda file: file.size) if number is None else self._files[number]
