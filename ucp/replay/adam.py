"""Adam and AdamW as torch computes them: one way in separate operations, another in one fused operator."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ucp.replay.scratch import scratch
from ucp.replay.stretch import NUMBER, Hyper, Stretch, learning_rate, step_after, step_before

if TYPE_CHECKING:
    import torch


def adam_kinds(hyper: Hyper) -> tuple[str, ...]:
    """The states of Adam and AdamW."""
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper.get("amsgrad") else ()))


def _is_decoupled(hyper: Hyper, default: bool) -> bool:
    """Is weight decay apart from the gradient? AdamW's is; torch's Adam has a switch that makes it an AdamW."""
    return bool(hyper.get("decoupled_weight_decay", default))


def single_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
    """`single` or `foreach`, which give the same bits."""
    decoupled = _is_decoupled(hyper, decoupled)
    if _is_plain(stretch, hyper) and _torch_takes_the_same_steps(decoupled):
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
        [step_before(stretch)],
        foreach=False,
        fused=False,
        amsgrad=amsgrad,
        decoupled_weight_decay=decoupled,
        beta1=hyper["betas"][0],
        beta2=hyper["betas"][1],
        lr=learning_rate(hyper),
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
    step = step_after(stretch.step).item()
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


def fused_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
    """The operator that torch's fused Adam ends in: what torch does around it costs as much as a small tensor."""
    states, betas, amsgrad = stretch.states, hyper["betas"], bool(hyper.get("amsgrad"))
    _fused_operator(_is_decoupled(hyper, decoupled))(
        [stretch.param],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if amsgrad else [],
        [step_after(stretch.step)],
        amsgrad=amsgrad,
        lr=learning_rate(hyper),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
        grad_scale=None,
        found_inf=None,
    )


@cache
def _fused_operator(decoupled: bool) -> Any:
    import torch

    return torch._fused_adamw_ if decoupled else torch._fused_adam_
