"""One optimizer tensor that a shadow holds, in stretches, and what a step does to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.log.codecs import Bits, apply_difference, bits_type
from ucp.log.kinds import BUFFER, parse_own
from ucp.log.reader import StoredBlock, Stream
from ucp.log.schema import Block, StreamSchema
from ucp.log.stream import Memory
from ucp.log.walk import StreamScan
from ucp.model.box import Shape
from ucp.model.dtypes import DType
from ucp.replay.chunks import Replay, ReplayedTensor, memory_of
from ucp.replay.gradients import as_torch, torch_dtype
from ucp.replay.kernels import PARAM
from ucp.replay.stored import PARAM_NAMES
from ucp.replay.timeline import Update, hyper_of
from ucp.shadow.intake import ArrivedStep


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A buffer, or a state with a shape of its own. Another takes its place when it changes."""

    shape: Shape
    dtype: DType
    data: bytes

    @staticmethod
    def of(shape: Shape, block: StoredBlock) -> HeldValue:
        return HeldValue(shape, block.dtype, block.bits().tobytes())


@dataclass(frozen=True, slots=True)
class Change:
    """Elements `[low, high)` of a state of a stretch are these now."""

    replay: Replay
    kind: str
    dtype: DType
    low: int
    high: int
    bits: Bits

    def make(self) -> None:
        """Put them in their place. The stretch must be nobody else's."""
        import torch

        stretch = self.replay.stretch
        held = stretch.param if self.kind == PARAM else stretch.states.get(self.kind)
        if held is None:
            held = stretch.states[self.kind] = torch.zeros(len(stretch.param), dtype=torch_dtype(self.dtype))
        held[self.low : self.high] = as_torch(np.ascontiguousarray(self.bits).view(np.uint8), self.dtype)


class ArrivedStream(Stream):
    """A stream of which only the step that is being applied exists."""

    def __init__(self, folder: Path, schema: StreamSchema) -> None:
        super().__init__(folder, schema, StreamScan(folder, schema.stream))
        self.now: ArrivedStep | None = None

    def read_block(self, step: int, block: int, room: Memory | None = None) -> StoredBlock | None:
        del step, room
        return None if self.now is None else self.now.blocks.get(block)


