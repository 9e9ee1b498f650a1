"""What a log contains for each update of an optimizer tensor: hyper-parameters, and the gradients of its elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.dtypes import BFLOAT16, DType
from ucp.core.optimizers import Hyper
from ucp.errors import InconsistentError
from ucp.log.codecs import EncodedBlock, Encoding
from ucp.log.payloads import GroupScalars, LrKind
from ucp.log.reader import EpochSpan, LogStream
from ucp.log.stream_schema import LogBlock
from ucp.replay.kernels import PYTHON_NUMBER, ReusedBuffer, reused_buffer, scratch_tensor

if TYPE_CHECKING:
    import torch

_NARROWED: Final = int(Encoding.NARROWED)
_UNCOMPRESSED: Final = (int(Encoding.RAW), _NARROWED)
_WIDEST: Final = 4  # bytes per element of the reused buffer; wider gradients are rare, and allocated


class Gradients:
    """Reads the gradients of elements `[start, stop)` of an optimizer tensor, which `blocks` overlap.

    `names` are the parameters of the blocks, for messages.
    """

    def __init__(self, blocks: Sequence[LogBlock], names: Sequence[str], start: int, stop: int) -> None:
        self._names = {block.id: name for block, name in zip(blocks, names, strict=True)}
        self._numel = stop - start
        self._copies = []  # (block, its first element to copy, target range)
        for block in blocks:
            low, high = max(block.offset, start), min(block.offset + block.count, stop)
            self._copies.append((block, low - block.offset, low - start, high - start))
        self._has_padding = sum(high - low for _, _, low, high in self._copies) < self._numel
        self._only = blocks[0] if len(blocks) == 1 and blocks[0].count == self._numel else None
        self._buffer_bytes = max((block.count for block in blocks), default=0) * _WIDEST

    def read(self, stream: LogStream, step: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient in this dtype, zero outside of blocks. The caller may change it; valid until the next call."""
        buffer = reused_buffer(self._buffer_bytes)
        if self._only is not None:
            part = _elements(self._read_block(stream, step, self._only, buffer), buffer)
            can_return = part.dtype is dtype and buffer.contains(part)
            return part if can_return else scratch_tensor("gradient", self._numel, dtype).copy_(part)
        whole = scratch_tensor("gradient", self._numel, dtype)
        if self._has_padding:
            whole.zero_()
        for block, skipped, low, high in self._copies:
            part = _elements(self._read_block(stream, step, block, buffer), buffer)
            whole[low:high].copy_(part[skipped : skipped + high - low])
        return whole

    def _read_block(self, stream: LogStream, step: int, block: LogBlock, buffer: ReusedBuffer) -> EncodedBlock:
        encoded = stream.read_block(step, block.id, buffer)
        if encoded is None or encoded.count != block.count:
            raise InconsistentError(
                f"{stream.folder}: step {step} has no gradient of block {block.id} ({self._names[block.id]}), but it"
                " has gradients of other blocks of the same optimizer tensor",
                hint="`ucp log verify` reads all of the log",
            )
        return encoded


def consumed(reduced: torch.Tensor, factor: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that the kernel was given, from the logged one: one float32 multiplication by float32(factor).

    With a factor of None, that is the logged gradient itself. A float32 `reduced` is multiplied in place.
    """
    if factor is None:
        return reduced if reduced.dtype is dtype else reduced.to(dtype)
    import torch

    return reduced.to(torch.float32).mul_(torch.tensor(factor, dtype=torch.float32)).to(dtype)


def _elements(encoded: EncodedBlock, buffer: ReusedBuffer) -> torch.Tensor:
    """A block's elements in their own dtype, or in bfloat16 if they were narrowed to that."""
    dtype = BFLOAT16 if encoded.encoding == _NARROWED else encoded.dtype
    if encoded.encoding in _UNCOMPRESSED and encoded.data.nbytes == encoded.count * dtype.itemsize:
        if encoded.data.base is buffer.array:
            return buffer.tensor(encoded.count, torch_dtype(dtype))
        return as_torch(encoded.data, dtype)
    return as_torch(encoded.bits().view(np.uint8), encoded.dtype)


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of the same name."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def as_torch(raw: np.ndarray[Any, Any], dtype: DType) -> torch.Tensor:
    """Bytes as a flat tensor that shares their memory."""
    import torch

    if raw.size == 0:
        return torch.empty(0, dtype=torch_dtype(dtype))
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(torch_dtype(dtype))


_LR_KINDS: Final = {LrKind.FLOAT: PYTHON_NUMBER, LrKind.TENSOR32: "float32", LrKind.TENSOR64: "float64"}


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """One call of the optimizer, in this step of the log and with these hyper-parameters.

    The kernel was given the logged gradient times `scale` (see `gradients.consumed`), or the gradient itself.
    """

    step: int
    hyper: Hyper
    scale: float | None
    before: int  # updates that the optimizer had counted before (the largest count of the group); -1 if it counts none


class StreamUpdates:
    """The updates of one stream in a span of steps. Steps are read once for each group."""

    def __init__(self, span: EpochSpan, stream: LogStream) -> None:
        self._span = span
        self.stream = stream
        self._constants = [group.hyper for group in span.epoch.manifest.groups]
        self.of_group = cache(self._of_group)

    def of_tensor(self, tensor: int) -> list[OptimizerUpdate]:
        """The updates of an optimizer tensor: none in steps in which it had no gradient."""
        schema = self.stream.schema
        updates = self.of_group(schema.tensors[tensor].group)
        first = next((block.id for block in schema.blocks if block.tensor == tensor), None)
        if first is None:
            return []
        missing = self._missing
        return [update for update in updates if first not in missing.get(update.step, ())] if missing else updates

    def _of_group(self, group: int) -> list[OptimizerUpdate]:
        constants = self._constants[group] if group < len(self._constants) else {}
        updates: list[OptimizerUpdate] = []
        for step in range(self._span.first, self._span.last + 1):
            record = self.stream.record(step)
            scalars = next((one for one in record.groups if one.group == group and one.stepped), None)
            if scalars is not None and not record.skipped:
                scale = None if record.scale is None else float(record.scale)
                updates.append(OptimizerUpdate(step, group_hyper(constants, scalars), scale, scalars.opt_step))
        return updates

    @cached_property
    def _missing(self) -> dict[int, frozenset[int]]:
        """Step → blocks without gradient, if there are any."""
        every = frozenset(range(len(self.stream.schema.blocks)))
        return {
            step: every.difference(self.stream.blocks(step))
            for step in range(self._span.first, self._span.last + 1)
            if not self.stream.record(step).skipped and self.stream.block_count(step) != len(every)
        }


def all_steps_skipped(stream: LogStream, first: int, last: int) -> bool:
    """Were all steps after `first` up to `last` skipped? Then the state after `last` is that after `first`."""
    return all(stream.record(step).skipped for step in range(first + 1, last + 1))


def group_hyper(constants: Mapping[str, Any], scalars: GroupScalars) -> Hyper:
    """A group's hyper-parameters in one step: those of the step, and of the epoch's manifest for the rest."""
    hyper = {**constants, "lr": scalars.lr, "lr_kind": _LR_KINDS[scalars.lr_kind]}
    hyper.update(maximize=scalars.maximize, amsgrad=scalars.amsgrad, nesterov=scalars.nesterov)
    if not math.isnan(scalars.beta1):
        hyper["betas"] = (scalars.beta1, scalars.beta2)
    for key in ("eps", "weight_decay", "momentum", "dampening"):
        value = getattr(scalars, key)
        if not math.isnan(value):
            hyper[key] = value
    return hyper
