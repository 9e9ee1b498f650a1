"""The state that a shadow holds in memory: the optimizer tensors of every stream, and the buffers.

Tensors are kept in chunks that fit into the CPU's cache together with their states. A `StateSnapshot` shares memory
with the live state; a chunk is copied before it changes while a snapshot refers to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from ucp.core.box import Shape
from ucp.core.dtypes import DType
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, UsageError
from ucp.log.codecs import Bits, EncodedBlock, apply_difference, bits_type
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.payloads import StateDigest, StepRecord
from ucp.log.reader import LogStream, ReadBuffer
from ucp.log.stream_recovery import StreamScan
from ucp.log.stream_schema import BUFFER, PARAM, LogBlock, StreamSchema, parse_shaped_kind
from ucp.replay.exactness import ApproximationLabel
from ucp.replay.gradients import OptimizerUpdate, as_torch, group_hyper, torch_dtype
from ucp.replay.logged_states import PARAM_NAMES
from ucp.replay.replayer import ChunkReplay, ReplayedTensor, tensor_bytes
from ucp.storage.local import SourceFiles
from ucp.training.shadow.step_assembler import WHOLE, ReceivedStep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ShadowValue:
    """The value of a buffer, or of a state with another shape than its tensor. Immutable."""

    shape: Shape
    dtype: DType
    data: bytes

    @staticmethod
    def of(shape: Shape, block: EncodedBlock) -> ShadowValue:
        return ShadowValue(shape, block.dtype, block.bits().tobytes())


@dataclass(frozen=True, slots=True)
class StateChange:
    """New values for elements `[low, high)` of a state in one chunk."""

    replay: ChunkReplay
    kind: str
    dtype: DType
    low: int
    high: int
    bits: Bits

    def make(self) -> None:
        """Write the values. No snapshot may share the chunk."""
        import torch

        chunk = self.replay.chunk
        state = chunk.get(self.kind)
        if state is None:
            state = chunk.states[self.kind] = torch.zeros(len(chunk.param), dtype=torch_dtype(self.dtype))
        state[self.low : self.high] = as_torch(np.ascontiguousarray(self.bits).view(np.uint8), self.dtype)


class SingleStepStream(LogStream):
    """A log stream that consists only of the step that is being applied."""

    def __init__(self, folder: Path, schema: StreamSchema) -> None:
        super().__init__(folder, schema, StreamScan(folder, schema.stream))
        self.now: ReceivedStep | None = None

    def read_block(self, step: int, block: int, room: ReadBuffer | None = None) -> EncodedBlock | None:
        del step, room
        return None if self.now is None else self.now.blocks.get(block)


class TensorState:
    """An optimizer tensor with its states, or the part of it that belongs to a shard, in chunks."""

    def __init__(
        self,
        tensor: ReplayedTensor,
        stream: SingleStepStream,
        base: SourceFiles,
        elements: tuple[int, int],
        *,
        fresh: bool,
    ) -> None:
        """Load the state after step `tensor.last`; `fresh` if no step of its epoch has been applied yet.

        `elements` is the range `[start, stop)` to load; it starts and ends at chunk boundaries.
        """
        import torch

        self.stream = stream
        self.index = tensor.index
        self.group = stream.schema.tensors[tensor.index].group
        self.kernel = tensor.kernel
        self.numel = tensor.numel
        self.chunk_numel = tensor.chunk_numel
        self.elements = elements
        self.first_block = tensor.blocks[0].id if tensor.blocks else -1
        self.blocks = [b for b in tensor.blocks if b.offset < elements[1] and b.offset + b.count > elements[0]]
        self.is_padded = any(tensor.base_parameters[b.parameter].is_padded(b.region) for b in tensor.blocks)
        self.names = [origin.name for origin in tensor.base_parameters.values()]
        self.shaped: dict[str, ShadowValue] = {}  # states with other shapes, in a log of states
        self.full_at: int | None = None  # in a log of states: the step of the current values
        self.replays = []
        live = replace(tensor, stream=stream, updates=())
        for number in range(elements[0] // tensor.chunk_numel, -(-elements[1] // tensor.chunk_numel)):
            replay = ChunkReplay(tensor, number, base)
            with torch.no_grad():
                replay.run(tensor.last)
            if fresh:
                replay.chunk.resumed_at = replay.chunk.step
            replay.tensor = live
            self.replays.append(replay)

    @property
    def is_whole(self) -> bool:
        """Whether this is the complete tensor."""
        return self.elements == (0, self.numel)

    @property
    def counter(self) -> int:
        """The optimizer's update count; 0 in a log of states, where the count is a logged state."""
        return 0 if self.kernel is None else max((replay.chunk.step for replay in self.replays), default=0)

    @property
    def kinds(self) -> dict[str, str]:
        """All states with the names of their dtypes; the tensor itself first."""
        found = {PARAM: self.replays[0].chunk.param} if self.replays else {}
        for replay in self.replays:
            found.update(replay.chunk.states)
        return {kind: str(tensor.dtype).removeprefix("torch.") for kind, tensor in found.items()}

    def optimizer_update(self, received: ReceivedStep, constants: Mapping[str, Any]) -> OptimizerUpdate | None:
        """The update of this tensor by the step's gradients, or None if the step does not change it."""
        record = received.record
        scalars = next((one for one in record.groups if one.group == self.group), None)
        if self.kernel is None or record.skipped or scalars is None or not scalars.stepped:
            return None
        present = [block.id in received.blocks for block in self.blocks]
        if not any(present):
            return None
        if not all(present):
            raise InconsistentError(
                f"stream {self.stream.number}, step {received.step}: only some blocks of optimizer tensor {self.index}"
                " have gradients"
            )
        if self.kernel.optimizer.counts_updates and 0 <= scalars.opt_step < self.counter:
            raise InconsistentError(
                f"stream {self.stream.number}, step {received.step}: the job's optimizer had counted"
                f" {scalars.opt_step} updates before this step, but the shadow has {self.counter}",
                hint="the base belongs to another run or step",
            )
        scale = None if record.scale is None else float(record.scale)
        return OptimizerUpdate(received.step, group_hyper(constants, scalars), scale, scalars.opt_step)

    def state_changes(self, received: ReceivedStep, kinds: Sequence[str]) -> list[StateChange]:
        """In a log of states: the new values of this step, decoded but not written yet."""
        found: list[StateChange] = []
        if self.kernel is not None or not (received.full or received.differences):
            return found
        for state, name in enumerate(kinds):
            kind = PARAM if name in PARAM_NAMES else name
            for block in () if name == BUFFER or parse_shaped_kind(name) is not None else self.blocks:
                full = received.full.get((block.id, state))
                other = received.differences.get((block.id, state))
                if full is not None:
                    found.extend(self._changes(block, kind, full.dtype, full.bits()))
                elif other is not None:
                    if other[1] >= received.step or (self.full_at is not None and other[1] < self.full_at):
                        raise InconsistentError(
                            f"stream {self.stream.number}, step {received.step}: {kind} of optimizer tensor"
                            f" {self.index} is logged as a difference to step {other[1]}, but the shadow has the"
                            f" values of step {self.full_at}"
                        )
                    found.extend(self._changes(block, kind, other[0].dtype, other[0].bits(), is_difference=True))
        return found

    def _changes(
        self, block: LogBlock, kind: str, dtype: DType, bits: Bits, *, is_difference: bool = False
    ) -> Iterator[StateChange]:
        for replay in self.replays:
            low, high = replay.range_of(block)
            if low >= high:
                continue
            values = bits[replay.start + low - block.offset : replay.start + high - block.offset]
            state = replay.chunk.get(kind)
            if (state is None and is_difference) or (state is not None and state.dtype != torch_dtype(dtype)):
                raise InconsistentError(
                    f"stream {self.stream.number}, optimizer tensor {self.index}: the job logs {kind} as {dtype}, but"
                    f" the shadow has {'none' if state is None else state.dtype}",
                    hint="the base belongs to another run or step",
                )
            if is_difference and state is not None:
                before = np.frombuffer(tensor_bytes(state), bits_type(dtype))[low:high]
                values = apply_difference(before, values)
            yield StateChange(replay, kind, dtype, low, high, values)

    def shaped_values(self, received: ReceivedStep, kinds: Sequence[str]) -> dict[str, ShadowValue]:
        """The step's values of states with other shapes than the tensor's."""
        found = {}
        for state, name in enumerate(kinds):
            parsed = parse_shaped_kind(name)
            block = received.full.get((self.first_block, state))
            if parsed is not None and block is not None:
                found[parsed[0]] = ShadowValue.of(parsed[1], block)
        return found

    def digest(self, kind: str) -> str | None:
        """XXH3-128 over the concatenated blocks of a state; None without such a state."""
        running = xxhash.xxh3_128()
        for replay in self.replays:
            if replay.chunk.get(kind) is None:
                return None
            replay.add_to_digest(running, kind)
        return running.hexdigest()


