"""Where the gradients of a step are taken from in a live job.

Either from `p.grad` when the optimizer is called (CONSUMED), or, from DeepSpeed's optimizers, before they unscale and
clip (REDUCED): then the gradient still has few bits, and the factor is logged beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.log.payloads import GroupScalars, Stage, StepRecord
from ucp.log.ring import Slot
from ucp.log.schema import StreamSchema
from ucp.log.writer import Writer
from ucp.train.live import LiveJob, dtype_of, local_part
from ucp.train.recording_kernel import own_step, scalars
from ucp.train.recording_schema import is_trained

if TYPE_CHECKING:
    import torch

FULL_CHECKS: Final = 2  # steps whose every gradient is compared with what the optimizer is given
CHECK_EVERY: Final = 100  # …, and then every so many
SAMPLE: Final = 64  # elements of each tensor that are compared in the other steps

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


class Taker:
    """Copies the gradients of one step after the other into slots of the writer's ring."""

    def __init__(self, writer: Writer, schema: StreamSchema, keys: list[Any], groups: list[int]) -> None:
        """`keys` are the optimizer's tensors of the stream, `groups` their groups."""
        self.writer = writer
        self.number = {id(key): number for number, key in enumerate(keys)}
        self.keys = keys
        self.groups = groups
        self.slot: Slot | None = None
        self.taken: set[int] = set()  # tensors of this step
        self.scalars: dict[int, GroupScalars] = {}
        self.scale: np.float32 | None = None
        self.failure: UcpError | None = None
        self.seconds = 0.0  # spent in hooks
        self.cpu_seconds = 0.0
        self._blocks = [schema.blocks_of(number) for number in range(len(keys))]
        self._views = [_views(slot, self._blocks, keys) for slot in writer.slots]
        self._steps = 0

    def begin(self) -> Slot:
        """The slot of this step."""
        if self.slot is None:
            self.slot = self.writer.acquire()
        return self.slot

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of one of the stream's tensors."""
        self.take_all([(number, gradient)])

    def take_all(self, gradients: list[tuple[int, torch.Tensor]]) -> None:
        """Copy gradients of several tensors."""
        import torch

        slot = self.begin()
        targets, sources = [], []
        for number, gradient in gradients:
            if number in self.taken:
                continue
            self.taken.add(number)
            local = local_part(gradient)
            views, blocks = self._views[slot.number][number], self._blocks[number]
            if len(views) == 1 and views[0].shape == local.shape:
                targets.append(views[0])
                sources.append(local)
            else:
                flat = local.reshape(-1)
                targets.extend(view.view(-1) for view in views)
                sources.extend(flat[block.offset : block.offset + block.count] for block in blocks)
            slot.present.extend(block.id for block in blocks)
        if targets:
            torch._foreach_copy_(targets, sources)

    def note_group(self, optimizer: Any, group: dict[str, Any], number: int) -> None:
        """Note the scalars of a group as they are when the optimizer is called."""
        if number in self.scalars:
            return
        with_gradient = next((p for p in group["params"] if p.grad is not None), None)
        step = -1 if with_gradient is None else own_step(optimizer, with_gradient)
        self.scalars[number] = scalars(number, group, step)

    def check(self, number: int, consumed: torch.Tensor) -> None:
        """Compare what was taken with what the optimizer is given: a sample, or now and then all of it."""
        import torch

        if number not in self.taken or self.slot is None:
            return
        flat = local_part(consumed).reshape(-1)
        full = self._steps < FULL_CHECKS or self._steps % CHECK_EVERY == 0
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
        self, step: int, *, stage: Stage, skipped: bool, micro_batches: int, samples: int, aux: Any, time_ns: int
    ) -> None:
        """Hand the step over to the writer and get ready for the next."""
        slot = self.begin()
        groups = () if skipped else tuple(self.scalars[number] for number in sorted(self.scalars))
        slot.step = step
        slot.aux = aux
        if skipped:
            slot.present = []
        scale = None if skipped else self.scale
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
        self.slot, self.scale = None, None
        self.taken, self.scalars = set(), {}


