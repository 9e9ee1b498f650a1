"""Capture gradients as soon as they are final, overlapping with the rest of the backward pass (LowDiff+).

A gradient that was captured early is used only if it is still the one that the optimizer consumes: the same memory, the
same autograd version, and equal in a sample of elements. Otherwise it is captured again. So a job may accumulate, clip
or change gradients as usual.

The hooks at the end find the moment when a gradient is final: in plain torch, FSDP2, DDP, and DeepSpeed's ZeRO. For
ZeRO, only the last micro-batch is captured, and everything is compared with what the optimizer unscales: stages and
settings differ in when a gradient is final, and users may change gradients in between (`safe_set_full_grad`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import InconsistentError
from ucp.training.live_job import Hooks, LiveJob
from ucp.training.recording.capture import FULL_CHECKS, SAMPLE, GradientCapture, run_guarded

if TYPE_CHECKING:
    import torch


MAX_MISMATCHES: Final = 3  # give up after this many steps in a row in which most early gradients were changed later

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
        if len(equal) < len(kept) and self._marked:
            self._disable(first=first, full=full)
        return equal

    def _disable(self, *, first: bool, full: bool) -> None:
        """Stop capturing early: gradients are changed in a way that autograd does not count."""
        self._on = False
        if full and not first:
            raise InconsistentError(
                "gradients were changed after the backward pass in a way that autograd does not count, perhaps also in"
                " earlier steps",
                hint="record again from a new base, with early=False",
            )

    def _equal(self, number: int, gradient: torch.Tensor, scale: np.float32 | None) -> bool:
        import torch

        targets, sources = self._capture.block_views(number, gradient)
        for captured, consumed in zip(targets, sources, strict=True):
            captured = captured.to(consumed.dtype)
            expected = captured if scale is None else captured * torch.tensor(float(scale), dtype=torch.float32)
            if not torch.equal(_bits(expected), _bits(consumed.to(captured.device))):
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
        return bool(torch.equal(_bits(expected), _bits(torch.cat(consumed).to(expected.device))))

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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers, so that -0.0 differs from 0.0 and NaN equals NaN."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


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


def hook_accumulation(overlap: OverlapCapture, capture: GradientCapture, hooks: Hooks) -> None:
    """Plain torch and FSDP2: a gradient is final when it has been accumulated (FSDP2: reduced) into `grad`."""

    def hook_of(number: int) -> Any:
        def accumulated(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                run_guarded(capture, lambda: overlap.ready(number, gradient))

        return accumulated

    for number, key in enumerate(capture.keys):
        hooks.add(key.register_post_accumulate_grad_hook(hook_of(number)))


class DdpBuckets:
    """A DDP comm hook that reduces like torch's `allreduce_hook` and captures the reduced gradients.

    A comm hook cannot be removed, so the next recorder of the same module reuses this one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.overlap: OverlapCapture | None = None
        self.capture: GradientCapture | None = None

    def reduced(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Called with gradients that are final."""
        overlap, capture = self.overlap, self.capture
        if overlap is None or capture is None:
            return

        def ready() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                number = capture.number.get(id(parameter))
                if number is not None:
                    overlap.ready(number, gradient)

        run_guarded(capture, ready)


def _reduce_bucket(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    parameters, gradients = bucket.parameters(), bucket.gradients()

    def take(future: Any) -> Any:
        state.reduced(parameters, gradients)
        return future.value()

    return allreduce_hook(state.group, bucket).then(take)


_reduce_bucket.__annotations__.clear()  # DDP accepts only its own types as annotations, or none


def hook_ddp_buckets(ddp: Any, overlap: OverlapCapture, capture: GradientCapture) -> bool:
    """DDP: gradients are final when their bucket has been reduced. False if the job has its own comm hook."""
    hooks = [state for _, state in ddp._comm_hooks]
    if not hooks:
        hooks = [DdpBuckets(ddp.process_group)]
        ddp.register_comm_hook(hooks[0], _reduce_bucket)
    if not isinstance(hooks[0], DdpBuckets):
        return False
    hooks[0].overlap, hooks[0].capture = overlap, capture
    return True


def find_ddp(model: Any) -> Any:
    """The DDP wrapper of a model, or None."""
    from torch.nn.parallel import DistributedDataParallel

    while not isinstance(model, DistributedDataParallel):
        if not hasattr(model, "_orig_mod"):
            return None
        model = model._orig_mod
    return model


_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def hook_zero(job: LiveJob, overlap: OverlapCapture, capture: GradientCapture, hooks: Hooks) -> None:
    """ZeRO: capture gradients when their bucket has been reduced, if the stage has them before backward ends."""
    outer = job.engine.optimizer
    kind = type(outer).__name__
    parts = _ZeroPartitions(job, overlap, capture)
    if kind == "DeepSpeedZeroOptimizer_Stage3" and hasattr(outer, _PARTITIONS):
        hooks.wrap(outer, "partition_grads", after=parts.after_partitioning)
        return
    # Stage 2 adds up micro-batches only after backward.
    is_early = kind == "DeepSpeedZeroOptimizer" and not outer.cpu_offload
    if is_early and (not outer.partition_gradients or int(job.engine.gradient_accumulation_steps()) == 1):
        hooks.wrap(outer, "copy_grads_in_partition", after=parts.after_copying)


class _ZeroPartitions:
    """The slices of each parameter in the optimizer tensors of this rank."""

    def __init__(self, job: LiveJob, overlap: OverlapCapture, capture: GradientCapture) -> None:
        self._outer = job.engine.optimizer
        self._overlap = overlap
        self._capture = capture
        names = {name: id(p) for name, p in job.parameters.items()}
        self._slices: dict[int, list[tuple[int, Any]]] = {}  # id of a parameter → (tensor of the stream, slice)
        for stepped in job.stepped:
            number = capture.number.get(id(stepped.key))
            for part in stepped.slices:
                if number is not None and part.name in names:
                    self._slices.setdefault(names[part.name], []).append((number, part))

    def after_copying(self, param: Any, *_: Any, **__: Any) -> None:
        """ZeRO-1 and 2: capture the averaged gradient of a whole parameter."""

        def take() -> None:
            gradient = self._outer.get_gradient_for_reduction(param)
            if gradient is not None:
                self._take(param, gradient.detach().reshape(-1), whole=True)

        if self._outer.is_gradient_accumulation_boundary():
            run_guarded(self._capture, take)

    def after_partitioning(self, params: Sequence[Any], *_: Any, **__: Any) -> None:
        """ZeRO-3: capture this rank's partition of the averaged gradients."""

        def take() -> None:
            partitions = getattr(self._outer, _PARTITIONS)
            for param in params:
                if param.ds_id in partitions:
                    self._take(param, partitions[param.ds_id].detach().reshape(-1), whole=False)

        if self._outer.is_gradient_accumulation_boundary():
            run_guarded(self._capture, take)

    def _take(self, param: Any, flat: torch.Tensor, *, whole: bool) -> None:
        for number, part in self._slices.get(id(param), ()):
            first = part.region.start if whole else 0
            if first + part.region.numel <= flat.numel():
                self._overlap.capture_part(number, part.start, flat[first : first + part.region.numel])
