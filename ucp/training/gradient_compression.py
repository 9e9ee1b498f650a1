"""Gradient compression for DDP with error feedback, and its state in the bases of a log (one file per rank).

    topk = ucp.TopK(model, fraction=0.01)                       # a DDP module, before its first step
    recorder = ucp.record("run", model, optimizer, compressed=topk)

Only the largest elements of each gradient are sent; the rest is added to the next gradient. The gradients that training
uses are then sparse, and so is the log (LowDiff). The unsent rest is different on every rank: bases of the recorder
contain it, and `topk.load` restores it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ucp.errors import StorageError, UsageError
from ucp.formats.dcp.optimizer_keys import strip_wrappers
from ucp.storage.local import sync
from ucp.training.collectives import rank_and_size

if TYPE_CHECKING:
    import torch


@runtime_checkable
class GradientCompression(Protocol):
    """A gradient compression that keeps a state (error feedback) on every rank."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything of this rank that the next step depends on, by name."""


def checked_compression(compressed: object) -> GradientCompression | None:
    """Validate the user's `compressed=`."""
    if compressed is None or isinstance(compressed, GradientCompression):
        return compressed
    raise UsageError(
        f"compressed= is a {type(compressed).__name__} without state_dict()",
        hint="pass ucp.TopK, or an object whose state_dict() returns the error feedback of this rank as tensors",
    )


def compression_file(base: Path, rank: int) -> Path:
    """The file in a base's folder with the compression state of one rank."""
    return base / "compression" / f"rank-{rank:05d}.safetensors"


def save_compression(compressed: GradientCompression, base: Path, rank: int) -> None:
    """Write this rank's state into the folder of a base and sync it to disk."""
    from safetensors.torch import save_file

    path = compression_file(base, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in compressed.state_dict().items()}, path)
        sync(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


class TopK:
    """A DDP comm hook with error feedback.

    Every rank sums the received elements in order of rank, so all ranks get the same bits.
    """

    def __init__(self, model: Any, fraction: float = 0.01) -> None:
        """`model` is a DDP module without a comm hook; `fraction` of each gradient is sent, at least one element."""
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(model, DistributedDataParallel):
            raise UsageError(f"top-k compression is for DDP modules, not for a {type(model).__name__}")
        if not 0 < fraction <= 1:
            raise UsageError(f"fraction={fraction}: must be above 0 and at most 1")
        if model._comm_hooks:
            raise UsageError("the DDP module already has a comm hook", hint="create one TopK only, before the recorder")
        self.fraction = fraction
        self._group = model.process_group
        named = {strip_wrappers(name): p for name, p in model.module.named_parameters()}
        self._names = {id(p): name for name, p in named.items()}
        self._shapes = {name: p.shape for name, p in named.items()}
        self._unsent: dict[str, torch.Tensor] = {}  # name → elements that this rank has not sent yet, flat
        model.register_comm_hook(self, _reduce)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the elements that this rank has not sent yet, by parameter."""
        return {name: unsent.view(self._shapes[name]).clone() for name, unsent in self._unsent.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with the `state_dict` of the same rank."""
        for name, unsent in state.items():
            if name not in self._shapes or unsent.shape != self._shapes[name]:
                raise UsageError(f"the model has no parameter {name} of shape {list(unsent.shape)}")
        self._unsent = {name: unsent.detach().clone().reshape(-1) for name, unsent in state.items()}

    def load(self, base: str | os.PathLike[str]) -> None:
        """Continue with this rank's state in a base (`run/base/base-000017`). The world size must be the same."""
        from safetensors.torch import load_file

        rank, size = rank_and_size()
        folder = Path(base)
        if not compression_file(folder, 0).parent.is_dir():  # the path of the base's atoms was passed
            folder = folder.parent
        saved = len(list(compression_file(folder, 0).parent.glob("rank-*.safetensors")))
        if saved != size:
            raise UsageError(
                f"{base}: has the error feedback of {saved} ranks, but this job has {size}",
                hint="error feedback belongs to a rank: use the same number of ranks, or continue without it",
            )
        try:
            self.load_state_dict(load_file(compression_file(folder, rank)))
        except OSError as error:
            raise StorageError(f"{compression_file(folder, rank)}: cannot be read: {error}") from error

    def reduce(self, bucket: Any) -> Any:
        """Average the selected elements of a bucket over all ranks; returns a future."""
        import torch
        import torch.distributed as dist

        buffer = bucket.buffer()
        places, values = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            where, what = self._select(self._names[id(parameter)], gradient.reshape(-1))
            places.append(where + gradient.storage_offset() - buffer.storage_offset())
            values.append(what)
        packed = torch.cat([torch.cat(places).view(torch.uint8), torch.cat(values).view(torch.uint8)])
        size = dist.get_world_size(self._group)
        received = [torch.empty_like(packed) for _ in range(size)]
        split = sum(len(where) for where in places) * 8

        def add_up(future: Any) -> Any:
            future.value()
            buffer.zero_()
            for one in received:
                buffer.index_add_(0, one[:split].view(torch.int64), one[split:].view(buffer.dtype))
            return buffer.div_(size)

        work = dist.all_gather(received, packed, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(add_up)

    def _select(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, values) of the largest elements of gradient plus unsent rest; the others become the new rest."""
        unsent = self._unsent.get(name)
        whole = gradient.clone() if unsent is None else unsent.add_(gradient)
        count = max(1, math.ceil(self.fraction * whole.numel()))
        where = whole.abs().topk(count, sorted=False).indices.sort().values
        what = whole[where]
        whole[where] = 0
        self._unsent[name] = whole
        return where, what


def _reduce(state: Any, bucket: Any) -> Any:
    return state.reduce(bucket)


_reduce.__annotations__.clear()  # DDP accepts only its own types as annotations, or none
