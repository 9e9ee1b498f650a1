"""Optimizers with one state: SGD and Adagrad as torch computes them, and Lion as it is commonly written with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.replay.stretch import Hyper, Stretch, learning_rate, step_before

if TYPE_CHECKING:
    import torch


def sgd_kinds(hyper: Hyper) -> tuple[str, ...]:
    """The states of SGD."""
    return ("momentum_buffer",) if hyper["momentum"] else ()


def update_sgd(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    """SGD, which makes its momentum with the first update."""
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
        lr=learning_rate(hyper),
        dampening=hyper.get("dampening", 0.0),
        nesterov=bool(hyper.get("nesterov")),
        maximize=bool(hyper.get("maximize")),
    )
    if buffers[0] is not None:
        stretch.states["momentum_buffer"] = buffers[0]


def update_adagrad(stretch: Stretch, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    """Adagrad, whose accumulator begins with a value of its own."""
    from torch.optim.adagrad import adagrad

    adagrad(
        [stretch.param],
        [grad],
        [stretch.states["sum"]],
        [step_before(stretch)],
        foreach=False,
        fused=fused,
        lr=learning_rate(hyper),
        weight_decay=hyper["weight_decay"],
        lr_decay=hyper.get("lr_decay", 0.0),
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
    )


def update_lion(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    """Lion as it is commonly written with torch: decay, then the sign of the interpolated momentum."""
    first, second = hyper["betas"]
    moment = stretch.states["exp_avg"]
    if hyper["weight_decay"]:
        stretch.param.mul_(1 - hyper["lr"] * hyper["weight_decay"])
    update = moment.clone().mul_(first).add_(grad, alpha=1 - first).sign_()
    stretch.param.add_(update, alpha=-hyper["lr"])
    moment.mul_(second).add_(grad, alpha=1 - second)


def initial_accumulator(_kind: str, hyper: Hyper) -> float:
    """What an element of Adagrad's accumulator begins with."""
    return float(hyper.get("initial_accumulator_value", 0.0))
