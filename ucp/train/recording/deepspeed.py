"""Where DeepSpeed's optimizers have a gradient before they unscale and clip it, and with what they multiply it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ucp.errors import UsageError
from ucp.log.payloads import Stage
from ucp.train.hooks import Hooks
from ucp.train.live import LiveJob, dtype_of, local_part
from ucp.train.recording.early import Early
from ucp.train.recording.taker import Taker, guarded

_UNSCALING: Final = frozenset(
    {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FP16_UnfusedOptimizer", "FP16_Optimizer"}
)


def stage_of(job: LiveJob) -> Stage:
    """Which gradient can be logged."""
    outer = None if job.engine is None else job.engine.optimizer
    if outer is None or outer is job.optimizer or getattr(outer, "torch_autocast_gradscaler", None) is not None:
        return Stage.CONSUMED
    for legacy in ("fused_adam_legacy", "fused_lamb_legacy"):
        if getattr(outer, legacy, False):
            raise UsageError(f"{type(outer).__name__} with {type(job.optimizer).__name__} cannot be recorded")
    return Stage.REDUCED if type(outer).__name__ in _UNSCALING | {"BF16_Optimizer"} else Stage.CONSUMED


def grad_dtypes(job: LiveJob, stage: Stage) -> list[str]:
    """The element types in which the gradients of the stepped tensors are taken; the writer narrows where it can."""
    outer: Any = None if job.engine is None else job.engine.optimizer
    offload = getattr(outer, "cpu_offload", False) or getattr(outer, "offload_optimizer", False)
    kind = type(outer).__name__
    if stage == Stage.REDUCED and kind.startswith("DeepSpeedZeroOptimizer") and not offload:
        # What is unscaled is these, widened: copying them back loses nothing. The first steps are compared in full.
        low = str(outer.gradient_accumulation_dtype).removeprefix("torch.")
        return [low for _ in job.stepped]
    if stage == Stage.REDUCED and kind == "FP16_UnfusedOptimizer":
        return [str(dtype_of(p)) for group in outer.fp16_groups for p in group]
    return [str(dtype_of(local_part(stepped.key))) for stepped in job.stepped]


def hang_into_unscaling(outer: Any, taker: Taker, hooks: Hooks, early: Early) -> None:
    """ZeRO and its like: before they unscale and clip, `grad` of their tensors is the reduced gradient, widened."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_and_clip_grads(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                if taker.scale is None:
                    taker.scale = _unscaling_factor(outer, *args, **kwargs)
                ready = [(i, key.grad) for i, key in enumerate(taker.keys) if key.grad is not None]
                taker.take_all(early.settle_raw(ready))

            guarded(taker, take)
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


def hang_into_bf16(outer: Any, taker: Taker, hooks: Hooks) -> None:
    """BF16_Optimizer: its accumulators when `step` begins."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                pairs = zip(outer.fp32_groups_flat_partition, outer.fp32_groups_gradient_flat_partition, strict=True)
                known = taker.number
                taker.take_all([(known[id(key)], grad) for key, grad in pairs if id(key) in known])

            guarded(taker, take)
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


__all__ = ["bf16_scale", "grad_dtypes", "hang_into_bf16", "hang_into_unscaling", "stage_of"]
