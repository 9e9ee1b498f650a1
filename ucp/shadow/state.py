"""The state that a shadow holds: the optimizer's tensors of every stream, updated in memory step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.engine.shares import Share
from ucp.errors import InconsistentError, UsageError
from ucp.files.local import SourceFiles
from ucp.log.codecs import Bytes
from ucp.log.manifest import Manifest
from ucp.log.payloads import Digest, StepRecord
from ucp.log.reader import StoredBlock, Stream
from ucp.log.schema import StreamSchema
from ucp.log.walk import StreamScan
from ucp.records import replace
from ucp.replay.chunks import Replay, ReplayedTensor, memory_of
from ucp.replay.exactness import Approximate
from ucp.replay.kernels import PARAM, Stretch
from ucp.replay.stored import PARAM_NAMES
from ucp.replay.timeline import Update, hyper_of
from ucp.shadow.intake import ArrivedStep
from ucp.shadow.portions import WHOLE

if TYPE_CHECKING:
    import torch

Place = tuple[int, int, str]  # stream, tensor, state


class ArrivedStream(Stream):
    """A stream of which only the step that is being applied exists."""

    def __init__(self, folder: Path, schema: StreamSchema) -> None:
        super().__init__(folder, schema, StreamScan(folder, schema.stream))
        self.now: ArrivedStep | None = None

    def read_block(self, step: int, block: int, room: Bytes | None = None) -> StoredBlock | None:
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
        self.blocks = [b for b in tensor.blocks if b.offset < held[1] and b.offset + b.count > held[0]]
        self.is_padded = any(tensor.origins[b.parameter].is_padded(b.region) for b in tensor.blocks)
        self.names = [origin.name for origin in tensor.origins.values()]
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
        """Updates that the optimizer has counted."""
        return max((replay.stretch.step for replay in self.replays), default=0)

    @property
    def kinds(self) -> dict[str, str]:
        """The states that there are, with the names of their types; the tensor itself first."""
        found = {PARAM: self.replays[0].stretch.param} if self.replays else {}
        for replay in self.replays:
            found.update(replay.stretch.states)
        return {kind: str(tensor.dtype).removeprefix("torch.") for kind, tensor in found.items()}

    def update_in(self, arrived: ArrivedStep, constants: Mapping[str, Any]) -> Update | None:
        """What the step does to this tensor; None where it leaves it alone."""
        record = arrived.record
        scalars = next((one for one in record.groups if one.group == self.group), None)
        if record.skipped or scalars is None or not scalars.stepped:
            return None
        there = [block.id in arrived.blocks for block in self.blocks]
        if not any(there):
            return None
        if not all(there):
            raise InconsistentError(
                f"stream {self.stream.number}, step {arrived.step}: some blocks of optimizer tensor {self.index} have"
                " gradients and some have none"
            )
        if self.kernel is not None and self.kernel.counts and 0 <= scalars.opt_step < self.counter:
            raise InconsistentError(
                f"stream {self.stream.number}, step {arrived.step}: the job's optimizer had counted"
                f" {scalars.opt_step} updates before it, the shadow has {self.counter}",
                hint="the base is not of this run, or not of the step that it says",
            )
        scale = None if record.scale is None else float(record.scale)
        return Update(arrived.step, hyper_of(constants, scalars), scale, scalars.opt_step)

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


class Snapshot:
    """The state after one step, whatever is applied later: shares memory with the live state until that changes."""

    def __init__(self, told: dict[str, Any], step: int, tensors: Sequence[HeldTensor], close: Callable[[], None]):
        self.told = told
        self.step = step
        self._tensors = {(tensor.stream.number, tensor.index): tensor for tensor in tensors}
        self.stretches = {id(replay): replay.stretch for tensor in tensors for replay in tensor.replays}
        self.close = close

    def read_into(self, place: Place, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a state of an optimizer tensor, from byte `offset` on."""
        stream, index, kind = place
        tensor = self._tensors.get((stream, index))
        if tensor is None or kind not in tensor.kinds:
            raise UsageError(f"stream {stream} has no tensor {index} with state {kind!r}")
        size = self._tensor(tensor.replays[0], kind).element_size()
        if offset < tensor.held[0] * size or offset + len(target) > tensor.held[1] * size:
            raise UsageError(f"bytes {offset} to {offset + len(target)} are not in stream {stream}, tensor {index}")
        done = 0
        while done < len(target):
            number, start = divmod(offset + done - tensor.held[0] * size, tensor.chunk * size)
            data = memory_of(self._tensor(tensor.replays[number], kind))
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def _tensor(self, replay: Replay, kind: str) -> torch.Tensor:
        import torch

        stretch = self.stretches[id(replay)]
        held = stretch.param if kind == PARAM else stretch.states.get(kind)
        return torch.zeros_like(stretch.param) if held is None else held


