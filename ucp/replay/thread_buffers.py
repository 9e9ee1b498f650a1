"""Memory that a thread reuses while it replays: allocating it anew would cost as much as an update.

There is one buffer per use and thread, as large as the largest request so far.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from ucp.read.aligned_buffers import page_aligned
from ucp.read.casting import RawArray

if TYPE_CHECKING:
    import torch


_CACHED_VIEWS: Final = 64  # creating a view takes longer than looking it up


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}  # of their first elements
        self.read_buffer: ReusedBuffer | None = None


_BUFFERS = _ThreadBuffers()


def scratch_tensor(use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized flat tensor, valid until the same thread asks for the same use and dtype again."""
    view = _BUFFERS.views.get((use, dtype, numel))
    if view is not None:
        return view
    tensor = _BUFFERS.tensors.get((use, dtype))
    if tensor is None or tensor.numel() < numel:
        import torch

        tensor = _BUFFERS.tensors[use, dtype] = torch.empty(numel, dtype=dtype)
        _BUFFERS.views.clear()  # views would keep the old tensor alive
    elif len(_BUFFERS.views) >= _CACHED_VIEWS:
        _BUFFERS.views.clear()
    view = _BUFFERS.views[use, dtype, numel] = tensor[:numel]
    return view


class ReusedBuffer:
    """Bytes to read into, and the same bytes as tensors.

    The buffer is page-aligned: some processors copy several times slower if source and destination differ by a few
    bytes in their offset within a page, as memory from malloc and the pages of a file often do.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = page_aligned(nbytes)
        self._address = int(self.array.ctypes.data)
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._pieces: dict[int, tuple[RawArray, memoryview]] = {}

    def piece(self, nbytes: int) -> tuple[RawArray, memoryview]:
        """As `ReadBuffer.piece`: the first bytes, always the same objects for the same number of bytes."""
        piece = self._pieces.get(nbytes)
        if piece is None:
            if len(self._pieces) >= _CACHED_VIEWS:
                self._pieces.clear()
            part = self.array[:nbytes] if nbytes <= len(self.array) else np.empty(nbytes, np.uint8)
            piece = part, part.data
            if nbytes <= len(self.array):
                self._pieces[nbytes] = piece
        return piece

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements, which the caller may change until the buffer is requested again."""
        view = self._views.get((dtype, numel))
        if view is None:
            import torch

            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            view = self._views[dtype, numel] = torch.from_numpy(self.array).view(dtype)[:numel]
        return view

    def contains(self, tensor: torch.Tensor) -> bool:
        """Does a tensor start at the buffer's first byte?"""
        address: int = tensor.data_ptr()
        return address == self._address


def reused_buffer(nbytes: int) -> ReusedBuffer:
    """The thread's buffer, of at least `nbytes` bytes; valid until the thread asks for it again."""
    buffer = _BUFFERS.read_buffer
    if buffer is None or len(buffer.array) < nbytes:
        buffer = _BUFFERS.read_buffer = ReusedBuffer(nbytes)
    return buffer
