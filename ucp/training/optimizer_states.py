"""The states that an optimizer needs in order to continue, and the form in which it keeps numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucp.core.checkpoint import STEP, kind_of_state
from ucp.core.optimizers import optimizer_of_class


def expected_kinds(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """The states without which the optimizer cannot continue; empty if they are not known."""
    known = optimizer_of_class(cls.__name__ for cls in type(optimizer).__mro__)
    return set(known.state_names(group)) if known is not None and known.is_state_required else set()


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
