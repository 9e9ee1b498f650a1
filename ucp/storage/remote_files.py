"""Objects open for reading: a few bytes at a time for an index, or slab after slab."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from ucp import settings
from ucp.errors import IntegrityError, storage_errors
from ucp.storage.local import scatter_bytes
from ucp.storage.paths import RemotePath
from ucp.storage.range_cache import RangeCache
from ucp.storage.storage import FolderEntry, PositionalFile, RangeReader


class RemoteStorage:
    """All object stores; a `Storage`."""

    is_remote = True

    def scan(self, folder: Path) -> AbstractContextManager[Iterable[FolderEntry]]:
        return nullcontext(list(folder.iterdir()))

    def list(self, folder: Path) -> Iterator[tuple[str, int]]:
        for path in folder.rglob("*"):
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path.stat().st_size

    def open(self, path: Path) -> RemoteIndexFile:
        with storage_errors(path, "cannot be opened"):
            return _remote(path).indexed()

    def read_ranges(self, root: Path, max_open: int | None = None) -> RemoteReader:
        del max_open
        return RemoteReader(_remote(root))

    def is_unfinished(self, folder: Path) -> bool:
        remote = _remote(folder)
        return remote.store.is_unfinished(remote.key)


REMOTE: Final = RemoteStorage()


def _remote(path: Path) -> RemotePath:
    assert isinstance(path, RemotePath)
    return path


class RemoteIndexFile(PositionalFile):
    """An object of `size` bytes, read in small blocks that are cached for all files of the store."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self.path = path
        self.size = size
        self._key = path.key
        self._store = path.store

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise IntegrityError(
                f"{self.path}: ends at byte {self.size}, but {size} bytes at {offset} are needed",
                hint="the object is truncated or was changed while it was read; copy it again",
            )
        data = bytearray(size)
        self._store.index.read(self._key, self.size, offset, memoryview(data))
        return bytes(data)

    def read_at_most(self, offset: int, size: int) -> bytes:
        return self.read(min(offset, self.size), max(0, min(size, self.size - offset)))

    def prefetch_ends(self) -> None:
        """Start to fetch the first and the last bytes, also of the next files in the folder."""
        length = settings.REMOTE_PROBE_BYTES
        following = self._store.next_files(self._key, settings.REMOTE_FILES_AHEAD)
        for key, size in ((self._key, self.size), *following):
            self._store.index.prefetch(key, size, [(0, length), (max(0, size - length), length)])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Start to fetch byte ranges `(offset, length)` that will be read soon, all at once."""
        self._store.index.prefetch(self._key, self.size, ranges)


class RemoteRawFile(io.RawIOBase):
    """An object as a raw file of Python."""

    def __init__(self, file: RemoteIndexFile) -> None:
        self._file = file
        self._position = 0

    def read_at_most(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`, fewer only if the object ends."""
        return self._file.read_at_most(offset, size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read_at_most(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class RemoteReader(RangeReader):
    """Positional reads of the objects below a folder, in large blocks, which are prefetched for sequential reads."""

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        store = root.store
        self._objects: dict[str, tuple[str, int]] = {}  # file → (key, size)
        self._cache = RangeCache(
            store.fetch,
            store.submit,
            settings.REMOTE_BLOCK_BYTES,
            settings.REMOTE_CACHE_BYTES,
            settings.REMOTE_BLOCKS_AHEAD,
        )

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        known = self._objects.get(file)
        if known is None:
            path = self.root / file
            with storage_errors(path, "cannot be opened"):
                known = self._objects[file] = path.key, path.stat().st_size
        key, size = known
        if offset + len(target) > size:
            raise IntegrityError(
                f"{key}: ends at byte {size}, but bytes [{offset}, {offset + len(target)}) are needed",
                hint="the object is truncated or was changed while it was read; copy it again",
            )
        self._cache.read(key, size, offset, target.cast("B"))

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        scatter_bytes(self.read(file, offset, nbytes), targets)

    def read(self, file: str, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)
