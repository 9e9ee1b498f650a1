"""Sharded checkpoints (`torch_dist`, `zarr`): tensors as blocks, and the parameters that are stacked in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final, Protocol

from ucp.core.box import Box, Shape, flat_index, strides_of
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment
from ucp.core.dtypes import DType
from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.core.rules import SlicePiece
from ucp.errors import InconsistentError
from ucp.formats.megatron.mcore_modules import StackedKey, fused_matrix_keys, parse_stacked_key

_STATE: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)$")
_BUCKET: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_GATE, _PROJECTION = "_w", "_v"  # ends of keys, where every rank's shards have keys of their own
_MASTERS: Final = frozenset({"fp32_param", "param"})


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where a block starts in its file, in bytes; `strides` (in elements) where it does not lie row-major."""

    offset: int
    strides: Shape | None = None


class ShardedBlock(Protocol):
    """A block of a tensor in a file."""

    @property
    def file(self) -> str: ...

    @property
    def writer(self) -> int:
        """The rank that wrote it."""

    def locate(self) -> BlockLocation: ...


@dataclass(slots=True)
class ShardedTensor:
    """A tensor under one key; its blocks tile it."""

    key: str
    shape: Shape
    dtype: DType
    blocks: dict[Box, ShardedBlock] = field(default_factory=dict)


@dataclass(slots=True)
class ShardedContents:
    """Everything in a sharded checkpoint but its common part. Objects are inert, their tensors atoms."""

    tensors: dict[str, ShardedTensor]
    objects: dict[str, Any]


MakeFragments = Callable[[], Iterator[Fragment]]


@dataclass(slots=True)
class ShardedState:
    """What a sharded checkpoint holds of one state of one parameter: makers of fragments, and copies of some."""

    dtype: DType
    makers: list[MakeFragments] = field(default_factory=list)
    count: int = 0  # fragments that the makers give
    copies: list[Sequence[Fragment]] = field(default_factory=list)
    _slices: set[tuple[SlicePiece, ...]] = field(default_factory=set)

    def fragments(self) -> Iterator[Fragment]:
        for make in self.makers:
            yield from make()

    def add(self, make: MakeFragments, count: int = 1) -> None:
        self.makers.append(make)
        self.count += count

    def replace(self, make: MakeFragments, count: int) -> None:
        self.makers, self.count = [make], count

    def add_slice(self, pieces: tuple[SlicePiece, ...], fragments: Sequence[Fragment]) -> None:
        """A rank's slice; one that another rank already gave is a copy."""
        if pieces in self._slices:
            self.copies.append(fragments)
        else:
            self._slices.add(pieces)
            self.add(lambda: iter(fragments), len(fragments))


