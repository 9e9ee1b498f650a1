"""The gradients of a chunk, one update after the other, as they were logged."""

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
