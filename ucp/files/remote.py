"""Object stores: what is there, range reads, whole writes. Any file system that fsspec knows will do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Final, TypeVar

from ucp import tunables
from ucp.errors import StorageError
from ucp.files.remote_blocks import Blocks
from ucp.files.remote_listing import Found, Listings, found_of
from ucp.files.remote_retry import persistently

__all__ = ["Found", "Store", "part_bytes", "store_of"]

T = TypeVar("T")

_MOST_PARTS: Final = 9_000  # of an upload; S3 takes 10,000

_stores: dict[tuple[str, str], Store] = {}
_stores_lock = threading.Lock()


def store_of(scheme: str, first: str) -> Store:
    """The store of all URLs `scheme//first/…`; `scheme` ends with a colon."""
    with _stores_lock:
        known = _stores.get((scheme, first))
        if known is None:
            known = _stores[scheme, first] = Store(f"{scheme}//{first}")
        return known


class Store(Listings):
    """A bucket, or what a scheme has in its place: what is there, and its bytes. Keys are URLs. Thread-safe."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.index = Blocks(
            self.fetch, self.submit, tunables.REMOTE_INDEX_BLOCK_BYTES, tunables.REMOTE_INDEX_CACHE_BYTES
        )

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(tunables.REMOTE_CONNECTIONS, thread_name_prefix="ucp-remote")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do something in one of the threads that wait for the store."""
        return self._pool.submit(work)

    def forget(self, key: str) -> None:
        """A user names `key` (again): look anew at it and at everything below."""
        super().forget(key)
        self.index.forget(key)

    def changed(self, key: str) -> None:
        """An object was written or removed: what was known of it, and of the folders that it is in, counts no more."""
        super().changed(key)
        self.index.forget(key)

    def fetch(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of an object, all of them."""
        deadline = self._deadline() if self._is_async else {"cache_type": "none"}

        def request() -> bytes:
            data: bytes = self.fs.cat_file(key, start=start, end=stop, **deadline)
            if len(data) != stop - start:
                raise _ShortError(f"{len(data)} of {stop - start} bytes came")
            return data

        try:
            return persistently(request, f"{key}: cannot read bytes [{start}, {stop})")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: is gone", hint="was it removed while it was read?") from error

    def get(self, key: str) -> bytes | None:
        """A small object, whole and as it is now; None where there is none."""

        def request() -> bytes:
            self.fs.invalidate_cache()
            data: bytes = self.fs.cat_file(key, **self._deadline())
            return data

        try:
            return persistently(request, f"{key}: cannot be read")
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, whole."""
        self._write(lambda: self.fs.pipe_file(key, data), key)

    def upload(self, file: Path, key: str, streams: int = 1) -> Found:
        """Copy a local file to an object, a large one in parts, `streams` at once. Gives what the store says of it."""
        size = file.stat().st_size
        how = {"chunksize": part_bytes(size), "max_concurrency": streams}
        # What a store's own client does not name, it would hand on to whoever sends the request.
        taken = signature(getattr(self.fs, "_put_file", self.fs.put_file)).parameters
        how = {name: value for name, value in how.items() if name in taken}

        def request() -> Found:
            self.fs.put_file(str(file), key, **how)
            self.fs.invalidate_cache()
            arrived = found_of(self.fs.info(key))
            if arrived.size != size:
                raise _ShortError(f"{arrived.size} of {size} bytes arrived")
            return arrived

        return self._write(request, key)

    def _write(self, request: Callable[[], T], key: str) -> T:
        try:
            answer = persistently(request, f"{key}: cannot be written")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: cannot be written: {error}", hint=f"is {self.url} there?") from error
        self.changed(key)
        return answer

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are gone already are no matter."""
        for key in keys:
            with suppress(FileNotFoundError):
                persistently(partial(self.fs.rm_file, key), f"{key}: cannot be removed")
            self.changed(key)


def part_bytes(size: int) -> int:
    """Bytes of each part of an upload of `size` bytes: whole units that all stores take, and no more than 10,000."""
    unit = 256 * tunables.KIB
    return max(tunables.REMOTE_PART_BYTES, -(-size // _MOST_PARTS // unit) * unit)


class _ShortError(OSError):
    """Fewer bytes went over than should."""
