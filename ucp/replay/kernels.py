"""The optimizers that can be replayed: kernel id → what one update does to a stretch of an optimizer tensor.

A replay is exact when it runs the arithmetic that the job ran, so kernels call the very functions that the optimizers
of torch and DeepSpeed call. An optimizer that is not listed here is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from ucp.records import dataclass, field
from ucp.replay.scratch import scratch

if TYPE_CHECKING:
    import torch

# Kernels that work in vectors treat the last few elements of a tensor otherwise. Stretches that start at multiples of
# this many elements of the optimizer's tensor, and end so or with the tensor, give every element the same treatment.
CUT: Final = 64

PARAM: Final = "param"  # the tensor that the optimizer updates, among its states

NUMBER: Final = "number"  # lr_kind of a learning rate that is no tensor; else the name of the tensor's dtype

Hyper = Mapping[str, Any]  # one group's, with `lr_kind`


@dataclass(slots=True)
class Stretch:
    """Equal stretches of an optimizer tensor and of its states, updated in place.

    A state that the optimizer makes with its first update may be missing from `states` until then.
    """

    param: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0  # updates taken so far
    resumed_at: int = 0  # updates that the job's optimizer had taken when its process began
    handle: Any = None  # what a kernel keeps from update to update


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to update. `update(stretch, gradient, hyper)` changes the stretch; its `step` is the caller's."""

    id: str
    kinds: Callable[[Hyper], tuple[str, ...]]  # the states of an optimizer with these hyper-parameters
    update: Callable[[Stretch, torch.Tensor, Hyper], None]
    counts: bool = True  # the optimizer keeps the number of its updates
    initial: Callable[[str, Hyper], float | None] = lambda _kind, _hyper: 0.0  # of a missing state; None: made later
    prepare: Callable[[], object] = lambda: None  # loads what updates need, once in a process


def _adam_kinds(hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper.get("amsgrad") else ()))


def _adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, fused: bool, decoupled: bool) -> None:
    if fused:
        _fused_adam(stretch, grad, hyper, decoupled)
    elif _is_plain(stretch, hyper) and _torch_takes_the_same_steps(decoupled):
        _plain_adam(stretch, grad, hyper, decoupled)
    else:
        _torch_adam(stretch, grad, hyper, decoupled)


def _torch_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    from torch.optim.adam import adam

    amsgrad = bool(hyper.get("amsgrad"))
    states = stretch.states
    adam(
        [stretch.param],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if amsgrad else [],
        [_step_tensor(stretch)],
        foreach=False,
        fused=False,
        amsgrad=amsgrad,
        decoupled_weight_decay=decoupled,
        beta1=hyper["betas"][0],
        beta2=hyper["betas"][1],
        lr=_learning_rate(hyper),
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
    )


def _is_plain(stretch: Stretch, hyper: Hyper) -> bool:
    import torch

    unusual = hyper.get("amsgrad") or hyper.get("maximize") or hyper.get("lr_kind", NUMBER) != NUMBER
    return not unusual and stretch.param.dtype is torch.float32


def _plain_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    """The operations of `_torch_adam` one by one, but into memory that is at hand.

    torch makes two tensors of the stretch's size in every update. Where the system takes such memory back at once, the
    pages that it gives out anew cost more than the arithmetic.
    """
    import torch

    (beta1, beta2), lr, decay = hyper["betas"], hyper["lr"], hyper["weight_decay"]
    step = _step_after(stretch.step).item()
    first, second = stretch.states["exp_avg"], stretch.states["exp_avg_sq"]
    room = scratch("adam", grad.numel(), torch.float32)
    if decay != 0 and decoupled:
        stretch.param.mul_(1 - lr * decay)
    elif decay != 0:
        grad = torch.add(grad, stretch.param, alpha=decay, out=room)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    torch.sqrt(second, out=room)
    room.div_((1 - beta2**step) ** 0.5).add_(hyper["eps"])
    stretch.param.addcdiv_(first, room, value=-(lr / (1 - beta1**step)))


@cache
def _torch_takes_the_same_steps(decoupled: bool) -> bool:
    """Does the installed torch give the bits of `_plain_adam`? Another version may order operations otherwise."""
    import torch

    generator = torch.Generator().manual_seed(7)
    mine, theirs = (
        Stretch(torch.linspace(-3, 3, 331), {kind: torch.zeros(331) for kind in ("exp_avg", "exp_avg_sq")})
        for _ in range(2)
    )
    with torch.no_grad():
        for lr, decay in ((3.1e-3, 0.0), (1.7e-4, 0.013), (2.9e-2, 0.1), (7e-4, 0.01), (1e-3, 0.0), (9e-4, 0.3)):
            hyper = {"betas": (0.87, 0.983), "eps": 3e-8, "lr": lr, "weight_decay": decay}
            grad = torch.randn(331, generator=generator)
            _plain_adam(mine, grad, hyper, decoupled)
            _torch_adam(theirs, grad, hyper, decoupled)
            mine.step, theirs.step = mine.step + 1, theirs.step + 1
    pairs = [(mine.param, theirs.param), *((mine.states[kind], theirs.states[kind]) for kind in mine.states)]
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def _fused_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    """The operator that torch's fused Adam ends in: what torch does around it costs as much as a small tensor."""
    import torch

    operator = torch._fused_adamw_ if decoupled else torch._fused_adam_
    states, betas, amsgrad = stretch.states, hyper["betas"], bool(hyper.get("amsgrad"))
    operator(
        [stretch.param],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if amsgrad else [],
        [_step_after(stretch.step)],
        amsgrad=amsgrad,
        lr=_learning_rate(hyper),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
        grad_scale=None,
        found_inf=None,
    )


