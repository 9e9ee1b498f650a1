"""Gradients taken as soon as they are final, layer by layer while the backward pass goes on (LowDiff+).

A gradient that was taken early counts only if it is still the one that the optimizer is given: the same memory, not
written to since, as autograd counts, and equal where it is looked at. One that is not is taken again, as if nothing had
been taken before. So a job may accumulate, clip or change gradients as it likes.

Where the gradients of torch jobs become final: plain, FSDP2, DDP.

DeepSpeed's ZeRO: where its stages have the reduced gradient of a parameter before the step begins.

Only what the last micro-batch of a step leaves is taken. All of it is compared with what the optimizer unscales: stages
and settings differ in when a gradient is final, and users may set gradients (`safe_set_full_grad`) in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import InconsistentError
from ucp.training.live_job import Hooks, LiveJob
from ucp.training.recording.capture import FULL_CHECKS, SAMPLE, GradientCapture, run_guarded

if TYPE_CHECKING:
    import torch


MAX_MISMATCHES: Final = (
    3  # steps in a row whose early gradients were mostly changed afterwards, before it is no longer tried
)

Mark = tuple["torch.Tensor", int, int]  # a gradient (held, so that no other gets its memory), its address and version


class OverlapCapture:
    """What was taken of this step so far, and whether it counts.

    A hook that runs with every backward pass does not know whether it is the last one of the step. As many passes are
    expected as the step before had; with another number nothing is taken early, or what was taken does not count.
    """

    def __init__(self, taker: GradientCapture, *, marked: bool) -> None:
        """`marked`: gradients stay where they are when they are final, so their version tells whether they changed.

        Otherwise (DDP copies them once more) all that was taken is compared with what the optimizer is given.
        """
        self.tensors = 0  # that were taken early and counted, all told
        self._taker = taker
        self._marked = marked
        self._marks: dict[int, Mark] = {}  # tensor → the gradient that the slot has of it
        self._passes: dict[int, int] = {}  # tensor → backward passes of this step that it was part of
        self._parts: dict[int, dict[int, int]] = {}  # tensor → where it was taken in parts, and how many elements
        self._expected = 0
        self._vain = 0
        self._of_step = 0, 0  # tensors that were taken early, and those of them that counted
        self._steps = 0  # in which something was taken early
        self._on = True

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        """A backward pass has ended for one of the stream's tensors."""
        if self._taker.scale is not None:  # another pass after clipping: what was noted then is past
            self._marks, self._taker.scale = {}, None
        self._marks.pop(number, None)
        if not self._on:
            return
        passes = self._passes[number] = self._passes.get(number, 0) + 1
        if passes == self._expected:
            self._take(number, gradient)

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        targets, sources = self._taker.paired(number, gradient)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        self._marks[number] = mark_of(gradient)

    def take_part(self, number: int, start: int, values: torch.Tensor) -> None:
        """Some elements of a gradient are final: those from `start` on of one of the stream's tensors."""
        if not self._on:
            return
        copied = self._taker.copy_part(number, start, values)
        parts = self._parts.setdefault(number, {})
        parts[start] = copied
        if sum(parts.values()) == self._taker.counts[number]:
            self._marks[number] = mark_of(values)

    def settle_raw(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """As `settle`, with gradients as they were before unscaling, of which all is compared."""
        taken = [each for each in gradients if each[0] in self._marks and each[0] not in self._taker.taken]
        kept = [each for each in taken if self._equal(*each, None)]
        for number, _ in kept:
            self._taker.count_in(number)
        self._count(len(taken), len(kept))
        return [each for each in gradients if each[0] not in self._taker.taken]

    def settle(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """The optimizer is called with these: count what was taken of them, give back those that must be taken."""
        taken = [(number, gradient) for number, gradient in gradients if number in self._marks]
        kept = self._unchanged(taken) if taken else []
        if self._taker.scale is not None and len(kept) < len(gradients):
            kept, self._taker.scale = [], None  # one factor is logged for all
        for number, _ in kept:
            self._taker.count_in(number)
        self._count(len(taken), len(kept))
        self._steps += bool(taken)
        counted = {number for number, _ in kept}
        return [(number, gradient) for number, gradient in gradients if number not in counted]

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip as torch does; where all gradients are known as they were before, note the factor instead of them."""
        import torch

        taker = self._taker
        mine = [(taker.number[id(p)], p.grad) for p in parameters if p.grad is not None and id(p) in taker.number]
        plain = all(gradient.dtype == torch.float32 for _, gradient in mine) and taker.scale is None
        if plain:
            known = {number for number, _ in self._unchanged([each for each in mine if each[0] in self._marks])}
            for number, gradient in mine:
                if number not in known:
                    self._take(number, gradient)
        norm, factor = _clip(parameters, max_norm, norm_type)
        taker.scale = factor if plain else None
        known_before = plain and factor is not None
        self._marks = {number: mark_of(gradient) for number, gradient in mine} if known_before else {}
        return norm

    def _unchanged(self, taken: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Those of the early gradients that are still what the slot holds, times the factor where there is one."""
        kept = taken
        if self._marked or self._taker.scale is not None:
            kept = [each for each in taken if mark_of(each[1])[1:] == self._marks[each[0]][1:]]
        first = self._steps < FULL_CHECKS
        full = first or not self._marked or self._taker.checks_all
        if full:
            equal = [each for each in kept if self._equal(*each, self._taker.scale)]
        else:
            equal = kept if not kept or self._looks_equal(kept) else []
        if len(equal) < len(kept) and self._marked:
            self._distrust(first=first, full=full)
        return equal

    def _distrust(self, *, first: bool, full: bool) -> None:
        """Gradients are changed in a way that autograd does not see: nothing can be taken early in this job."""
        self._on = False
        if full and not first:
            raise InconsistentError(
                "gradients were changed after the backward pass in a way that autograd does not count, and not for the"
                " first time perhaps",
                hint="record with early=False, and again from a new base",
            )

    def _equal(self, number: int, gradient: torch.Tensor, scale: np.float32 | None) -> bool:
        import torch

        targets, sources = self._taker.paired(number, gradient)
        for held, given in zip(targets, sources, strict=True):
            held = held.to(given.dtype)
            again = held if scale is None else held * torch.tensor(float(scale), dtype=torch.float32)
            if not torch.equal(_bits(again), _bits(given.to(held.device))):
                return False
        return True

    def _looks_equal(self, taken: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """A few elements of each, all over it."""
        import torch

        held, given = [], []
        for number, gradient in taken:
            targets, sources = self._taker.paired(number, gradient)
            stride = max(1, targets[0].numel() // SAMPLE)
            held.append(targets[0].view(-1)[::stride])
            given.append(sources[0].reshape(-1)[::stride])
        again = torch.cat(held)
        if self._taker.scale is not None:
            again.mul_(float(self._taker.scale))
        return bool(torch.equal(_bits(again), _bits(torch.cat(given).to(again.device))))

    def _count(self, taken: int, kept: int) -> None:
        """So many were taken early, and so many of them counted. An optimizer may be called several times in a step."""
        self.tensors += kept
        self._of_step = self._of_step[0] + taken, self._of_step[1] + kept

    def next_step(self) -> None:
        """The step is over."""
        taken, kept = self._of_step
        self._vain = self._vain + 1 if taken and kept * 2 < taken else 0
        if self._vain >= MAX_MISMATCHES:
            self._on = False
        self._of_step = 0, 0
        self._expected = max(self._passes.values(), default=0)
        self._passes, self._marks, self._parts = {}, {}, {}

    def stop(self) -> None:
        """Take nothing any more, also where a hook cannot be taken off."""
        self._on = False
        self._marks = {}


def mark_of(gradient: torch.Tensor) -> Mark:
    """What changes when a gradient is written to or replaced: where its memory is, and how often it was written to."""
    local: Any = getattr(gradient, "_local_tensor", gradient)
    return local, int(local.data_ptr()), int(local._version)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers, so that -0.0 is not 0.0 and NaN is itself."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> tuple[torch.Tensor, np.float32 | None]:
    """Clip; (norm of all gradients, what they were multiplied with: found by clipping a one with the same norm)."""
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


def hook_accumulation(early: OverlapCapture, taker: GradientCapture, hooks: Hooks) -> None:
    """Plain torch and FSDP2: when autograd has added to `grad` (FSDP2: when the reduced gradient is there)."""

    def hook_of(number: int) -> Any:
        def accumulated(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                run_guarded(taker, lambda: early.ready(number, gradient))

        return accumulated

    for number, key in enumerate(taker.keys):
        hooks.add(key.register_post_accumulate_grad_hook(hook_of(number)))


class DdpBuckets:
    """The comm hook of a DDP module: reduces as torch's `allreduce_hook` does, and says when a bucket is reduced.

    DDP takes one such hook for ever, so the next recorder of the same module goes on with this one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.early: OverlapCapture | None = None
        self.taker: GradientCapture | None = None

    def reduced(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """These gradients are final."""
        early, taker = self.early, self.taker
        if early is None or taker is None:
            return

        def ready() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                number = taker.number.get(id(parameter))
                if number is not None:
                    early.ready(number, gradient)

        run_guarded(taker, ready)


def _reduce_bucket(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    parameters, gradients = bucket.parameters(), bucket.gradients()

    def take(future: Any) -> Any:
        state.reduced(parameters, gradients)
        return future.value()

    return allreduce_hook(state.group, bucket).then(take)


_reduce_bucket.__annotations__.clear()  # DDP wants its own types there, or none


def hook_ddp_buckets(ddp: Any, early: OverlapCapture, taker: GradientCapture) -> bool:
    """DDP: when a bucket has been reduced. Not where the job has a comm hook of its own."""
    hooks = [state for _, state in ddp._comm_hooks]
    if not hooks:
        hooks = [DdpBuckets(ddp.process_group)]
        ddp.register_comm_hook(hooks[0], _reduce_bucket)
    if not isinstance(hooks[0], DdpBuckets):
        return False
    hooks[0].early, hooks[0].taker = early, taker
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


def hook_zero(job: LiveJob, early: OverlapCapture, taker: GradientCapture, hooks: Hooks) -> None:
    """Take gradients when a bucket of theirs has been reduced; nothing where the stage has them only after backward."""
    outer = job.engine.optimizer
    kind = type(outer).__name__
    parts = _ZeroPartitions(job, early, taker)
    if kind == "DeepSpeedZeroOptimizer_Stage3" and hasattr(outer, _PARTITIONS):
        hooks.wrap(outer, "partition_grads", parts.after_partitioning)
        return
    # Stage 2 adds up micro-batches when backward is over.
    early_enough = kind == "DeepSpeedZeroOptimizer" and not outer.cpu_offload
    if early_enough and (not outer.partition_gradients or int(job.engine.gradient_accumulation_steps()) == 1):
        hooks.wrap(outer, "copy_grads_in_partition", parts.after_copying)


class _ZeroPartitions:
    """Where the elements of each parameter lie in the optimizer's tensors of this rank."""

    def __init__(self, job: LiveJob, early: OverlapCapture, taker: GradientCapture) -> None:
        self._outer = job.engine.optimizer
        self._early = early
        self._taker = taker
        names = {name: id(p) for name, p in job.parameters.items()}
        self._shares: dict[int, list[tuple[int, Any]]] = {}  # id of a parameter → (tensor of the stream, share)
        for stepped in job.stepped:
            number = taker.number.get(id(stepped.key))
            for share in stepped.slices:
                if number is not None and share.name in names:
                    self._shares.setdefault(names[share.name], []).append((number, share))

    def after_copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """ZeRO 1 and 2: the averaged gradient of a whole parameter."""

        def copy_grads_in_partition(param: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(param, *args, **kwargs)

            def take() -> None:
                gradient = self._outer.get_gradient_for_reduction(param)
                if gradient is not None:
                    self._take(param, gradient.detach().reshape(-1), whole=True)

            if self._outer.is_gradient_accumulation_boundary():
                run_guarded(self._taker, take)
            return result

        return copy_grads_in_partition

    def after_partitioning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """ZeRO 3: this rank's part of the averaged gradients of some parameters."""

        def partition_grads(params: Any, *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            result = original(params, *args, **kwargs)

            def take() -> None:
                held = getattr(self._outer, _PARTITIONS)
                for param in params:
                    if param.ds_id in held:
                        self._take(param, held[param.ds_id].detach().reshape(-1), whole=False)

            if self._outer.is_gradient_accumulation_boundary():
                run_guarded(self._taker, take)
            return result

        return partition_grads

    def _take(self, param: Any, flat: torch.Tensor, *, whole: bool) -> None:
        for number, share in self._shares.get(id(param), ()):
            first = share.region.start if whole else 0
            if first + share.region.numel <= flat.numel():
                self._early.take_part(number, share.start, flat[first : first + share.region.numel])
