"""Describe a running optimizer for the log: the kernel that updates its tensors, and its hyper-parameters per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ucp.core.optimizers import UNLOGGED_FIELDS, optimizer_of_class
from ucp.log.epoch_manifest import KernelFingerprint
from ucp.log.payloads import GroupScalars, LrKind
from ucp.training.live_job import updates_counted

_VECTOR_BYTES: Final = {"AVX512": 64, "AVX512_VNNI": 64, "AVX512_BF16": 64, "AMX": 64, "AVX2": 32}


def kernel_of(optimizer: Any) -> KernelFingerprint:
    """The kernel of an (innermost) optimizer, and everything that the bits of its results depend on."""
    import torch

    capability = str(torch.backends.cpu.get_cpu_capability())
    device = _device(optimizer)
    name, library = _id(optimizer, device)
    module: Any = None if device == "cpu" else getattr(torch, device, None)
    hardware = f"{device} {module.get_device_name()}" if hasattr(module, "get_device_name") else device
    return KernelFingerprint(
        name, str(torch.__version__), capability, hardware, _VECTOR_BYTES.get(capability, 16), library
    )


def depends_on_position(kernel: KernelFingerprint) -> bool:
    """Whether results depend on an element's position in memory: true for fused kernels with a scalar tail loop."""
    return kernel.id.rpartition(".")[2] not in ("single", "foreach")


def constants(optimizer: Any) -> dict[int, tuple[Any, ...]]:
    """By id of param group: settings that change a kernel's results but are not logged with every step."""
    device = _device(optimizer)
    found = {}
    for group in optimizer.param_groups:
        fused = _variant_of(group, device) == "fused"  # single and foreach compute the same bits
        found[id(group)] = (fused, _is_unsupported(group), *map(group.get, UNLOGGED_FIELDS))
    return found


def _id(optimizer: Any, device: str) -> tuple[str, str]:
    """(kernel id, version of its library if that is not torch)."""
    cls = type(optimizer)
    known = optimizer_of_class([cls.__name__])
    kernel = known.kernel or "" if known is not None else ""
    path = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.startswith("torch.optim") and kernel.startswith("torch."):
        return f"{kernel}.{_variant(optimizer, device)}", ""
    if cls.__module__.startswith("deepspeed."):
        import deepspeed

        return kernel if kernel.startswith("deepspeed.") else path, str(deepspeed.__version__)
    return kernel if kernel == "lion" else path, ""


def _variant(optimizer: Any, device: str) -> str:
    """torch's implementation: single, foreach or fused; otherwise a name that no replay kernel has."""
    if any(map(_is_unsupported, optimizer.param_groups)):
        return "unusual"
    found = {_variant_of(group, device) for group in optimizer.param_groups}
    if len(found) == 1:
        return found.pop()
    return "mixed" if "fused" in found else "single"  # single and foreach compute the same bits


def _is_unsupported(group: Mapping[str, Any]) -> bool:
    """Whether torch computes with tensors instead of numbers for a group (capturable, differentiable)."""
    betas = group.get("betas") or ()
    values = [*betas, *(group.get(key) for key in ("eps", "weight_decay", "momentum", "dampening"))]
    return bool(group.get("capturable") or group.get("differentiable")) or any(
        hasattr(value, "requires_grad") for value in values
    )


def _variant_of(group: Mapping[str, Any], device: str) -> str:
    """single, foreach or fused; torch's default if the user did not choose."""
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and device != "cpu") else "single"


def _device(optimizer: Any) -> str:
    for group in optimizer.param_groups:
        for p in group["params"]:
            return str(p.device.type)
    return "cpu"


def scalars(number: int, group: Mapping[str, Any], opt_step: int) -> GroupScalars:
    """The current hyper-parameters of a param group."""
    betas = group.get("betas")
    betas = betas if isinstance(betas, Sequence) and len(betas) == 2 else (math.nan, math.nan)
    lr, kind = _learning_rate(group.get("lr", math.nan))
    return GroupScalars(
        number,
        lr,
        _number(betas[0]),
        _number(betas[1]),
        _number(group.get("eps")),
        _number(group.get("weight_decay")),
        _number(group.get("momentum")),
        _number(group.get("dampening")),
        kind,
        bool(group.get("maximize", False)),
        bool(group.get("amsgrad", False)),
        bool(group.get("nesterov", False)),
        opt_step,
    )


def _learning_rate(value: Any) -> tuple[float, LrKind]:
    if hasattr(value, "item"):
        return float(value.item()), LrKind.TENSOR64 if str(value.dtype) == "torch.float64" else LrKind.TENSOR32
    return float(value), LrKind.FLOAT


def _number(value: Any) -> float:
    """A float64; NaN if the group has no such number (Adafactor's eps is a pair)."""
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else math.nan


def update_count(optimizer: Any, tensor: Any) -> int:
    """The number of updates that the optimizer has made to a tensor; -1 if it does not count them."""
    state = optimizer.state.get(tensor)
    if not state:
        return 0
    counted = updates_counted(state)
    return -1 if counted is None else counted


def plain_hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group as JSON values; other values as text."""
    return {str(key): _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "numel", lambda: 2)() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)
