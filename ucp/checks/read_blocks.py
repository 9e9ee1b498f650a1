"""Blocks to read into, laid so that the kernel copies fast."""

from __future__ import annotations

from typing import Final

from ucp import settings
from ucp.read.aligned_buffers import scratch_buffer
from ucp.read.casting import RawArray

# On some machines the kernel's copy takes four times as long where the target lies 1 to 31 bytes behind the source,
# modulo the page size, and that is where large blocks of the allocator lie when the source is aligned. Equal is fast.
_LINE: Final = 64


def block_bytes() -> int:
    """Bytes to read at a time: what is looked at is not written again, so fewer and longer reads win over the cache."""
    return 4 * settings.SLAB_BYTES


class ReadBlock:
    """A buffer of `nbytes` bytes. What `place` gives is overwritten by what is placed next.

    A thread's blocks of one number are the same memory, from task to task: whoever needs several numbers them.
    """

    __slots__ = ("_raw",)

    def __init__(self, number: int, nbytes: int) -> None:
        self._raw = scratch_buffer(f"checks: block {number}", nbytes + _LINE)

    def place(self, offset: int, nbytes: int) -> RawArray:
        """Room for `nbytes` bytes that lie at byte `offset` of a file."""
        shift = offset % _LINE
        placed: RawArray = self._raw[shift : shift + nbytes]
        return placed


def aligned(data: RawArray, itemsize: int) -> RawArray:
    """Bytes as whole elements only, at an address that numpy can view them at: a copy where they are not."""
    data = data[: len(data) // itemsize * itemsize]
    return data if data.view(f"u{min(itemsize, 8)}").flags.aligned else data.copy()
