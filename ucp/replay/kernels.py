"""Optimizer updates that can be replayed: kernel id → function that updates a chunk of an optimizer tensor.

A replay is exact only if it runs the same arithmetic as the job, so the kernels call the functions that the optimizers
of torch and DeepSpeed themselves call. An update must be element-wise: every element is computed from its own gradient
and states. `ucp.core.optimizers` describes the optimizers; one without a kernel here is not replayed.

A thread reuses its memory: allocating it anew would cost as much as an update. There is one buffer per use and thread,
as large as the largest request so far.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.optimizers import Hyper, Optimizer, optimizer_of_kernel
from ucp.errors import UsageError, missing_package
from ucp.log.stream_schema import PARAM
from ucp.read.casting import RawArray, page_aligned

if TYPE_CHECKING:
    import torch

# Vectorized kernels treat the last few elements of a tensor differently. Chunks that start at multiples of this many
# elements of the optimizer's tensor, and end at one or with the tensor, give every element the same treatment.
CHUNK_ALIGNMENT: Final = 64

PYTHON_NUMBER: Final = "number"  # `lr_kind` of a learning rate that is not a tensor; else the tensor's dtype


@dataclass(slots=True)
class StateChunk:
    """The same range of elements of an optimizer tensor and of its states, updated in place.

    A state that the optimizer creates in its first update may be missing from `states` until then.
    """

    param: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0  # updates so far
    resumed_at: int = 0  # updates that the job's optimizer had counted when its process started
    handle: Any = None  # what a kernel keeps from one update to the next

    def get(self, kind: str) -> torch.Tensor | None:
        """A state, or with `PARAM` the tensor itself; None if the state does not exist (yet)."""
        return self.param if kind == PARAM else self.states.get(kind)


@dataclass(frozen=True, slots=True)
class ReplayKernel:
    """One way to compute an update. `update(chunk, gradient, hyper)` changes the chunk, except for `chunk.step`.

    `hyper` are the hyper-parameters of the param group, and `lr_kind`.
    """

    id: str
    optimizer: Optimizer
    update: Callable[[StateChunk, torch.Tensor, Hyper], None]
    creates_states: bool = False  # the first update creates the states: they do not start at a fixed value
    native_op: str | None = None  # operator that DeepSpeed compiles

    def kinds(self, hyper: Hyper) -> tuple[str, ...]:
        """The states of an optimizer with these hyper-parameters."""
        return (*self.optimizer.state_names(hyper), *self.optimizer.unused_states)

    def initial(self, kind: str, hyper: Hyper) -> float | None:
        """The value of a state before the first update; None if that update creates it."""
        return None if self.creates_states else self.optimizer.initial_value(kind, hyper)

    def prepare(self) -> None:
        """Load what updates need, so that forks of this process share it."""
        if self.native_op is not None:
            load_native_op(self.native_op)


def _learning_rate(hyper: Hyper) -> Any:
    """As the optimizer had it: torch computes in another precision with a one-element tensor than with a number."""
    kind = hyper.get("lr_kind", PYTHON_NUMBER)
    if kind == PYTHON_NUMBER:
        return hyper["lr"]
    import torch

    return torch.tensor(hyper["lr"], dtype=getattr(torch, kind))


def _step_before(chunk: StateChunk) -> torch.Tensor:
    """The step counter before this update; torch's functions increment it."""
    import torch

    return torch.tensor(float(chunk.step), dtype=torch.float32)


@lru_cache(maxsize=4096)
def _step_after(step: int) -> torch.Tensor:
    """The step counter after an update, in float32 as torch counts. Shared by all chunks: must not be changed."""
    import torch

    return torch.tensor(float(step), dtype=torch.float32).add_(1)


# Adam and AdamW -----------------------------------------------------------------------------------------------------


def _is_decoupled(hyper: Hyper, default: bool) -> bool:
    """Is weight decay applied to the parameter, and not to the gradient? AdamW's is, and torch's Adam has a switch."""
    return bool(hyper.get("decoupled_weight_decay", default))


