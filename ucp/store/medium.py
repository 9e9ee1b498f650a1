"""The memory of a store: a file mapped once, and how what was written into it becomes durable.

On persistent memory with DAX the kernel accepts `MAP_SYNC`, and libpmem, where it is installed, flushes caches without
a system call. Everywhere else `msync` writes the pages of the given ranges.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import mmap
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from ucp.errors import StorageError
from ucp.store.layout import joined

_MAP_SHARED_VALIDATE: Final = 0x03
_MAP_SYNC: Final = 0x80000
_MS_SYNC: Final = 4


class Medium(Protocol):
    """Bytes that can be written in place, and made durable range by range."""

    view: memoryview

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return when bytes `[start, stop)` of every range are durable."""

    def close(self) -> None: ...


class MappedFile:
    """A file mapped for writing. `way` says how it is made durable: `pmem_persist`, `msync on DAX` or `msync`."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._path = path
        self._map, is_dax = _map(fd, size, path)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pmem = _libpmem() if is_dax else None
        self.way = "pmem_persist" if self._pmem is not None else "msync on DAX" if is_dax else "msync"

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        if self._pmem is not None:
            for start, stop in ranges:
                self._pmem.pmem_persist(ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start))
            return
        # Through ctypes, which lets other threads run meanwhile; `mmap.flush` does not in every version.
        for start, stop in joined(ranges, mmap.PAGESIZE):
            length = min(stop, len(self.view)) - start
            if _libc().msync(ctypes.c_void_p(self._address + start), ctypes.c_size_t(length), _MS_SYNC) != 0:
                what = os.strerror(ctypes.get_errno())
                raise StorageError(f"{self._path}: bytes [{start}, {stop}) cannot be made durable: {what}")

    def close(self) -> None:
        """Let go of the map; it ends with the last array that lies on it."""
        self.view = memoryview(b"")
        del self._map


def _map(fd: int, size: int, path: Path) -> tuple[mmap.mmap, bool]:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        try:
            return mmap.mmap(fd, size, _MAP_SHARED_VALIDATE | _MAP_SYNC, protection), True
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return mmap.mmap(fd, size, mmap.MAP_SHARED, protection), False
    except OSError as error:
        raise StorageError(f"{path}: cannot be mapped: {error.strerror}") from error


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _libpmem() -> Any:
    name = ctypes.util.find_library("pmem")
    try:
        return None if name is None else ctypes.CDLL(name)
    except OSError:
        return None
