"""Memory that begins a page, kept by every thread for its next use.

AMD's Zen copies several times slower where the target lies 1 to 31 bytes after the source, modulo 4,096: as what malloc
gives in large pieces lies after the pages of a file. New pages cost as much as what is read into them.
"""

from __future__ import annotations

import threading
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import numpy as np

from ucp.read.casting import RawArray


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.blocks: dict[str, RawArray] = {}


_BUFFERS = _ThreadBuffers()


def scratch_buffer(use: str, nbytes: int) -> RawArray:
    """Room for `nbytes` bytes with any values, good until this thread asks for the same use again."""
    block = _BUFFERS.blocks.get(use)
    if block is None or block.size < nbytes:
        block = _BUFFERS.blocks[use] = page_aligned(nbytes)
    return block[:nbytes]


def page_aligned(nbytes: int) -> RawArray:
    """At least `nbytes` zero bytes that begin a page. A fork has its own: no two processes write the same memory."""
    size = -(-max(1, nbytes) // PAGESIZE) * PAGESIZE
    return np.frombuffer(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS), np.uint8)
