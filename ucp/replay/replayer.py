"""Computing states: stretches of optimizer tensors, replayed from the base to a step, all states of a stretch at once.

A replay runs in the coordinates of the tensor that the optimizer was called on, because kernels that work in vectors
treat the last few elements of a tensor otherwise.

The computed files of a span of a log: a stretch is replayed when it is read, and kept until its other states are.
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

from ucp import settings
from ucp.core.checkpoint import COMPUTED, Atom, ComputedFiles, ForkableFiles
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.log.codecs import bits_type
from ucp.log.reader import LogStream
from ucp.log.stream_schema import PARAM, LogBlock
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, raw_dtype
from ucp.replay.gradients import Gradients, as_torch, consumed, torch_dtype
from ucp.replay.kernels import ReplayKernel, StateChunk
from ucp.replay.logged_states import DiffChain, LoggedStates
from ucp.replay.logged_updates import OptimizerUpdate, all_steps_skipped
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class BaseParameter:
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
    stream: LogStream
    index: int  # its number in the stream
    numel: int
    dtype: DType
    kernel: ReplayKernel | None  # None: states come from stored values alone
    kinds: dict[str, DType]  # of the states that there are in the end; PARAM first
    blocks: list[LogBlock]  # by offset
    origins: Mapping[int, BaseParameter]  # by the log's parameter number
    updates: Sequence[OptimizerUpdate]
    stored: LoggedStates
    last: int
    resumed_at: int = 0
    chunk: int = field(default_factory=lambda: settings.LOG_BLOCK_ELEMENTS)


class ChunkReplay:
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
        self.stretch = StateChunk(param, resumed_at=tensor.resumed_at)
        self._waiting = sorted(map(self._beginning, self.blocks), key=lambda each: each[0])
        self._updates = iter(tensor.updates)
        self._next = next(self._updates, None)

    def run(self, last: int) -> StateChunk:
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

    def take(self, update: OptimizerUpdate) -> None:
        """One more update, after all that `run` has taken: for who has its step in hand and no log."""
        self._update(self.tensor.kernel, update)

    def tensor_of(self, kind: str) -> torch.Tensor:
        """A state of the stretch; zeros where no update has made it."""
        import torch

        held = self.stretch.param if kind == PARAM else self.stretch.states.get(kind)
        return held if held is not None else torch.zeros_like(self.stretch.param)

    def _update(self, kernel: ReplayKernel | None, update: OptimizerUpdate) -> None:
        if kernel is None:
            return  # every block begins at the last step
        kernel.update(self.stretch, self._gradient(update), update.hyper)
        self.stretch.step += 1
        self.taken += 1

    def _beginning(self, block: LogBlock) -> tuple[int, int, LogBlock, Mapping[str, DiffChain] | None]:
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
        if tensor.kernel is None and not all_steps_skipped(tensor.stream, origin.step, tensor.last):
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

    def _load_state(self, block: LogBlock, kind: str, dtype: DType, chain: DiffChain | None) -> None:
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
            values = np.frombuffer(tensor_bytes(place), raw_dtype(atom.dtype))
            AtomReader(self.base, atom, flat=False).read_region(block.region.cut(inside.start, inside.stop), values)

    def _stored(self, block: LogBlock, dtype: DType, atom: Atom | None, chain: DiffChain) -> RawArray:
        """A state of a block at the end of a chain of stored values, which may begin with the value in the base."""
        if chain.full is not None:
            return self.tensor.stored.follow(chain, None)
        bits = np.zeros(block.count, bits_type(dtype))
        if atom is not None:
            AtomReader(self.base, atom, flat=False).read_region(block.region, bits.view(raw_dtype(atom.dtype)))
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

    def _gradient(self, update: OptimizerUpdate) -> torch.Tensor:
        """What the kernel saw. Good until the next one."""
        import torch

        dtype = self.stretch.param.dtype
        read = self._gradients.read(self.tensor.stream, update.step, dtype if update.scale is None else torch.float32)
        return consumed(read, update.scale, dtype)


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


ChunkBytes = dict[str, memoryview]  # the bytes of every state of a stretch


class ReplayedFiles:
    """The computed files of one span of a log. Keeps a few stretches; threads that want the same one wait for it."""

    def __init__(
        self, base: SourceFiles, tensors: Sequence[ReplayedTensor], identity: str, inner: ComputedFiles | None
    ) -> None:
        """`inner` has the computed files of older spans, on which these are built."""
        self.identity = identity
        self._base = base
        self.inner = inner
        self._places = {f"{tensor.file}/{kind}": (tensor, kind) for tensor in tensors for kind in tensor.kinds}
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Future[ChunkBytes]] = OrderedDict()
        self._kept_bytes = settings.REPLAY_CACHE_BYTES  # at most, or four stretches
        self.replayed = 0  # elements times updates, so far
        weakref.finalize(self, base.close)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        place = self._places.get(file)
        if place is None:
            if self.inner is None:
                raise AssertionError(f"{file} is not computed here")
            self.inner.read_into(file, offset, target)
            return
        tensor, kind = place
        size = tensor.chunk * tensor.kinds[kind].itemsize
        done = 0
        while done < len(target):
            number, start = divmod(offset + done, size)
            data = self._chunk(tensor, number)[kind]
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def before_fork(self) -> bool:
        """As `ForkableFiles.before_fork`: torch and operators are loaded once and not by every fork."""
        tensors = [tensor for tensor, _ in self._places.values()]
        if self._base.is_remote or any(tensor.stream.is_remote for tensor in tensors):
            return False
        import torch  # noqa: F401

        for kernel in {tensor.kernel.id: tensor.kernel for tensor in tensors if tensor.kernel is not None}.values():
            kernel.prepare()
        return self.inner is None or (isinstance(self.inner, ForkableFiles) and self.inner.before_fork())

    def in_fork(self, workers: int) -> None:
        """As `ForkableFiles.in_fork`."""
        import torch

        # Also because the threads that torch computes in, where it has begun to, were not forked with us.
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
                self._evict(tensor)
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

    def _evict(self, tensor: ReplayedTensor) -> None:
        nbytes = sum(dtype.itemsize for dtype in tensor.kinds.values()) * min(tensor.chunk, tensor.numel)
        room = max(4, self._kept_bytes // max(1, nbytes))
        for key in list(self._kept):
            if len(self._kept) <= room:
                break
            if self._kept[key].done():
                del self._kept[key]

    def _compute(self, tensor: ReplayedTensor, number: int) -> ChunkBytes:
        import torch

        with torch.no_grad():
            replay = ChunkReplay(tensor, number, self._base)
            stretch = replay.run(tensor.last)
        self.replayed += replay.taken * stretch.param.numel()
        return {kind: tensor_bytes(replay.tensor_of(kind)) for kind in tensor.kinds}
