"""What steps a live job's optimizer tensors, in the words of a log's manifest, and the scalars of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ucp.core.optimizers import UNLOGGED_FIELDS, optimizer_of_class
from ucp.log.epoch_manifest import KernelFingerprint
from ucp.log.payloads import GroupScalars, LrKind
from ucp.training.optimizer_states import updates_counted

_VECTOR_BYTES: Final = {"AVX512": 64, "AVX512_VNNI": 64, "AVX512_BF16": 64, "AMX": 64, "AVX2": 32}


def kernel_of(optimizer: Any) -> KernelFingerprint:
    """The kernel of an (innermost) optimizer, and all that its bits depend on."""
    import torch

    capability = str(torch.backends.cpu.get_cpu_capability())
    device = _device(optimizer)
    name, library = _id(optimizer, device)
    told = device if device == "cpu" else f"{device} {_device_name(device)}".strip()
    return KernelFingerprint(name, str(torch.__version__), capability, told, _VECTOR_BYTES.get(capability, 16), library)


def sees_vectors(kernel: KernelFingerprint) -> bool:
    """Do the bits of an element depend on where it lies in memory? Not where torch's own operations are called."""
    return kernel.id.rpartition(".")[2] not in ("single", "foreach")


def constants(optimizer: Any) -> dict[int, tuple[Any, ...]]:
    """What a kernel depends on besides the scalars that every step logs, by the group's id: a manifest has it once."""
    device = _device(optimizer)
    found = {}
    for group in optimizer.param_groups:
        fused = _variant_of(group, device) == "fused"  # the other two give the same bits
        found[id(group)] = (fused, _is_unusual(group), *map(group.get, UNLOGGED_FIELDS))
    return found


def _id(optimizer: Any, device: str) -> tuple[str, str]:
    """(kernel id, version of the library it is from where that is not torch)."""
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
    """How torch computes: single, foreach, fused; something else where nobody can replay it, or not as one kernel."""
    if any(map(_is_unusual, optimizer.param_groups)):
        return "unusual"
    found = {_variant_of(group, device) for group in optimizer.param_groups}
    if len(found) == 1:
        return found.pop()
    return "mixed" if "fused" in found else "single"  # foreach and single give the same bits


def _is_unusual(group: Mapping[str, Any]) -> bool:
    """Does torch compute with a group otherwise than with numbers: in tensors, as it can be captured or derived?"""
    betas = group.get("betas") or ()
    values = [*betas, *(group.get(key) for key in ("eps", "weight_decay", "momentum", "dampening"))]
    return bool(group.get("capturable") or group.get("differentiable")) or any(
        hasattr(value, "requires_grad") for value in values
    )


def _variant_of(group: Mapping[str, Any], device: str) -> str:
    """single, foreach or fused, as torch itself decides where the user did not."""
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and device != "cpu") else "single"


def _device(optimizer: Any) -> str:
    for group in optimizer.param_groups:
        for p in group["params"]:
            return str(p.device.type)
    return "cpu"


def _device_name(device: str) -> str:
    import torch

    module = getattr(torch, device, None)
    return str(module.get_device_name()) if module is not None and hasattr(module, "get_device_name") else ""


def scalars(number: int, group: Mapping[str, Any], opt_step: int) -> GroupScalars:
    """The numbers of a parameter group as they are now."""
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
    """A float64; NaN where the group has none, or something else of this name (Adafactor's two epsilons)."""
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else math.nan


def own_step(optimizer: Any, tensor: Any) -> int:
    """How many updates the optimizer has made to a tensor; -1 where it does not count."""
    state = optimizer.state.get(tensor)
    if not state:
        return 0
    counted = updates_counted(state)
    return -1 if counted is None else counted


def plain_hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a group as JSON values; what is none is told as text."""
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
