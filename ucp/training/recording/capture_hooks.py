"""Where DeepSpeed's optimizers have a gradient before they unscale and clip it, and with what they multiply it.

Where the gradients of a step are taken from in a live job.

Either from `p.grad` when the optimizer is called (CONSUMED), or, from DeepSpeed's optimizers, before they unscale and
clip (REDUCED): then the gradient still has few bits, and the factor is logged beside it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Which gradient can be logged."""
    outer = None if job.engine is None else job.engine.optimizer
    if outer is None or outer is job.optimizer or getattr(outer, "torch_autocast_gradscaler", None) is not None:
        return GradientStage.CONSUMED
    for legacy in ("fused_adam_legacy", "fused_lamb_legacy"):
        if getattr(outer, legacy, False):
            raise UsageError(f"{type(outer).__name__} with {type(job.optimizer).__name__} cannot be recorded")
    return GradientStage.REDUCED if type(outer).__name__ in _UNSCALING | {"BF16_Optimizer"} else GradientStage.CONSUMED


def grad_dtypes(job: LiveJob, stage: GradientStage) -> list[str]:
    """The element types in which the gradients of the stepped tensors are taken; the writer narrows where it can."""
    outer: Any = None if job.engine is None else job.engine.optimizer
    offload = getattr(outer, "cpu_offload", False) or getattr(outer, "offload_optimizer", False)
    kind = type(outer).__name__
    if stage == GradientStage.REDUCED and kind.startswith("DeepSpeedZeroOptimizer") and not offload:
        # What is unscaled is these, widened: copying them back loses nothing. The first steps are compared in full.
        low = str(outer.gradient_accumulation_dtype).removeprefix("torch.")
        return [low for _ in job.stepped]
    if stage == GradientStage.REDUCED and kind == "FP16_UnfusedOptimizer":
        return [str(dtype_of(p)) for group in outer.fp16_groups for p in group]
    return [str(dtype_of(local_tensor(stepped.key))) for stepped in job.stepped]


def hook_unscaling(outer: Any, taker: GradientCapture, hooks: Hooks, early: OverlapCapture) -> None:
    """ZeRO and its like: before they unscale and clip, `grad` of their tensors is the reduced gradient, widened."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_and_clip_grads(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                if taker.scale is None:
                    taker.scale = _unscaling_factor(outer, *args, **kwargs)
                ready = [(i, key.grad) for i, key in enumerate(taker.keys) if key.grad is not None]
                taker.take_all(early.settle_raw(ready))

            run_guarded(taker, take)
            return original(*args, **kwargs)

        return unscale_and_clip_grads

    hooks.wrap(outer, "unscale_and_clip_grads", around)


def _unscaling_factor(outer: Any, *args: Any, **kwargs: Any) -> np.float32:
    """What the optimizer is about to multiply gradients with: found by having it multiply a one.

    So the factor is DeepSpeed's own in every version, rounded as its multiplication rounds it.
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


