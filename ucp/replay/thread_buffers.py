"""Memory that a thread uses again and again while it replays: to ask the system for it anew costs as much as an update.

There is one piece for each use and thread, as large as the largest that was asked for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from ucp.read.aligned_buffers import page_aligned
from ucp.read.casting import RawArray

if TYPE_CHECKING:
    import torch


_VIEWS: Final = 64  # that are kept: making one takes longer than looking it up


class _ThreadScratch(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}  # of their first elements
        self.room: ReusedBuffer | None = None


_BUFFERS = _ThreadScratch()


def scratch_tensor(use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of `numel` elements with any values, good until the same thread asks for the same use and type."""
    view = _BUFFERS.views.get((use, dtype, numel))
    if view is not None:
        return view
    held = _BUFFERS.pieces.get((use, dtype))
    if held is None or held.numel() < numel:
        import torch

        held = _BUFFERS.pieces[use, dtype] = torch.empty(numel, dtype=dtype)
        _BUFFERS.views.clear()  # they would keep what was there before
    elif len(_BUFFERS.views) >= _VIEWS:
        _BUFFERS.views.clear()
    view = _BUFFERS.views[use, dtype, numel] = held[:numel]
    return view


class ReusedBuffer:
    """Bytes to read into, and the same bytes as tensors.

    They begin a page, because some processors take several times as long for a copy between places that differ by a
    few bytes in their offset within a page, which what malloc gives and the pages of a file often do.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = page_aligned(nbytes)
        self._address = int(self.array.ctypes.data)
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._pieces: dict[int, tuple[RawArray, memoryview]] = {}

    def piece(self, nbytes: int) -> tuple[RawArray, memoryview]:
        """As `Memory.piece`: the first bytes, always the same objects for the same number of them."""
        piece = self._pieces.get(nbytes)
        if piece is None:
            if len(self._pieces) >= _VIEWS:
                self._pieces.clear()
            part = self.array[:nbytes] if nbytes <= len(self.array) else np.empty(nbytes, np.uint8)
            piece = part, part.data
            if nbytes <= len(self.array):
                self._pieces[nbytes] = piece
        return piece

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements. It is the caller's to change until the room is asked for again."""
        view = self._views.get((dtype, numel))
        if view is None:
            import torch

            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[dtype, numel] = torch.from_numpy(self.array).view(dtype)[:numel]
        return view

    def holds(self, tensor: torch.Tensor) -> bool:
        """Are these the first elements?"""
        address: int = tensor.data_ptr()
        return address == self._address


def reused_buffer(nbytes: int) -> ReusedBuffer:
    """The thread's room, of at least so many bytes; good until the thread asks for it again."""
    held = _BUFFERS.room
    if held is None or len(held.array) < nbytes:
        held = _BUFFERS.room = ReusedBuffer(nbytes)
    return held
