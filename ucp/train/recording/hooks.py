"""Where the gradients of a step are taken from in a live job.

Either from `p.grad` when the optimizer is called (CONSUMED), or, from DeepSpeed's optimizers, before they unscale and
clip (REDUCED): then the gradient still has few bits, and the factor is logged beside it.
"""

from __future__ import annotations

from typing import Any

from ucp.errors import UsageError
from ucp.log.payloads import Stage
from ucp.train.hooks import Hooks
from ucp.train.live import LiveJob
from ucp.train.recording.deepspeed import bf16_scale, hang_into_bf16, hang_into_unscaling
from ucp.train.recording.early import Early
from ucp.train.recording.early_torch import find_ddp, hang_into_accumulation, hang_into_buckets
from ucp.train.recording.early_zero import hang_into_zero
from ucp.train.recording.schema import is_trained
from ucp.train.recording.taker import Taker, guarded


def hang_in(job: LiveJob, taker: Taker, stage: Stage, hooks: Hooks, *, model: Any = None, early: bool = False) -> Early:
    """Take gradients from now on. What goes wrong is kept in `taker.failure` and never disturbs the step.

    `early` as `ucp.record` has it. `model` is what the user gave.
    """
    known = _trained(job)
    ddp = find_ddp(model)
    sooner = Early(taker, marked=ddp is None)

    def before_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        def take() -> None:
            taker.called = True
            if any(callable(each) for each in (*args, *kwargs.values())):
                raise UsageError(
                    "an optimizer step that computes the gradients itself (closure) cannot be recorded",
                    hint='compute them before the step, or record states instead: what="state"',
                )
            _on_update(job, known, taker, stage, optimizer, sooner)

        guarded(taker, take)

    taker.hook = job.optimizer.register_step_pre_hook(before_update)
    hooks.add(taker.hook)
    if stage == Stage.CONSUMED:
        if early and ddp is not None:
            hang_into_buckets(ddp, sooner, taker)
        elif early and job.engine is None:
            hang_into_accumulation(sooner, taker, hooks)
        return sooner
    outer = job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer":
        hang_into_bf16(outer, taker, hooks)
    else:
        hang_into_unscaling(outer, taker, hooks, sooner)
        if early:
            hang_into_zero(job, sooner, taker, hooks)
    return sooner


def hang_in_scalars(job: LiveJob, taker: Taker, hooks: Hooks) -> Early:
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

        guarded(taker, note)

    hooks.add(job.optimizer.register_step_pre_hook(before_update))
    return Early(taker, marked=True)


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


def _on_update(job: LiveJob, known: dict[int, int], taker: Taker, stage: Stage, optimizer: Any, early: Early) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError(
            "a fused optimizer that unscales gradients itself (GradScaler) cannot be recorded",
            hint="call scaler.unscale_(optimizer) before scaler.step, or build the optimizer with fused=False",
        )
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):  # the fused operator itself leaves everything as it is
        taker.skipped = True
    outer = None if job.engine is None else job.engine.optimizer
    if type(outer).__name__ == "BF16_Optimizer" and taker.scale is None and stage == Stage.REDUCED:
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
            if stage == Stage.CONSUMED:
                gradients.append((number, grad))
            else:
                taker.check(number, grad)
        taker.note_group(optimizer, group, groups.pop())
    if gradients:
        taker.take_all(early.settle(gradients))


__all__ = ["hang_in", "hang_in_scalars"]
