"""The state of a gradient compression in the bases of a log: each rank's own, a file a rank.

Gradient compression for DDP: only the largest elements of each gradient are sent, the rest waits for the next step.

    topk = ucp.TopK(model, fraction=0.01)                       # a DDP module, before its first step
    recorder = ucp.record("run", model, optimizer, compressed=topk)

What training uses is then sparse, and so is the log (LowDiff). What was not sent is each rank's own state: bases of the
recorder have it, and `topk.load` takes it from one.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ucp.errors import StorageError, UsageError
from ucp.storage.local import sync
from ucp.training.collectives import rank_and_size
from ucp.training.live_job import strip_wrappers

if TYPE_CHECKING:
    import torch


@runtime_checkable
class GradientCompression(Protocol):
    """What compresses the gradients of a job before training uses them, and has a state of its own on every rank."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on (error feedback), by name; of this rank."""


def checked_compression(compressed: object) -> GradientCompression | None:
    """What the user gave as `compressed=`."""
    if compressed is None or isinstance(compressed, GradientCompression):
        return compressed
    raise UsageError(
        f"compressed= is a {type(compressed).__name__} without state_dict()",
        hint="give ucp.TopK, or an object whose state_dict() has the error feedback of this rank as tensors",
    )


def compression_file(base: Path, rank: int) -> Path:
    """Where a base has the compression's state of a rank."""
    return base / "compression" / f"rank-{rank:05d}.safetensors"


def save_compression(compressed: GradientCompression, base: Path, rank: int) -> None:
    """Write this rank's state into the folder of a base, and wait for the disk."""
    from safetensors.torch import save_file

    path = compression_file(base, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in compressed.state_dict().items()}, path)
        sync(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


class TopK:
    """A comm hook with error feedback. Ranks add up what they were sent in order of rank, so all have the same bits."""

    def __init__(self, model: Any, fraction: float = 0.01) -> None:
        """`model` is a DDP module without a comm hook; `fraction` of each gradient is sent, at least one element."""
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(model, DistributedDataParallel):
            raise UsageError(f"top-k compression is for DDP modules, not for a {type(model).__name__}")
        if not 0 < fraction <= 1:
            raise UsageError(f"fraction={fraction}: must be above 0 and at most 1")
        if model._comm_hooks:
            raise UsageError(
                "the DDP module has a comm hook already", hint="make TopK before the recorder, and only one"
            )
        self.fraction = fraction
        self._group = model.process_group
        self._names = {id(p): strip_wrappers(name) for name, p in model.module.named_parameters()}
        self._shapes = {strip_wrappers(name): p.shape for name, p in model.module.named_parameters()}
        self._unsent: dict[str, torch.Tensor] = {}  # name → what this rank has not sent yet, flat
        model.register_comm_hook(self, _reduce)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter; copies."""
        return {name: unsent.view(self._shapes[name]).clone() for name, unsent in self._unsent.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state_dict` of the same rank gave."""
        for name, unsent in state.items():
            if name not in self._shapes or unsent.shape != self._shapes[name]:
                raise UsageError(f"the model has no parameter {name} of shape {list(unsent.shape)}")
        self._unsent = {name: unsent.detach().clone().reshape(-1) for name, unsent in state.items()}

    def load(self, base: str | os.PathLike[str]) -> None:
        """Go on with what a base (`run/base/base-000017`) has of this rank. The number of ranks must be the same."""
        from safetensors.torch import load_file

        rank, size = rank_and_size()
        folder = Path(base)
        folder = (
            folder if compression_file(folder, 0).parent.is_dir() else folder.parent
        )  # the atoms of the base were named
        held = len(list(compression_file(folder, 0).parent.glob("rank-*.safetensors")))
        if held != size:
            raise UsageError(
                f"{base}: has the error feedback of {held} ranks, and this job has {size}",
                hint="what a rank has not sent is its own: go on with as many ranks, or without it",
            )
        try:
            self.load_state_dict(load_file(compression_file(folder, rank)))
        except OSError as error:
            raise StorageError(f"{compression_file(folder, rank)}: cannot be read: {error}") from error

    def reduce(self, bucket: Any) -> Any:
        """The average over ranks of what each sends of a bucket, when all have sent it."""
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
        everyone = [torch.empty_like(packed) for _ in range(size)]
        split = sum(len(where) for where in places) * 8

        def add_up(future: Any) -> Any:
            future.value()
            buffer.zero_()
            for one in everyone:
                buffer.index_add_(0, one[:split].view(torch.int64), one[split:].view(buffer.dtype))
            return buffer.div_(size)

        work = dist.all_gather(everyone, packed, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(add_up)

    def _select(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(places, values) of the largest elements of a gradient and what was left of earlier ones; keeps the rest."""
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


_reduce.__annotations__.clear()  # DDP wants its own types there, or none
