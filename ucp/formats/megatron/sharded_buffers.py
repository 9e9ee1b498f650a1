"""The distributed optimizer's buffers in sharded checkpoints: flat, without the names of parameters.

`dp_reshardable` stores every bucket as a tensor, `dp_zero_gather_scatter` an object with all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp.errors import InconsistentError
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.buffers import BufferLayout, Seat
from ucp.formats.megatron.fragments import Run, Slice, Stored, fragments_of
from ucp.formats.megatron.local_module import (
    ModuleRank,
    ModuleTensor,
    Whole,
    buffers_of_module,
    layout_of_buffer,
    module_of,
)
from ucp.formats.megatron.sharded import Block, Found, Pieces, ShardedTensor
from ucp.model.box import Box
from ucp.model.checkpoint import MASTER, Atom, Fragment
from ucp.model.layout import Rank

_KEY: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)"
    r"\.bucket_idx_(\d+)\.(\w+)$"
)
_GATHERED: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1$"
)
_HINT: Final = "the layout of the buffers cannot be replayed; take the weights alone with --only weights"


@dataclass(frozen=True, slots=True)
class _BlockSpot:
    """Element `skip` of a block."""

    block: Block
    skip: int
    itemsize: int

    @property
    def file(self) -> str:
        return self.block.file

    @property
    def offset(self) -> int:
        return self.block.locate().offset + self.skip * self.itemsize


class _Bucket:
    """Elements `[first, first + length)` of a flat tensor, whose blocks are searchable by element."""

    def __init__(self, tensor: ShardedTensor, first: int = 0, length: int | None = None) -> None:
        self.tensor = tensor
        self.first = first
        self.length = tensor.shape[0] if length is None else length
        blocks = sorted(tensor.blocks.items(), key=lambda item: item[0].start)
        self._blocks = [block for _, block in blocks]
        self._starts = [box.start[0] for box, _ in blocks]
        self._stops = [box.start[0] + box.shape[0] for box, _ in blocks]

    def is_cut_at(self, seat: Seat) -> bool:
        """Whether blocks start and end where a parameter does; one block says nothing."""
        start, stop = self.first + seat.start, self.first + seat.start + seat.numel
        if len(self._blocks) < 2:
            return True
        at, end = bisect_left(self._starts, start), bisect_left(self._stops, stop)
        return self._starts[at : at + 1] == [start] and self._stops[end : end + 1] == [stop]

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Where elements [start, stop) of the bucket lie."""
        start, stop = start + self.first, stop + self.first
        for number in range(bisect_right(self._stops, start), len(self._blocks)):
            lo, hi = max(start, self._starts[number]), min(stop, self._stops[number])
            if lo >= hi:
                return
            spot = _BlockSpot(self._blocks[number], lo - self._starts[number], self.tensor.dtype.itemsize)
            yield Run(lo - start, hi - start, spot)


_WHOLE: Final = -1  # in place of a bucket's number: all buckets of a buffer, one after the other


@dataclass(frozen=True, slots=True)
class _AtomBlock:
    """A tensor inside an object, as a block."""

    fragment: Fragment

    @property
    def file(self) -> str:
        return self.fragment.file

    @property
    def writer(self) -> int:
        return self.fragment.rank.dp

    def locate(self) -> Found:
        return Found(self.fragment.offset)


@dataclass(frozen=True, slots=True, order=True)
class _Owner:
    """Whose buffers: of which optimizer of a chain (-1: there is no chain), and of which group of ranks."""

    chained: int
    group: int


