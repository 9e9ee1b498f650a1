"""Copies of the gradients of a step, in a slot of the log's ring, and whether they are what the optimizer was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import InconsistentError, UcpError
from ucp.log.payloads import GradientStage, GroupScalars, StepRecord
from ucp.log.stream_schema import StreamSchema
from ucp.log.writer import StepSlot, StreamWriter
from ucp.training.live_job import local_tensor
from ucp.training.recording.optimizer_kernel import own_step, scalars

if TYPE_CHECKING:
    import torch

FULL_CHECKS: Final = 2  # steps whose every gradient is compared with what the optimizer is given
CHECK_EVERY: Final = 100  # …, and then every so many
SAMPLE: Final = 64  # elements of each tensor that are compared in the other steps


class GradientCapture:
    """Copies the gradients of one step after the other into slots of the writer's ring."""

    def __init__(
        self, writer: StreamWriter, schema: StreamSchema, keys: list[Any], groups: list[int], *, gradients: bool = True
    ) -> None:
        """`keys` are the optimizer's tensors of the stream, `groups` their groups. Slots may have no `gradients`."""
        self.writer = writer
        self.number = {id(key): number for number, key in enumerate(keys)}
        self.keys = keys
        self.groups = groups
        self.slot: StepSlot | None = None
        self.taken: set[int] = set()  # tensors of this step
        self.scalars: dict[int, GroupScalars] = {}
        self._most: dict[int, int] = {}  # group → the most updates that it was ever found to have counted
        self.scale: np.float32 | None = None
        self.skipped = False  # the optimizer was called, and left everything as it was
        self.called = False  # the optimizer was, in this step, though perhaps with no gradient at all
        self.hook: Any = None  # the handle of what takes gradients when the optimizer is called
        self.failure: UcpError | None = None
        self.seconds = 0.0  # spent in hooks
        self.cpu_seconds = 0.0
        self._blocks = [schema.blocks_of(number) for number in range(len(keys))]
        self._ids = [[block.id for block in blocks] for blocks in self._blocks]
        self.counts = [sum(block.count for block in blocks) for blocks in self._blocks]  # elements that are logged
        self._views = [_views(slot, self._blocks, keys) for slot in writer.slots] if gradients else []
        self._steps = 0
        self._lock = threading.Lock()

    def begin(self) -> StepSlot:
        """The slot of this step. Threads that take gradients while others are computed get the same one."""
        slot = self.slot
        if slot is not None:
            return slot
        with self._lock:
            if self.slot is None:
                self.slot = self.writer.acquire()
            return self.slot

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of one of the stream's tensors."""
        self.take_all([(number, gradient)])

    def take_all(self, gradients: list[tuple[int, torch.Tensor]]) -> None:
        """Copy gradients of several tensors."""
        import torch

        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        views, taken = self._views[self.begin().number], self.taken
        for number, gradient in gradients:
            if number in taken:
                continue
            held = views[number]
            if type(gradient) is torch.Tensor and len(held) == 1 and held[0].shape == gradient.shape:
                targets.append(held[0])
                sources.append(gradient)
            else:
                some, others = self.paired(number, gradient)
                targets.extend(some)
                sources.extend(others)
            self.count_in(number)
        if targets:
            with torch.no_grad():  # a gradient may be part of a graph itself
                torch._foreach_copy_(targets, sources)

    def paired(self, number: int, gradient: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(where the gradient of a tensor lies in the slot, the gradient cut alike)."""
        local = local_tensor(gradient)
        views, blocks = self._views[self.begin().number][number], self._blocks[number]
        if len(views) == 1 and views[0].shape == local.shape:
            return [views[0]], [local]
        flat = local.reshape(-1)
        return [v.view(-1) for v in views], [flat[block.offset : block.offset + block.count] for block in blocks]

    def copy_part(self, number: int, start: int, values: torch.Tensor) -> int:
        """Copy some elements of a gradient, from element `start` of the tensor on; gives how many the stream has."""
        copied = 0
        for block, view in zip(self._blocks[number], self._views[self.begin().number][number], strict=True):
            low, high = max(block.offset, start), min(block.offset + block.count, start + values.numel())
            if low < high:
                view.view(-1)[low - block.offset : high - block.offset].copy_(values[low - start : high - start])
                copied += high - low
        return copied

    def count_in(self, number: int) -> None:
        """What the slot holds of a tensor is its gradient of this step."""
        self.taken.add(number)
        self.begin().present.extend(self._ids[number])

    @property
    def checks_all(self) -> bool:
        """Is this a step in which all is compared, and not a sample?"""
        return self._steps < FULL_CHECKS or self._steps % CHECK_EVERY == 0

    def note_group(self, optimizer: Any, group: dict[str, Any], number: int) -> None:
        """Note the scalars of a group as they are when the optimizer is called."""
        if number in self.scalars:
            return
        self.scalars[number] = scalars(number, group, self._counted(optimizer, group, number))

    def _counted(self, optimizer: Any, group: dict[str, Any], number: int) -> int:
        """Updates that the optimizer has counted, the most of all tensors that it will update now; -1: it counts none.

        A tensor that had no gradient for a while counts less than others.
        """
        counts = (own_step(optimizer, p) for p in group["params"] if p.grad is not None)
        step = next(counts, -1)
        most = self._most.get(number)
        if step >= 0 and (most is None or step <= most):  # no tensor can have more than one more than ever before
            step = max([step, *counts])
        self._most[number] = max(step, -1 if most is None else most)
        return step

    def check(self, number: int, consumed: torch.Tensor, *, all_of_it: bool = False) -> None:
        """Compare what was taken with what the optimizer is given: a sample, or now and then all of it."""
        import torch

        if number not in self.taken or self.slot is None:
            return
        flat = local_tensor(consumed).reshape(-1)
        full = all_of_it or self.checks_all
        views = self._views[self.slot.number][number]
        for block, view in zip(self._blocks[number], views, strict=True):
            count = block.count if full else min(block.count, SAMPLE)
            again = view.view(-1)[:count].to(torch.float32, copy=True)
            if self.scale is not None:
                again.mul_(float(self.scale))
            given = flat[block.offset : block.offset + count].to("cpu", torch.float32)
            if not torch.equal(again.view(torch.int32), given.contiguous().view(torch.int32)):
                self.failure = InconsistentError(
                    f"step: the gradient that was recorded for optimizer tensor {number} (block {block.id}), times"
                    f" {self.scale}, is not what the optimizer is given",
                    hint="record before anything else changes gradients, or report this with your configuration",
                )
                return
            if not full:
                return

    def finish(
        self,
        step: int,
        *,
        stage: GradientStage,
        skipped: bool,
        micro_batches: int,
        samples: int,
        aux: Any,
        time_ns: int,
    ) -> None:
        """Hand the step over to the writer and get ready for the next."""
        slot = self.begin()
        groups = () if skipped else tuple(self.scalars[number] for number in sorted(self.scalars))
        slot.step = step
        slot.aux = aux
        if skipped:
            slot.present = []
        scale = None if skipped else self.scale
        stage = stage if scale is None else GradientStage.REDUCED
        slot.record = StepRecord(groups, stage, scale, skipped, micro_batches, samples, time_ns)
        self._reset()
        self._steps += 1
        self.writer.submit(slot)

    def forget(self) -> None:
        """Drop what was taken so far of this step."""
        if self.slot is not None:
            self.writer.release(self.slot)
        self._reset()

    def _reset(self) -> None:
        self.slot, self.scale, self.called, self.skipped = None, None, False, False
        self.taken, self.scalars = set(), {}


def _views(slot: StepSlot, blocks: list[list[Any]], keys: list[Any]) -> list[list[torch.Tensor]]:
    """A slot's arrays as torch tensors, by tensor and block; of a tensor that is one block, in its shape."""
    import torch

    views = []
    for held, key in zip(blocks, keys, strict=True):
        shape = local_tensor(key).shape
        some = []
        for block in held:
            array = slot.arrays[block.id]
            dtype = getattr(torch, slot.dtypes[block.id].name)
            view = torch.from_numpy(array.view(f"<i{array.dtype.itemsize}")).view(dtype)
            some.append(view.view(shape) if len(held) == 1 and block.count == shape.numel() else view)
        views.append(some)
    return views


def run_guarded(taker: GradientCapture, work: Callable[[], None]) -> None:
    """Do the work of a hook; what goes wrong is told when the step is over."""
    if taker.failure is not None:
        return
    begin, cpu = time.perf_counter(), time.thread_time()
    try:
        work()
    except UcpError as error:
        taker.failure = error
    except Exception as error:  # noqa: BLE001 - the trainer's step must not fail because of a log
        taker.failure = UcpError(f"recording failed: {type(error).__name__}: {error}")
    finally:
        taker.seconds += time.perf_counter() - begin
        taker.cpu_seconds += time.thread_time() - cpu


__all__ = ["GradientCapture", "run_guarded"]
