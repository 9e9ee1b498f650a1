"""The gradients of a stretch, one update after the other, as the optimizer had them before it scaled them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.dtypes import BFLOAT16, DType
from ucp.errors import InconsistentError
from ucp.log.codecs import EncodedBlock, Encoding
from ucp.log.reader import LogStream
from ucp.log.stream_schema import LogBlock
from ucp.replay.thread_buffers import ReusedBuffer, reused_buffer, scratch_tensor

if TYPE_CHECKING:
    import torch

_NARROWED: Final = int(Encoding.NARROWED)
_AS_THEY_ARE: Final = (int(Encoding.RAW), _NARROWED)
_WIDEST: Final = 4  # bytes of an element that a thread keeps room for; gradients of wider ones are rare


class Gradients:
    """Reads the gradients of elements `start` to `stop` of an optimizer tensor, which `blocks` are parts of.

    `names` are the parameters that the blocks belong to, for messages.
    """

    def __init__(self, blocks: Sequence[LogBlock], names: Sequence[str], start: int, stop: int) -> None:
        self._names = {block.id: name for block, name in zip(blocks, names, strict=True)}
        self._numel = stop - start
        self._places = []  # block; its first element that is wanted; where that and the one after its last go
        for block in blocks:
            low, high = max(block.offset, start), min(block.offset + block.count, stop)
            self._places.append((block, low - block.offset, low - start, high - start))
        self._is_padded = sum(high - low for _, _, low, high in self._places) < self._numel
        self._only = blocks[0] if len(blocks) == 1 and blocks[0].count == self._numel else None
        self._room = max((block.count for block in blocks), default=0) * _WIDEST

    def read(self, stream: LogStream, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Every element in this type, zero where no block is. The caller may change it; good until the next one."""
        room = reused_buffer(self._room)
        if self._only is not None:
            part = _elements(self._stored(stream, step, self._only, room), room)
            mine = part.dtype is dtype and room.holds(part)
            return part if mine else scratch_tensor("gradient", self._numel, dtype).copy_(part)
        whole = scratch_tensor("gradient", self._numel, dtype)
        if self._is_padded:
            whole.zero_()
        for block, skipped, low, high in self._places:
            part = _elements(self._stored(stream, step, block, room), room)
            whole[low:high].copy_(part[skipped : skipped + high - low])
        return whole

    def _stored(self, stream: LogStream, step: int, block: LogBlock, room: ReusedBuffer) -> EncodedBlock:
        stored = stream.read_block(step, block.id, room)
        if stored is None or stored.count != block.count:
            raise InconsistentError(
                f"{stream.folder}: step {step} has no gradient of block {block.id} ({self._names[block.id]}), but of"
                " its neighbours",
                hint="`ucp log verify` reads all of the log",
            )
        return stored


def consumed(reduced: torch.Tensor, factor: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that the kernel saw, from the one that was logged: one multiplication in float32 by float32(factor).

    A factor of None means that the logged gradient is the one that the kernel saw. Where `reduced` is float32 it is
    multiplied in place.
    """
    if factor is None:
        return reduced if reduced.dtype is dtype else reduced.to(dtype)
    import torch

    return reduced.to(torch.float32).mul_(torch.tensor(factor, dtype=torch.float32)).to(dtype)


def _elements(stored: EncodedBlock, room: ReusedBuffer) -> torch.Tensor:
    """A block's elements in their own type, or in bfloat16 where that holds them."""
    dtype = BFLOAT16 if stored.encoding == _NARROWED else stored.dtype
    if stored.encoding in _AS_THEY_ARE and stored.data.nbytes == stored.count * dtype.itemsize:
        if stored.data.base is room.array:
            return room.tensor(stored.count, torch_dtype(dtype))
        return as_torch(stored.data, dtype)
    return as_torch(stored.bits().view(np.uint8), stored.dtype)


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type of this name."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def as_torch(raw: np.ndarray[Any, Any], dtype: DType) -> torch.Tensor:
    """Bytes as a flat tensor, which shares their memory."""
    import torch

    if raw.size == 0:
        return torch.empty(0, dtype=torch_dtype(dtype))
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(torch_dtype(dtype))
