"""What optimizers keep: the states that one needs before it can go on, and the form of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ucp.core.checkpoint import STEP, kind_of_state

_OTHERS: Final = {
    "Adamax": ("exp_avg", "exp_inf"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Rprop": ("prev", "step_size"),
    "ASGD": ("ax",),
    "Lion": ("exp_avg",),
}


def expected_kinds(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """States without which the optimizer would not continue; empty where that is not known."""
    families = {cls.__name__ for cls in type(optimizer).__mro__}
    if families & {"Adam", "AdamW", "NAdam", "RAdam", "FusedAdam", "DeepSpeedCPUAdam", "FusedLamb"}:
        return {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    if "SGD" in families:
        return {"momentum_buffer"} if group.get("momentum") else set()
    if "Adagrad" in families:
        return {"sum"}
    if "RMSprop" in families:
        momentum = {"momentum_buffer"} if group.get("momentum") else set()
        return {"square_avg"} | momentum | ({"grad_avg"} if group.get("centered") else set())
    return next((set(kinds) for family, kinds in _OTHERS.items() if family in families), set())


def is_counter(name: str, value: Any) -> bool:
    """Is a state the number of updates, and not one for every element? (Of a parameter that is a number, both fit.)"""
    return kind_of_state(name) == STEP and value.numel() == 1


def updates_counted(state: Mapping[str, Any]) -> int | None:
    """The updates that an optimizer has counted for a tensor; None where it keeps no number, or one an element."""
    step: Any = state.get(STEP)
    if hasattr(step, "numel"):
        return int(step.item()) if step.numel() == 1 else None
    return None if step is None else int(step)


def number_for(optimizer: Any, group: Mapping[str, Any], key: Any, value: float, *, was_int: bool) -> Any:
    """A number such as `step` in the form that this optimizer keeps: a tensor of torch's own, else as it was stored."""
    import torch

    module = type(optimizer).__module__
    if module.startswith("deepspeed.") or (was_int and not module.startswith("torch.")):
        return int(value)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(value), device=key.device if on_device else "cpu")
