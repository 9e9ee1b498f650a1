"""`dp_reshardable` state: the distributed optimizer's buckets as flat tensors that name no parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
from ucp.formats.megatron.sharded import Block, Pieces, ShardedTensor
from ucp.model.box import Box
from ucp.model.checkpoint import MASTER
from ucp.model.layout import Rank

_KEY: Final = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)"
    r"\.bucket_idx_(\d+)\.(\w+)$"
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


@dataclass(frozen=True, slots=True, order=True)
class _Owner:
    """Whose buffers: of which optimizer of a chain (-1: there is no chain), and of which group of ranks."""

    chained: int
    group: int


class Buckets:
    """All buckets of a checkpoint, by owner, buffer, state and number."""

    def __init__(self, tensors: Mapping[str, ShardedTensor], arguments: Arguments, where: str) -> None:
        self._arguments = arguments
        self._where = where
        self._table: dict[_Owner, dict[int, dict[str, dict[int, ShardedTensor]]]] = {}
        for key, tensor in tensors.items():
            found = _KEY.match(key)
            if not found:
                raise InconsistentError(f"{where}: {key} is a buffer of an unknown kind", hint=_HINT)
            owner = _Owner(-1 if found[1] is None else int(found[1]), int(found[2]))
            buffers = self._table.setdefault(owner, {})
            buffers.setdefault(int(found[3]), {}).setdefault(found[6], {})[int(found[5])] = tensor

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
        buffers: Mapping[int, Mapping[str, Mapping[int, ShardedTensor]]],
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
            for kind, buckets in buffers[number].items():
                self._check(owner, kind, buckets, layout)
                for tensor, seat in zip(mine, layout.seats, strict=True):
                    bucket = buckets[seat.bucket]
                    if len(bucket.blocks) > 1:
                        self._check_seat(bucket, seat)
                    _put(pieces, MASTER if kind == "param" else kind, tensor, seat, bucket, rank)

    def _check(self, owner: _Owner, kind: str, buckets: Mapping[int, ShardedTensor], layout: BufferLayout) -> None:
        lengths = tuple(buckets[number].shape[0] for number in sorted(buckets))
        if sorted(buckets) != list(range(len(layout.lengths))) or lengths != layout.lengths:
            raise InconsistentError(
                f"{self._where}: the buckets of '{kind}' of rank group {owner.group} have {list(lengths)} elements, its"
                f" parameters need {list(layout.lengths)}",
                hint=_HINT,
            )

    def _check_seat(self, bucket: ShardedTensor, seat: Seat) -> None:
        """Megatron cuts blocks where parameters start and end, so that a wrong order of parameters shows."""
        starts = {box.start[0] for box in bucket.blocks}
        stops = {box.start[0] + box.shape[0] for box in bucket.blocks}
        if seat.start not in starts or seat.start + seat.numel not in stops:
            raise InconsistentError(
                f"{self._where}: {bucket.key} is not cut at elements {seat.start} and {seat.start + seat.numel}, where"
                " a parameter should lie",
                hint=_HINT,
            )


def _put(
    pieces: dict[str, dict[str, Pieces]],
    kind: str,
    tensor: ModuleTensor,
    seat: Seat,
    bucket: ShardedTensor,
    rank: ModuleRank,
) -> None:
    for lodger in tensor.lodgers:
        first = seat.start + lodger.shift
        numel = sum(piece.box.numel for piece in lodger.pieces)
        stored = Stored(bucket.dtype, tuple(_runs(bucket, first, first + numel)), lodger.transposed)
        where = Rank(rank.pp, rank.tp, 0, rank.ep if tensor.is_expert else None)
        parts = [(Slice(lodger.pieces, lodger.shape, where), stored)]
        held = pieces.setdefault(lodger.name, {}).setdefault(kind, Pieces(bucket.dtype))
        held.add_slice(lodger.pieces, fragments_of(parts))


def _runs(bucket: ShardedTensor, start: int, stop: int) -> Iterator[Run]:
    for box, block in sorted(bucket.blocks.items(), key=_first):
        lo, hi = max(start, box.start[0]), min(stop, box.start[0] + box.shape[0])
        if lo < hi:
            yield Run(lo - start, hi - start, _BlockSpot(block, lo - box.start[0], bucket.dtype.itemsize))


def _first(item: tuple[Box, Block]) -> int:
    return item[0].start[0]
