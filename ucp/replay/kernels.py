"""What an update works on: equal stretches of an optimizer tensor and of its states, and a group's hyper-parameters.

Adam and AdamW as torch computes them: one way in separate operations, another in one fused operator.

Optimizers with one state: SGD and Adagrad as torch computes them, and Lion as it is commonly written with torch.

DeepSpeed's own optimizers on the CPU: C++ operators that DeepSpeed compiles on the machine that they run on.

The optimizers that can be replayed: kernel id → what one update does to a stretch of an optimizer tensor.

A replay is exact when it runs the arithmetic that the job ran, so kernels call the very functions that the optimizers
of torch and DeepSpeed call. An optimizer that is not listed here is not replayed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UsageError
from ucp.replay.thread_buffers import scratch_tensor

if TYPE_CHECKING:
    import torch


# Kernels that work in vectors treat the last few elements of a tensor otherwise. Stretches that start at multiples of
# this many elements of the optimizer's tensor, and end so or with the tensor, give every element the same treatment.
CHUNK_ALIGNMENT: Final = 64

PARAM: Final = "param"  # the tensor that the optimizer updates, among its states

PYTHON_NUMBER: Final = "number"  # lr_kind of a learning rate that is no tensor; else the name of the tensor's dtype

Hyper = Mapping[str, Any]  # one group's, with `lr_kind`


@dataclass(slots=True)
class StateChunk:
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
    kind = hyper.get("lr_kind", PYTHON_NUMBER)
    if kind == PYTHON_NUMBER:
        return hyper["lr"]
    import torch

    return torch.tensor(hyper["lr"], dtype=getattr(torch, kind))


def step_before(stretch: StateChunk) -> torch.Tensor:
    """The counter before this update, as torch's functions want it; they raise it by one."""
    import torch

    return torch.tensor(float(stretch.step), dtype=torch.float32)


@lru_cache(maxsize=4096)
def step_after(step: int) -> torch.Tensor:
    """The counter after an update, as torch counts: in float32. Not to be changed, every stretch is given the same."""
    import torch

    return torch.tensor(float(step), dtype=torch.float32).add_(1)


def adam_kinds(hyper: Hyper) -> tuple[str, ...]:
    """The states of Adam and AdamW."""
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper.get("amsgrad") else ()))


def _is_decoupled(hyper: Hyper, default: bool) -> bool:
    """Is weight decay apart from the gradient? AdamW's is; torch's Adam has a switch that makes it an AdamW."""
    return bool(hyper.get("decoupled_weight_decay", default))


def single_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
    """`single` or `foreach`, which give the same bits."""
    decoupled = _is_decoupled(hyper, decoupled)
    if _is_plain(stretch, hyper) and _torch_takes_the_same_steps(decoupled):
        _plain_adam(stretch, grad, hyper, decoupled)
    else:
        _torch_adam(stretch, grad, hyper, decoupled)


def _torch_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
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


def _is_plain(stretch: StateChunk, hyper: Hyper) -> bool:
    import torch

    unusual = hyper.get("amsgrad") or hyper.get("maximize") or hyper.get("lr_kind", PYTHON_NUMBER) != PYTHON_NUMBER
    return not unusual and stretch.param.dtype is torch.float32


def _plain_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    """The operations of `_torch_adam` one by one, but into memory that is at hand.

    torch makes two tensors of the stretch's size in every update. Where the system takes such memory back at once, the
    pages that it gives out anew cost more than the arithmetic.
    """
    import torch

    (beta1, beta2), lr, decay = hyper["betas"], hyper["lr"], hyper["weight_decay"]
    step = step_after(stretch.step).item()
    first, second = stretch.states["exp_avg"], stretch.states["exp_avg_sq"]
    room = scratch_tensor("adam", grad.numel(), torch.float32)
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
        StateChunk(torch.linspace(-3, 3, 331), {kind: torch.zeros(331) for kind in ("exp_avg", "exp_avg_sq")})
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


def fused_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
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


def sgd_kinds(hyper: Hyper) -> tuple[str, ...]:
    """The states of SGD."""
    return ("momentum_buffer",) if hyper["momentum"] else ()


