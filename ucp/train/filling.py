"""Carrying a load plan out: bytes of the checkpoint into the tensors of the job, in place, with little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import merge
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp import tunables
from ucp.engine.casting import raw_dtype
from ucp.engine.regions import RegionReader
from ucp.files.local import SourceFiles
from ucp.model.box import flat_index
from ucp.model.checkpoint import state_of_kind
from ucp.model.dtypes import DType
from ucp.model.region import Region
from ucp.model.slabs import slabs
from ucp.train.live import LiveJob, Share, dtype_of, flat_view, local_part
from ucp.train.matching import LoadPlan, Read, SteppedPlan
from ucp.train.optimizers import number_for

if TYPE_CHECKING:
    import torch


class CountingFiles(SourceFiles):
    """Source files that count the bytes read from them."""

    nbytes = 0

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `SourceFiles.read_into`."""
        self.nbytes += len(target)
        super().read_into(file, offset, target)


class Filler:
    """Writes into live tensors. `held` counts the bytes of state that came from the checkpoint."""

    def __init__(self, job: LiveJob, files: SourceFiles) -> None:
        self.job = job
        self.files = files
        self.held = 0

    def fill(self, plan: LoadPlan) -> None:
        """Write everything. In place wherever a tensor exists: parameters and flat buffers are views of each other."""
        import torch

        with torch.no_grad():
            for stepped in plan.stepped:
                self._fill_stepped(stepped)
            for tensor, read in plan.held:
                self._fill_tensor(tensor, [read])
            for group, hyper in zip(self.job.groups, plan.hyper, strict=False):
                if hyper is not None:
                    apply_hyper(group, hyper)

    def _fill_stepped(self, plan: SteppedPlan) -> None:
        import torch

        key, optimizer = plan.stepped.key, self.job.optimizer
        group = self.job.groups[plan.stepped.group]
        shares = plan.stepped.shares
        if plan.untouched:
            optimizer.state.pop(key, None)
        if not (plan.states or plan.numbers or plan.whole):
            self._fill_tensor(key, plan.values, shares)
            return
        state = optimizer.state[key]
        for kind, kept_as in plan.dtypes.items():
            name = state_of_kind(kind)
            if state.get(name) is None:
                state[name] = torch.zeros_like(key, dtype=getattr(torch, kept_as.name), requires_grad=False)
        filled = [(key, plan.values), *((state[state_of_kind(kind)], reads) for kind, reads in plan.states.items())]
        computed = any(read.atom.computed for read in plan.values)
        if computed and all(flat_view(tensor) is not None for tensor, _ in filled):
            self._fill_side_by_side(filled, shares)
        else:
            for tensor, reads in filled:
                self._fill_tensor(tensor, reads, shares)
        for kind, (value, dtype) in plan.numbers.items():
            name = state_of_kind(kind)
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            elif name in state:
                state[name] = type(state[name])(value)
            else:
                state[name] = number_for(optimizer, group, key, value, was_int=dtype.family == "int")
            self.held += dtype.itemsize
        for kind, atom in plan.whole.items():
            name = state_of_kind(kind)
            known = state.get(name)
            dtype = dtype_of(known) if isinstance(known, torch.Tensor) else atom.dtype
            if known is None:
                state[name] = torch.zeros(atom.shape, dtype=getattr(torch, dtype.name), device=local_part(key).device)
            self._fill_tensor(state[name], [Read(replace(atom, dtype=dtype), Region.all_of(atom.shape), 0)])

    def _fill_side_by_side(
        self, filled: Sequence[tuple[torch.Tensor, Sequence[Read]]], shares: Sequence[Share]
    ) -> None:
        """Fill a tensor and its states stretch by stretch: what computes one of them computes all."""
        for tensor, _ in filled:
            self._fill_tensor(tensor, (), shares)
        cut = [[(part.start, number, part) for part in _stretches(reads)] for number, (_, reads) in enumerate(filled)]
        for _, number, part in merge(*cut, key=lambda each: each[:2]):
            self._fill_tensor(filled[number][0], [part])

    def _fill_tensor(self, tensor: torch.Tensor, reads: Sequence[Read], shares: Sequence[Share] | None = None) -> None:
        """Fill a tensor. What belongs to none of the `shares` is padding and becomes zero."""
        flat, local = flat_view(tensor), local_part(tensor)
        if shares is not None and flat is not None:
            _zero_padding(flat, shares)
        for read in reads:
            self.held += read.nbytes
            reader = RegionReader(self.files, read.atom)
            if flat is None:
                _fill_strided(reader, read.region, local)
            else:
                _fill_flat(reader, read.region, flat.narrow(0, read.start, read.region.numel))


def _stretches(reads: Sequence[Read]) -> list[Read]:
    """Reads cut into stretches, in the order of the tensor that they fill."""
    step = tunables.LOG_BLOCK_ELEMENTS
    found = [
        Read(read.atom, read.region.cut(start, start + step), read.start + start)
        for read in reads
        for start in range(0, read.region.numel, step)
    ]
    return sorted(found, key=lambda read: read.start)


def _zero_padding(flat: torch.Tensor, shares: Sequence[Share]) -> None:
    at = 0
    for share in sorted(shares, key=lambda share: share.start):
        flat[at : share.start].zero_()
        at = share.start + share.region.numel
    flat[at:].zero_()


def _fill_flat(reader: RegionReader, region: Region, target: torch.Tensor) -> None:
    dtype = reader.atom.dtype
    if target.device.type == "cpu":
        reader.read(region, raw_view(target, dtype))
        return
    step = max(1, tunables.BOUNCE_BYTES // dtype.itemsize)
    for start in range(0, region.numel, step):
        part = region.cut(start, start + step)
        target.narrow(0, start, part.numel).copy_(_block(reader, part))


def _fill_strided(reader: RegionReader, region: Region, target: torch.Tensor) -> None:
    """A tensor that does not lie row-major in memory (channels last): block by block, through a buffer."""
    shape = tuple(target.shape)
    for box in slabs(shape, max(1, tunables.BOUNCE_BYTES // reader.atom.dtype.itemsize)):
        start = flat_index(box.start, shape)
        where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        target[where].copy_(_block(reader, region.cut(start, start + box.numel)).view(box.shape))


def _block(reader: RegionReader, region: Region) -> torch.Tensor:
    import torch

    raw = np.empty(region.numel, raw_dtype(reader.atom.dtype))
    reader.read(region, raw)
    return torch.from_numpy(raw.view(np.uint8)).view(getattr(torch, reader.atom.dtype.name))


def raw_view(tensor: torch.Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    """The memory of a flat tensor on the CPU as a raw array."""
    import torch

    if tensor.numel() == 0:
        return np.empty(0, raw_dtype(dtype))
    raw: np.ndarray[Any, Any] = tensor.view(torch.uint8).numpy().view(raw_dtype(dtype))
    return raw


def apply_hyper(group: dict[str, Any], hyper: dict[str, Any]) -> None:
    """Hyper-parameters into a live group, in place; never its parameters."""
    for key, value in hyper.items():
        if key != "params":
            group[key] = _put_into(group.get(key), value)


def _put_into(live: Any, value: Any) -> Any:
    """A hyper-parameter with a new value: tensors stay the tensors that they are, betas that are tensors too."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(value, (int, float)):
        return live.fill_(value)
    if isinstance(live, (list, tuple)) and isinstance(value, (list, tuple)) and len(live) == len(value):
        return type(value)(_put_into(*pair) for pair in zip(live, value, strict=True))
    return value
