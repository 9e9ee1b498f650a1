"""Computing states: chunks of optimizer tensors are replayed from the base to a step, all states of a chunk at once.

A replay runs in the coordinates of the tensor that the optimizer was called on, because vectorized kernels treat the
last few elements of a tensor differently. `ReplayedFiles` offers the results as computed files: a chunk is replayed
when one of its states is read, and kept until the others have been read too.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ucp import settings
from ucp.core.checkpoint import COMPUTED, Atom, ComputedFiles, ForkableFiles
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.log.codecs import bits_type
from ucp.log.reader import LogStream
from ucp.log.stream_schema import PARAM, LogBlock
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, raw_dtype
from ucp.replay.gradients import Gradients, OptimizerUpdate, all_steps_skipped, as_torch, consumed, torch_dtype
from ucp.replay.kernels import ReplayKernel, StateChunk
from ucp.replay.logged_states import DiffChain, LoggedStates
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class BaseParameter:
    """A parameter in the base: its states there, and after which step of the log they are."""

    name: str
    step: int
    counter: int  # updates that the optimizer had counted
    atoms: dict[str, Atom]  # by kind; PARAM is the tensor that the optimizer updates

    def is_padded(self, region: Region) -> bool:
        """Does a region exceed the parameter's shape?"""
        shape = self.atoms[PARAM].shape
        return any(stop > n for box in region.boxes for stop, n in zip(box.stop, shape, strict=True))


@dataclass(slots=True)
class ReplayedTensor:
    """An optimizer tensor of one stream, and its updates between the base and the requested step."""

    file: str  # name of its computed files, without the state
    stream: LogStream
    index: int  # its number in the stream
    numel: int
    dtype: DType
    kernel: ReplayKernel | None  # None: states come from logged values only
    kinds: dict[str, DType]  # states after the last step; PARAM first
    blocks: list[LogBlock]  # by offset
    base_parameters: Mapping[int, BaseParameter]  # by their numbers in the log
    updates: Sequence[OptimizerUpdate]
    stored: LoggedStates
    last: int  # step
    resumed_at: int = 0  # see `StateChunk`
    chunk_numel: int = field(default_factory=lambda: settings.LOG_BLOCK_ELEMENTS)


