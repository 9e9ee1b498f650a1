"""Install the hooks that capture the gradients of every step.

Gradients are captured from `p.grad` when the optimizer is called (CONSUMED) or, with DeepSpeed's optimizers, before
they unscale and clip (REDUCED): then they still have few significant bits, and the factor is logged with them.

With `early`, further hooks find the moment when a gradient is final: in plain torch, FSDP2, DDP, and DeepSpeed's ZeRO.
For ZeRO, only the last micro-batch is captured, and everything is compared with what the optimizer unscales: stages and
settings differ in when a gradient is final, and users may change gradients in between (`safe_set_full_grad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import UsageError
from ucp.log.payloads import GradientStage
from ucp.training.live_job import Hooks, LiveJob, ParamSlice, dtype_of, local_tensor
from ucp.training.recording.capture import GradientCapture, OverlapCapture, run_guarded

if TYPE_CHECKING:
    import torch

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
    outer = None if job.engine is None else job.engine.optimizer
    is_bf16_optimizer = type(outer).__name__ == "BF16_Optimizer"

    def before_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        capture.called = True
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise UsageError(
                "an optimizer step that computes the gradients itself (closure) cannot be recorded",
                hint='compute gradients before the step, or record states instead: what="state"',
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "a fused optimizer that unscales gradients itself (GradScaler) cannot be recorded",
                hint="call scaler.unscale_(optimizer) before scaler.step, or build the optimizer with fused=False",
            )
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # the fused kernel will skip the update
            capture.skipped = True
        if is_bf16_optimizer and capture.scale is None and stage == GradientStage.REDUCED:
            capture.scale = bf16_scale(outer)
        gradients = []
        for group in optimizer.param_groups:
            stepped = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
            if not stepped:
                continue
            number_of_group = _check_update(known, stepped)
            for p, grad in stepped:
                number = capture.number.get(id(p))
                if number is None:
                    continue  # another rank logs it
                if stage == GradientStage.CONSUMED:
                    gradients.append((number, grad))
                else:
                    capture.check(number, grad)
            capture.add_group_scalars(optimizer, group, number_of_group)
        if gradients:
            capture.copy_all(overlap.keep_matching(gradients))

    capture.hook = job.optimizer.register_step_pre_hook(
        lambda *call: run_guarded(capture, lambda: before_update(*call))
    )
    hooks.add(capture.hook)
    if stage == GradientStage.CONSUMED:
        if early and ddp is not None:
            hook_ddp_buckets(ddp, overlap, capture)
        elif early and job.engine is None:
            hook_accumulation(overlap, capture, hooks)
    elif is_bf16_optimizer:
        hook_bf16_optimizer(outer, capture, hooks)
    else:
        hook_unscaling(outer, capture, hooks, overlap)
        if early:
            hook_zero(job, overlap, capture, hooks)
    return overlap


def hook_scalars(job: LiveJob, capture: GradientCapture, hooks: Hooks) -> OverlapCapture:
    """Install a hook that captures the hyper-parameters of every step only; gradients may come from a closure."""
    known = _trained(job)

    def before_update(optimizer: Any) -> None:
        capture.called = True
        for group in optimizer.param_groups:
            stepped = [p for p in group["params"] if p.requires_grad]
            if not all(id(p) in known for p in stepped):
                raise _unknown()
            if stepped:
                capture.add_group_scalars(optimizer, group, known[id(stepped[0])])

    hooks.add(
        job.optimizer.register_step_pre_hook(
            lambda optimizer, *_: run_guarded(capture, lambda: before_update(optimizer))
        )
    )
    return OverlapCapture(capture, marked=True)


def _trained(job: LiveJob) -> dict[int, int]:
    """id of each logged optimizer tensor → its param group."""
    return {id(stepped.key): stepped.group for stepped in job.stepped if stepped.is_trained}


def _unknown() -> UsageError:
    return UsageError(
        "the optimizer updates a parameter that it did not have when recording started, or that was frozen then",
        hint="close the recorder and record again after adding or unfreezing parameters",
    )


def _check_update(known: dict[int, int], stepped: list[tuple[Any, Any]]) -> int:
    """The number of the group of these tensors and gradients; raise if their update cannot be recorded."""
    import torch

    groups = {known.get(id(p), -1) for p, _ in stepped}
    if -1 in groups:
        raise _unknown()
    if len(groups) > 1:
        raise UsageError(
            "a parameter has moved to another param group since recording started",
            hint="close the recorder and record again",
        )
    if any(grad.layout != torch.strided for _, grad in stepped):
        raise UsageError(
            "the optimizer has a sparse gradient, which cannot be recorded",
            hint='record states instead: what="state"; or create the embedding with sparse=False',
        )
    return groups.pop()


def hook_accumulation(overlap: OverlapCapture, capture: GradientCapture, hooks: Hooks) -> None:
    """Plain torch and FSDP2: a gradient is final when it has been accumulated (FSDP2: reduced) into `grad`."""

    def accumulated(number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            run_guarded(capture, lambda: overlap.ready(number, gradient))

    for number, key in enumerate(capture.keys):
        hooks.add(key.register_post_accumulate_grad_hook(partial(accumulated, number)))


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


def hook_ddp_buckets(ddp: Any, overlap: OverlapCapture, capture: GradientCapture) -> None:
    """DDP: gradients are final when their bucket has been reduced. Does nothing if the job has its own comm hook."""
    hooks = [state for _, state in ddp._comm_hooks]
    if not hooks:
        hooks = [DdpBuckets(ddp.process_group)]
        ddp.register_comm_hook(hooks[0], _reduce_bucket)
    if isinstance(hooks[0], DdpBuckets):
        hooks[0].overlap, hooks[0].capture = overlap, capture


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
    slices: dict[int, list[tuple[int, ParamSlice]]] = {}  # id of a parameter → (tensor of the stream, slice in it)
    for stepped in job.stepped:
        number = capture.number.get(id(stepped.key))
        for part in stepped.slices:
            if number is not None and part.name in job.parameters:
                slices.setdefault(id(job.parameters[part.name]), []).append((number, part))

    def take(param: Any, gradient: torch.Tensor, *, whole: bool) -> None:
        flat = gradient.detach().reshape(-1)
        for number, part in slices.get(id(param), ()):
            first = part.region.start if whole else 0
            if first + part.region.numel <= flat.numel():
                overlap.capture_part(number, part.start, flat[first : first + part.region.numel])

    def take_copied(param: Any) -> None:  # ZeRO-1 and 2: the averaged gradient of a whole parameter
        gradient = outer.get_gradient_for_reduction(param)
        if gradient is not None:
            take(param, gradient, whole=True)

    def take_partitions(params: Sequence[Any]) -> None:  # ZeRO-3: this rank's partition of the averaged gradients
        partitions = getattr(outer, _PARTITIONS)
        for param in params:
            if param.ds_id in partitions:
                take(param, partitions[param.ds_id], whole=False)

    def hook(method: str, work: Callable[[Any], None]) -> None:
        def after(given: Any, *_: Any, **__: Any) -> None:
            if outer.is_gradient_accumulation_boundary():
                run_guarded(capture, lambda: work(given))

        hooks.wrap(outer, method, after=after)

    # Stage 2 adds up micro-batches only after backward.
    is_early = kind == "DeepSpeedZeroOptimizer" and not outer.cpu_offload
    if kind == "DeepSpeedZeroOptimizer_Stage3" and hasattr(outer, _PARTITIONS):
        hook("partition_grads", take_partitions)
    elif is_early and (not outer.partition_gradients or int(job.engine.gradient_accumulation_steps()) == 1):
        hook("copy_grads_in_partition", take_copied)
