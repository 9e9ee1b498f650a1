"""Objects open for reading: a few bytes at a time for an index, or slab after slab."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ucp import settings
from ucp.errors import IntegrityError, StorageError
from ucp.storage.range_cache import RangeCache

if TYPE_CHECKING:
    from ucp.storage.paths import RemotePath


class RemoteIndexFile:
    """An object of `size` bytes, read in small blocks that all indexes of the store share."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self.path = path
        self.size = size
        self._key = path.key
        self._store = path.store

    def __enter__(self) -> RemoteIndexFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`; an object that ends earlier is an integrity error."""
        if offset < 0 or offset + size > self.size:
            raise IntegrityError(
                f"{self.path}: ends at byte {self.size}, but {size} bytes at {offset} are needed",
                hint="the object is truncated or was changed while it was read; copy it again",
            )
        data = bytearray(size)
        self._store.index.read(self._key, self.size, offset, memoryview(data))
        return bytes(data)

    def read_at_most(self, offset: int, size: int) -> bytes:
        """As `read`, but fewer bytes where the object ends."""
        return self.read(min(offset, self.size), max(0, min(size, self.size - offset)))

    def expect_ends(self) -> None:
        """The first and the last bytes will be read soon, and then those of the files beside it."""
        self._expect_ends(self._key, self.size)
        for name, size in self._store.after(self._key, settings.REMOTE_FILES_AHEAD):
            self._expect_ends(name, size)

    def _expect_ends(self, key: str, size: int) -> None:
        look = settings.REMOTE_PROBE_BYTES
        self._store.index.expect(key, size, [(0, look), (max(0, size - look), look)])

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Byte ranges `(offset, length)` will be read soon: they are fetched at once and not one after the other."""
        self._store.index.expect(self._key, self.size, ranges)


class RemoteRawFile(io.RawIOBase):
    """An object as a file of Python's."""

    def __init__(self, file: RemoteIndexFile) -> None:
        self._file = file
        self._at = 0

    def read_at_most(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`, fewer only where the object ends."""
        return self._file.read_at_most(offset, size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read_at_most(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class RemoteReader:
    """Positional reads of the objects below a folder, in large blocks, ahead of readers that go through an object."""

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self._store = root.store
        self._known: dict[str, tuple[str, int]] = {}  # file → (key, size)
        self._blocks = RangeCache(
            self._store.fetch,
            self._store.submit,
            settings.REMOTE_BLOCK_BYTES,
            settings.REMOTE_CACHE_BYTES,
            settings.REMOTE_BLOCKS_AHEAD,
        )

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `file` at byte `offset`."""
        known = self._known.get(file)
        if known is None:
            known = self._known[file] = self._look(file)
        key, size = known
        if offset + len(target) > size:
            raise IntegrityError(
                f"{key}: ends at byte {size}, but bytes [{offset}, {offset + len(target)}) are needed",
                hint="the object is truncated or was changed while it was read; copy it again",
            )
        self._blocks.read(key, size, offset, target.cast("B"))

    def _look(self, file: str) -> tuple[str, int]:
        path = self.root / file
        try:
            return path.key, path.stat().st_size
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
