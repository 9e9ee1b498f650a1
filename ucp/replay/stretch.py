"""What an update works on: equal stretches of an optimizer tensor and of its states, and a group's hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

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


def learning_rate(hyper: Hyper) -> Any:
    """As the optimizer had it: torch computes with a tensor of one element in another precision than with a number."""
    kind = hyper.get("lr_kind", NUMBER)
    if kind == NUMBER:
        return hyper["lr"]
    import torch

    return torch.tensor(hyper["lr"], dtype=getattr(torch, kind))


def step_before(stretch: Stretch) -> torch.Tensor:
    """The counter before this update, as torch's functions want it; they raise it by one."""
    import torch

    return torch.tensor(float(stretch.step), dtype=torch.float32)


@lru_cache(maxsize=4096)
def step_after(step: int) -> torch.Tensor:
    """The counter after an update, as torch counts: in float32. Not to be changed, every stretch is given the same."""
    import torch

    return torch.tensor(float(step), dtype=torch.float32).add_(1)
