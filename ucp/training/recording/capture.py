"""Copy the gradients of a step into a slot of the log's ring, and check that the optimizer gets the same gradients.

Gradients can be captured as soon as they are final, overlapping with the rest of the backward pass (LowDiff+). Such a
gradient is used only if it is still the one that the optimizer consumes: the same memory, the same autograd version,
and equal in a sample of elements. Otherwise it is captured again. So a job may accumulate, clip or change gradients as
usual.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import InconsistentError, UcpError
from ucp.log.payloads import GradientStage, GroupScalars, StepRecord
from ucp.log.stream_schema import StreamSchema
from ucp.log.writer import StepSlot, StreamWriter
from ucp.training.live_job import local_tensor, same_bits
from ucp.training.recording.optimizer_kernel import scalars, update_count

if TYPE_CHECKING:
    import torch

FULL_CHECKS: Final = 2  # first steps in which all recorded gradients are compared with those of the optimizer
CHECK_EVERY: Final = 100  # steps between further full comparisons
SAMPLE: Final = 64  # elements of each tensor that are compared in the other steps
MAX_MISMATCHES: Final = 3  # give up after this many steps in a row in which most early gradients were changed later


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
        """Add the hyper-parameters of a param group at the moment the optimizer is called.

        They include the highest update count of the tensors that will be updated now, or -1 if the optimizer does not
        count. Counts differ if a tensor had no gradient in some steps.
        """
        if number in self.scalars:
            return
        counts = (update_count(optimizer, p) for p in group["params"] if p.grad is not None)
        count, most = next(counts, -1), self._most.get(number, -1)
        if count >= 0 and (number not in self._most or count <= most):  # a count above `most` is the new maximum
            count = max([count, *counts])
        self._most[number] = max(count, most)
        self.scalars[number] = scalars(number, group, count)

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
            if not same_bits(again, flat[block.offset : block.offset + count].to("cpu", torch.float32)):
                self.failure = InconsistentError(
                    f"step: the gradient recorded for optimizer tensor {number} (block {block.id}), times"
                    f" {self.scale}, is not the one that the optimizer consumes",
                    hint="start recording before installing hooks that change gradients, or report this as a bug",
                )
                return
            if not full:
                return

    def finish(
        self, step: int, *, stage: GradientStage, skipped: bool, micro_batches: int, samples: int, aux: Any
    ) -> None:
        """Submit the step to the writer and prepare for the next one."""
        slot = self.acquire_slot()
        groups = () if skipped else tuple(self.scalars[number] for number in sorted(self.scalars))
        slot.step, slot.aux = step, aux
        if skipped:
            slot.present = []
        scale = None if skipped else self.scale
        stage = stage if scale is None else GradientStage.REDUCED
        slot.record = StepRecord(groups, stage, scale, skipped, micro_batches, samples, time.time_ns())
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
    begin, cpu = time.perf_counter(), time.thread_time()
    try:
        work()
    except UcpError as error:
        capture.failure = error
    except Exception as error:  # noqa: BLE001 - recording must not break the trainer's step
        capture.failure = UcpError(f"recording failed: {type(error).__name__}: {error}")
    finally:
        capture.seconds += time.perf_counter() - begin
        capture.cpu_seconds += time.thread_time() - cpu


Mark = tuple["torch.Tensor", int, int]  # a gradient (kept, so that its memory is not reused), its address and version


class OverlapCapture:
    """The gradients of this step that were captured early, and whether they are valid.

    A hook cannot know whether a backward pass is the last one of the step, so the number of passes of the previous step
    is expected. If a step has another number, its gradients are captured when the optimizer is called.
    """

    def __init__(self, capture: GradientCapture, *, marked: bool) -> None:
        """With `marked`, final gradients keep their memory, so their autograd version shows whether they changed.

        Otherwise (DDP copies them once more) all elements are compared with what the optimizer consumes.
        """
        self.tensors = 0  # total number of valid early gradients
        self._capture = capture
        self._marked = marked
        self._marks: dict[int, Mark] = {}  # tensor → mark of the gradient in the slot
        self._passes: dict[int, int] = {}  # tensor → number of its backward passes in this step
        self._parts: dict[int, dict[int, int]] = {}  # tensor → start of each captured part → its elements
        self._expected = 0
        self._mismatches = 0
        self._step_counts = 0, 0  # early gradients of this step, and how many of them were valid
        self._steps = 0  # steps with early gradients
        self._on = True

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        """Called when a backward pass has finished for one of the stream's tensors."""
        if self._capture.scale is not None:  # another pass after clipping invalidates the marks
            self._marks, self._capture.scale = {}, None
        self._marks.pop(number, None)
        if not self._on:
            return
        passes = self._passes[number] = self._passes.get(number, 0) + 1
        if passes == self._expected:
            self._take(number, gradient)

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        targets, sources = self._capture.block_views(number, gradient)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        self._marks[number] = memory_mark(gradient)

    def capture_part(self, number: int, start: int, values: torch.Tensor) -> None:
        """Capture final elements of a gradient, starting at element `start` of one of the stream's tensors."""
        if not self._on:
            return
        copied = self._capture.copy_part(number, start, values)
        parts = self._parts.setdefault(number, {})
        parts[start] = copied
        if sum(parts.values()) == self._capture.counts[number]:
            self._marks[number] = memory_mark(values)

    def keep_matching_raw(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Like `keep_matching`, for gradients before unscaling; all elements are compared."""
        taken = [each for each in gradients if each[0] in self._marks and each[0] not in self._capture.taken]
        kept = [each for each in taken if self._equal(*each, None)]
        for number, _ in kept:
            self._capture.mark_captured(number)
        self._count(len(taken), len(kept))
        return [each for each in gradients if each[0] not in self._capture.taken]

    def keep_matching(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Mark the early gradients that equal those of the optimizer as captured; return the others."""
        taken = [(number, gradient) for number, gradient in gradients if number in self._marks]
        kept = self._unchanged(taken) if taken else []
        if self._capture.scale is not None and len(kept) < len(gradients):
            kept, self._capture.scale = [], None  # a step has one factor for all gradients
        for number, _ in kept:
            self._capture.mark_captured(number)
        self._count(len(taken), len(kept))
        self._steps += bool(taken)
        counted = {number for number, _ in kept}
        return [(number, gradient) for number, gradient in gradients if number not in counted]

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip like torch. If all gradients are captured, record the unclipped ones and the clipping factor."""
        import torch

        capture = self._capture
        mine = [(capture.number[id(p)], p.grad) for p in parameters if p.grad is not None and id(p) in capture.number]
        plain = all(gradient.dtype == torch.float32 for _, gradient in mine) and capture.scale is None
        if plain:
            known = {number for number, _ in self._unchanged([each for each in mine if each[0] in self._marks])}
            for number, gradient in mine:
                if number not in known:
                    self._take(number, gradient)
        norm, factor = _clip(parameters, max_norm, norm_type)
        capture.scale = factor if plain else None
        known_before = plain and factor is not None
        self._marks = {number: memory_mark(gradient) for number, gradient in mine} if known_before else {}
        return norm

    def _unchanged(self, taken: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """The early gradients that still equal those in the slot, times the factor if there is one."""
        kept = taken
        if self._marked or self._capture.scale is not None:
            kept = [each for each in taken if memory_mark(each[1])[1:] == self._marks[each[0]][1:]]
        first = self._steps < FULL_CHECKS
        full = first or not self._marked or self._capture.checks_everything
        if full:
            equal = [each for each in kept if self._equal(*each, self._capture.scale)]
        else:
            equal = kept if not kept or self._sample_is_equal(kept) else []
        if len(equal) < len(kept) and self._marked:  # gradients are changed in a way that autograd does not count
            self._on = False
            if full and not first:
                raise InconsistentError(
                    "gradients were changed after the backward pass in a way that autograd does not count, perhaps also"
                    " in earlier steps",
                    hint="record again from a new base, with early=False",
                )
        return equal

    def _equal(self, number: int, gradient: torch.Tensor, scale: np.float32 | None) -> bool:
        import torch

        targets, sources = self._capture.block_views(number, gradient)
        for captured, consumed in zip(targets, sources, strict=True):
            captured = captured.to(consumed.dtype)
            expected = captured if scale is None else captured * torch.tensor(float(scale), dtype=torch.float32)
            if not same_bits(expected, consumed.to(captured.device)):
                return False
        return True

    def _sample_is_equal(self, taken: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """Compare a few elements of each gradient."""
        import torch

        captured, consumed = [], []
        for number, gradient in taken:
            targets, sources = self._capture.block_views(number, gradient)
            stride = max(1, targets[0].numel() // SAMPLE)
            captured.append(targets[0].view(-1)[::stride])
            consumed.append(sources[0].reshape(-1)[::stride])
        expected = torch.cat(captured)
        if self._capture.scale is not None:
            expected.mul_(float(self._capture.scale))
        return same_bits(expected, torch.cat(consumed).to(expected.device))

    def _count(self, taken: int, kept: int) -> None:
        """Add to the counts of this step; an optimizer may be called several times per step."""
        self.tensors += kept
        self._step_counts = self._step_counts[0] + taken, self._step_counts[1] + kept

    def next_step(self) -> None:
        """Reset at the end of a step."""
        taken, kept = self._step_counts
        self._mismatches = self._mismatches + 1 if taken and kept * 2 < taken else 0
        if self._mismatches >= MAX_MISMATCHES:
            self._on = False
        self._step_counts = 0, 0
        self._expected = max(self._passes.values(), default=0)
        self._passes, self._marks, self._parts = {}, {}, {}

    def stop(self) -> None:
        """Stop capturing, even if a hook cannot be removed."""
        self._on = False
        self._marks = {}


def memory_mark(gradient: torch.Tensor) -> Mark:
    """The gradient's address and autograd version, which change when it is replaced or written to."""
    local: Any = getattr(gradient, "_local_tensor", gradient)
    return local, int(local.data_ptr()), int(local._version)


def _clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> tuple[torch.Tensor, np.float32 | None]:
    """Clip; returns (norm, factor). The factor is found by clipping a gradient of 1 with the same norm."""
    import torch

    try:
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    except ImportError:  # before torch 2.6
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type), None

    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    clip_grads_with_norm_(parameters, max_norm, norm)
    one = torch.zeros(1)
    one.grad = torch.ones(1)
    clip_grads_with_norm_([one], max_norm, norm.cpu())
    return norm, np.float32(float(one.grad[0]))
