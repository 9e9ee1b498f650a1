"""One optimizer tensor that a shadow holds, in stretches, and what a step does to it.

The state that a shadow had after one step, as long as somebody reads it.

The state that a shadow holds: the optimizer's tensors of every stream and the buffers, step by step, in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from ucp.replay.gradients import as_torch, torch_dtype
from ucp.replay.kernels import StateChunk
from ucp.replay.logged_states import PARAM_NAMES
from ucp.replay.logged_updates import OptimizerUpdate, group_hyper
from ucp.replay.replayer import ChunkReplay, ReplayedTensor, tensor_bytes
from ucp.storage.local import SourceFiles
from ucp.training.shadow.step_assembler import WHOLE, ReceivedStep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ShadowValue:
    """A buffer, or a state with a shape of its own. Another takes its place when it changes."""

    shape: Shape
    dtype: DType
    data: bytes

    @staticmethod
    def of(shape: Shape, block: EncodedBlock) -> ShadowValue:
        return ShadowValue(shape, block.dtype, block.bits().tobytes())


@dataclass(frozen=True, slots=True)
class StateChange:
    """Elements `[low, high)` of a state of a stretch are these now."""

    replay: ChunkReplay
    kind: str
    dtype: DType
    low: int
    high: int
    bits: Bits

    def make(self) -> None:
        """Put them in their place. The stretch must be nobody else's."""
        import torch

        stretch = self.replay.chunk
        held = stretch.get(self.kind)
        if held is None:
            held = stretch.states[self.kind] = torch.zeros(len(stretch.param), dtype=torch_dtype(self.dtype))
        held[self.low : self.high] = as_torch(np.ascontiguousarray(self.bits).view(np.uint8), self.dtype)


class SingleStepStream(LogStream):
    """A stream of which only the step that is being applied exists."""

    def __init__(self, folder: Path, schema: StreamSchema) -> None:
        super().__init__(folder, schema, StreamScan(folder, schema.stream))
        self.now: ReceivedStep | None = None

    def read_block(self, step: int, block: int, room: ReadBuffer | None = None) -> EncodedBlock | None:
        del step, room
        return None if self.now is None else self.now.blocks.get(block)