def _views(slot: Slot, blocks: list[list[Any]], keys: list[Any]) -> list[list[torch.Tensor]]:
    """A slot's arrays as torch tensors, by tensor and block; of a tensor that is one block, in its shape."""
    import torch

    views = []
    for held, key in zip(blocks, keys, strict=True):
        shape = local_part(key).shape
        some = []
        for block in held:
            array = slot.arrays[block.id]
            dtype = getattr(torch, slot.dtypes[block.id].name)
            view = torch.from_numpy(array.view(f"<i{array.dtype.itemsize}")).view(dtype)
            some.append(view.view(shape) if len(held) == 1 and block.count == shape.numel() else view)
        views.append(some)
    return views


class Hooks:
    """Everything that was hung into a live job, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a method of this one object inside another function."""
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, around(before))
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def add(self, handle: Any) -> None:
        """Remember a handle of torch's."""
        self._undo.append(handle.remove)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def hang_in(job: LiveJob, taker: Taker, stage: Stage, hooks: Hooks) -> None:
    """Take gradients from now on. What goes wrong is kept in `taker.failure` and never disturbs the step."""

    known = {id(stepped.key): stepped.group for stepped in job.stepped if is_trained(stepped)}

    def before_update(optimizer: Any, *_: Any) -> None:
        _guarded(taker, lambda: _on_update(job, known, taker, stage, optimizer))

    hooks.add(job.optimizer.register_step_pre_hook(before_update))
    if stage == Stage.CONSUMED:
        return
    outer = job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer":
        _hang_into_bf16(outer, taker, hooks)
    else:
        _hang_into_unscaling(outer, taker, hooks)


def _on_update(job: LiveJob, known: dict[int, int], taker: Taker, stage: Stage, optimizer: Any) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError(
            "a fused optimizer that unscales gradients itself (GradScaler) cannot be recorded",
            hint="call scaler.unscale_(optimizer) before scaler.step, or build the optimizer with fused=False",
        )
    outer = None if job.engine is None else job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer" and taker.scale is None and stage == Stage.REDUCED:
        taker.scale = _bf16_scale(outer)
    gradients = []
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None]
        for p in stepped:
            if id(p) not in known:
                raise UsageError(
                    "the optimizer has a gradient of a parameter that it did not have when recording began, or that was"
                    " frozen then",
                    hint="close the recorder and record again after adding or thawing parameters",
                )
            number = taker.number.get(id(p))
            if number is None:
                continue  # another rank logs it
            if stage == Stage.CONSUMED:
                gradients.append((number, p.grad))
            else:
                taker.check(number, p.grad)
        if stepped:
            taker.note_group(optimizer, group, known[id(stepped[0])])
    if gradients:
        taker.take_all(gradients)


def _hang_into_unscaling(outer: Any, taker: Taker, hooks: Hooks) -> None:
    """ZeRO and its like: before they unscale and clip, `grad` of their tensors is the reduced gradient, widened."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_and_clip_grads(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                if taker.scale is None:
                    taker.scale = _unscaling_factor(outer, *args, **kwargs)
                ready = [(i, key.grad) for i, key in enumerate(taker.keys) if key.grad is not None]
                taker.take_all(ready)

            _guarded(taker, take)
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


def _hang_into_bf16(outer: Any, taker: Taker, hooks: Hooks) -> None:
    """BF16_Optimizer: its accumulators when `step` begins."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            def take() -> None:
                pairs = zip(outer.fp32_groups_flat_partition, outer.fp32_groups_gradient_flat_partition, strict=True)
                known = taker.number
                taker.take_all([(known[id(key)], grad) for key, grad in pairs if id(key) in known])

            _guarded(taker, take)
            return original(*args, **kwargs)

        return step

    hooks.wrap(outer, "step", around)


def _bf16_scale(outer: Any) -> np.float32:
    """The factor with which BF16_Optimizer has just clipped: found by clipping a one with the same norm."""
    import torch
    from deepspeed.runtime.utils import clip_tensors_by_global_norm

    one = torch.ones(1)
    if outer.clip_grad > 0.0:
        norm = outer._global_grad_norm
        clip_tensors_by_global_norm(input_tensors=[one], max_norm=outer.clip_grad, global_norm=norm, mpu=outer.mpu)
    factor: np.float32 = np.float32(float(one[0]))
    return factor


def _guarded(taker: Taker, work: Callable[[], None]) -> None:
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


__all__ = ["Hooks", "Taker", "grad_dtypes", "hang_in", "stage_of"]
