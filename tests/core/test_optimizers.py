"""The registry of optimizers agrees with the optimizers of the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ucp.core.optimizers import (
    COUNTERS,
    NON_NEGATIVE,
    NONZERO_PADDING,
    OPTIMIZERS,
    default_group_fields,
    optimizer_of_class,
    optimizer_of_kernel,
    state_scale,
)

OF_TORCH = [optimizer.classes[0] for optimizer in OPTIMIZERS if (optimizer.kernel or "").startswith("torch.")]
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def stepped(make: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.tensor([-2.0, 3.0, 0.5]))
    optimizer = make([parameter], **options)
    parameter.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", OF_TORCH)
def test_states_are_those_of_torch(name: str) -> None:
    optimizer = stepped(getattr(torch.optim, name), **OPTIONS.get(name, {}))
    known = optimizer_of_class(cls.__name__ for cls in type(optimizer).__mro__)
    assert known is not None
    (state,) = optimizer.state.values()
    elements = {kind for kind, value in state.items() if torch.is_tensor(value) and value.ndim}
    assert elements == set(known.state_names(optimizer.param_groups[0]))
    assert state.keys() - elements <= COUNTERS
    assert ("step" in state) == known.counts_updates
    for kind in elements & NON_NEGATIVE:
        assert bool((state[kind] >= 0).all())
    filled = {kind for kind in elements if float(state[kind][2]) != 0.0}  # the element without a gradient
    assert filled <= NONZERO_PADDING | {"ax"}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_group_fields_are_those_of_torch(name: str) -> None:
    optimizer = stepped(getattr(torch.optim, name), **({"momentum": 0.9} if name == "SGD" else {}))
    (state,) = optimizer.state.values()
    fields = default_group_fields({}, state)
    assert fields.keys() == optimizer.defaults.keys()


def test_fields_of_other_optimizers_are_not_filled_in() -> None:
    assert default_group_fields({"momentum_decay": 4e-3}, {"exp_avg", "exp_avg_sq"}) == {}
    assert default_group_fields({}, {"row_var", "col_var"}) == {}


def test_kernel_ids_name_optimizers() -> None:
    for kernel, name in (
        ("torch.adamw.fused", "AdamW"),
        ("lion", "Lion"),
        ("deepspeed.cpu_adam", "DeepSpeedCPUAdam"),
        ("torch.optim._adafactor.Adafactor", "Adafactor"),
    ):
        optimizer = optimizer_of_kernel(kernel)
        assert optimizer is not None
        assert optimizer.classes == (name,)
    assert optimizer_of_kernel("somebody.Optimizer") is None


def test_moments_scale_inversely_to_weights() -> None:
    assert state_scale("weight", 2.0) == 2.0
    assert state_scale("exp_avg", 2.0) == 0.5
    assert state_scale("exp_avg_sq", 2.0) == 0.25
    assert state_scale("exp_avg_sq_row", 2.0) == 0.25


# name → options, and options with which the same weight, stored times 2, makes the same steps times 2
STORED_TIMES_TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam": ({"lr": 0.1, "eps": 2**-20, "amsgrad": True}, {"lr": 0.2, "eps": 2**-21, "amsgrad": True}),
    "Adamax": ({"lr": 0.1, "eps": 2**-20}, {"lr": 0.2, "eps": 2**-21}),
    "Adagrad": ({"lr": 0.1, "eps": 2**-20}, {"lr": 0.2, "eps": 2**-21}),
    "RMSprop": ({"lr": 0.1, "eps": 2**-20, "centered": True}, {"lr": 0.2, "eps": 2**-21, "centered": True}),
    "SGD": ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.4, "momentum": 0.5}),
    "ASGD": ({"lr": 0.1, "lambd": 0.0, "t0": 1.0}, {"lr": 0.4, "lambd": 0.0, "t0": 1.0}),
    "Rprop": ({"lr": 0.1, "step_sizes": (0.01, 50)}, {"lr": 0.2, "step_sizes": (0.02, 100)}),
}


@pytest.mark.parametrize("name", STORED_TIMES_TWO)
def test_states_of_a_weight_that_is_stored_times_two(name: str) -> None:
    """Both trainings compute the same function, so all their states must differ by exactly the known factors."""

    def train(factor: float, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parameter = torch.nn.Parameter(torch.tensor([-2.0, 3.0, 0.5]) * factor)
        optimizer = getattr(torch.optim, name)([parameter], foreach=False, **options)
        for step in range(4):
            weight = parameter / factor
            optimizer.zero_grad()
            (weight * weight + weight * (step - 1)).sum().backward()
            optimizer.step()
        return parameter.detach(), {k: v for k, v in optimizer.state[parameter].items() if k not in COUNTERS}

    plain, doubled = (train(f, options) for f, options in zip((1.0, 2.0), STORED_TIMES_TWO[name], strict=True))
    assert torch.equal(doubled[0], plain[0] * state_scale("weight", 2.0))
    assert plain[1]
    for kind, value in plain[1].items():
        assert torch.equal(doubled[1][kind], value * state_scale(kind, 2.0)), kind
        assert bool((value != 0).any()), kind
