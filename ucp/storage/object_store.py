"""Object stores: listings, range reads, whole writes, with retries. Any file system of fsspec can be used."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, Final, TypeVar
from zlib import crc32

from ucp import settings
from ucp.errors import StorageError, UcpError, UsageError, missing_package
from ucp.storage.paths import COMPLETION_MARKER, OWN_PREFIX, UPLOAD_JOURNAL
from ucp.storage.range_cache import RangeCache

T = TypeVar("T")

_MAX_UPLOAD_PARTS: Final = 9_000  # S3 allows 10,000
_VERSION_FIELDS: Final = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "mtime", "created")

_stores: dict[tuple[str, str], ObjectStore] = {}
_stores_lock = threading.Lock()


def object_store(scheme: str, first: str) -> ObjectStore:
    """The store of all URLs `scheme//first/…`; `scheme` ends with a colon."""
    with _stores_lock:
        known = _stores.get((scheme, first))
        if known is None:
            known = _stores[scheme, first] = ObjectStore(f"{scheme}//{first}")
        return known


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is at a URL: an object of `size` bytes, or a folder. `stamp` differs if the object was changed."""

    is_folder: bool
    size: int = 0
    stamp: int = 0

    @staticmethod
    def from_entry(entry: dict[str, Any]) -> ObjectInfo:
        """From what fsspec reports."""
        if entry.get("type") == "directory":
            return ObjectInfo(True)
        # Stores identify the version of an object in different fields, and report times in different types.
        version = next((entry[field] for field in _VERSION_FIELDS if entry.get(field)), "")
        version = version.timestamp() if isinstance(version, datetime) else version
        return ObjectInfo(False, int(entry.get("size") or 0), crc32(str(version).strip('"').encode()))