# (stream, optimizer tensor, state). A state with another shape than its tensor is named `SHAPED_PREFIX` + name; for a
# buffer, the second entry is its number in the stream.
StateKey = tuple[int, int, str]
SHAPED_PREFIX: Final = "own/"


class StateSnapshot:
    """The state after one step, unaffected by later steps. Close it to release memory."""

    def __init__(
        self,
        description: dict[str, Any],
        step: int,
        tensors: Sequence[TensorState],
        buffers: Mapping[tuple[int, int], ShadowValue],
        close: Callable[[], None],
    ) -> None:
        self.description = description
        self.step = step
        self._tensors = {(tensor.stream.number, tensor.index): tensor for tensor in tensors}
        self._values: dict[StateKey, ShadowValue] = {(*key, BUFFER): value for key, value in buffers.items()}
        for key, tensor in self._tensors.items():
            self._values.update({(*key, SHAPED_PREFIX + kind): value for kind, value in tensor.shaped.items()})
        self.chunks = {id(replay): replay.chunk for tensor in tensors for replay in tensor.replays}
        self.close = close

    def read_into(self, key: StateKey, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a state or buffer, starting at byte `offset`."""
        stream, index, kind = key
        value, tensor = self._values.get(key), self._tensors.get((stream, index))
        if value is None and (tensor is None or kind not in tensor.kinds):
            raise UsageError(f"stream {stream} has no tensor {index} with state {kind!r}")
        low, high, size = 0, 0 if value is None else len(value.data), 1
        if value is None:
            assert tensor is not None
            size = self._tensor(tensor.replays[0], kind).element_size()
            low, high = (element * size for element in tensor.elements)
        if offset < low or offset + len(target) > high:
            raise UsageError(
                f"bytes {offset} to {offset + len(target)} of {kind} are not in stream {stream}, tensor {index}"
            )
        if value is not None:
            target[:] = value.data[offset : offset + len(target)]
            return
        assert tensor is not None
        done = 0
        while done < len(target):
            number, start = divmod(offset + done - low, tensor.chunk_numel * size)
            data = tensor_bytes(self._tensor(tensor.replays[number], kind))[start : start + len(target) - done]
            target[done : done + len(data)] = data
            done += len(data)

    def _tensor(self, replay: ChunkReplay, kind: str) -> torch.Tensor:
        import torch

        chunk = self.chunks[id(replay)]
        state = chunk.get(kind)
        return torch.zeros_like(chunk.param) if state is None else state


Buffers = dict[tuple[int, int], ShadowValue]  # by (stream, number in the stream)


@dataclass(slots=True, eq=False)
class ShadowState:
    """The complete state of one epoch. One thread applies steps; any thread may take snapshots."""

    manifest: EpochManifest
    step: int
    tensors: list[TensorState]
    labels: list[ApproximationLabel] = field(default_factory=list)
    recent: list[tuple[int, StepRecord]] = field(default_factory=list)  # records since the last step not skipped
    aux: Any = None
    shard: WorkShard = WHOLE
    buffers: Buffers = field(default_factory=dict)
    proven_step: int | None = field(default=None, init=False)  # the newest at which it matched all digests of the job
    refuted: ApproximationLabel | None = field(default=None, init=False)
    _matched: dict[int, int] = field(default_factory=dict, init=False)  # stream → newest step with matching digests
    # Shared with the state of the next epoch if that has the same tensors. The lock is held between two steps.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _snapshots: list[StateSnapshot] = field(default_factory=list)

    def apply(self, received: Mapping[int, ReceivedStep], pool: ThreadPoolExecutor | None = None) -> None:
        """Apply one step, given for every stream. If it is inconsistent, nothing is changed."""
        groups, kinds = self.manifest.groups, self.manifest.state_kinds
        work: list[tuple[ChunkReplay, OptimizerUpdate]] = []
        shaped: list[tuple[TensorState, dict[str, ShadowValue]]] = []
        for tensor in self.tensors:
            constants = groups[tensor.group].hyper if tensor.group < len(groups) else {}
            update = tensor.optimizer_update(received[tensor.stream.number], constants)
            if update is not None:
                work += [(replay, update) for replay in tensor.replays if replay.blocks]
            if tensor.kernel is None:
                shaped.append((tensor, tensor.shaped_values(received[tensor.stream.number], kinds)))
        changes = self._changes(received, pool)
        buffers: Buffers = {}
        for schema in self.manifest.streams:
            for (number, state), block in received[schema.stream].full.items():
                if kinds[state] == BUFFER:
                    shape = self.manifest.buffers[schema.buffers[number].parameter].shape
                    buffers[schema.stream, number] = ShadowValue.of(shape, block)
        with self._lock:
            for tensor in self.tensors:
                tensor.stream.now = received[tensor.stream.number]
            if pool is None:
                for replay, update in work:
                    self._update(replay, update)
            else:
                list(pool.map(lambda each: self._update(*each), work))
            for change in changes:
                self._unshare(change.replay)
                change.make()
            for tensor, values in shaped:
                tensor.shaped.update(values)
            self.buffers.update(buffers)
            first = received[min(received)]
            for tensor in self.tensors:
                tensor.stream.now = None
                tensor.full_at = first.step if changes else tensor.full_at
            self.step = first.step
            self.aux = first.aux
            if not first.record.skipped:
                self.recent.clear()
            self.recent.append((first.step, first.record))

    def _changes(self, received: Mapping[int, ReceivedStep], pool: ThreadPoolExecutor | None) -> list[StateChange]:
        """The new values of a log of states, all decoded before anything is changed."""
        kinds = self.manifest.state_kinds

        def of(tensor: TensorState) -> list[StateChange]:
            return tensor.state_changes(received[tensor.stream.number], kinds)

        each = map(of, self.tensors) if pool is None else pool.map(of, self.tensors)
        return [change for changes in each for change in changes]

    def _unshare(self, replay: ChunkReplay) -> None:
        """Replace a chunk by a copy if a snapshot refers to it."""
        if any(snapshot.chunks.get(id(replay)) is replay.chunk for snapshot in self._snapshots):
            states = {kind: state.clone() for kind, state in replay.chunk.states.items()}
            replay.chunk = replace(replay.chunk, param=replay.chunk.param.clone(), states=states)

    def _update(self, replay: ChunkReplay, update: OptimizerUpdate) -> None:
        import torch

        kernel = replay.tensor.kernel
        assert kernel is not None
        self._unshare(replay)
        with torch.no_grad():
            for kind in kernel.kinds(update.hyper):
                value = kernel.initial(kind, update.hyper)
                if kind not in replay.chunk.states and value is not None:
                    replay.chunk.states[kind] = torch.full_like(replay.chunk.param, value)
            replay.apply(update)

    def compare(self, stream: int, digests: Iterable[StateDigest]) -> None:
        """Compare the state with the job's digests of the same step.

        The state is proven when the digests of all streams match. A partial tensor cannot be compared.
        """
        tensors = {tensor.index: tensor for tensor in self.tensors if tensor.stream.number == stream}
        for digest in digests:
            tensor = tensors.get(digest.tensor)
            if tensor is None or tensor.is_padded or not tensor.is_whole:
                continue  # the job's digest includes padding rows of the vocabulary, which the base does not have
            kind = PARAM if digest.kind in PARAM_NAMES else digest.kind
            found = tensor.digest(kind)
            if found is not None and found != digest.value:
                reason = f"the state differs from the job's own digest ({kind} of stream {stream})"
                self.refuted = self.refuted or ApproximationLabel(self.step, ", ".join(tensor.names), reason)
                return
        if all(tensor.is_whole for tensor in tensors.values()):
            self._matched[stream] = self.step
        if all(self._matched.get(schema.stream) == self.step for schema in self.manifest.streams):
            self.proven_step = self.step

    def snapshot(self, description: Callable[[], dict[str, Any]]) -> StateSnapshot:
        """A snapshot of the current state, between two steps; `description` is called at the same moment."""

        def close() -> None:
            with self._lock:
                if made in self._snapshots:
                    self._snapshots.remove(made)

        with self._lock:
            made = StateSnapshot(description(), self.step, self.tensors, self.buffers, close)
            self._snapshots.append(made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all states, including the chunks that only snapshots refer to."""
        chunks = {id(replay.chunk): replay.chunk for tensor in self.tensors for replay in tensor.replays}
        for snapshot in self._snapshots:
            chunks.update({id(chunk): chunk for chunk in snapshot.chunks.values()})
        states: int = sum(
            state.numel() * state.element_size()
            for chunk in chunks.values()
            for state in (chunk.param, *chunk.states.values())
        )
        shaped = sum(len(value.data) for tensor in self.tensors for value in tensor.shaped.values())
        return states + shaped + sum(len(value.data) for value in self.buffers.values())
