"""Computing states: stretches of optimizer tensors, replayed from the base to a step, all states of a stretch at once.

A replay runs in the coordinates of the tensor that the optimizer was called on, because kernels that work in vectors
treat the last few elements of a tensor otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucp import tunables
from ucp.engine.casting import RawArray, raw_dtype
from ucp.engine.regions import RegionReader
from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.log.codecs import bits_type
from ucp.log.reader import Stream
from ucp.log.schema import Block
from ucp.model.checkpoint import COMPUTED, Atom
from ucp.model.dtypes import DType
from ucp.model.region import Region
from ucp.replay.gradients import Gradients, as_torch, consumed, torch_dtype
from ucp.replay.kernels import Kernel
from ucp.replay.stored import Chain, StoredStates
from ucp.replay.stretch import PARAM, Stretch
from ucp.replay.timeline import Update, stood_still

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Origin:
    """A parameter in the base: its states there, and the step of the log that it is of."""

    name: str
    step: int
    counter: int  # updates that the optimizer had counted
    atoms: dict[str, Atom]  # by kind; PARAM is the tensor that the optimizer updates

    def is_padded(self, region: Region) -> bool:
        """Does a region reach past the parameter's shape?"""
        shape = self.atoms[PARAM].shape
        return any(stop > n for box in region.boxes for stop, n in zip(box.stop, shape, strict=True))


@dataclass(slots=True)
class ReplayedTensor:
    """An optimizer tensor of one stream, and what happened to it between the base and the step that is wanted."""

    file: str  # name of its computed files, without the state
    stream: Stream
    index: int  # its number in the stream
    numel: int
    dtype: DType
    kernel: Kernel | None  # None: states come from stored values alone
    kinds: dict[str, DType]  # of the states that there are in the end; PARAM first
    blocks: list[Block]  # by offset
    origins: Mapping[int, Origin]  # by the log's parameter number
    updates: Sequence[Update]
    stored: StoredStates
    last: int
    resumed_at: int = 0
    chunk: int = field(default_factory=lambda: tunables.LOG_BLOCK_ELEMENTS)


