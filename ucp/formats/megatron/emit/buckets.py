"""The distributed optimizer's state in its `dp_reshardable` flavour: every bucket of every buffer as a flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.files.torchzip_writer import Fill, Zeros
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.emit.buffers import STATES, Buffer, Buffers
from ucp.formats.megatron.emit.optimizer import has_apart_experts
from ucp.formats.megatron.local_module import ModuleRank, ModuleTensor
from ucp.model.dtypes import DType

_Content = Fill | Zeros


@dataclass(frozen=True, slots=True)
class Owner:
    """Ranks that share the state of one optimizer: `group` is their number, `rank` the first of them."""

    chained: int | None  # which optimizer of a chain; None where there is no chain
    group: int
    rank: ModuleRank

    @property
    def prefix(self) -> str:
        """What stands before the keys of this owner's state."""
        chain = "" if self.chained is None else f"chained_{self.chained}."
        return f"{chain}optimizer.distributed.dp_group_idx_{self.group}."


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements from `start` on of a bucket."""

    start: int
    contents: tuple[_Content, ...]

    @property
    def numel(self) -> int:
        return sum(content.numel for content in self.contents)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One state of a bucket: a flat tensor of `numel` elements under `key`. Chunks tile it."""

    key: str
    numel: int
    chunks: tuple[Chunk, ...]


def owners_of(arguments: Arguments) -> Iterator[Owner]:
    """Everybody who has optimizer state of their own: of dense parameters, then of experts where these are apart."""
    apart = has_apart_experts(arguments)
    tp, etp, ep = arguments.tp, arguments.etp, arguments.ep
    for number in range(arguments.pp * tp):
        yield Owner(0 if apart else None, number, ModuleRank(number // tp, number % tp, 0, number % tp % etp))
    for number in range(arguments.pp * ep * etp) if apart else ():
        stage, rest = divmod(number, ep * etp)
        yield Owner(1, number, ModuleRank(stage, rest % etp, rest // etp, rest % etp))


class OwnState:
    """What a sharded checkpoint keeps of one owner."""

    def __init__(self, owner: Owner, buffers: Buffers, arguments: Arguments) -> None:
        self._owner = owner
        self._source = buffers
        self._buffers = buffers.of(owner.rank, experts=None if owner.chained is None else owner.chained == 1)
        self._dp = arguments.expert_dp if owner.chained == 1 else arguments.dp

    def buckets(self) -> Iterator[Bucket]:
        """Every state of every bucket."""
        for number, buffer in enumerate(self._buffers):
            stem = f"{self._owner.prefix}gbuf_idx_{number}.dtype_{_spelled(buffer.key)}.bucket_idx_"
            for bucket, length in enumerate(buffer.layout.lengths):
                for state in STATES:
                    yield Bucket(f"{stem}{bucket}.{state}", length, tuple(self._chunks(buffer, bucket, state)))

    def _chunks(self, buffer: Buffer, bucket: int, state: str) -> Iterator[Chunk]:
        """A bucket, cut where tensors start and end, and where the share of a data-parallel rank does."""
        share = buffer.layout.padded[bucket] // self._dp
        at = 0
        for start, stop, tensor in _tiles(buffer, bucket):
            contents: list[Fill] | list[Zeros] = (
                [Zeros(stop - start)] if tensor is None else self._source.fills(tensor, state)
            )
            while at < stop:
                end = min(stop, (at // share + 1) * share)
                yield Chunk(at, tuple(_cut(contents, at - start, end - start)))
                at = end

    def objects(self, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Key and value of what is no tensor; `tree` is what the optimizer has besides states."""
        layouts = [(buffer.key, buffer.layout) for buffer in self._buffers]
        sizes = {
            "per_bucket_numel": [{key: list(layout.padded)} for key, layout in layouts],
            "per_bucket_numel_unpadded": [{key: list(layout.lengths)} for key, layout in layouts],
        }
        for name, value in {**tree, **sizes}.items():
            yield f"{self._owner.prefix}{name}/shard_0_1", value


def _tiles(buffer: Buffer, bucket: int) -> Iterator[tuple[int, int, ModuleTensor | None]]:
    """The tensors of a bucket in order, each as [start, stop); None for the gaps between them."""
    seats = zip(buffer.layout.seats, buffer.tensors, strict=True)
    here = sorted((seat.start, tensor.numel, i) for i, (seat, tensor) in enumerate(seats) if seat.bucket == bucket)
    at = 0
    for start, numel, i in here:
        if start > at:
            yield at, start, None
        at = start + numel
        yield start, at, buffer.tensors[i]
    if at < buffer.layout.lengths[bucket]:
        yield at, buffer.layout.lengths[bucket], None


def _cut(contents: Sequence[_Content], start: int, stop: int) -> Iterator[_Content]:
    """Elements [start, stop) of contents that are laid end to end."""
    at = 0
    for content in contents:
        lo, hi = max(start - at, 0), min(stop - at, content.numel)
        if lo < hi:
            yield Zeros(hi - lo) if isinstance(content, Zeros) else Fill(content.atom, content.region.cut(lo, hi))
        at += content.numel


def _spelled(key: tuple[DType, DType]) -> str:
    """The dtypes as Python prints torch's."""
    return f"(torch.{key[0].name}, torch.{key[1].name})"
