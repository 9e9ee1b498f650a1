"""Copy the gradients of a step into a slot of the log's ring, and check that the optimizer gets the same gradients."""

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
from ucp.training.recording.optimizer_kernel import scalars, update_count

if TYPE_CHECKING:
    import torch

FULL_CHECKS: Final = 2  # first steps in which all recorded gradients are compared with those of the optimizer
CHECK_EVERY: Final = 100  # steps between further full comparisons
SAMPLE: Final = 64  # elements of each tensor that are compared in the other steps


class GradientCapture:
    """Copies the gradients of each step into a slot of the writer's ring."""

    def __init__(
        self, writer: StreamWriter, schema: StreamSchema, keys: list[Any], groups: list[int], *, gradients: bool = True
    ) -> None:
        """`keys` are the stream's optimizer tensors, `groups` their param groups. A log of states has no gradients."""
        self.writer = writer
        self.number = {id(key): number for number, key in enumerate(keys)}
        self.keys = keys
        self.groups = groups
        self.slot: StepSlot | None = None
        self.taken: set[int] = set()  # tensors of this step
        self.scalars: dict[int, GroupScalars] = {}
        self._most: dict[int, int] = {}  # group → highest update count seen so far
        self.scale: np.float32 | None = None  # factor from recorded to consumed gradients
        self.skipped = False  # the optimizer was called, but skipped its update
        self.called = False  # the optimizer was called in this step, perhaps without any gradient
        self.hook: Any = None  # handle of the pre-hook that captures gradients
        self.failure: UcpError | None = None
        self.seconds = 0.0  # timings in hooks
        self.cpu_seconds = 0.0
        self._blocks = [schema.blocks_of(number) for number in range(len(keys))]
        self._ids = [[block.id for block in blocks] for blocks in self._blocks]
        self.counts = [sum(block.count for block in blocks) for blocks in self._blocks]  # elements that are logged
        self._views = [_views(slot, self._blocks, keys) for slot in writer.slots] if gradients else []
        self._steps = 0
        self._lock = threading.Lock()

    def acquire_slot(self) -> StepSlot:
        """The slot of this step; the same one for all threads that capture gradients."""
        slot = self.slot
        if slot is not None:
            return slot
        with self._lock:
            if self.slot is None:
                self.slot = self.writer.acquire()
            return self.slot

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of one of the stream's tensors."""
        self.copy_all([(number, gradient)])

    def copy_all(self, gradients: list[tuple[int, torch.Tensor]]) -> None:
        """Copy gradients of several tensors."""
        import torch

        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        views, taken = self._views[self.acquire_slot().number], self.taken
        for number, gradient in gradients:
            if number in taken:
                continue
            blocks = views[number]
            if type(gradient) is torch.Tensor and len(blocks) == 1 and blocks[0].shape == gradient.shape:
                targets.append(blocks[0])
                sources.append(gradient)
            else:
                in_slot, in_gradient = self.block_views(number, gradient)
                targets.extend(in_slot)
                sources.extend(in_gradient)
            self.mark_captured(number)
        if targets:
            with torch.no_grad():  # a gradient may be part of a graph itself
                torch._foreach_copy_(targets, sources)

    def block_views(self, number: int, gradient: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(views of the slot, views of the gradient) for every block of a tensor."""
        local = local_tensor(gradient)
        views, blocks = self._views[self.acquire_slot().number][number], self._blocks[number]
        if len(views) == 1 and views[0].shape == local.shape:
            return [views[0]], [local]
        flat = local.reshape(-1)
        return [v.view(-1) for v in views], [flat[block.offset : block.offset + block.count] for block in blocks]

    def copy_part(self, number: int, start: int, values: torch.Tensor) -> int:
        """Copy elements of a gradient, starting at element `start` of the tensor; returns how many are logged."""
        copied = 0
        for block, view in zip(self._blocks[number], self._views[self.acquire_slot().number][number], strict=True):
            low, high = max(block.offset, start), min(block.offset + block.count, start + values.numel())
            if low < high:
                view.view(-1)[low - block.offset : high - block.offset].copy_(values[low - start : high - start])
                copied += high - low
        return copied

    def mark_captured(self, number: int) -> None:
        """Note that the slot contains the gradient of a tensor for this step."""
        self.taken.add(number)
        self.acquire_slot().present.extend(self._ids[number])

    @property
    def checks_everything(self) -> bool:
        """Whether all elements are compared in this step, instead of a sample."""
        return self._steps < FULL_CHECKS or self._steps % CHECK_EVERY == 0

    def add_group_scalars(self, optimizer: Any, group: dict[str, Any], number: int) -> None:
        """Add the hyper-parameters of a param group at the moment the optimizer is called."""
        if number in self.scalars:
            return
        self.scalars[number] = scalars(number, group, self._max_update_count(optimizer, group, number))

    def _max_update_count(self, optimizer: Any, group: dict[str, Any], number: int) -> int:
        """The highest update count of the tensors that will be updated now; -1 if the optimizer does not count.

        Counts differ if a tensor had no gradient in some steps.
        """
        counts = (update_count(optimizer, p) for p in group["params"] if p.grad is not None)
        step = next(counts, -1)
        most = self._most.get(number)
        if step >= 0 and (most is None or step <= most):  # a count above `most` is the new maximum: it grows by one
            step = max([step, *counts])
        self._most[number] = max(step, -1 if most is None else most)
        return step

    def check(self, number: int, consumed: torch.Tensor, *, all_of_it: bool = False) -> None:
        """Compare a recorded gradient with the one that the optimizer consumes: a sample, or all elements."""
        import torch

        if number not in self.taken or self.slot is None:
            return
        flat = local_tensor(consumed).reshape(-1)
        full = all_of_it or self.checks_everything
        views = self._views[self.slot.number][number]
        for block, view in zip(self._blocks[number], views, strict=True):
            count = block.count if full else min(block.count, SAMPLE)
            again = view.view(-1)[:count].to(torch.float32, copy=True)
            if self.scale is not None:
                again.mul_(float(self.scale))
            given = flat[block.offset : block.offset + count].to("cpu", torch.float32)
            if not torch.equal(again.view(torch.int32), given.contiguous().view(torch.int32)):
                self.failure = InconsistentError(
                    f"step: the gradient recorded for optimizer tensor {number} (block {block.id}), times"
                    f" {self.scale}, is not the one that the optimizer consumes",
                    hint="start recording before installing hooks that change gradients, or report this as a bug",
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
        """Submit the step to the writer and prepare for the next one."""
        slot = self.acquire_slot()
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

    def discard(self) -> None:
        """Discard what was captured of this step."""
        if self.slot is not None:
            self.writer.release(self.slot)
        self._reset()

    def _reset(self) -> None:
        self.slot, self.scale, self.called, self.skipped = None, None, False, False
        self.taken, self.scalars = set(), {}


def _views(slot: StepSlot, blocks: list[list[Any]], keys: list[Any]) -> list[list[torch.Tensor]]:
    """A slot's arrays as torch tensors, by tensor and block; with the tensor's shape if it is a single block."""
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


def run_guarded(capture: GradientCapture, work: Callable[[], None]) -> None:
    """Run a hook and measure its time; an exception is kept and raised at the end of the step."""
    if capture.failure is not None:
        return
    acquire_slot, cpu = time.perf_counter(), time.thread_time()
    try:
        work()
    except UcpError as error:
        capture.failure = error
    except Exception as error:  # noqa: BLE001 - recording must not break the trainer's step
        capture.failure = UcpError(f"recording failed: {type(error).__name__}: {error}")
    finally:
        capture.seconds += time.perf_counter() - acquire_slot
        capture.cpu_seconds += time.thread_time() - cpu


__all__ = ["GradientCapture", "run_guarded"]
