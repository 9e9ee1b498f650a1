"""Where the gradients of torch jobs become final: plain, FSDP2, DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ucp.train.hooks import Hooks
from ucp.train.recording.early import Early
from ucp.train.recording.taker import Taker, guarded

if TYPE_CHECKING:
    import torch


def hang_into_accumulation(early: Early, taker: Taker, hooks: Hooks) -> None:
    """Plain torch and FSDP2: when autograd has added to `grad` (FSDP2: when the reduced gradient is there)."""

    def hook_of(number: int) -> Any:
        def accumulated(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                guarded(taker, lambda: early.ready(number, gradient))

        return accumulated

    for number, key in enumerate(taker.keys):
        hooks.add(key.register_post_accumulate_grad_hook(hook_of(number)))


class Buckets:
    """The comm hook of a DDP module: reduces as torch's `allreduce_hook` does, and says when a bucket is reduced.

    DDP takes one such hook for ever, so the next recorder of the same module goes on with this one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.early: Early | None = None
        self.taker: Taker | None = None

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

        guarded(taker, ready)


def _reduce(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    parameters, gradients = bucket.parameters(), bucket.gradients()

    def take(future: Any) -> Any:
        state.reduced(parameters, gradients)
        return future.value()

    return allreduce_hook(state.group, bucket).then(take)


_reduce.__annotations__.clear()  # DDP wants its own types there, or none


def hang_into_buckets(ddp: Any, early: Early, taker: Taker) -> bool:
    """DDP: when a bucket has been reduced. Not where the job has a comm hook of its own."""
    hooks = [state for _, state in ddp._comm_hooks]
    if not hooks:
        hooks = [Buckets(ddp.process_group)]
        ddp.register_comm_hook(hooks[0], _reduce)
    if not isinstance(hooks[0], Buckets):
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


__all__ = ["find_ddp", "hang_into_accumulation", "hang_into_buckets"]