class Buckets:
    """All buckets of a checkpoint, by owner, buffer, state and number."""

    def __init__(
        self, tensors: Mapping[str, ShardedTensor], objects: Mapping[str, Any], arguments: Arguments, where: str
    ) -> None:
        self._arguments = arguments
        self._where = where
        self._table: dict[_Owner, dict[int, dict[str, dict[int, _Bucket]]]] = {}
        for key, tensor in tensors.items():
            found = _KEY.match(key)
            if not found:
                raise InconsistentError(f"{where}: {key} is a buffer of an unknown kind", hint=_HINT)
            owner = _Owner(-1 if found[1] is None else int(found[1]), int(found[2]))
            buffers = self._table.setdefault(owner, {})
            buffers.setdefault(int(found[3]), {}).setdefault(found[6], {})[int(found[5])] = _Bucket(tensor)
        for key, value in objects.items():
            found = _GATHERED.match(key)
            if found and isinstance(value, dict):
                owner = _Owner(-1 if found[1] is None else int(found[1]), int(found[2]))
                self._table[owner] = _gathered(key, value)

    def place(self, model: Mapping[str, Whole], pieces: dict[str, dict[str, Pieces]]) -> None:
        """Find every parameter in the buckets, and add what is there to `pieces`."""
        for owner, buffers in sorted(self._table.items(), key=lambda item: item[0]):
            rank, tensors = self._module(owner, model)
            self._place_owner(owner, rank, tensors, buffers, pieces)

    def _module(self, owner: _Owner, model: Mapping[str, Whole]) -> tuple[ModuleRank, list[ModuleTensor]]:
        """The rank whose parameters an owner's buffers hold, and those parameters."""
        arguments = self._arguments
        if owner.chained == 1:
            rest, etp = divmod(owner.group, arguments.etp)
            pp, ep = divmod(rest, arguments.ep)
            rank = ModuleRank(pp, 0, ep, etp)
        else:
            pp, tp = divmod(owner.group, arguments.tp)
            rank = ModuleRank(pp, tp, 0, tp % arguments.etp)
        tensors = module_of(rank, model, arguments)
        if owner.chained >= 0:
            tensors = [tensor for tensor in tensors if tensor.is_expert == (owner.chained == 1)]
        return rank, tensors

    def _place_owner(
        self,
        owner: _Owner,
        rank: ModuleRank,
        tensors: Sequence[ModuleTensor],
        buffers: Mapping[int, Mapping[str, Mapping[int, _Bucket]]],
        pieces: dict[str, dict[str, Pieces]],
    ) -> None:
        needed = buffers_of_module(tensors)
        if len(needed) != len(buffers):
            raise InconsistentError(
                f"{self._where}: rank group {owner.group} has {len(buffers)} buffers, its parameters need"
                f" {len(needed)}",
                hint=_HINT,
            )
        for number, mine in zip(sorted(buffers), needed, strict=True):
            layout = layout_of_buffer(mine, tensors, rank, self._arguments, expert=owner.chained == 1)
            for kind, stored in buffers[number].items():
                buckets = _by_layout(stored, layout)
                self._check(owner, kind, buckets, layout)
                for tensor, seat in zip(mine, layout.seats, strict=True):
                    bucket = buckets[seat.bucket]
                    self._check_seat(bucket, seat)
                    _put(pieces, MASTER if kind == "param" else kind, tensor, seat, bucket, rank)

    def _check(self, owner: _Owner, kind: str, buckets: Mapping[int, _Bucket], layout: BufferLayout) -> None:
        lengths = tuple(buckets[number].length for number in sorted(buckets))
        if sorted(buckets) != list(range(len(layout.lengths))) or lengths != layout.lengths:
            raise InconsistentError(
                f"{self._where}: the buckets of '{kind}' of rank group {owner.group} have {list(lengths)} elements, its"
                f" parameters need {list(layout.lengths)}",
                hint=_HINT,
            )

    def _check_seat(self, bucket: _Bucket, seat: Seat) -> None:
        """Megatron cuts blocks where parameters start and end, so that a wrong order of parameters shows."""
        if not bucket.is_cut_at(seat):
            raise InconsistentError(
                f"{self._where}: {bucket.tensor.key} is not cut at elements {seat.start} and"
                f" {seat.start + seat.numel}, where a parameter should lie",
                hint=_HINT,
            )


def _put(
    pieces: dict[str, dict[str, Pieces]],
    kind: str,
    tensor: ModuleTensor,
    seat: Seat,
    bucket: _Bucket,
    rank: ModuleRank,
) -> None:
    for lodger in tensor.lodgers:
        first = seat.start + lodger.shift
        numel = sum(piece.box.numel for piece in lodger.pieces)
        stored = Stored(bucket.tensor.dtype, tuple(bucket.runs(first, first + numel)), lodger.transposed)
        where = Rank(rank.pp, rank.tp, 0, rank.ep if tensor.is_expert else None)
        parts = [(Slice(lodger.pieces, lodger.shape, where), stored)]
        held = pieces.setdefault(lodger.name, {}).setdefault(kind, Pieces(bucket.tensor.dtype))
        held.add_slice(lodger.pieces, fragments_of(parts))


def is_state(key: str) -> bool:
    """Whether an object of this key holds states of parameters."""
    return _GATHERED.match(key) is not None


def _gathered(key: str, value: Mapping[Any, Any]) -> dict[int, dict[str, dict[int, _Bucket]]]:
    """The buffers in an object that one rank gathered from all: by number, state and (as a whole) bucket."""
    found: dict[int, dict[str, dict[int, _Bucket]]] = {}
    numbers = sorted(number for number in value if type(number) is int)
    tables = [table for number in numbers for table in value[number].values() if isinstance(table, dict)]
    for number, table in enumerate(tables):
        for kind, atom in table.items():
            if isinstance(atom, Atom) and len(atom.shape) == 1 and atom.fragments:
                block: Block = _AtomBlock(atom.fragments[0])
                tensor = ShardedTensor(f"{key}: {kind}", atom.shape, atom.dtype, {Box((0,), atom.shape): block})
                found.setdefault(number, {})[str(kind)] = {_WHOLE: _Bucket(tensor)}
    return found


def _by_layout(stored: Mapping[int, _Bucket], layout: BufferLayout) -> Mapping[int, _Bucket]:
    """The buckets, cut out of the whole where that is what is stored."""
    whole = stored.get(_WHOLE)
    if whole is None or whole.length != layout.numel:
        return stored
    return {
        number: _Bucket(whole.tensor, start, length)
        for number, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True))
    }
