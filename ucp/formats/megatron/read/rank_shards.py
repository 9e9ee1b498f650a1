"""From what one rank stores of its slice to fragments of the whole.

What each rank holds of each parameter: the table between rank files and atoms.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Box, Shape, intersect, interval_boxes, strides_of
from ucp.core.checkpoint import Fragment, LazyFragments, Role
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.core.rules import SlicePiece


class FileLocation(Protocol):
    """Where something starts: `offset` bytes into `file` (relative to the checkpoint's root), looked up when asked."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Element `shift` of a tensor in a torch file."""

    file: str
    archive: TorchFile
    ref: TensorRef
    shift: int = 0

    @property
    def offset(self) -> int:
        return self.archive.position(self.ref) + self.shift * self.ref.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """Elements `[start, stop)` of a local tensor as it is stored, contiguous from `spot` on.

    With `strides` (in elements) it is the whole tensor, which does not lie row-major.
    """

    start: int
    stop: int
    spot: FileLocation
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class MegatronStored:
    """One state of one parameter as one rank has it: its runs, in order, are the local tensor.

    `transposed` means that what is stored is the transpose of the local matrix (experts of a grouped GEMM).
    """

    dtype: DType
    runs: tuple[MegatronRun, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class MegatronSlice:
    """What the local tensor of one rank is of the whole."""

    pieces: tuple[SlicePiece, ...]
    shape: Shape
    rank: Rank


def fragments_of(parts: Sequence[tuple[MegatronSlice, MegatronStored]]) -> LazyFragments:
    """The fragments of several ranks' slices, rank by rank."""
    plain = all(not stored.transposed and all(run.strides is None for run in stored.runs) for _, stored in parts)
    count = sum(len(stored.runs) for part, stored in parts if prod(part.shape)) if plain else None
    return LazyFragments(lambda: _make(parts), count)


def _make(parts: Sequence[tuple[MegatronSlice, MegatronStored]]) -> Iterator[Fragment]:
    for part, stored in parts:
        if not prod(part.shape):
            continue
        region = Region.of(piece.box for piece in part.pieces)
        for run in stored.runs:
            if run.strides is None and not stored.transposed:
                cut = region.cut(run.start, run.stop)
                yield Fragment(cut, run.spot.file, run.spot.offset, stored.dtype, part.rank)
            else:
                yield from _blockwise(part, stored, run)


def _blockwise(part: MegatronSlice, stored: MegatronStored, run: MegatronRun) -> Iterator[Fragment]:
    """One fragment a block of the local tensor that lies with constant strides in the file."""
    kept = part.shape[::-1] if stored.transposed else part.shape
    strides = run.strides or strides_of(kept)
    at = 0  # elements of the run before this block
    for block in interval_boxes(kept, run.start, run.stop):
        first = 0 if run.strides is not None else at
        at += block.numel
        if stored.transposed:
            block, steps = Box(block.start[::-1], block.shape[::-1]), strides[::-1]
        else:
            steps = strides
        for piece in part.pieces:
            held = Box(_unravel(piece.offset, part.shape), piece.box.shape)
            common = intersect(held, block)
            if common is None:
                continue
            inside = tuple(a - b for a, b in zip(common.start, block.start, strict=True))
            offset = first + sum(i * step for i, step in zip(inside, steps, strict=True))
            away = tuple(a - b for a, b in zip(piece.box.start, held.start, strict=True))
            yield Fragment(
                Region.of((common.shift(away),)),
                run.spot.file,
                run.spot.offset + offset * stored.dtype.itemsize,
                stored.dtype,
                part.rank,
                steps,
            )


def _unravel(flat: int, shape: Shape) -> Shape:
    index: list[int] = []
    for step in strides_of(shape):
        i, flat = divmod(flat, step)
        index.append(i)
    return tuple(index)


@dataclass(frozen=True, slots=True, order=True)
class MegatronRank:
    """A rank that writes files of its own."""

    pp: int
    tp: int
    ep: int

    def __str__(self) -> str:
        return f"pp {self.pp} tp {self.tp} ep {self.ep}"


@dataclass(frozen=True, slots=True)
class StoredScalar:
    """A number of `file`: at `spot`, or `inline` as little-endian bytes where the file keeps a plain number."""

    dtype: DType
    file: str
    spot: FileLocation | None = None
    inline: bytes | None = None

    def fragment(self, rank: Rank) -> Fragment:
        """The number as the only fragment of an atom of no dimensions."""
        offset = self.spot.offset if self.spot is not None else 0
        return Fragment(Region.all_of(()), self.file, offset, self.dtype, rank, inline=self.inline)


def inline_scalar(file: str, value: float) -> StoredScalar:
    """A plain number of a file, in the type that torch's optimizers count steps in."""
    return StoredScalar(FLOAT32, file, inline=struct.pack("<f", value))


@dataclass(slots=True)
class MegatronShard:
    """One rank's part of one parameter."""

    name: str
    shape: Shape  # of the rank's slice
    kinds: dict[str, MegatronStored] = field(default_factory=dict)
    scalars: dict[str, StoredScalar] = field(default_factory=dict)


@dataclass(slots=True)
class MegatronParamGroup:
    """A parameter group as one rank has it."""

    hyper: dict[str, Any]
    names: list[str]


class MegatronShardTable:
    """All holdings of a checkpoint. A name may be held twice by one rank: the tied copy of an embedding."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}  # in the order of the model
        self.groups: list[MegatronParamGroup] = []  # merged over ranks: those with the same settings are one
        self._table: dict[str, list[tuple[MegatronRank, MegatronShard]]] = {}

    def add(self, holder: MegatronRank, held: MegatronShard, role: Role) -> None:
        self.roles.setdefault(held.name, role)
        self._table.setdefault(held.name, []).append((holder, held))

    def add_group(self, group: MegatronParamGroup) -> None:
        known = next((other for other in self.groups if other.hyper == group.hyper), None)
        if known is None:
            self.groups.append(MegatronParamGroup(dict(group.hyper), list(dict.fromkeys(group.names))))
        else:
            known.names = list(dict.fromkeys([*known.names, *group.names]))

    def row(self, name: str) -> list[tuple[MegatronRank, MegatronShard]]:
        """Every holding of `name`, first stage first."""
        return sorted(self._table[name], key=lambda item: item[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)
