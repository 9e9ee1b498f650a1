"""What makes a replay exact, and why one is not: labels that stay with the result."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Final

from ucp.core.optimizers import optimizer_of_kernel
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint
from ucp.replay.kernels import KERNELS, ReplayKernel

ALL_PARAMETERS: Final = "*"  # parameter of a label that applies to all of them
BUFFERS_NOT_LOGGED: Final = "buffers are not logged"  # start of a manifest note that does not concern parameters

_UNUSUAL_VARIANTS: Final = {
    "unusual": "its param groups are capturable or differentiable, or have tensors as betas, eps or weight decay",
    "mixed": "some of its param groups are fused and some are not",
}


@dataclass(frozen=True, slots=True)
class ApproximationLabel:
    """From this step on, this parameter (or every one) may differ from the job's own state, and why."""

    step: int
    parameter: str
    reason: str

    def __str__(self) -> str:
        whose = "every parameter" if self.parameter == ALL_PARAMETERS else self.parameter
        return f"approximate from step {self.step} on, {whose}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "parameter": self.parameter, "reason": self.reason}


def find_kernel(fingerprint: KernelFingerprint) -> tuple[ReplayKernel | None, str | None]:
    """The kernel that repeats an optimizer, if there is one, and why its arithmetic may differ from the job's."""
    if fingerprint.id.rpartition(".")[2].lower() == "lion":  # not part of torch, so every project has its own class
        doubt = "Lion is replayed as it is commonly written; the job's own class may compute differently"
        return KERNELS["lion"], doubt
    return KERNELS.get(fingerprint.id), None


def why_not_replayed(fingerprint: KernelFingerprint) -> str:
    """Why `find_kernel` has no kernel for an optimizer."""
    optimizer = optimizer_of_kernel(fingerprint.id)
    if optimizer is not None and optimizer.whole_tensor:
        return f"its update is not element-wise: {optimizer.whole_tensor}"
    return _UNUSUAL_VARIANTS.get(fingerprint.id.rpartition(".")[2], "ucp has no replay kernel for it")


def approximation_reasons(manifest: EpochManifest) -> list[str]:
    """Why a replay of this epoch on this machine may not produce the same bits; empty if it does."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    fingerprint = manifest.kernel
    reasons = [note for note in manifest.notes if not note.startswith(BUFFERS_NOT_LOGGED)]
    if fingerprint.device != "cpu":
        reasons.append(f"it was trained on {fingerprint.device} and is replayed on the CPU")
        return reasons
    here = str(torch.__version__)
    if _release(fingerprint.torch) != _release(here):
        reasons.append(f"it was trained with torch {fingerprint.torch} and is replayed with {here}")
    capability = torch.backends.cpu.get_cpu_capability()
    if fingerprint.cpu_capability != capability:
        reasons.append(
            f"it was trained with {fingerprint.cpu_capability or 'unknown'} vectors, this CPU has {capability}"
        )
    if fingerprint.library and fingerprint.id.startswith("deepspeed."):
        try:
            here = version("deepspeed")
        except PackageNotFoundError:
            here = f"none (Python {platform.python_version()})"
        if _release(here) != _release(fingerprint.library.rpartition(" ")[2]):
            reasons.append(f"it was trained with DeepSpeed {fingerprint.library} and is replayed with {here}")
    return reasons


def _release(version: str) -> str:
    """A version without its build suffix."""
    return version.partition("+")[0]