class TensorState:
    """An optimizer tensor, or a part of it, in stretches that stay in the CPU's cache with their states."""

    def __init__(
        self, tensor: ReplayedTensor, stream: SingleStepStream, base: SourceFiles, held: tuple[int, int], *, fresh: bool
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
        self.chunk_numel = tensor.chunk_numel
        self.held = held
        self.first_block = tensor.blocks[0].id if tensor.blocks else -1
        self.blocks = [b for b in tensor.blocks if b.offset < held[1] and b.offset + b.count > held[0]]
        self.is_padded = any(tensor.base_parameters[b.parameter].is_padded(b.region) for b in tensor.blocks)
        self.names = [origin.name for origin in tensor.base_parameters.values()]
        self.own: dict[str, ShadowValue] = {}  # states with shapes of their own, of a log of states
        self.set_at: int | None = None  # the step whose values were taken last, where it is a log of states
        self.replays = []
        live = replace(tensor, stream=stream, updates=())
        for number in range(held[0] // tensor.chunk_numel, -(-held[1] // tensor.chunk_numel)):
            replay = ChunkReplay(tensor, number, base)
            with torch.no_grad():
                replay.run(tensor.last)
            if fresh:
                replay.chunk.resumed_at = replay.chunk.step
            replay.tensor = live
            self.replays.append(replay)

    @property
    def is_whole(self) -> bool:
        """Is all of the tensor held here?"""
        return self.held == (0, self.numel)

    @property
    def counter(self) -> int:
        """Updates that the optimizer has counted; of a log of states that is a state like any other, and 0 here."""
        return 0 if self.kernel is None else max((replay.chunk.step for replay in self.replays), default=0)

    @property
    def kinds(self) -> dict[str, str]:
        """The states that there are, with the names of their types; the tensor itself first."""
        found = {PARAM: self.replays[0].chunk.param} if self.replays else {}
        for replay in self.replays:
            found.update(replay.chunk.states)
        return {kind: str(tensor.dtype).removeprefix("torch.") for kind, tensor in found.items()}

    def update_in(self, arrived: ReceivedStep, constants: Mapping[str, Any]) -> OptimizerUpdate | None:
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
        if self.kernel.optimizer.counts_updates and 0 <= scalars.opt_step < self.counter:
            raise InconsistentError(
                f"stream {self.stream.number}, step {arrived.step}: the job's optimizer had counted"
                f" {scalars.opt_step} updates before it, the shadow has {self.counter}",
                hint="the base is not of this run, or not of the step that it says",
            )
        scale = None if record.scale is None else float(record.scale)
        return OptimizerUpdate(arrived.step, group_hyper(constants, scalars), scale, scalars.opt_step)

    def changes_in(self, arrived: ReceivedStep, kinds: Sequence[str]) -> list[StateChange]:
        """What the step says that the states are now, where it is a log of states. Nothing is changed yet."""
        values = arrived.values
        found: list[StateChange] = []
        if self.kernel is not None or not (values.full or values.differences):
            return found
        for state, name in enumerate(kinds):
            kind = PARAM if name in PARAM_NAMES else name
            for block in () if name == BUFFER or parse_shaped_kind(name) is not None else self.blocks:
                full = values.full.get((block.id, state))
                other = values.differences.get((block.id, state))
                if full is not None:
                    found.extend(self._changes(block, kind, full.dtype, full.bits()))
                elif other is not None:
                    self._check_difference(arrived.step, other[1], kind)
                    found.extend(self._changes(block, kind, other[0].dtype, other[0].bits(), is_difference=True))
        return found

    def _changes(
        self, block: LogBlock, kind: str, dtype: DType, bits: Bits, *, is_difference: bool = False
    ) -> Iterator[StateChange]:
        for replay in self.replays:
            low, high = replay.range_of(block)
            if low >= high:
                continue
            some = bits[replay.start + low - block.offset : replay.start + high - block.offset]
            held = replay.chunk.get(kind)
            if (held is None and is_difference) or (held is not None and held.dtype != torch_dtype(dtype)):
                raise InconsistentError(
                    f"stream {self.stream.number}, optimizer tensor {self.index}: the job logs {kind} as {dtype}, the"
                    f" shadow holds {'none' if held is None else held.dtype}",
                    hint="the base is not of this run, or not of the step that it says",
                )
            if is_difference and held is not None:
                before = np.frombuffer(tensor_bytes(held), bits_type(dtype))[low:high]
                some = apply_difference(before, some)
            yield StateChange(replay, kind, dtype, low, high, some)

    def _check_difference(self, step: int, base_step: int, kind: str) -> None:
        """A difference leads on from what is held only where nothing was taken since the step that it is to."""
        if base_step >= step or (self.set_at is not None and base_step < self.set_at):
            raise InconsistentError(
                f"stream {self.stream.number}, step {step}: {kind} of optimizer tensor {self.index} is told as a"
                f" difference to step {base_step}, the shadow has that of step {self.set_at}"
            )

    def own_in(self, arrived: ReceivedStep, kinds: Sequence[str]) -> dict[str, ShadowValue]:
        """What the step says of states with shapes of their own."""
        found = {}
        for state, name in enumerate(kinds):
            told = parse_shaped_kind(name)
            block = arrived.values.full.get((self.first_block, state))
            if told is not None and block is not None:
                found[told[0]] = ShadowValue.of(told[1], block)
        return found

    def digest(self, kind: str) -> str | None:
        """XXH3-128 over the blocks of a state end to end; None where it has no such state."""
        running = xxhash.xxh3_128()
        for replay in self.replays:
            if replay.chunk.get(kind) is None:
                return None
            replay.add_to_digest(running, kind)
        return running.hexdigest()


# Stream, optimizer tensor, state. Of a state with a shape of its own, that is `OWN` and its name; of a buffer, its
# number in the stream stands in the tensor's place.
StateKey = tuple[int, int, str]
OWN: Final = "own/"


class StateSnapshot:
    """The state after one step, whatever is applied later: shares memory with the live state until that changes."""

    def __init__(
        self,
        told: dict[str, Any],
        step: int,
        tensors: Sequence[TensorState],
        buffers: Mapping[tuple[int, int], ShadowValue],
        close: Callable[[], None],
    ) -> None:
        self.told = told
        self.step = step
        self._tensors = {(tensor.stream.number, tensor.index): tensor for tensor in tensors}
        self._values: dict[StateKey, ShadowValue] = {(*place, BUFFER): value for place, value in buffers.items()}
        for place, tensor in self._tensors.items():
            self._values.update({(*place, OWN + kind): value for kind, value in tensor.own.items()})
        self.stretches = {id(replay): replay.chunk for tensor in tensors for replay in tensor.replays}
        self.close = close

    def read_into(self, place: StateKey, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a state of an optimizer tensor, or of a buffer, from byte `offset` on."""
        value = self._values.get(place)
        if value is None:
            self._read_state(place, offset, target)
            return
        if offset < 0 or offset + len(target) > len(value.data):
            raise _out_of_range(place, offset, len(target))
        target[:] = value.data[offset : offset + len(target)]

    def _read_state(self, place: StateKey, offset: int, target: memoryview) -> None:
        stream, index, kind = place
        tensor = self._tensors.get((stream, index))
        if tensor is None or kind not in tensor.kinds:
            raise UsageError(f"stream {stream} has no tensor {index} with state {kind!r}")
        size = self._tensor(tensor.replays[0], kind).element_size()
        if offset < tensor.held[0] * size or offset + len(target) > tensor.held[1] * size:
            raise _out_of_range(place, offset, len(target))
        done = 0
        while done < len(target):
            number, start = divmod(offset + done - tensor.held[0] * size, tensor.chunk_numel * size)
            data = tensor_bytes(self._tensor(tensor.replays[number], kind))
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def _tensor(self, replay: ChunkReplay, kind: str) -> torch.Tensor:
        import torch

        stretch = self.stretches[id(replay)]
        held = stretch.param if kind == PARAM else stretch.states.get(kind)
        return torch.zeros_like(stretch.param) if held is None else held


def _out_of_range(place: StateKey, offset: int, size: int) -> UsageError:
    stream, index, kind = place
    return UsageError(f"bytes {offset} to {offset + size} of {kind} are not in stream {stream}, tensor {index}")


Buffers = dict[tuple[int, int], ShadowValue]  # by stream, and number in it


class ShadowState:
    """Everything that a shadow holds of one epoch. One thread applies; any may take snapshots."""

    def __init__(
        self,
        manifest: EpochManifest,
        step: int,
        tensors: Sequence[TensorState],
        labels: Sequence[ApproximationLabel] = (),
        recent: Sequence[tuple[int, StepRecord]] = (),
        aux: Any = None,
        share: WorkShard = WHOLE,
        buffers: Buffers | None = None,
    ) -> None:
        """`recent` are the newest steps and their records, from the last that changed something on."""
        self.share = share
        self.manifest = manifest
        self.step = step
        self.tensors = list(tensors)
        self.labels = list(labels)
        self.recent = list(recent)
        self.aux = aux
        self.buffers: Buffers = {} if buffers is None else buffers
        self.proven_step: int | None = None  # the newest step at which the job's own digests were met
        self.refuted: ApproximationLabel | None = None
        self._met: dict[int, int] = {}  # stream → the newest step at which its digests were met
        self._lock = threading.Lock()  # held while the state is between two steps
        self._snapshots: list[StateSnapshot] = []

    def apply(self, arrived: Mapping[int, ReceivedStep], pool: ThreadPoolExecutor | None = None) -> None:
        """Take one step, of which every stream is there. Nothing is changed where it does not fit."""
        groups, kinds = self.manifest.groups, self.manifest.state_kinds
        work: list[tuple[ChunkReplay, OptimizerUpdate]] = []
        own: list[tuple[TensorState, dict[str, ShadowValue]]] = []
        for tensor in self.tensors:
            constants = groups[tensor.group].hyper if tensor.group < len(groups) else {}
            update = tensor.update_in(arrived[tensor.stream.number], constants)
            if update is not None:
                work += [(replay, update) for replay in tensor.replays if replay.blocks]
            if tensor.kernel is None:
                own.append((tensor, tensor.own_in(arrived[tensor.stream.number], kinds)))
        changes = self._changes(arrived, pool)
        buffers = self._changed_buffers(arrived)
        with self._lock:
            for tensor in self.tensors:
                tensor.stream.now = arrived[tensor.stream.number]
            if pool is None:
                for replay, update in work:
                    self._update(replay, update)
            else:
                list(pool.map(lambda each: self._update(*each), work))
            for change in changes:
                self._unshare(change.replay)
                change.make()
            for tensor, values in own:
                tensor.own.update(values)
            self.buffers.update(buffers)
            first = arrived[min(arrived)]
            for tensor in self.tensors:
                tensor.stream.now = None
                tensor.set_at = first.step if changes else tensor.set_at
            self.step = first.step
            self.aux = first.aux
            if not first.record.skipped:
                self.recent.clear()
            self.recent.append((first.step, first.record))

    def _changes(self, arrived: Mapping[int, ReceivedStep], pool: ThreadPoolExecutor | None) -> list[StateChange]:
        """What the step says that states are now, decoded before anything is changed."""
        kinds = self.manifest.state_kinds

        def of(tensor: TensorState) -> list[StateChange]:
            return tensor.changes_in(arrived[tensor.stream.number], kinds)

        each = map(of, self.tensors) if pool is None else pool.map(of, self.tensors)
        return [change for some in each for change in some]

    def _changed_buffers(self, arrived: Mapping[int, ReceivedStep]) -> Buffers:
        """The buffers that the step has changed."""
        kinds, found = self.manifest.state_kinds, {}
        for schema in self.manifest.streams:
            values = arrived[schema.stream].values
            for (number, state), block in values.full.items():
                if kinds[state] == BUFFER:
                    shape = self.manifest.buffers[schema.buffers[number].parameter].shape
                    found[schema.stream, number] = ShadowValue.of(shape, block)
        return found

    def _unshare(self, replay: ChunkReplay) -> None:
        """Leave a stretch to the snapshots that read it, and go on with a copy."""
        if any(snapshot.stretches.get(id(replay)) is replay.chunk for snapshot in self._snapshots):
            replay.chunk = _copy_chunk(replay.chunk)

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
        """Compare the state with digests that the job took after this very step.

        It is proven when those of all streams were met. Of a tensor that is held in part nothing can be said.
        """
        mine = {tensor.index: tensor for tensor in self.tensors if tensor.stream.number == stream}
        for digest in digests:
            tensor = mine.get(digest.tensor)
            if tensor is None or tensor.is_padded or not tensor.is_whole:
                continue  # rows beyond the vocabulary are in the job's digest, and not in the base
            kind = PARAM if digest.kind in PARAM_NAMES else digest.kind
            found = tensor.digest(kind)
            if found is not None and found != digest.value:
                reason = f"the state differs from the job's own digest ({kind} of stream {stream})"
                self.refuted = self.refuted or ApproximationLabel(self.step, ", ".join(tensor.names), reason)
                return
        if all(tensor.is_whole for tensor in mine.values()):
            self._met[stream] = self.step
        if all(self._met.get(schema.stream) == self.step for schema in self.manifest.streams):
            self.proven_step = self.step

    def snapshot(self, told: Callable[[], dict[str, Any]]) -> StateSnapshot:
        """The state as it is now, at the boundary of two steps. `told` is asked at that very moment. Close it."""

        def close() -> None:
            with self._lock:
                self._snapshots = [other for other in self._snapshots if other is not made]

        with self._lock:
            made = StateSnapshot(told(), self.step, self.tensors, self.buffers, close)
            self._snapshots = [*self._snapshots, made]
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all states, and of what snapshots keep beside them."""
        stretches = {id(replay.chunk): replay.chunk for tensor in self.tensors for replay in tensor.replays}
        for snapshot in self._snapshots:
            stretches.update({id(stretch): stretch for stretch in snapshot.stretches.values()})
        states: int = sum(
            held.numel() * held.element_size()
            for stretch in stretches.values()
            for held in (stretch.param, *stretch.states.values())
        )
        own = sum(len(value.data) for tensor in self.tensors for value in tensor.own.values())
        return states + own + sum(len(value.data) for value in self.buffers.values())


def _copy_chunk(stretch: StateChunk) -> StateChunk:
    states = {kind: held.clone() for kind, held in stretch.states.items()}
    return replace(stretch, param=stretch.param.clone(), states=states)