class ObjectStore:
    """A bucket, or its counterpart in other schemes: cached listings, and bytes. Keys are URLs. Thread-safe.

    Readers ask for many names, and each question would be a round trip: folders are listed whole, and cached until
    `reload`. What is in an unfinished folder is hidden.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._listings: dict[str, dict[str, ObjectInfo] | None] = {}  # folder → contents; None: not a folder
        self._infos: dict[str, ObjectInfo | None] = {}  # of keys whose folder was not listed
        self._unfinished: set[str] = set()
        # Of folders whose files are being indexed: the listing, its names in order, and the position of each name.
        self._positions: dict[str, tuple[dict[str, ObjectInfo], list[str], dict[str, int]]] = {}
        self._opened: set[str] = set()  # keys that users gave: folders below them are worth listing
        self.index = RangeCache(
            self.fetch, self.submit, settings.REMOTE_INDEX_BLOCK_BYTES, settings.REMOTE_INDEX_CACHE_BYTES
        )

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        install = (
            "install the client of the store: pip install 'universal-checkpoint[remote]' for s3://, otherwise gcsfs,"
            " adlfs, huggingface_hub, …"
        )
        try:
            from fsspec.core import url_to_fs

            return url_to_fs(self.url)[0]
        except ImportError as error:
            raise missing_package(error, self.url) or UsageError(f"{self.url}: {error}", hint=install) from error
        except ValueError as error:
            if "not known" in str(error):
                scheme = self.url.partition(":/")[0]
                raise UsageError(
                    f"{self.url}: fsspec has no protocol {scheme}://",
                    hint=f"for a local folder of that name use ./{scheme}:/…; otherwise {install}",
                ) from error
            raise StorageError(
                f"{self.url}: {error}", hint="see docs/large-checkpoints.md for how stores are configured"
            ) from error

    def _current(self, method: str, key: str, what: str = "", *, pages: int = 1, **options: Any) -> Any:
        """What a method of the file system returns for a key now: fsspec caches as well. `what` starts the error."""

        def request() -> Any:
            self.fs.invalidate_cache()
            return getattr(self.fs, method)(key, **options, **self._timeout(pages))

        return with_retries(request, what or key)

    def reload(self, key: str) -> None:
        """A user has given `key` (again): discard everything cached at it and below."""
        with self._lock:
            self._opened.add(key)
            for cached in (self._listings, self._infos):
                for name in [name for name in cached if name == key or name.startswith(key + "/")]:
                    del cached[name]
            self._listings.pop(_parent(key), None)
        self.index.discard(key)

    def invalidate(self, key: str) -> None:
        """An object was written or removed: discard what is cached of it and of the folders above."""
        with self._lock:
            for cached in (self._listings, self._infos):
                at = key
                while at != self.url and at:
                    cached.pop(at, None)
                    at = _parent(at)
                cached.pop(at, None)
        self.index.discard(key)

    def info(self, key: str) -> ObjectInfo | None:
        """What is at a key; None for nothing."""
        parent = _parent(key)
        with self._lock:
            is_below_opened = any(key.startswith(opened + "/") for opened in self._opened)
            if parent in self._listings:
                return (self._listings[parent] or {}).get(_name(key))
            if key in self._listings:
                return None if self._listings[key] is None else ObjectInfo(True)
            if key in self._infos:
                return self._infos[key]
        if is_below_opened:
            return (self._list(parent) or {}).get(_name(key))
        try:
            info = ObjectInfo.from_entry(self._current("info", key))
        except FileNotFoundError:
            info = None
        with self._lock:
            self._infos[key] = info
        return info

    def list_names(self, folder: str) -> list[str]:
        """The names in a folder, sorted."""
        listing = self._listing(folder)
        if listing is None:
            if self.info(folder) is None:
                raise FileNotFoundError(2, "No such file or directory", folder)
            raise NotADirectoryError(20, "Not a directory", folder)
        return list(listing)

    def next_files(self, key: str, count: int) -> list[tuple[str, int]]:
        """The next objects with the same suffix in a listed folder, with their sizes: readers visit them in order."""
        folder, suffix = _parent(key), _name(key).rpartition(".")[2]
        with self._lock:
            listing = self._listings.get(folder) or {}
            known = self._positions.get(folder)
            if known is None or known[0] is not listing:
                known = self._positions[folder] = listing, list(listing), {name: n for n, name in enumerate(listing)}
        _, names, positions = known
        start = positions.get(_name(key), len(names)) + 1
        return [
            (f"{folder}/{name}", listing[name].size)
            for name in names[start : start + count]
            if name.rpartition(".")[2] == suffix and not listing[name].is_folder
        ]

    def list_below(self, folder: str) -> list[str]:
        """The relative path of every object below a folder, sorted: one listing, however deep."""
        objects = self.list_all(folder)
        started = {name.rpartition(UPLOAD_JOURNAL)[0] for name in objects if UPLOAD_JOURNAL in name}
        unfinished = tuple(prefix for prefix in started if prefix + COMPLETION_MARKER not in objects)
        visible = {
            name: info
            for name, info in objects.items()
            if not _is_own(name) and not (unfinished and name.startswith(unfinished))
        }
        listings: dict[str, dict[str, ObjectInfo]] = {folder: {}} if visible else {}
        for path in sorted(visible):
            at, names = folder, path.split("/")
            for name in names[:-1]:
                listings.setdefault(at, {})[name] = ObjectInfo(True)
                at = f"{at}/{name}"
            listings.setdefault(at, {})[names[-1]] = visible[path]
        with self._lock:
            self._listings.update(listings)
        return sorted(visible)

    def list_all(self, folder: str) -> dict[str, ObjectInfo]:
        """Every object below a folder, by relative path, as it is now: with ucp's notes and unfinished folders."""
        prefix = self._path(folder) + "/"
        try:
            entries: dict[str, Any] = self._current("find", folder, pages=10, detail=True)
        except FileNotFoundError:
            return {}
        named = ((_relative(name, prefix), entry) for name, entry in entries.items())
        return {name: ObjectInfo.from_entry(entry) for name, entry in named if name}

    def is_unfinished(self, folder: str) -> bool:
        """Whether ucp has started to write a folder and has not finished."""
        self._listing(folder)
        with self._lock:
            return folder in self._unfinished

    def _listing(self, folder: str) -> dict[str, ObjectInfo] | None:
        with self._lock:
            if folder in self._listings:
                return self._listings[folder]
        return self._list(folder)

    def _list(self, folder: str) -> dict[str, ObjectInfo] | None:
        listing: dict[str, ObjectInfo] | None = None
        prefix = self._path(folder) + "/"
        try:
            entries = self._current("ls", folder, pages=10, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        for entry in entries:
            name = _relative(entry["name"], prefix)
            if name is None:  # the listing of an object is the object itself
                continue
            listing = {} if listing is None else listing
            if name and "/" not in name:
                listing[name] = ObjectInfo.from_entry(entry)
        is_unfinished = False
        if listing is not None:
            has_journal = any(name.startswith(UPLOAD_JOURNAL) for name in listing)
            is_unfinished = has_journal and COMPLETION_MARKER not in listing
            visible = [] if is_unfinished else [name for name in sorted(listing) if not _is_own(name)]
            listing = {name: listing[name] for name in visible}
        with self._lock:
            self._listings[folder] = listing
            (self._unfinished.add if is_unfinished else self._unfinished.discard)(folder)
        return listing

    def _path(self, key: str) -> str:
        """The key as the file system spells it in listings."""
        path: str = self.fs._strip_protocol(key)
        return path.rstrip("/")

    @cached_property
    def _is_async(self) -> bool:
        return bool(getattr(self.fs, "async_impl", False))

    def _timeout(self, pages: int = 1) -> dict[str, Any]:
        """The timeout of a request, for file systems that support one. A listing may take several requests."""
        return {"timeout": pages * settings.REMOTE_TIMEOUT_SECONDS} if self._is_async else {}

    # Bytes ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(settings.REMOTE_CONNECTIONS, thread_name_prefix="ucp-remote")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run something in one of the threads that wait for the store."""
        return self._pool.submit(work)

    def fetch(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of an object, all of them."""
        options = self._timeout() if self._is_async else {"cache_type": "none"}

        def request() -> bytes:
            data: bytes = self.fs.cat_file(key, start=start, end=stop, **options)
            if len(data) != stop - start:
                raise _ShortTransferError(f"received {len(data)} of {stop - start} bytes")
            return data

        try:
            return with_retries(request, f"{key}: cannot read bytes [{start}, {stop})")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: is gone", hint="was it removed while it was read?") from error

    def get(self, key: str) -> bytes | None:
        """A small object, whole and as it is now; None if it does not exist."""
        try:
            data: bytes = self._current("cat_file", key, f"{key}: cannot be read")
        except FileNotFoundError:
            return None
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, whole."""
        self._write(lambda: self.fs.pipe_file(key, data), key)

    def upload(self, file: Path, key: str, streams: int = 1) -> ObjectInfo:
        """Copy a local file to an object, a large one in parts, `streams` at once; returns what the store reports."""
        size = file.stat().st_size
        options = {"chunksize": upload_part_bytes(size), "max_concurrency": streams}
        # A client would pass on options that it does not know to the library that sends the request.
        known = signature(getattr(self.fs, "_put_file", self.fs.put_file)).parameters
        options = {name: value for name, value in options.items() if name in known}

        def request() -> ObjectInfo:
            self.fs.put_file(str(file), key, **options)
            self.fs.invalidate_cache()
            info = ObjectInfo.from_entry(self.fs.info(key))
            if info.size != size:
                raise _ShortTransferError(f"only {info.size} of {size} bytes arrived")
            return info

        return self._write(request, key)

    def _write(self, request: Callable[[], T], key: str) -> T:
        try:
            result = with_retries(request, f"{key}: cannot be written")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: cannot be written: {error}", hint=f"does {self.url} exist?") from error
        self.invalidate(key)
        return result

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
        for key in keys:
            with suppress(FileNotFoundError):
                with_retries(partial(self.fs.rm_file, key), f"{key}: cannot be removed")
            self.invalidate(key)


def upload_part_bytes(size: int) -> int:
    """Bytes per part of an upload of `size` bytes: a multiple of a size that all stores accept, at most 9,000 parts."""
    unit = 256 * settings.KIB
    return max(settings.REMOTE_PART_BYTES, -(-size // _MAX_UPLOAD_PARTS // unit) * unit)


class _ShortTransferError(OSError):
    """Fewer bytes were transferred than requested."""


def _relative(name: str, prefix: str) -> str | None:
    """A listed name without the folder's `prefix`; empty for the folder itself, None for something else."""
    if name.rstrip("/") + "/" == prefix:
        return "" if name.endswith("/") else None
    return name[len(prefix) :].rstrip("/") if name.startswith(prefix) else None


def _is_own(path: str) -> bool:
    return path.startswith(OWN_PREFIX) or f"/{OWN_PREFIX}" in path


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _name(key: str) -> str:
    return key.rpartition("/")[2]


# Retries ------------------------------------------------------------------------------------------------------------

# Errors that another attempt does not change, by name, because the libraries that define them may not be installed.
_CREDENTIALS: Final = frozenset(
    {
        *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        *("TokenRetrievalError", "DefaultCredentialsError", "GatedRepoError"),
    }
)
_FINAL: Final = _CREDENTIALS | {
    *("FileNotFoundError", "IsADirectoryError", "NotADirectoryError", "NotImplementedError"),
    *("ParamValidationError", "TypeError"),
}


def with_retries(request: Callable[[], T], what: str) -> T:
    """The result of `request`, which is repeated with growing pauses if it fails. `what` starts the error message.

    A missing object raises FileNotFoundError at once; any other error that is final, or the last of several attempts,
    becomes a StorageError.
    """
    attempts = max(1, settings.REMOTE_ATTEMPTS)
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (UcpError, FileNotFoundError):
            raise
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            if names & _FINAL:
                hint = "are the store's credentials set where ucp runs? See docs/large-checkpoints.md"
                found = f"{what}: {_error_text(error)}"
                raise StorageError(found, hint=hint if names & _CREDENTIALS else None) from error
            if attempt == attempts:
                raise StorageError(
                    f"{what}: {_error_text(error)} ({attempts} attempts)",
                    hint="the store does not answer as it should: try again later; finished work is kept",
                ) from error
        # Twice as long each time, and not the same in all threads.
        longest = min(settings.REMOTE_MAX_RETRY_SECONDS, settings.REMOTE_RETRY_SECONDS * 2 ** (attempt - 1))
        time.sleep(longest * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _error_text(error: Exception) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(error))[:300].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