def hook_bf16_optimizer(outer: Any, taker: GradientCapture, hooks: Hooks) -> None:
    """BF16_Optimizer: its accumulators when `step` begins."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                pairs = zip(outer.fp32_groups_flat_partition, outer.fp32_groups_gradient_flat_partition, strict=True)
                known = taker.number
                taker.take_all([(known[id(key)], grad) for key, grad in pairs if id(key) in known])

            run_guarded(taker, take)
            return original(*args, **kwargs)

        return step

    hooks.wrap(outer, "step", around)


def bf16_scale(outer: Any) -> np.float32:
    """The factor with which BF16_Optimizer has just clipped: found by clipping a one with the same norm."""
    import torch
    from deepspeed.runtime.utils import clip_tensors_by_global_norm

    one = torch.ones(1)
    if outer.clip_grad > 0.0:
        norm = outer._global_grad_norm
        clip_tensors_by_global_norm(input_tensors=[one], max_norm=outer.clip_grad, global_norm=norm, mpu=outer.mpu)
    factor: np.float32 = np.float32(float(one[0]))
    return factor


def hook_gradients(
    job: LiveJob, taker: GradientCapture, stage: GradientStage, hooks: Hooks, *, model: Any = None, early: bool = False
) -> OverlapCapture:
    """Take gradients from now on. What goes wrong is kept in `taker.failure` and never disturbs the step.

    `early` as `ucp.record` has it. `model` is what the user gave.
    """
    known = _trained(job)
    ddp = find_ddp(model)
    sooner = OverlapCapture(taker, marked=ddp is None)

    def before_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        def take() -> None:
            taker.called = True
            if any(callable(each) for each in (*args, *kwargs.values())):
                raise UsageError(
                    "an optimizer step that computes the gradients itself (closure) cannot be recorded",
                    hint='compute them before the step, or record states instead: what="state"',
                )
            _on_update(job, known, taker, stage, optimizer, sooner)

        run_guarded(taker, take)

    taker.hook = job.optimizer.register_step_pre_hook(before_update)
    hooks.add(taker.hook)
    if stage == GradientStage.CONSUMED:
        if early and ddp is not None:
            hook_ddp_buckets(ddp, sooner, taker)
        elif early and job.engine is None:
            hook_accumulation(sooner, taker, hooks)
        return sooner
    outer = job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer":
        hook_bf16_optimizer(outer, taker, hooks)
    else:
        hook_unscaling(outer, taker, hooks, sooner)
        if early:
            hook_zero(job, sooner, taker, hooks)
    return sooner


def hook_scalars(job: LiveJob, taker: GradientCapture, hooks: Hooks) -> OverlapCapture:
    """Note the scalars of every step, and take no gradients: a closure may compute them only then."""
    known = _trained(job)

    def before_update(optimizer: Any, *_: Any) -> None:
        def note() -> None:
            taker.called = True
            for group in optimizer.param_groups:
                stepped = [p for p in group["params"] if p.requires_grad]
                if not all(id(p) in known for p in stepped):
                    raise _unknown()
                if stepped:
                    taker.note_group(optimizer, group, known[id(stepped[0])])

        run_guarded(taker, note)

    hooks.add(job.optimizer.register_step_pre_hook(before_update))
    return OverlapCapture(taker, marked=True)


def _trained(job: LiveJob) -> dict[int, int]:
    """The groups of the tensors that are logged, by their ids."""
    return {id(stepped.key): stepped.group for stepped in job.stepped if is_trained(stepped)}


def _unknown() -> UsageError:
    return UsageError(
        "the optimizer steps a parameter that it did not have when recording began, or that was frozen then",
        hint="close the recorder and record again after adding or thawing parameters",
    )


def _check_update(groups: set[int], layouts: list[Any]) -> None:
    """Can this be recorded? `groups` are those that the tensors of a group were in when it began; -1: in none."""
    import torch

    if -1 in groups:
        raise _unknown()
    if len(groups) > 1:
        raise UsageError(
            "a parameter has moved to another group of the optimizer since recording began",
            hint="close the recorder and record again after it",
        )
    if layouts.count(torch.strided) != len(layouts):
        raise UsageError(
            "the optimizer has a gradient that is sparse, which cannot be recorded",
            hint='record states instead: what="state"; or make the embedding with sparse=False',
        )


def _on_update(
    job: LiveJob,
    known: dict[int, int],
    taker: GradientCapture,
    stage: GradientStage,
    optimizer: Any,
    early: OverlapCapture,
) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError(
            "a fused optimizer that unscales gradients itself (GradScaler) cannot be recorded",
            hint="call scaler.unscale_(optimizer) before scaler.step, or build the optimizer with fused=False",
        )
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):  # the fused operator itself leaves everything as it is
        taker.skipped = True
    outer = None if job.engine is None else job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer" and taker.scale is None and stage == GradientStage.REDUCED:
        taker.scale = bf16_scale(outer)
    gradients = []
    for group in optimizer.param_groups:
        stepped = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        if not stepped:
            continue
        groups = {known.get(id(p), -1) for p, _ in stepped}
        _check_update(groups, [grad.layout for _, grad in stepped])
        for p, grad in stepped:
            number = taker.number.get(id(p))
            if number is None:
                continue  # another rank logs it
            if stage == GradientStage.CONSUMED:
                gradients.append((number, grad))
            else:
                taker.check(number, grad)
        taker.note_group(optimizer, group, groups.pop())
    if gradients:
        taker.take_all(early.settle(gradients))
