"""Tensors of sharded checkpoints (`torch_dist`, `zarr`) as blocks, and the parameters that are stacked in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

from ucp.core.box import Box, Shape, flat_index, strides_of
from ucp.core.checkpoint import MASTER, WEIGHT, Fragment, Rank
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import SlicePiece
from ucp.errors import InconsistentError
from ucp.formats.megatron.mcore_modules import StackedKey, fused_matrix_keys, parse_stacked_key

_STATE: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)$")
_BUCKET: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_GATE, _PROJECTION = "_w", "_v"  # suffixes of keys, if gate and projection have keys of their own
_MASTERS: Final = frozenset({"fp32_param", "param"})


BlockLocation = tuple[int, Shape | None]  # offset in the file in bytes; strides in elements if not row-major


@dataclass(slots=True, eq=False)
class ShardedBlock:
    """A block of a tensor in a file that rank `writer` wrote; `find` locates it when that is needed."""

    file: str
    writer: int
    location: BlockLocation | None = None
    find: Callable[[], BlockLocation] | None = None

    def locate(self) -> BlockLocation:
        if self.location is None:
            assert self.find is not None
            self.location = self.find()
        return self.location


@dataclass(slots=True)
class ShardedTensor:
    """A tensor under one key; its blocks tile it."""

    key: str
    shape: Shape
    dtype: DType
    blocks: dict[Box, ShardedBlock] = field(default_factory=dict)


@dataclass(slots=True)
class ShardedContents:
    """Everything in a sharded checkpoint except its common part. Objects are inert, their tensors are atoms."""

    tensors: dict[str, ShardedTensor]
    objects: dict[str, Any]


MakeFragments = Callable[[], Iterator[Fragment]]


@dataclass(slots=True)
class ShardedState:
    """What a sharded checkpoint holds of one state of one parameter: makers of fragments, and copies of some."""

    dtype: DType
    count: int = 0  # of all fragments, without copies
    copies: list[Sequence[Fragment]] = field(default_factory=list)
    _makers: list[MakeFragments] = field(default_factory=list)
    _slices: set[tuple[SlicePiece, ...]] = field(default_factory=set)

    def fragments(self) -> Iterator[Fragment]:
        for make in self._makers:
            yield from make()

    def add(self, make: MakeFragments, count: int = 1) -> None:
        self._makers.append(make)
        self.count += count

    def replace(self, make: MakeFragments, count: int) -> None:
        self._makers, self.count = [make], count

    def add_slice(self, pieces: tuple[SlicePiece, ...], fragments: Sequence[Fragment]) -> None:
        """Add a rank's slice; it is a copy if another rank already had the same."""
        if pieces in self._slices:
            self.copies.append(fragments)
        else:
            self._slices.add(pieces)
            self.add(lambda: iter(fragments), len(fragments))


StateTable = dict[str, dict[str, ShardedState]]  # parameter → kind → state