def _single_adam(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
    """`single` or `foreach`, which produce the same bits."""
    import torch

    decoupled = _is_decoupled(hyper, decoupled)
    unusual = hyper.get("amsgrad") or hyper.get("maximize") or hyper.get("lr_kind", PYTHON_NUMBER) != PYTHON_NUMBER
    is_plain = not unusual and chunk.param.dtype is torch.float32 and _torch_computes_alike(decoupled)
    (_plain_adam if is_plain else _torch_adam)(chunk, grad, hyper, decoupled)


def _torch_adam(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    from torch.optim.adam import adam

    amsgrad = bool(hyper.get("amsgrad"))
    states = chunk.states
    adam(
        [chunk.param],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if amsgrad else [],
        [_step_before(chunk)],
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


def _plain_adam(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, decoupled: bool) -> None:
    """The operations of `_torch_adam` one by one, but into reused memory.

    torch allocates two tensors of the chunk's size in every update. If the allocator returns that memory to the system
    at once, page faults cost more than the arithmetic.
    """
    import torch

    (beta1, beta2), lr, decay = hyper["betas"], hyper["lr"], hyper["weight_decay"]
    step = _step_after(chunk.step).item()
    first, second = chunk.states["exp_avg"], chunk.states["exp_avg_sq"]
    scratch = scratch_tensor("adam", grad.numel(), torch.float32)
    if decay != 0 and decoupled:
        chunk.param.mul_(1 - lr * decay)
    elif decay != 0:
        grad = torch.add(grad, chunk.param, alpha=decay, out=scratch)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    torch.sqrt(second, out=scratch)
    scratch.div_((1 - beta2**step) ** 0.5).add_(hyper["eps"])
    chunk.param.addcdiv_(first, scratch, value=-(lr / (1 - beta1**step)))


@cache
def _torch_computes_alike(decoupled: bool) -> bool:
    """Does the installed torch produce the bits of `_plain_adam`? Other versions may order operations differently."""
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


def _fused_adam(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, *, decoupled: bool) -> None:
    """The operator that torch's fused Adam ends in: the Python code around it costs as much as a small tensor."""
    import torch

    states, betas, amsgrad = chunk.states, hyper["betas"], bool(hyper.get("amsgrad"))
    operator: Any = torch._fused_adamw_ if _is_decoupled(hyper, decoupled) else torch._fused_adam_
    operator(
        [chunk.param],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if amsgrad else [],
        [_step_after(chunk.step)],
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


# Optimizers with one state ------------------------------------------------------------------------------------------


def _sgd(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    """SGD, which creates its momentum buffer in the first update."""
    from torch.optim.sgd import sgd

    buffers = [chunk.states.get("momentum_buffer")]
    sgd(
        [chunk.param],
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
        chunk.states["momentum_buffer"] = buffers[0]


def _adagrad(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper, *, fused: bool) -> None:
    from torch.optim.adagrad import adagrad

    adagrad(
        [chunk.param],
        [grad],
        [chunk.states["sum"]],
        [_step_before(chunk)],
        foreach=False,
        fused=fused,
        lr=_learning_rate(hyper),
        weight_decay=hyper["weight_decay"],
        lr_decay=hyper.get("lr_decay", 0.0),
        eps=hyper["eps"],
        maximize=bool(hyper.get("maximize")),
    )


def _lion(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
    """Lion as it is commonly written with torch: decay, then the sign of the interpolated momentum."""
    first, second = hyper["betas"]
    moment = chunk.states["exp_avg"]
    if hyper["weight_decay"]:
        chunk.param.mul_(1 - hyper["lr"] * hyper["weight_decay"])
    update = moment.clone().mul_(first).add_(grad, alpha=1 - first).sign_()
    chunk.param.add_(update, alpha=-hyper["lr"])
    moment.mul_(second).add_(grad, alpha=1 - second)


# DeepSpeed's CPU optimizers: C++ operators that DeepSpeed compiles on the machine that they run on ------------------

_NUMBERS: Final = itertools.count(1 << 20)  # of optimizers; a job in this process counts from 0
_NATIVE_LOCK: Final = threading.Lock()  # the operators' tables of optimizers are not thread-safe


def _cpu_adam(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPUAdam`."""
    first, second = hyper["betas"]
    arguments = (first, second, hyper["eps"], hyper["weight_decay"], bool(hyper.get("bias_correction", True)))
    if chunk.handle is None:
        mode = bool(hyper.get("adamw_mode", True))
        chunk.handle = _NativeOptimizer("adam", (hyper["lr"], *arguments[:4], mode, False))
        import torch

        # Bring the operator's running products of betas to where the job had them: every step rounds them. They start
        # with the process: in the first update they are powers, from then on they are multiplied.
        dummies = [torch.zeros(1) for _ in range(4)]
        for step in range(chunk.resumed_at + 1, chunk.step + 1):
            chunk.handle.op.adam_update(chunk.handle.number, step, hyper["lr"], *arguments, *dummies)
    chunk.handle.op.adam_update(
        chunk.handle.number,
        chunk.step + 1,
        hyper["lr"],
        *arguments,
        chunk.param,
        grad,
        chunk.states["exp_avg"],
        chunk.states["exp_avg_sq"],
    )


def _cpu_lion(chunk: StateChunk, grad: torch.Tensor, hyper: Hyper) -> None:
    """One update of `DeepSpeedCPULion`."""
    first, second = hyper["betas"]
    if chunk.handle is None:
        chunk.handle = _NativeOptimizer("lion", (hyper["lr"], first, second, hyper["weight_decay"], False))
    chunk.handle.op.lion_update(
        chunk.handle.number,
        chunk.step + 1,
        hyper["lr"],
        first,
        second,
        hyper["weight_decay"],
        chunk.param,
        grad,
        chunk.states["exp_avg"],
    )


class _NativeOptimizer:
    """An optimizer in the operator's own table; removed together with this object."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.op = load_native_op(name)
        self._name = name
        with _NATIVE_LOCK:
            self.number = next(_NUMBERS)
            getattr(self.op, f"create_{name}")(self.number, *arguments)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            with _NATIVE_LOCK:
                getattr(self.op, f"destroy_{self._name}")(self.number)


@cache
def load_native_op(name: str) -> Any:
    """DeepSpeed's operator `adam` or `lion`, which it compiles on first use."""
    try:
        from deepspeed.ops import op_builder

        return getattr(op_builder, {"adam": "CPUAdamBuilder", "lion": "CPULionBuilder"}[name])().load(verbose=False)
    except ModuleNotFoundError as error:
        raise missing_package(error, f"replaying DeepSpeed's cpu_{name}") or error from None
    except Exception as error:  # a missing compiler fails in many ways
        raise UsageError(
            f"DeepSpeed's cpu_{name} operator cannot be loaded: {error}",
            hint="install deepspeed and a C++ compiler with ninja, or replay on the machine that trained",
        ) from error


def _kernel(
    kernel_id: str,
    update: Callable[[StateChunk, torch.Tensor, Hyper], None],
    *,
    creates_states: bool = False,
    native_op: str | None = None,
) -> ReplayKernel:
    optimizer = optimizer_of_kernel(kernel_id)
    assert optimizer is not None, kernel_id
    return ReplayKernel(kernel_id, optimizer, update, creates_states, native_op)


def _torch_kernels(variant: str) -> list[ReplayKernel]:
    fused = variant == "fused"
    adam = _fused_adam if fused else _single_adam
    return [
        _kernel(f"torch.adam.{variant}", partial(adam, decoupled=False)),
        _kernel(f"torch.adamw.{variant}", partial(adam, decoupled=True)),
        _kernel(f"torch.sgd.{variant}", partial(_sgd, fused=fused), creates_states=True),
        _kernel(f"torch.adagrad.{variant}", partial(_adagrad, fused=fused)),
    ]


KERNELS: Final[dict[str, ReplayKernel]] = {
    kernel.id: kernel
    for kernel in (
        *_torch_kernels("single"),
        *_torch_kernels("foreach"),
        *_torch_kernels("fused"),
        _kernel("lion", _lion),
        _kernel("deepspeed.cpu_adam", _cpu_adam, native_op="adam"),
        _kernel("deepspeed.cpu_lion", _cpu_lion, native_op="lion"),
    )
}


_CACHED_VIEWS: Final = 64  # creating a view takes longer than looking it up


class _ThreadScratch(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}  # of their first elements
        self.read_buffer: ReusedBuffer | None = None


_BUFFERS = _ThreadScratch()


def scratch_tensor(use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized flat tensor, valid until the same thread asks for the same use and dtype again."""
    view = _BUFFERS.views.get((use, dtype, numel))
    if view is not None:
        return view
    tensor = _BUFFERS.tensors.get((use, dtype))
    if tensor is None or tensor.numel() < numel:
        import torch

        tensor = _BUFFERS.tensors[use, dtype] = torch.empty(numel, dtype=dtype)
        _BUFFERS.views.clear()  # views would keep the old tensor alive
    elif len(_BUFFERS.views) >= _CACHED_VIEWS:
        _BUFFERS.views.clear()
    view = _BUFFERS.views[use, dtype, numel] = tensor[:numel]
    return view


class ReusedBuffer:
    """Bytes to read into, and the same bytes as tensors.

    The buffer is page-aligned: some processors copy several times slower if source and destination differ by a few
    bytes in their offset within a page, as memory from malloc and the pages of a file often do.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = page_aligned(nbytes)
        self._address = int(self.array.ctypes.data)
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._pieces: dict[int, tuple[RawArray, memoryview]] = {}

    def piece(self, nbytes: int) -> tuple[RawArray, memoryview]:
        """As `ReadBuffer.piece`: the first bytes, always the same objects for the same number of bytes."""
        piece = self._pieces.get(nbytes)
        if piece is None:
            if len(self._pieces) >= _CACHED_VIEWS:
                self._pieces.clear()
            part = self.array[:nbytes] if nbytes <= len(self.array) else np.empty(nbytes, np.uint8)
            piece = part, part.data
            if nbytes <= len(self.array):
                self._pieces[nbytes] = piece
        return piece

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements, which the caller may change until the buffer is requested again."""
        view = self._views.get((dtype, numel))
        if view is None:
            import torch

            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            view = self._views[dtype, numel] = torch.from_numpy(self.array).view(dtype)[:numel]
        return view

    def contains(self, tensor: torch.Tensor) -> bool:
        """Does a tensor start at the buffer's first byte?"""
        address: int = tensor.data_ptr()
        return address == self._address


def reused_buffer(nbytes: int) -> ReusedBuffer:
    """The thread's buffer, of at least `nbytes` bytes; valid until the thread asks for it again."""
    buffer = _BUFFERS.read_buffer
    if buffer is None or len(buffer.array) < nbytes:
        buffer = _BUFFERS.read_buffer = ReusedBuffer(nbytes)
    return buffer