def _sgd_kinds(hyper: Hyper) -> tuple[str, ...]:
    return ("momentum_buffer",) if hyper["momentum"] else ()


def _sgd(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    from torch.optim.sgd import sgd

    buffers = [stretch.states.get("momentum_buffer")]
    sgd(
        [stretch.param],
        [grad],
        buffers,
        foreach=False,
        fused=fused,
        weight_decay=hyper["weight_decay"],
        momentum=hyper["momentum"],
        lr=_learning_rate(hyper),
        dampening=hyper.get("dampening", 0.0),
        nesterov=bool(hyper.get("nesterov")),
        maximize=bool(hyper.get("maximize")),
    )
    if buffers[0] is not None:
        stretch.states["momentum_buffer"] = buffers[0]


def _adagrad(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    from torch.optim.adagrad import adagrad

    adagrad(
        [stretch.param],
        [grad],
        [stretch.states["sum"]],
        [_step_tensor(stretch)],
        foreach=False,
        fused=fused,
        lr=_learning_rate(hyper),
        weight_decay=hyper["weight_decay"],
        lr_decay=hyper.get("lr_decay", 0.0),
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
    )


def _lion(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    """Lion as it is commonly written with torch: decay, then the sign of the interpolated momentum."""
    first, second = hyper["betas"]
    moment = stretch.states["exp_avg"]
    if hyper["weight_decay"]:
        stretch.param.mul_(1 - hyper["lr"] * hyper["weight_decay"])
    update = moment.clone().mul_(first).add_(grad, alpha=1 - first).sign_()
    stretch.param.add_(update, alpha=-hyper["lr"])
    moment.mul_(second).add_(grad, alpha=1 - second)


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


def _learning_rate(hyper: Hyper) -> Any:
    """As the optimizer had it: torch computes with a tensor of one element in another precision than with a number."""
    kind = hyper.get("lr_kind", NUMBER)
    if kind == NUMBER:
        return hyper["lr"]
    import torch

    return torch.tensor(hyper["lr"], dtype=getattr(torch, kind))


def _step_tensor(stretch: Stretch) -> torch.Tensor:
    """The counter before this update, as torch's functions want it; they raise it by one."""
    import torch

    return torch.tensor(float(stretch.step), dtype=torch.float32)


@lru_cache(maxsize=4096)
def _step_after(step: int) -> torch.Tensor:
    """The counter after an update, as torch counts: in float32. Not to be changed, every stretch is given the same."""
    import torch

    return torch.tensor(float(step), dtype=torch.float32).add_(1)


def _exp_avg(_hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg",)


def _made_by_the_first_update(_kind: str, _hyper: Hyper) -> None:
    return None


def _accumulator(_kind: str, hyper: Hyper) -> float:
    return float(hyper.get("initial_accumulator_value", 0.0))


def _torch_kernels() -> list[Kernel]:
    made = []
    for way in ("single", "foreach", "fused"):  # the first two give the same bits
        fused = way == "fused"
        for name, decoupled in (("adam", False), ("adamw", True)):
            update = partial(_adam, fused=fused, decoupled=decoupled)
            made.append(Kernel(f"torch.{name}.{way}", _adam_kinds, update))
        sgd = partial(_sgd, fused=fused)
        made.append(Kernel(f"torch.sgd.{way}", _sgd_kinds, sgd, counts=False, initial=_made_by_the_first_update))
        adagrad = partial(_adagrad, fused=fused)
        made.append(Kernel(f"torch.adagrad.{way}", lambda _: ("sum",), adagrad, initial=_accumulator))
    return made


KERNELS: Final[dict[str, Kernel]] = {
    kernel.id: kernel
    for kernel in (
        *_torch_kernels(),
        Kernel("lion", _exp_avg, _lion, counts=False),
        Kernel("deepspeed.cpu_adam", _two_moments, _cpu_adam, prepare=partial(_load, "adam")),
        Kernel("deepspeed.cpu_lion", _two_moments, _cpu_lion, prepare=partial(_load, "lion")),
    )
}


def consumed(reduced: torch.Tensor, factor: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that the kernel saw, from the one that was logged: one multiplication in float32 by float32(factor).

    A factor of None means that the logged gradient is the one that the kernel saw. Where `reduced` is float32 it is
    multiplied in place.
    """
    if factor is None:
        return reduced if reduced.dtype is dtype else reduced.to(dtype)
    import torch

    return reduced.to(torch.float32).mul_(torch.tensor(factor, dtype=torch.float32)).to(dtype)