class UnstackedParameters:
    """Parameters taken out of the tensors that stack them; `where` names the checkpoint in messages."""

    def __init__(self, sharded: ShardedContents, where: str) -> None:
        self.shapes: dict[str, Shape] = {}  # by parameter, of the whole, with the padding of the vocabulary
        self.states: StateTable = {}
        self.buckets: dict[str, ShardedTensor] = {}  # flat buffers, which do not name parameters
        states: list[tuple[str, str, ShardedTensor]] = []
        stacks: dict[str, Shape] = {}  # key of the model → shape of its whole stack
        for key, tensor in _join_fused(sharded.tensors).items():
            match = _STATE.match(key)
            if match:
                kind = MASTER if match[1] in _MASTERS else match[1]
                states.append((kind, match[2], tensor))
            elif _BUCKET.match(key):
                self.buckets[key] = tensor
            else:
                stacks[key] = tensor.shape
                self._add_blocks(parse_stacked_key(key), WEIGHT, tensor)
        for kind, key, tensor in states:
            stack = parse_stacked_key(key)
            whole = stacks.get(key, tensor.shape)
            if tensor.shape == whole:
                self._add_blocks(stack, kind, tensor)
            else:
                self._add_ranges(stack, kind, tensor, whole, where)

    def _add(self, name: str, kind: str, tensor: ShardedTensor, shape: Shape, make: MakeFragments) -> None:
        self.shapes.setdefault(name, shape)
        self.states.setdefault(name, {}).setdefault(kind, ShardedState(tensor.dtype)).add(make)

    def _add_blocks(self, stack: StackedKey, kind: str, tensor: ShardedTensor) -> None:
        """Add the blocks of a stack: each has a block of every parameter that it overlaps."""
        axes = len(stack.axes)
        for box, block in tensor.blocks.items():
            part = Box(box.start[axes:], box.shape[axes:])
            for inside in product(*(range(n) for n in box.shape[:axes])):
                index = tuple(a + i for a, i in zip(box.start[:axes], inside, strict=True))
                make = partial(_block_fragment, block, box, inside, part, tensor.dtype)
                self._add(stack.name(index), kind, tensor, tensor.shape[axes:], make)

    def _add_ranges(self, stack: StackedKey, kind: str, tensor: ShardedTensor, whole: Shape, where: str) -> None:
        """Add flat ranges of each rank's slice: the tensor is a grid of slices, each flattened into the last axis."""
        grid = tensor.shape[:-1]
        if len(grid) != len(whole) or any(n % cells for n, cells in zip(whole, grid, strict=True)):
            raise InconsistentError(
                f"{where}: {tensor.key} is stored as {list(tensor.shape)}, which is not a grid of slices of"
                f" {list(whole)}"
            )
        local = tuple(n // cells for n, cells in zip(whole, grid, strict=True))
        axes = len(stack.axes)
        numel = prod(local[axes:])
        for box, block in tensor.blocks.items():
            lo, hi = box.start[-1], box.start[-1] + box.shape[-1]
            for number, steps in enumerate(product(*(range(n) for n in box.shape[:-1]))):
                cell = tuple(a + i for a, i in zip(box.start[:-1], steps, strict=True))
                corner = tuple(i * n for i, n in zip(cell, local, strict=True))
                rank_slice = Region.of((Box(corner[axes:], local[axes:]),))
                for inside in product(*(range(n) for n in local[:axes])):
                    at = flat_index(inside, local[:axes]) * numel
                    start, stop = max(lo, at), min(hi, at + numel)
                    if start >= stop:
                        continue
                    index = tuple(a + i for a, i in zip(corner[:axes], inside, strict=True))
                    make = partial(
                        _range_fragment,
                        block,
                        rank_slice.cut(start - at, stop - at),
                        number * box.shape[-1] + start - lo,
                        tensor.dtype,
                    )
                    self._add(stack.name(index), kind, tensor, whole[axes:], make)


def _join_fused(tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return the tensors, with the parts of a fused matrix, which have keys of their own, joined into one."""
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
    """Join tensors that follow each other along an axis."""
    first = parts[0]
    blocks: dict[Box, ShardedBlock] = {}
    rows = 0
    for part in parts:
        shift = tuple(rows if i == axis else 0 for i in range(len(first.shape)))
        blocks.update((box.shift(shift), block) for box, block in part.blocks.items())
        rows += part.shape[axis]
    return ShardedTensor(key, (*first.shape[:axis], rows, *first.shape[axis + 1 :]), first.dtype, blocks)


def _join_gates(tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return the tensors, with gate and projection of an MLP joined if they have keys of their own (`_w`, `_v`)."""
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
    """Yield the fragment of a region that is contiguous, `skip` elements into a block."""
    offset = block.locate()[0] + skip * dtype.itemsize
    yield Fragment(region, block.file, offset, dtype, Rank(dp=block.writer))


def _block_fragment(block: ShardedBlock, box: Box, inside: Shape, part: Box, dtype: DType) -> Iterator[Fragment]:
    """Yield the fragment of the parameter at index `inside` of a block of stacked parameters."""
    offset, own_strides = block.locate()
    strides = own_strides or strides_of(box.shape)
    skip = sum(i * step for i, step in zip(inside, strides, strict=False))
    own = strides[len(inside) :]
    yield Fragment(
        Region.of((part,)),
        block.file,
        offset + skip * dtype.itemsize,
        dtype,
        Rank(dp=block.writer),
        None if own == strides_of(part.shape) else own,
    )
