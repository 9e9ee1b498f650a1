"""DeepSpeed's own optimizers on the CPU: C++ operators that DeepSpeed compiles on the machine that they run on."""

from __future__ import annotations

import itertools
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

from ucp.errors import UsageError

if TYPE_CHECKING:
    import torch

    from ucp.replay.stretch import Hyper, Stretch

_NUMBERS = itertools.count(1 << 20)  # of optimizers; a job in this process counts from 0
_LOCK = threading.Lock()


def cpu_adam(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPUAdam`."""
    first, second = hyper["betas"]
    settings = (first, second, hyper["eps"], hyper["weight_decay"], bool(hyper.get("bias_correction", True)))
    if stretch.handle is None:
        mode = bool(hyper.get("adamw_mode", True))
        stretch.handle = _Optimizer("adam", (hyper["lr"], *settings[:4], mode, False))
        _walk_to(stretch, hyper["lr"], settings)
    stretch.handle.op.adam_update(
        stretch.handle.number,
        stretch.step + 1,
        hyper["lr"],
        *settings,
        stretch.param,
        grad,
        stretch.states["exp_avg"],
        stretch.states["exp_avg_sq"],
    )


def _walk_to(stretch: Stretch, lr: float, settings: tuple[Any, ...]) -> None:
    """Take the operator's running product of betas to where the job had it: it is rounded with every step.

    The product starts with the process: at the first update it is a power, from then on it is multiplied.
    """
    import torch

    dummy = [torch.zeros(1) for _ in range(4)]
    for step in range(stretch.resumed_at + 1, stretch.step + 1):
        stretch.handle.op.adam_update(stretch.handle.number, step, lr, *settings, *dummy)


def cpu_lion(stretch: Stretch, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPULion`. It has a second moment that it never touches."""
    first, second = hyper["betas"]
    if stretch.handle is None:
        stretch.handle = _Optimizer("lion", (hyper["lr"], first, second, hyper["weight_decay"], False))
    stretch.handle.op.lion_update(
        stretch.handle.number,
        stretch.step + 1,
        hyper["lr"],
        first,
        second,
        hyper["weight_decay"],
        stretch.param,
        grad,
        stretch.states["exp_avg"],
    )


class _Optimizer:
    """An optimizer in the operator's own table, gone with this object."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.op = load(name)
        self._name = name
        with _LOCK:  # the operator's table is not made for several threads
            self.number = next(_NUMBERS)
            getattr(self.op, f"create_{name}")(self.number, *arguments)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            with _LOCK:
                getattr(self.op, f"destroy_{self._name}")(self.number)


@cache
def load(name: str) -> Any:
    """The operator `adam` or `lion`, which DeepSpeed compiles when it is first asked for."""
    try:
        from deepspeed.ops import op_builder

        return getattr(op_builder, {"adam": "CPUAdamBuilder", "lion": "CPULionBuilder"}[name])().load(verbose=False)
    except Exception as error:  # a compiler that is missing fails in many ways
        raise UsageError(
            f"DeepSpeed's cpu_{name} operator cannot be loaded here: {error}",
            hint="install deepspeed and a C++ compiler with ninja, or replay on the machine that trained",
        ) from error
