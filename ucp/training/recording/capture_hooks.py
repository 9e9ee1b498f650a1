"""Install the hooks that capture the gradients of every step.

Gradients are captured from `p.grad` when the optimizer is called (CONSUMED) or, with DeepSpeed's optimizers, before
they unscale and clip (REDUCED): then they still have few significant bits, and the factor is logged with them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ucp.errors import UsageError
from ucp.log.payloads import GradientStage
from ucp.training.live_job import Hooks, LiveJob, dtype_of, local_tensor
from ucp.training.recording.capture import GradientCapture, run_guarded
from ucp.training.recording.overlap import OverlapCapture, find_ddp, hook_accumulation, hook_ddp_buckets, hook_zero
from ucp.training.recording.schema_agreement import is_trained

_UNSCALING: Final = frozenset(
    {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FP16_UnfusedOptimizer", "FP16_Optimizer"}
)


def stage_of(job: LiveJob) -> GradientStage:
    """Which gradients can be logged: as reduced, or as the optimizer consumes them."""
    outer = None if job.engine is None else job.engine.optimizer
    if outer is None or outer is job.optimizer or getattr(outer, "torch_autocast_gradscaler", None) is not None:
        return GradientStage.CONSUMED
    for legacy in ("fused_adam_legacy", "fused_lamb_legacy"):
        if getattr(outer, legacy, False):
            raise UsageError(f"{type(outer).__name__} with {type(job.optimizer).__name__} cannot be recorded")
    return GradientStage.REDUCED if type(outer).__name__ in _UNSCALING | {"BF16_Optimizer"} else GradientStage.CONSUMED


def grad_dtypes(job: LiveJob, stage: GradientStage) -> list[str]:
    """The dtypes in which gradients are captured, one per stepped tensor; the writer narrows them if that is exact."""
    outer: Any = None if job.engine is None else job.engine.optimizer
    offload = getattr(outer, "cpu_offload", False) or getattr(outer, "offload_optimizer", False)
    kind = type(outer).__name__
    if stage == GradientStage.REDUCED and kind.startswith("DeepSpeedZeroOptimizer") and not offload:
        # The optimizer unscales these gradients after widening them to fp32, so narrowing again is exact. The first
        # steps are compared in full.
        low = str(outer.gradient_accumulation_dtype).removeprefix("torch.")
        return [low for _ in job.stepped]
    if stage == GradientStage.REDUCED and kind == "FP16_UnfusedOptimizer":
        return [str(dtype_of(p)) for group in outer.fp16_groups for p in group]
    return [str(dtype_of(local_tensor(stepped.key))) for stepped in job.stepped]


def hook_unscaling(outer: Any, capture: GradientCapture, hooks: Hooks, overlap: OverlapCapture) -> None:
    """ZeRO and the fp16 optimizers: capture `grad` of their fp32 tensors before they unscale and clip."""

    def before(*args: Any, **kwargs: Any) -> None:
        def take() -> None:
            if capture.scale is None:
                capture.scale = _unscaling_factor(outer, *args, **kwargs)
            ready = [(i, key.grad) for i, key in enumerate(capture.keys) if key.grad is not None]
            capture.copy_all(overlap.keep_matching_raw(ready))

        run_guarded(capture, take)

    hooks.wrap(outer, "unscale_and_clip_grads", before=before)


def _unscaling_factor(outer: Any, *args: Any, **kwargs: Any) -> np.float32:
    """The factor by which the optimizer will multiply gradients, found by letting it unscale a gradient of 1.

    So it is exactly DeepSpeed's factor in every version, including its rounding.
    """
    import torch

    one = torch.zeros(1)
    one.grad = torch.ones(1)
    stand_in = SimpleNamespace(
        clip_grad=outer.clip_grad,
        device=getattr(outer, "device", "cpu"),
        fp32_partitioned_groups_flat=[one],
        fp32_groups=[[one]],
    )
    for name in ("loss_scale", "loss_scale_config"):
        if hasattr(outer, name):
            setattr(stand_in, name, getattr(outer, name))
    method = type(outer).unscale_and_clip_grads
    first = args[0] if args else None
    if isinstance(first, list):  # ([flat gradient, …], norm)
        method(stand_in, [one.grad], *args[1:], **kwargs)
    elif isinstance(first, int) and type(outer).__name__.endswith("Stage3"):  # (sub-group, norm)
        method(stand_in, 0, *args[1:], **kwargs)
    else:  # (norm)
        method(stand_in, *args, **kwargs)
    factor: np.float32 = np.float32(float(one.grad[0]))
    return factor


def hook_bf16_optimizer(outer: Any, capture: GradientCapture, hooks: Hooks) -> None:
    """BF16_Optimizer: capture its gradient accumulators when `step` is called."""

    def take() -> None:
        pairs = zip(outer.fp32_groups_flat_partition, outer.fp32_groups_gradient_flat_partition, strict=True)
        known = capture.number
        capture.copy_all([(known[id(key)], grad) for key, grad in pairs if id(key) in known])

    hooks.wrap(outer, "step", before=lambda *_, **__: run_guarded(capture, take))


def bf16_scale(outer: Any) -> np.float32:
    """The factor by which BF16_Optimizer has just clipped, found by clipping a 1 with the same norm."""
    import torch
    from deepspeed.runtime.utils import clip_tensors_by_global_norm

    one = torch.ones(1)
    if outer.clip_grad > 0.0:
        norm = outer._global_grad_norm
        clip_tensors_by_global_norm(input_tensors=[one], max_norm=outer.clip_grad, global_norm=norm, mpu=outer.mpu)
    factor: np.float32 = np.float32(float(one[0]))
    return factor


def hook_gradients(
    job: LiveJob,
    capture: GradientCapture,
    stage: GradientStage,
    hooks: Hooks,
    *,
    model: Any = None,
    early: bool = False,
) -> OverlapCapture:
    """Install the hooks that capture gradients. Errors are kept in `capture.failure` and do not break the step.

    `early` is the option of `ucp.record`, `model` the user's model.
    """
    known = _trained(job)
    ddp = find_ddp(model)
    overlap = OverlapCapture(capture, marked=ddp is None)

    def before_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        def take() -> None:
            capture.called = True
            if any(callable(each) for each in (*args, *kwargs.values())):
                raise UsageError(
                    "an optimizer step that computes the gradients itself (closure) cannot be recorded",
                    hint='compute gradients before the step, or record states instead: what="state"',
                )
            _on_update(job, known, capture, stage, optimizer, overlap)

        run_guarded(capture, take)

    capture.hook = job.optimizer.register_step_pre_hook(before_update)
    hooks.add(capture.hook)
    if stage == GradientStage.CONSUMED:
        if early and ddp is not None:
            hook_ddp_buckets(ddp, overlap, capture)
        elif early and job.engine is None:
            hook_accumulation(overlap, capture, hooks)
        return overlap
    outer = job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer":
        hook_bf16_optimizer(outer, capture, hooks)
    else:
        hook_unscaling(outer, capture, hooks, overlap)
        if early:
            hook_zero(job, overlap, capture, hooks)
    return overlap


def hook_scalars(job: LiveJob, capture: GradientCapture, hooks: Hooks) -> OverlapCapture:
    """Install a hook that captures the hyper-parameters of every step only; gradients may come from a closure."""
    known = _trained(job)

    def before_update(optimizer: Any, *_: Any) -> None:
        def note() -> None:
            capture.called = True
            for group in optimizer.param_groups:
                stepped = [p for p in group["params"] if p.requires_grad]
                if not all(id(p) in known for p in stepped):
                    raise _unknown()
                if stepped:
                    capture.add_group_scalars(optimizer, group, known[id(stepped[0])])

        run_guarded(capture, note)

    hooks.add(job.optimizer.register_step_pre_hook(before_update))
    return OverlapCapture(capture, marked=True)


def _trained(job: LiveJob) -> dict[int, int]:
    """id of each logged optimizer tensor → its param group."""
    return {id(stepped.key): stepped.group for stepped in job.stepped if is_trained(stepped)}


def _unknown() -> UsageError:
    return UsageError(
        "the optimizer updates a parameter that it did not have when recording started, or that was frozen then",
        hint="close the recorder and record again after adding or unfreezing parameters",
    )


def _check_update(groups: set[int], layouts: list[Any]) -> None:
    """Raise if an update cannot be recorded. `groups` are the original groups of its tensors; -1 means unknown."""
    import torch

    if -1 in groups:
        raise _unknown()
    if len(groups) > 1:
        raise UsageError(
            "a parameter has moved to another param group since recording started",
            hint="close the recorder and record again",
        )
    if layouts.count(torch.strided) != len(layouts):
        raise UsageError(
            "the optimizer has a sparse gradient, which cannot be recorded",
            hint='record states instead: what="state"; or create the embedding with sparse=False',
        )


def _on_update(
    job: LiveJob,
    known: dict[int, int],
    capture: GradientCapture,
    stage: GradientStage,
    optimizer: Any,
    overlap: OverlapCapture,
) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError(
            "a fused optimizer that unscales gradients itself (GradScaler) cannot be recorded",
            hint="call scaler.unscale_(optimizer) before scaler.step, or build the optimizer with fused=False",
        )
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):  # the fused kernel will skip the update
        capture.skipped = True
    outer = None if job.engine is None else job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer" and capture.scale is None and stage == GradientStage.REDUCED:
        capture.scale = bf16_scale(outer)
    gradients = []
    for group in optimizer.param_groups:
        stepped = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        if not stepped:
            continue
        groups = {known.get(id(p), -1) for p, _ in stepped}
        _check_update(groups, [grad.layout for _, grad in stepped])
        for p, grad in stepped:
            number = capture.number.get(id(p))
            if number is None:
                continue  # another rank logs it
            if stage == GradientStage.CONSUMED:
                gradients.append((number, grad))
            else:
                capture.check(number, grad)
        capture.add_group_scalars(optimizer, group, groups.pop())
    if gradients:
        capture.copy_all(overlap.keep_matching(gradients))
