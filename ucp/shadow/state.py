"""The state that a shadow holds: the optimizer's tensors of every stream and the buffers, step by step, in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ucp.engine.shares import Share
from ucp.log.kinds import BUFFER
from ucp.log.manifest import Manifest
from ucp.log.payloads import Digest, StepRecord
from ucp.replay.chunks import Replay
from ucp.replay.exactness import Approximate
from ucp.replay.kernels import PARAM, Stretch
from ucp.replay.stored import PARAM_NAMES
from ucp.replay.timeline import Update
from ucp.shadow.held import Change, HeldTensor, HeldValue
from ucp.shadow.intake import ArrivedStep
from ucp.shadow.portions import WHOLE
from ucp.shadow.snapshot import Snapshot

Buffers = dict[tuple[int, int], HeldValue]  # by stream, and number in it


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
        self.refuted: Approximate | None = None
        self._met: dict[int, int] = {}  # stream → the newest step at which its digests were met
        self._lock = threading.Lock()  # held while the state is between two steps
        self._snapshots: list[Snapshot] = []

    def apply(self, arrived: Mapping[int, ArrivedStep], pool: ThreadPoolExecutor | None = None) -> None:
        """Take one step, of which every stream is there. Nothing is changed where it does not fit."""
        groups, kinds = self.manifest.groups, self.manifest.state_kinds
        work: list[tuple[Replay, Update]] = []
        own: list[tuple[HeldTensor, dict[str, HeldValue]]] = []
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

    def _changes(self, arrived: Mapping[int, ArrivedStep], pool: ThreadPoolExecutor | None) -> list[Change]:
        """What the step says that states are now, decoded before anything is changed."""
        kinds = self.manifest.state_kinds

        def of(tensor: HeldTensor) -> list[Change]:
            return tensor.changes_in(arrived[tensor.stream.number], kinds)

        each = map(of, self.tensors) if pool is None else pool.map(of, self.tensors)
        return [change for some in each for change in some]

    def _changed_buffers(self, arrived: Mapping[int, ArrivedStep]) -> Buffers:
        """The buffers that the step has changed."""
        kinds, found = self.manifest.state_kinds, {}
        for schema in self.manifest.streams:
            values = arrived[schema.stream].values
            for (number, state), block in values.full.items():
                if kinds[state] == BUFFER:
                    shape = self.manifest.buffers[schema.buffers[number].parameter].shape
                    found[schema.stream, number] = HeldValue.of(shape, block)
        return found

    def _unshare(self, replay: Replay) -> None:
        """Leave a stretch to the snapshots that read it, and go on with a copy."""
        if any(snapshot.stretches.get(id(replay)) is replay.stretch for snapshot in self._snapshots):
            replay.stretch = _copy(replay.stretch)

    def _update(self, replay: Replay, update: Update) -> None:
        import torch

        kernel = replay.tensor.kernel
        assert kernel is not None
        self._unshare(replay)
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
            made = Snapshot(told(), self.step, self.tensors, self.buffers, close)
            self._snapshots = [*self._snapshots, made]
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all states, and of what snapshots keep beside them."""
        stretches = {id(replay.stretch): replay.stretch for tensor in self.tensors for replay in tensor.replays}
        for snapshot in self._snapshots:
            stretches.update({id(stretch): stretch for stretch in snapshot.stretches.values()})
        states: int = sum(
            held.numel() * held.element_size()
            for stretch in stretches.values()
            for held in (stretch.param, *stretch.states.values())
        )
        own = sum(len(value.data) for tensor in self.tensors for value in tensor.own.values())
        return states + own + sum(len(value.data) for value in self.buffers.values())


def _copy(stretch: Stretch) -> Stretch:
    states = {kind: held.clone() for kind, held in stretch.states.items()}
    return replace(stretch, param=stretch.param.clone(), states=states)
