"""What makes a replay exact, and why one is not: labels that go with the result wherever it goes."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Final

from ucp.log.epoch_manifest import EpochManifest
from ucp.log.epoch_manifest import KernelFingerprint as Fingerprint
from ucp.replay.kernels import KERNELS, ReplayKernel

ALL_PARAMETERS: Final = "*"  # parameter of a label that concerns all
BUFFERS_NOT_LOGGED: Final = "buffers are not logged"  # a note of a log that is no doubt about parameters


@dataclass(frozen=True, slots=True)
class ApproximationLabel:
    """From this step on, this parameter (or every one) may differ from what the job held, and why."""

    step: int
    parameter: str
    reason: str

    def __str__(self) -> str:
        whose = "every parameter" if self.parameter == ALL_PARAMETERS else self.parameter
        return f"approximate from step {self.step} on, {whose}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "parameter": self.parameter, "reason": self.reason}


def find_kernel(fingerprint: Fingerprint) -> tuple[ReplayKernel | None, str | None]:
    """The kernel that repeats an optimizer, and why that may not be the same arithmetic; None where there is none."""
    if fingerprint.id.rpartition(".")[2].lower() == "lion":  # torch has none, so everyone writes their own
        return KERNELS["lion"], "Lion is replayed as it is commonly written; the job's own class may compute otherwise"
    return KERNELS.get(fingerprint.id), None


def approximation_reasons(manifest: EpochManifest) -> list[str]:
    """Why a replay of this epoch on this machine may not give the same bits; nothing where it does."""
    import torch

    fingerprint = manifest.kernel
    found = [note for note in manifest.notes if not note.startswith(BUFFERS_NOT_LOGGED)]
    if fingerprint.device != "cpu":
        found.append(f"it was trained on {fingerprint.device} and is replayed on the CPU")
        return found
    here = str(torch.__version__)
    if _release(fingerprint.torch) != _release(here):
        found.append(f"it was trained with torch {fingerprint.torch} and is replayed with {here}")
    capability = torch.backends.cpu.get_cpu_capability()
    if fingerprint.cpu_capability != capability:
        found.append(
            f"it was trained with {fingerprint.cpu_capability or 'unknown'} vectors, this CPU has {capability}"
        )
    if fingerprint.library and fingerprint.id.startswith("deepspeed."):
        found.extend(_other_deepspeed(fingerprint.library))
    return found


def _release(version: str) -> str:
    """A version without what a build adds to it."""
    return version.partition("+")[0]


def _other_deepspeed(trained: str) -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        here = version("deepspeed")
    except PackageNotFoundError:
        here = f"none (Python {platform.python_version()})"
    if _release(here) == _release(trained.rpartition(" ")[2]):
        return []
    return [f"it was trained with DeepSpeed {trained} and is replayed with {here}"]