class Replay:
    """One stretch on its way from the base to a step."""

    def __init__(self, tensor: ReplayedTensor, number: int, base: SourceFiles) -> None:
        import torch

        self.tensor = tensor
        self.base = base
        self.start = number * tensor.chunk
        self.stop = min(self.start + tensor.chunk, tensor.numel)
        self.blocks = [b for b in tensor.blocks if b.offset < self.stop and b.offset + b.count > self.start]
        self.taken = 0  # updates
        names = [tensor.origins[block.parameter].name for block in self.blocks]
        self._gradients = Gradients(self.blocks, names, self.start, self.stop)
        param = torch.zeros(self.stop - self.start, dtype=torch_dtype(tensor.dtype))
        self.stretch = Stretch(param, resumed_at=tensor.resumed_at)
        self._waiting = sorted(map(self._beginning, self.blocks), key=lambda each: each[0])
        self._updates = iter(tensor.updates)
        self._next = next(self._updates, None)

    def run(self, last: int) -> Stretch:
        """Go on until after step `last`."""
        kernel = self.tensor.kernel
        while self._next is not None and self._next.step <= last:
            update = self._next
            self._next = next(self._updates, None)
            self._load(update.step - 1)
            if len(self._waiting) < len(self.blocks):  # before that, there is nothing to update
                self._update(kernel, update)
        self._load(last)
        return self.stretch

    def take(self, update: Update) -> None:
        """One more update, after all that `run` has taken: for who has its step in hand and no log."""
        self._update(self.tensor.kernel, update)

    def tensor_of(self, kind: str) -> torch.Tensor:
        """A state of the stretch; zeros where no update has made it."""
        import torch

        held = self.stretch.param if kind == PARAM else self.stretch.states.get(kind)
        return held if held is not None else torch.zeros_like(self.stretch.param)

    def _update(self, kernel: Kernel | None, update: Update) -> None:
        if kernel is None:
            return  # every block begins at the last step
        kernel.update(self.stretch, self._gradient(update), update.hyper)
        self.stretch.step += 1
        self.taken += 1

    def _beginning(self, block: Block) -> tuple[int, int, Block, Mapping[str, Chain] | None]:
        """After which step a block is loaded, how many updates its tensor had taken by then, and from what."""
        tensor = self.tensor
        origin = tensor.origins[block.parameter]
        if tensor.stored:
            found = tensor.stored.best(
                block.id, list(tensor.kinds), origin.step, tensor.last, replays=tensor.kernel is not None
            )
            if found is not None:
                step = next(iter(found.values())).step
                counter = origin.counter + sum(origin.step < update.step <= step for update in tensor.updates)
                return step, counter, block, found
        if tensor.kernel is None and not stood_still(tensor.stream, origin.step, tensor.last):
            raise InconsistentError(
                f"parameter {origin.name}: the log has no states of it that lead from step {origin.step} to"
                f" {tensor.last}, and its optimizer cannot be replayed",
                hint="take a step that was logged in full, or convert the base as it is",
            )
        return origin.step, origin.counter, block, None

    def _load(self, step: int) -> None:
        """Put blocks that begin at or before `step` in their places."""
        while self._waiting and self._waiting[0][0] <= step:
            _, counter, block, chains = self._waiting.pop(0)
            self.stretch.step = counter
            for kind, dtype in self.tensor.kinds.items():
                self._load_state(block, kind, dtype, None if chains is None else chains[kind])

    def _load_state(self, block: Block, kind: str, dtype: DType, chain: Chain | None) -> None:
        atom = self.tensor.origins[block.parameter].atoms.get(kind)
        low, high = max(block.offset, self.start), min(block.offset + block.count, self.stop)
        inside = slice(low - block.offset, high - block.offset)
        target = self._target(kind, dtype, made=chain is not None or atom is not None)
        if target is None:
            return
        place = target[low - self.start : high - self.start]
        if chain is not None:
            raw = np.ascontiguousarray(self._stored(block, dtype, atom, chain)[inside]).view(np.uint8)
            place.copy_(as_torch(raw, dtype))
        elif atom is not None and len(place):
            values = np.frombuffer(memory_of(place), raw_dtype(atom.dtype))
            RegionReader(self.base, atom).read(block.region.cut(inside.start, inside.stop), values)

    def _stored(self, block: Block, dtype: DType, atom: Atom | None, chain: Chain) -> RawArray:
        """A state of a block at the end of a chain of stored values, which may begin with the value in the base."""
        if chain.full is not None:
            return self.tensor.stored.follow(chain, None)
        bits = np.zeros(block.count, bits_type(dtype))
        if atom is not None:
            RegionReader(self.base, atom).read(block.region, bits.view(raw_dtype(atom.dtype)))
        return self.tensor.stored.follow(chain, bits)

    def _target(self, kind: str, dtype: DType, *, made: bool) -> torch.Tensor | None:
        """The tensor of a state, made where it should exist."""
        import torch

        if kind == PARAM:
            return self.stretch.param
        known = self.stretch.states.get(kind)
        if known is None:
            kernel, updates = self.tensor.kernel, self.tensor.updates
            value = kernel.initial(kind, updates[0].hyper) if kernel and updates else 0.0
            if value is None and not made:
                return None
            known = torch.full((self.stop - self.start,), value or 0.0, dtype=torch_dtype(dtype))
            self.stretch.states[kind] = known
        return known

    def _gradient(self, update: Update) -> torch.Tensor:
        """What the kernel saw. Good until the next one."""
        import torch

        dtype = self.stretch.param.dtype
        read = self._gradients.read(self.tensor.stream, update.step, dtype if update.scale is None else torch.float32)
        return consumed(read, update.scale, dtype)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data


def file_of(epoch: int, stream: int, tensor: int, last: int) -> str:
    """Name of the computed files of an optimizer tensor after a step, without the state."""
    return f"{COMPUTED}epoch-{epoch:06d}/stream-{stream:05d}/tensor-{tensor:04d}@{last}"
