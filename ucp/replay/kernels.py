"""The optimizers that can be replayed: kernel id → what one update does to a stretch of an optimizer tensor.

A replay is exact when it runs the arithmetic that the job ran, so kernels call the very functions that the optimizers
of torch and DeepSpeed call. An optimizer that is not listed here is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ucp.replay.adam import adam_kinds, fused_adam, single_adam
from ucp.replay.sgd import initial_accumulator, sgd_kinds, update_adagrad, update_lion, update_sgd
from ucp.replay.stretch import CUT, NUMBER, PARAM, Hyper, Stretch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to update. `update(stretch, gradient, hyper)` changes the stretch; its `step` is the caller's."""

    id: str
    kinds: Callable[[Hyper], tuple[str, ...]]  # the states of an optimizer with these hyper-parameters
    update: Callable[[Stretch, torch.Tensor, Hyper], None]
    counts: bool = True  # the optimizer keeps the number of its updates
    initial: Callable[[str, Hyper], float | None] = lambda _kind, _hyper: 0.0  # of a missing state; None: made later
    prepare: Callable[[], object] = lambda: None  # loads what updates need, once in a process


def _cpu_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    from ucp.replay.deepspeed_ops import cpu_adam

    cpu_adam(stretch, grad, hyper)


def _cpu_lion(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    from ucp.replay.deepspeed_ops import cpu_lion

    cpu_lion(stretch, grad, hyper)


def _two_moments(_hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _load(name: str) -> None:
    from ucp.replay.deepspeed_ops import load

    load(name)


def _exp_avg(_hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg",)


def _made_by_the_first_update(_kind: str, _hyper: Hyper) -> None:
    return None


def _torch_kernels() -> list[Kernel]:
    made = []
    for way in ("single", "foreach", "fused"):  # the first two give the same bits
        fused = way == "fused"
        for name, decoupled in (("adam", False), ("adamw", True)):
            update = partial(fused_adam if fused else single_adam, decoupled=decoupled)
            made.append(Kernel(f"torch.{name}.{way}", adam_kinds, update))
        sgd = partial(update_sgd, fused=fused)
        made.append(Kernel(f"torch.sgd.{way}", sgd_kinds, sgd, counts=False, initial=_made_by_the_first_update))
        adagrad = partial(update_adagrad, fused=fused)
        made.append(Kernel(f"torch.adagrad.{way}", lambda _: ("sum",), adagrad, initial=initial_accumulator))
    return made


KERNELS: Final[dict[str, Kernel]] = {
    kernel.id: kernel
    for kernel in (
        *_torch_kernels(),
        Kernel("lion", _exp_avg, update_lion, counts=False),
        Kernel("deepspeed.cpu_adam", _two_moments, _cpu_adam, prepare=partial(_load, "adam")),
        Kernel("deepspeed.cpu_lion", _two_moments, _cpu_lion, prepare=partial(_load, "lion")),
    )
}


__all__ = ["CUT", "KERNELS", "NUMBER", "PARAM", "Hyper", "Kernel", "Stretch"]