class HeldTensor:
    """An optimizer tensor, or a part of it, in stretches that stay in the CPU's cache with their states."""

    def __init__(
        self, tensor: ReplayedTensor, stream: ArrivedStream, base: SourceFiles, held: tuple[int, int], *, fresh: bool
    ) -> None:
        """Load the state after `tensor.last`. `fresh` says that nothing of its epoch has happened by then.

        `held` are the elements `[start, stop)` that are loaded; they begin and end where stretches do.
        """
        import torch

        self.stream = stream
        self.index = tensor.index
        self.group = stream.schema.tensors[tensor.index].group
        self.kernel = tensor.kernel
        self.numel = tensor.numel
        self.chunk = tensor.chunk
        self.held = held
        self.first_block = tensor.blocks[0].id if tensor.blocks else -1
        self.blocks = [b for b in tensor.blocks if b.offset < held[1] and b.offset + b.count > held[0]]
        self.is_padded = any(tensor.origins[b.parameter].is_padded(b.region) for b in tensor.blocks)
        self.names = [origin.name for origin in tensor.origins.values()]
        self.own: dict[str, HeldValue] = {}  # states with shapes of their own, of a log of states
        self.set_at: int | None = None  # the step whose values were taken last, where it is a log of states
        self.replays = []
        live = replace(tensor, stream=stream, updates=())
        for number in range(held[0] // tensor.chunk, -(-held[1] // tensor.chunk)):
            replay = Replay(tensor, number, base)
            with torch.no_grad():
                replay.run(tensor.last)
            if fresh:
                replay.stretch.resumed_at = replay.stretch.step
            replay.tensor = live
            self.replays.append(replay)

    @property
    def is_whole(self) -> bool:
        """Is all of the tensor held here?"""
        return self.held == (0, self.numel)

    @property
    def counter(self) -> int:
        """Updates that the optimizer has counted; of a log of states that is a state like any other, and 0 here."""
        return 0 if self.kernel is None else max((replay.stretch.step for replay in self.replays), default=0)

    @property
    def kinds(self) -> dict[str, str]:
        """The states that there are, with the names of their types; the tensor itself first."""
        found = {PARAM: self.replays[0].stretch.param} if self.replays else {}
        for replay in self.replays:
            found.update(replay.stretch.states)
        return {kind: str(tensor.dtype).removeprefix("torch.") for kind, tensor in found.items()}

    def update_in(self, arrived: ArrivedStep, constants: Mapping[str, Any]) -> Update | None:
        """What the step's gradients do to this tensor; None where they leave it alone."""
        record = arrived.record
        scalars = next((one for one in record.groups if one.group == self.group), None)
        if self.kernel is None or record.skipped or scalars is None or not scalars.stepped:
            return None
        there = [block.id in arrived.blocks for block in self.blocks]
        if not any(there):
            return None
        if not all(there):
            raise InconsistentError(
                f"stream {self.stream.number}, step {arrived.step}: some blocks of optimizer tensor {self.index} have"
                " gradients and some have none"
            )
        if self.kernel.counts and 0 <= scalars.opt_step < self.counter:
            raise InconsistentError(
                f"stream {self.stream.number}, step {arrived.step}: the job's optimizer had counted"
                f" {scalars.opt_step} updates before it, the shadow has {self.counter}",
                hint="the base is not of this run, or not of the step that it says",
            )
        scale = None if record.scale is None else float(record.scale)
        return Update(arrived.step, hyper_of(constants, scalars), scale, scalars.opt_step)

    def changes_in(self, arrived: ArrivedStep, kinds: Sequence[str]) -> list[Change]:
        """What the step says that the states are now, where it is a log of states. Nothing is changed yet."""
        values = arrived.values
        found: list[Change] = []
        if self.kernel is not None or not (values.full or values.differences):
            return found
        for state, name in enumerate(kinds):
            kind = PARAM if name in PARAM_NAMES else name
            for block in () if name == BUFFER or parse_own(name) is not None else self.blocks:
                full = values.full.get((block.id, state))
                other = values.differences.get((block.id, state))
                if full is not None:
                    found.extend(self._changes(block, kind, full.dtype, full.bits()))
                elif other is not None:
                    self._check_difference(arrived.step, other[1], kind)
                    found.extend(self._changes(block, kind, other[0].dtype, other[0].bits(), is_difference=True))
        return found

    def _changes(
        self, block: Block, kind: str, dtype: DType, bits: Bits, *, is_difference: bool = False
    ) -> Iterator[Change]:
        for replay in self.replays:
            low, high = max(block.offset, replay.start), min(block.offset + block.count, replay.stop)
            if low >= high:
                continue
            some = bits[low - block.offset : high - block.offset]
            low, high = low - replay.start, high - replay.start
            held = replay.stretch.param if kind == PARAM else replay.stretch.states.get(kind)
            if (held is None and is_difference) or (held is not None and held.dtype != torch_dtype(dtype)):
                raise InconsistentError(
                    f"stream {self.stream.number}, optimizer tensor {self.index}: the job logs {kind} as {dtype}, the"
                    f" shadow holds {'none' if held is None else held.dtype}",
                    hint="the base is not of this run, or not of the step that it says",
                )
            if is_difference and held is not None:
                before = np.frombuffer(memory_of(held), bits_type(dtype))[low:high]
                some = apply_difference(before, some)
            yield Change(replay, kind, dtype, low, high, some)

    def _check_difference(self, step: int, base_step: int, kind: str) -> None:
        """A difference leads on from what is held only where nothing was taken since the step that it is to."""
        if base_step >= step or (self.set_at is not None and base_step < self.set_at):
            raise InconsistentError(
                f"stream {self.stream.number}, step {step}: {kind} of optimizer tensor {self.index} is told as a"
                f" difference to step {base_step}, the shadow has that of step {self.set_at}"
            )

    def own_in(self, arrived: ArrivedStep, kinds: Sequence[str]) -> dict[str, HeldValue]:
        """What the step says of states with shapes of their own."""
        found = {}
        for state, name in enumerate(kinds):
            told = parse_own(name)
            block = arrived.values.full.get((self.first_block, state))
            if told is not None and block is not None:
                found[told[0]] = HeldValue.of(told[1], block)
        return found

    def digest(self, kind: str) -> str | None:
        """XXH3-128 over the blocks of a state end to end; None where it has no such state."""
        running = xxhash.xxh3_128()
        for replay in self.replays:
            held = replay.stretch.param if kind == PARAM else replay.stretch.states.get(kind)
            if held is None:
                return None
            for block in replay.blocks:
                low, high = max(block.offset, replay.start), min(block.offset + block.count, replay.stop)
                running.update(memory_of(held[low - replay.start : high - replay.start]))
        return running.hexdigest()