class UnstackedParameters:
    """Parameters taken out of the tensors that stack them: shapes by name, pieces by name and kind."""

    def __init__(self, sharded: ShardedContents, where: str) -> None:
        self.shapes: dict[str, Shape] = {}  # of the whole, vocabulary padding included
        self.pieces: dict[str, dict[str, ShardedState]] = {}
        self.buckets: dict[str, ShardedTensor] = {}  # flat buffers, which know no parameters
        states: list[tuple[str, str, ShardedTensor]] = []
        globals_: dict[str, Shape] = {}  # model key → shape of its whole stack
        for key, tensor in _join_fused(sharded.tensors).items():
            found = _STATE.match(key)
            if found:
                kind = MASTER if found[1] in _MASTERS else found[1]
                states.append((kind, found[2], tensor))
            elif _BUCKET.match(key):
                self.buckets[key] = tensor
            else:
                globals_[key] = tensor.shape
                self._blocks(parse_stacked_key(key), WEIGHT, tensor)
        for kind, key, tensor in states:
            stack = parse_stacked_key(key)
            whole = globals_.get(key, tensor.shape)
            if tensor.shape == whole:
                self._blocks(stack, kind, tensor)
            else:
                self._ranges(stack, kind, tensor, whole, where)

    def _put(self, name: str, kind: str, tensor: ShardedTensor, shape: Shape, make: MakeFragments) -> None:
        self.shapes.setdefault(name, shape)
        self.pieces.setdefault(name, {}).setdefault(kind, ShardedState(tensor.dtype)).add(make)

    def _blocks(self, stack: StackedKey, kind: str, tensor: ShardedTensor) -> None:
        """Blocks of the stack: each is a block of every parameter that it reaches into."""
        axes = len(stack.axes)
        for box, block in tensor.blocks.items():
            part = Box(box.start[axes:], box.shape[axes:])
            for inside in product(*(range(n) for n in box.shape[:axes])):
                index = tuple(a + i for a, i in zip(box.start[:axes], inside, strict=True))
                make = partial(_block_fragment, block, box, inside, part, tensor.dtype)
                self._put(stack.name(index), kind, tensor, tensor.shape[axes:], make)

    def _ranges(self, stack: StackedKey, kind: str, tensor: ShardedTensor, whole: Shape, where: str) -> None:
        """Flat ranges of each rank's slice: the stored shape is a grid of slices with the elements of one behind it."""
        grid = tensor.shape[:-1]
        if len(grid) != len(whole) or any(n % cells for n, cells in zip(whole, grid, strict=True)):
            raise InconsistentError(
                f"{where}: {tensor.key} is stored as {list(tensor.shape)}, which is no grid of slices of {list(whole)}"
            )
        local = tuple(n // cells for n, cells in zip(whole, grid, strict=True))
        axes = len(stack.axes)
        numel = prod(local[axes:])
        for box, block in tensor.blocks.items():
            lo, hi = box.start[-1], box.start[-1] + box.shape[-1]
            for number, steps in enumerate(product(*(range(n) for n in box.shape[:-1]))):
                cell = tuple(a + i for a, i in zip(box.start[:-1], steps, strict=True))
                corner = tuple(i * n for i, n in zip(cell, local, strict=True))
                slice_ = Region.of((Box(corner[axes:], local[axes:]),))
                for inside in product(*(range(n) for n in local[:axes])):
                    at = flat_index(inside, local[:axes]) * numel
                    start, stop = max(lo, at), min(hi, at + numel)
                    if start >= stop:
                        continue
                    index = tuple(a + i for a, i in zip(corner[:axes], inside, strict=True))
                    make = partial(
                        _range_fragment,
                        block,
                        slice_.cut(start - at, stop - at),
                        number * box.shape[-1] + start - lo,
                        tensor.dtype,
                    )
                    self._put(stack.name(index), kind, tensor, whole[axes:], make)


def _join_fused(tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """The tensors, with those as one that are parts of a matrix under keys of their own."""
    joined: dict[str, ShardedTensor] = {}
    for key, tensor in _join_gates(tensors).items():
        family = fused_matrix_keys(key)
        parts = [tensors.get(f"{family.key}.{suffix}") for suffix in family.suffixes] if family else []
        known = [part for part in parts if part is not None]
        if family is None or len(known) < len(parts) or len(tensor.shape) < family.dimensions:
            joined[key] = tensor
        elif family.key not in joined:
            joined[family.key] = _concatenate(family.key, known, len(tensor.shape) - family.dimensions)
    return joined


def _concatenate(key: str, parts: Sequence[ShardedTensor], axis: int) -> ShardedTensor:
    """One tensor of several that follow each other along an axis."""
    first = parts[0]
    blocks: dict[Box, ShardedBlock] = {}
    rows = 0
    for part in parts:
        away = tuple(rows if i == axis else 0 for i in range(len(first.shape)))
        blocks.update((box.shift(away), block) for box, block in part.blocks.items())
        rows += part.shape[axis]
    return ShardedTensor(key, (*first.shape[:axis], rows, *first.shape[axis + 1 :]), first.dtype, blocks)


def _join_gates(tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """The tensors; gate and projection of an MLP as one where they have keys of their own (`_w`, `_v`)."""
    joined: dict[str, ShardedTensor] = {}
    for key, tensor in tensors.items():
        stem = key[: -len(_GATE)]
        if key.endswith(_PROJECTION) and stem + _GATE in tensors and ".linear_fc1." in key:
            continue
        other = tensors.get(stem + _PROJECTION) if key.endswith(_GATE) and ".linear_fc1." in key else None
        if other is None or other.shape != tensor.shape:
            joined[key] = tensor
            continue
        axis = len(tensor.shape) - (1 if stem.endswith("bias") else 2)
        joined[stem] = _concatenate(stem, (tensor, other), axis)
    return joined


def _range_fragment(block: ShardedBlock, region: Region, skip: int, dtype: DType) -> Iterator[Fragment]:
    """A region that lies contiguous, `skip` elements into a block."""
    offset = block.locate().offset + skip * dtype.itemsize
    yield Fragment(region, block.file, offset, dtype, Rank(dp=block.writer))


def _block_fragment(block: ShardedBlock, box: Box, inside: Shape, part: Box, dtype: DType) -> Iterator[Fragment]:
    """The parameter at index `inside` of a block of stacked parameters."""
    found = block.locate()
    strides = found.strides or strides_of(box.shape)
    skip = sum(i * step for i, step in zip(inside, strides, strict=False))
    own = strides[len(inside) :]
    plain = own == strides_of(part.shape)
    yield Fragment(
        Region.of((part,)),
        block.file,
        found.offset + skip * dtype.itemsize,
        dtype,
        Rank(dp=block.writer),
        None if plain else own,
    )
