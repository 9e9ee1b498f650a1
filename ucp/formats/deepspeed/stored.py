"""Where the local tensor of one holder lies: whole in one file, or cut over the data-parallel ranks by ZeRO.

A *run* is a flat interval of the local tensor that lies contiguous in one file. Runs are computed when asked for: a
checkpoint of a thousand ranks has millions of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from ucp.files.inert import TensorRef
from ucp.model.box import Shape
from ucp.model.dtypes import DType


class Run(NamedTuple):
    """Elements `[start, stop)` of a local tensor: contiguous in `file` (relative to the root) from byte `offset` on."""

    start: int
    stop: int
    file: str
    offset: int
    dp: int = 0
    strides: Shape | None = None  # in elements, where the whole local tensor lies strided in the file
    inline: bytes | None = None


class Stored(Protocol):
    """One state of one parameter as one holder has it."""

    @property
    def dtype(self) -> DType: ...

    @property
    def count(self) -> int:
        """Number of runs."""

    def runs(self) -> Iterator[Run]:
        """The runs in order; together they are the whole local tensor."""


class Archive(Protocol):
    """A file that knows where its tensors lie."""

    def position(self, ref: TensorRef) -> int:
        """Byte of the file where the first element of `ref` lies."""

    def number(self, ref: TensorRef) -> bytes | None:
        """The bytes of a one-element tensor, where they are known already."""


class Spot:
    """A tensor of a file. Its byte offset is looked up when it is first needed (that costs a read of the zip entry)."""

    __slots__ = ("_archive", "_offset", "dp", "file", "ref")

    def __init__(
        self, file: str, archive: Archive | None, ref: TensorRef | None, dp: int = 0, offset: int = -1
    ) -> None:
        self.file = file
        self.dp = dp
        self.ref = ref
        self._archive = archive
        self._offset = offset

    @property
    def offset(self) -> int:
        if self._offset < 0:
            assert self._archive is not None
            assert self.ref is not None
            self._offset = self._archive.position(self.ref)
        return self._offset

    def number(self) -> bytes | None:
        """The bytes of a one-element tensor, where they are known without reading the file again."""
        return None if self._archive is None or self.ref is None else self._archive.number(self.ref)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """All of the local tensor in one file."""

    spot: Spot
    dtype: DType
    shape: Shape
    strides: Shape | None = None

    @property
    def count(self) -> int:
        return 1 if prod(self.shape) else 0

    def runs(self) -> Iterator[Run]:
        spot = self.spot
        if numel := prod(self.shape):
            yield Run(0, numel, spot.file, spot.offset, spot.dp, self.strides)


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar that the file keeps as a plain number: its little-endian bytes."""

    file: str
    dtype: DType
    data: bytes
    dp: int = 0

    @property
    def count(self) -> int:
        return 1

    def runs(self) -> Iterator[Run]:
        yield Run(0, 1, self.file, 0, self.dp, None, self.data)


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Elements `[begin, begin + numel)` of a flat buffer that is cut into shards of `per` elements (ZeRO-1, 2)."""

    spots: Sequence[Spot]
    dtype: DType
    per: int
    begin: int
    numel: int

    @property
    def count(self) -> int:
        if not self.numel:
            return 0
        return (self.begin + self.numel - 1) // self.per - self.begin // self.per + 1

    def runs(self) -> Iterator[Run]:
        begin, end, per = self.begin, self.begin + self.numel, self.per
        itemsize = self.dtype.itemsize
        shard = begin // per if self.numel else 0
        at = begin
        while at < end:
            stop = min(end, (shard + 1) * per)
            spot = self.spots[shard]
            offset = spot.offset + (at - shard * per) * itemsize
            yield Run(at - begin, stop - begin, spot.file, offset, spot.dp)
            at = stop
            shard += 1


@dataclass(frozen=True, slots=True)
class EvenSlices:
    """A tensor cut into slices of `per` elements, one a rank, each `at` elements into that rank's buffer (ZeRO-3)."""

    spots: Sequence[Spot]
    dtype: DType
    per: int
    at: int
    numel: int

    @property
    def count(self) -> int:
        return -(-self.numel // self.per) if self.numel else 0

    def runs(self) -> Iterator[Run]:
        for rank in range(self.count):
            start = rank * self.per
            spot = self.spots[rank]
            offset = spot.offset + self.at * self.dtype.itemsize
            yield Run(start, min(start + self.per, self.numel), spot.file, offset, spot.dp)