class HeldState:
    """Everything that a shadow holds of one epoch. One thread applies; any may take snapshots."""

    def __init__(
        self,
        manifest: Manifest,
        step: int,
        tensors: Sequence[HeldTensor],
        labels: Sequence[Approximate] = (),
        recent: Sequence[tuple[int, StepRecord]] = (),
        aux: Any = None,
        share: Share = WHOLE,
    ) -> None:
        """`recent` are the newest steps and their records, from the last that changed something on."""
        self.share = share
        self.manifest = manifest
        self.step = step
        self.tensors = list(tensors)
        self.labels = list(labels)
        self.recent = list(recent)
        self.aux = aux
        self.proven_step: int | None = None  # the newest step at which the job's own digests were met
        self.refuted: Approximate | None = None
        self._met: dict[int, int] = {}  # stream → the newest step at which its digests were met
        self._lock = threading.Lock()  # held while the state is between two steps
        self._snapshots: list[Snapshot] = []

    def apply(self, arrived: Mapping[int, ArrivedStep], pool: ThreadPoolExecutor | None = None) -> None:
        """Take one step, of which every stream is there. Nothing is changed where it does not fit."""
        groups = self.manifest.groups
        work: list[tuple[Replay, Update]] = []
        for tensor in self.tensors:
            constants = groups[tensor.group].hyper if tensor.group < len(groups) else {}
            update = tensor.update_in(arrived[tensor.stream.number], constants)
            if update is not None:
                work += [(replay, update) for replay in tensor.replays if replay.blocks]
        with self._lock:
            for tensor in self.tensors:
                tensor.stream.now = arrived[tensor.stream.number]
            if pool is None:
                for replay, update in work:
                    self._update(replay, update)
            else:
                list(pool.map(lambda each: self._update(*each), work))
            for tensor in self.tensors:
                tensor.stream.now = None
            first = arrived[min(arrived)]
            self.step = first.step
            self.aux = first.aux
            if not first.record.skipped:
                self.recent.clear()
            self.recent.append((first.step, first.record))

    def _update(self, replay: Replay, update: Update) -> None:
        import torch

        kernel = replay.tensor.kernel
        assert kernel is not None
        if any(snapshot.stretches.get(id(replay)) is replay.stretch for snapshot in self._snapshots):
            replay.stretch = _copy(replay.stretch)
        with torch.no_grad():
            for kind in kernel.kinds(update.hyper):
                value = kernel.initial(kind, update.hyper)
                if kind not in replay.stretch.states and value is not None:
                    replay.stretch.states[kind] = torch.full_like(replay.stretch.param, value)
            replay.take(update)

    def compare(self, stream: int, digests: Iterable[Digest]) -> None:
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
                self.refuted = self.refuted or Approximate(self.step, ", ".join(tensor.names), reason)
                return
        if all(tensor.is_whole for tensor in mine.values()):
            self._met[stream] = self.step
        if all(self._met.get(schema.stream) == self.step for schema in self.manifest.streams):
            self.proven_step = self.step

    def snapshot(self, told: Callable[[], dict[str, Any]]) -> Snapshot:
        """The state as it is now, at the boundary of two steps. `told` is asked at that very moment. Close it."""

        def close() -> None:
            with self._lock:
                self._snapshots = [other for other in self._snapshots if other is not made]

        with self._lock:
            made = Snapshot(told(), self.step, self.tensors, close)
            self._snapshots = [*self._snapshots, made]
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all states, and of what snapshots keep beside them."""
        stretches = {id(replay.stretch): replay.stretch for tensor in self.tensors for replay in tensor.replays}
        for snapshot in self._snapshots:
            stretches.update({id(stretch): stretch for stretch in snapshot.stretches.values()})
        return sum(
            held.numel() * held.element_size()
            for stretch in stretches.values()
            for held in (stretch.param, *stretch.states.values())
        )


def _copy(stretch: Stretch) -> Stretch:
    states = {kind: held.clone() for kind, held in stretch.states.items()}
    return replace(stretch, param=stretch.param.clone(), states=states)