class ChunkReplay:
    """One chunk on its way from the base to a step."""

    def __init__(self, tensor: ReplayedTensor, number: int, base: SourceFiles) -> None:
        import torch

        self.tensor = tensor
        self.base = base
        self.start = number * tensor.chunk_numel
        self.stop = min(self.start + tensor.chunk_numel, tensor.numel)
        self.blocks = [b for b in tensor.blocks if b.offset < self.stop and b.offset + b.count > self.start]
        self.update_count = 0
        names = [tensor.base_parameters[block.parameter].name for block in self.blocks]
        self._gradients = Gradients(self.blocks, names, self.start, self.stop)
        param = torch.zeros(self.stop - self.start, dtype=torch_dtype(tensor.dtype))
        self.chunk = StateChunk(param, resumed_at=tensor.resumed_at)
        self._waiting = sorted(map(self._start_of, self.blocks), key=lambda each: each[0])
        self._updates = iter(tensor.updates)
        self._next = next(self._updates, None)

    def run(self, last: int) -> StateChunk:
        """Continue until after step `last`."""
        while self._next is not None and self._next.step <= last:
            update = self._next
            self._next = next(self._updates, None)
            self._load(update.step - 1)
            if len(self._waiting) < len(self.blocks):  # before that, no block is loaded
                self.apply(update)
        self._load(last)
        return self.chunk

    def apply(self, update: OptimizerUpdate) -> None:
        """Apply one update. `run` does, and so does a shadow that receives the step."""
        if self.tensor.kernel is None:
            return  # every block starts at the last step
        read_dtype = self.chunk.param.dtype if update.scale is None else torch_dtype(FLOAT32)
        gradient = self._gradients.read(self.tensor.stream, update.step, read_dtype)
        self.tensor.kernel.update(self.chunk, consumed(gradient, update.scale, self.chunk.param.dtype), update.hyper)
        self.chunk.step += 1
        self.update_count += 1

    def tensor_of(self, kind: str) -> torch.Tensor:
        """A state of the chunk; zeros if no update has created it yet."""
        import torch

        state = self.chunk.get(kind)
        return state if state is not None else torch.zeros_like(self.chunk.param)

    def range_of(self, block: LogBlock) -> tuple[int, int]:
        """Which elements `[start, stop)` of the chunk a block covers; start ≥ stop if none."""
        return max(block.offset, self.start) - self.start, min(block.offset + block.count, self.stop) - self.start

    def add_to_digest(self, digest: xxhash.xxh3_128, kind: str) -> None:
        """Add a state of the chunk to a digest, without padding: its blocks end to end."""
        values = self.tensor_of(kind)
        for block in self.blocks:
            start, stop = self.range_of(block)
            digest.update(tensor_bytes(values[start:stop]))

    def _start_of(self, block: LogBlock) -> tuple[int, int, LogBlock, Mapping[str, DiffChain] | None]:
        """After which step a block is loaded, how many updates its tensor had by then, and from which logged states."""
        tensor = self.tensor
        parameter = tensor.base_parameters[block.parameter]
        if tensor.stored:
            found = tensor.stored.best(
                block.id, list(tensor.kinds), parameter.step, tensor.last, replays=tensor.kernel is not None
            )
            if found is not None:
                step = next(iter(found.values())).step
                counter = parameter.counter + sum(parameter.step < update.step <= step for update in tensor.updates)
                return step, counter, block, found
        if tensor.kernel is None and not all_steps_skipped(tensor.stream, parameter.step, tensor.last):
            raise InconsistentError(
                f"parameter {parameter.name}: the log has no states of it that lead from step {parameter.step} to"
                f" {tensor.last}, and its optimizer cannot be replayed",
                hint="choose a step that was logged in full, or convert the base without --log",
            )
        return parameter.step, parameter.counter, block, None

    def _load(self, step: int) -> None:
        """Load the blocks that start at or before `step`."""
        while self._waiting and self._waiting[0][0] <= step:
            _, counter, block, chains = self._waiting.pop(0)
            self.chunk.step = counter
            for kind, dtype in self.tensor.kinds.items():
                self._load_state(block, kind, dtype, None if chains is None else chains[kind])

    def _load_state(self, block: LogBlock, kind: str, dtype: DType, chain: DiffChain | None) -> None:
        atom = self.tensor.base_parameters[block.parameter].atoms.get(kind)
        start, stop = self.range_of(block)
        inside = slice(self.start + start - block.offset, self.start + stop - block.offset)
        state = self.chunk.get(kind)
        if state is None:
            kernel, updates = self.tensor.kernel, self.tensor.updates
            value = kernel.initial(kind, updates[0].hyper) if kernel and updates else 0.0
            if value is None and chain is None and atom is None:
                return  # the first update creates it
            import torch

            state = torch.full((self.stop - self.start,), value or 0.0, dtype=torch_dtype(dtype))
            self.chunk.states[kind] = state
        place = state[start:stop]
        if chain is not None:
            raw = np.ascontiguousarray(self._stored(block, dtype, atom, chain)[inside]).view(np.uint8)
            place.copy_(as_torch(raw, dtype))
        elif atom is not None and len(place):
            values = np.frombuffer(tensor_bytes(place), raw_dtype(atom.dtype))
            AtomReader(self.base, atom, flat=False).read_region(block.region.cut(inside.start, inside.stop), values)

    def _stored(self, block: LogBlock, dtype: DType, atom: Atom | None, chain: DiffChain) -> RawArray:
        """A state of a block at the end of a chain of logged values, which may start with the value in the base."""
        if chain.full is not None:
            return self.tensor.stored.follow(chain, None)
        bits = np.zeros(block.count, bits_type(dtype))
        if atom is not None:
            AtomReader(self.base, atom, flat=False).read_region(block.region, bits.view(raw_dtype(atom.dtype)))
        return self.tensor.stored.follow(chain, bits)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data