def update_sgd(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
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


def update_adagrad(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
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


def update_lion(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
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


_NUMBERS = itertools.count(1 << 20)  # of optimizers; a job in this process counts from 0
_LOCK = threading.Lock()


def cpu_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPUAdam`."""
    first, second = hyper["betas"]
    settings = (first, second, hyper["eps"], hyper["weight_decay"], bool(hyper.get("bias_correction", True)))
    if stretch.handle is None:
        mode = bool(hyper.get("adamw_mode", True))
        stretch.handle = _NativeOptimizer("adam", (hyper["lr"], *settings[:4], mode, False))
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


def _walk_to(stretch: StateChunk, lr: float, settings: tuple[Any, ...]) -> None:
    """Take the operator's running product of betas to where the job had it: it is rounded with every step.

    The product starts with the process: at the first update it is a power, from then on it is multiplied.
    """
    import torch

    dummy = [torch.zeros(1) for _ in range(4)]
    for step in range(stretch.resumed_at + 1, stretch.step + 1):
        stretch.handle.op.adam_update(stretch.handle.number, step, lr, *settings, *dummy)


def cpu_lion(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPULion`. It has a second moment that it never touches."""
    first, second = hyper["betas"]
    if stretch.handle is None:
        stretch.handle = _NativeOptimizer("lion", (hyper["lr"], first, second, hyper["weight_decay"], False))
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


class _NativeOptimizer:
    """An optimizer in the operator's own table, gone with this object."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.op = load_native_op(name)
        self._name = name
        with _LOCK:  # the operator's table is not made for several threads
            self.number = next(_NUMBERS)
            getattr(self.op, f"create_{name}")(self.number, *arguments)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            with _LOCK:
                getattr(self.op, f"destroy_{self._name}")(self.number)


@cache
def load_native_op(name: str) -> Any:
    """The operator `adam` or `lion`, which DeepSpeed compiles when it is first asked for."""
    try:
        from deepspeed.ops import op_builder

        return getattr(op_builder, {"adam": "CPUAdamBuilder", "lion": "CPULionBuilder"}[name])().load(verbose=False)
    except Exception as error:  # a compiler that is missing fails in many ways
        raise UsageError(
            f"DeepSpeed's cpu_{name} operator cannot be loaded here: {error}",
            hint="install deepspeed and a C++ compiler with ninja, or replay on the machine that trained",
        ) from error


@dataclass(frozen=True, slots=True)
class ReplayKernel:
    """One way to update. `update(stretch, gradient, hyper)` changes the stretch; its `step` is the caller's."""

    id: str
    kinds: Callable[[Hyper], tuple[str, ...]]  # the states of an optimizer with these hyper-parameters
    update: Callable[[StateChunk, torch.Tensor, Hyper], None]
    counts: bool = True  # the optimizer keeps the number of its updates
    initial: Callable[[str, Hyper], float | None] = lambda _kind, _hyper: 0.0  # of a missing state; None: made later
    prepare: Callable[[], object] = lambda: None  # loads what updates need, once in a process


def _cpu_adam(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:

    cpu_adam(stretch, grad, hyper)


def _cpu_lion(stretch: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:

    cpu_lion(stretch, grad, hyper)


def _two_moments(_hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _load(name: str) -> None:

    load_native_op(name)


def _exp_avg(_hyper: Hyper) -> tuple[str, ...]:
    return ("exp_avg",)


def _made_by_the_first_update(_kind: str, _hyper: Hyper) -> None:
    return None


def _torch_kernels() -> list[ReplayKernel]:
    made = []
    for way in ("single", "foreach", "fused"):  # the first two give the same bits
        fused = way == "fused"
        for name, decoupled in (("adam", False), ("adamw", True)):
            update = partial(fused_adam if fused else single_adam, decoupled=decoupled)
            made.append(ReplayKernel(f"torch.{name}.{way}", adam_kinds, update))
        sgd = partial(update_sgd, fused=fused)
        made.append(ReplayKernel(f"torch.sgd.{way}", sgd_kinds, sgd, counts=False, initial=_made_by_the_first_update))
        adagrad = partial(update_adagrad, fused=fused)
        made.append(ReplayKernel(f"torch.adagrad.{way}", lambda _: ("sum",), adagrad, initial=initial_accumulator))
    return made


KERNELS: Final[dict[str, ReplayKernel]] = {
    kernel.id: kernel
    for kernel in (
        *_torch_kernels(),
        ReplayKernel("lion", _exp_avg, update_lion, counts=False),
        ReplayKernel("deepspeed.cpu_adam", _two_moments, _cpu_adam, prepare=partial(_load, "adam")),
        ReplayKernel("deepspeed.cpu_lion", _two_moments, _cpu_lion, prepare=partial(_load, "lion")),
    )
}
