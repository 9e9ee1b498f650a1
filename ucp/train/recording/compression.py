"""The state of a gradient compression in the bases of a log: each rank's own, a file a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ucp.errors import StorageError, UsageError
from ucp.files.local import sync

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Compression(Protocol):
    """What compresses the gradients of a job before training uses them, and has a state of its own on every rank."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on (error feedback), by name; of this rank."""


def checked(compressed: object) -> Compression | None:
    """What the user gave as `compressed=`."""
    if compressed is None or isinstance(compressed, Compression):
        return compressed
    raise UsageError(
        f"compressed= is a {type(compressed).__name__} without state_dict()",
        hint="give ucp.TopK, or an object whose state_dict() has the error feedback of this rank as tensors",
    )


def file_of(base: Path, rank: int) -> Path:
    """Where a base has the compression's state of a rank."""
    return base / "compression" / f"rank-{rank:05d}.safetensors"


def save_compression(compressed: Compression, base: Path, rank: int) -> None:
    """Write this rank's state into the folder of a base, and wait for the disk."""
    from safetensors.torch import save_file

    path = file_of(base, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in compressed.state_dict().items()}, path)
        sync(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
