"""DeepSpeed's ZeRO: where its stages have the reduced gradient of a parameter before the step begins.

Only what the last micro-batch of a step leaves is taken. All of it is compared with what the optimizer unscales: stages
and settings differ in when a gradient is final, and users may set gradients (`safe_set_full_grad`) in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ucp.train.hooks import Hooks
from ucp.train.live import LiveJob
from ucp.train.recording.early import Early
from ucp.train.recording.taker import Taker, guarded

if TYPE_CHECKING:
    import torch

_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def hang_into_zero(job: LiveJob, early: Early, taker: Taker, hooks: Hooks) -> None:
    """Take gradients when a bucket of theirs has been reduced; nothing where the stage has them only after backward."""
    outer = job.engine.optimizer
    kind = type(outer).__name__
    parts = _Parts(job, early, taker)
    if kind == "DeepSpeedZeroOptimizer_Stage3" and hasattr(outer, _PARTITIONS):
        hooks.wrap(outer, "partition_grads", parts.after_partitioning)
        return
    # Stage 2 adds up micro-batches when backward is over.
    early_enough = kind == "DeepSpeedZeroOptimizer" and not outer.cpu_offload
    if early_enough and (not outer.partition_gradients or int(job.engine.gradient_accumulation_steps()) == 1):
        hooks.wrap(outer, "copy_grads_in_partition", parts.after_copying)


class _Parts:
    """Where the elements of each parameter lie in the optimizer's tensors of this rank."""

    def __init__(self, job: LiveJob, early: Early, taker: Taker) -> None:
        self._outer = job.engine.optimizer
        self._early = early
        self._taker = taker
        names = {name: id(p) for name, p in job.attributes.items()}
        self._shares: dict[int, list[tuple[int, Any]]] = {}  # id of a parameter → (tensor of the stream, share)
        for stepped in job.stepped:
            number = taker.number.get(id(stepped.key))
            for share in stepped.shares:
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
                guarded(self._taker, take)
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
                guarded(self._taker, take)
            return result

        return partition_grads

    def _take(self, param: Any, flat: torch.Tensor, *, whole: bool) -> None:
        for number, share in self._shares.get(id(param), ()):
            first = share.region.start if whole else 0
            if first + share.region.numel <= flat.numel():
                self._early.take_part(number, share.start, flat[first : first + share.region.numel])


__all__ = ["hang_into_zero"]