def computed_file_name(epoch: int, stream: int, tensor: int, last: int) -> str:
    """Name of the computed files of an optimizer tensor after a step, without the state."""
    return f"{COMPUTED}epoch-{epoch:06d}/stream-{stream:05d}/tensor-{tensor:04d}@{last}"


ChunkBytes = dict[str, memoryview]  # the bytes of every state of a chunk


class ReplayedFiles:
    """The computed files of one span of a log. Keeps a few chunks; threads that need the same one wait for it."""

    def __init__(
        self, base: SourceFiles, tensors: Sequence[ReplayedTensor], identity: str, inner: ComputedFiles | None
    ) -> None:
        """`inner` has the computed files of earlier spans, which the base consists of."""
        self.identity = identity
        self._base = base
        self.inner = inner
        self._states = {f"{tensor.file}/{kind}": (tensor, kind) for tensor in tensors for kind in tensor.kinds}
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Future[ChunkBytes]] = OrderedDict()
        self._kept_bytes = settings.REPLAY_CACHE_BYTES  # at most, or four chunks
        self.replayed = 0  # elements times updates, so far
        weakref.finalize(self, base.close)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        found = self._states.get(file)
        if found is None:
            if self.inner is None:
                raise AssertionError(f"{file} is not computed here")
            self.inner.read_into(file, offset, target)
            return
        tensor, kind = found
        size = tensor.chunk_numel * tensor.kinds[kind].itemsize
        done = 0
        while done < len(target):
            number, start = divmod(offset + done, size)
            data = self._chunk(tensor, number)[kind]
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def before_fork(self) -> bool:
        tensors = [tensor for tensor, _ in self._states.values()]
        if self._base.is_remote or any(tensor.stream.is_remote for tensor in tensors):
            return False
        import torch  # noqa: F401

        for kernel in {tensor.kernel.id: tensor.kernel for tensor in tensors if tensor.kernel is not None}.values():
            kernel.prepare()
        return self.inner is None or (isinstance(self.inner, ForkableFiles) and self.inner.before_fork())

    def in_fork(self, workers: int) -> None:
        import torch

        # Threads that torch had started do not exist in the fork.
        torch.set_num_threads(1)
        self._kept_bytes = settings.REPLAY_CACHE_BYTES // workers
        if isinstance(self.inner, ForkableFiles):
            self.inner.in_fork(workers)

    def _chunk(self, tensor: ReplayedTensor, number: int) -> ChunkBytes:
        key = tensor.file, number
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if future is None:
                future = self._kept[key] = Future()
                nbytes = sum(dtype.itemsize for dtype in tensor.kinds.values()) * min(tensor.chunk_numel, tensor.numel)
                excess = len(self._kept) - max(4, self._kept_bytes // max(1, nbytes))
                finished = [other for other, kept in self._kept.items() if kept.done()] if excess > 0 else []
                for other in finished[:excess]:
                    del self._kept[other]
            else:
                self._kept.move_to_end(key)
        if mine:
            try:
                future.set_result(self._compute(tensor, number))
            except BaseException as error:
                future.set_exception(error)
                with self._lock:
                    self._kept.pop(key, None)
                raise
        return future.result()

    def _compute(self, tensor: ReplayedTensor, number: int) -> ChunkBytes:
        import torch

        with torch.no_grad():
            replay = ChunkReplay(tensor, number, self._base)
            chunk = replay.run(tensor.last)
        self.replayed += replay.update_count * chunk.param.numel()
        return {kind: tensor_bytes(replay.tensor_of(kind)) for kind in tensor.kinds}
