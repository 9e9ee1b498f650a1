"""Requests to an object store, made again when they fail in a way that may pass.

What is in an object store: folders are listed once and remembered, half-done ones are not seen into.

Object stores: what is there, range reads, whole writes. Any file system that fsspec knows will do.
"""

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
from ucp.errors import StorageError, UcpError, UsageError
from ucp.storage.paths import COMPLETION_MARKER, OWN_PREFIX, UPLOAD_JOURNAL
from ucp.storage.range_cache import RangeCache

Answer = TypeVar("Answer")

# What asking again does not change, by class and, for libraries that we do not import, by the name of the class.
_FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_FINAL_NAMES: Final = {
    "NoCredentialsError": "credentials",
    "PartialCredentialsError": "credentials",
    "CredentialRetrievalError": "credentials",
    "TokenRetrievalError": "credentials",
    "DefaultCredentialsError": "credentials",
    "GatedRepoError": "credentials",
    "ParamValidationError": "request",
    "TypeError": "request",
}
_CREDENTIALS: Final = "are the store's credentials set where ucp runs? See docs/object-storage.md"


def with_retries(request: Callable[[], Answer], what: str) -> Answer:
    """The answer to `request`, which is made again with growing pauses when it fails. `what` says what it is about.

    Objects that are not there raise FileNotFoundError at once; whatever else fails, or fails for good, is a
    StorageError that names `what`.
    """
    attempts = max(1, settings.REMOTE_ATTEMPTS)
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (UcpError, FileNotFoundError):
            raise
        except Exception as error:
            if _is_final(error):
                raise StorageError(f"{what}: {_error_text(error)}", hint=_error_hint(error)) from error
            if attempt == attempts:
                raise StorageError(
                    f"{what}: {_error_text(error)} ({attempts} attempts)",
                    hint="the store does not answer as it should: try again later; what was done is kept",
                ) from error
        time.sleep(_pause(attempt))
    raise AssertionError("unreachable")


def _pause(attempt: int) -> float:
    """Seconds to wait after a failed attempt: twice as long each time, and not the same in all threads."""
    longest: float = min(settings.REMOTE_MAX_RETRY_SECONDS, settings.REMOTE_RETRY_SECONDS * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


def _is_final(error: Exception) -> bool:
    return isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES


def _error_hint(error: Exception) -> str | None:
    if isinstance(error, PermissionError) or _FINAL_NAMES.get(type(error).__name__) == "credentials":
        return _CREDENTIALS
    return None


def _error_text(error: Exception) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(error))[:300].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_VERSION_FIELDS: Final = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "mtime", "created")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What lies under a URL: an object of `size` bytes, or a folder. `stamp` changes when the object does."""

    is_folder: bool
    size: int = 0
    stamp: int = 0


class ObjectListings:
    """What lies where in a store. Keys are URLs. Thread-safe.

    Readers ask for many names, and each question would be a round trip: folders are listed whole, and remembered until
    `forget`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._listings: dict[str, dict[str, ObjectInfo] | None] = {}  # folder → what is in it; None: is no folder
        self._looked: dict[str, ObjectInfo | None] = {}  # keys whose folder was not listed
        self._half_done: set[str] = set()
        # of folders whose files are being indexed: the listing, its names in order, and which is where
        self._turns: dict[str, tuple[dict[str, ObjectInfo], list[str], dict[str, int]]] = {}
        self._opened: set[str] = set()  # what users named: folders below are worth listing

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        return _file_system(self.url)

    def forget(self, key: str) -> None:
        """A user names `key` (again): look anew at it and at everything below."""
        with self._lock:
            self._opened.add(key)
            for known in (self._listings, self._looked):
                for name in [name for name in known if name == key or name.startswith(key + "/")]:
                    del known[name]
            self._listings.pop(_parent(key), None)

    def changed(self, key: str) -> None:
        """An object was written or removed: what was known of it, and of the folders that it is in, counts no more."""
        with self._lock:
            for known in (self._listings, self._looked):
                at = key
                while at != self.url and at:
                    known.pop(at, None)
                    at = _parent(at)
                known.pop(at, None)

    def look(self, key: str) -> ObjectInfo | None:
        """What lies under a key; None for nothing."""
        parent = _parent(key)
        with self._lock:
            below_opened = any(key.startswith(opened + "/") for opened in self._opened)
            if parent in self._listings:
                return (self._listings[parent] or {}).get(_name(key))
            if key in self._listings:
                return None if self._listings[key] is None else ObjectInfo(True)
            if key in self._looked:
                return self._looked[key]
        if below_opened:
            listing = self._list(parent)
            return (listing or {}).get(_name(key))
        found = self._ask(key)
        with self._lock:
            self._looked[key] = found
        return found

    def _ask(self, key: str) -> ObjectInfo | None:
        def request() -> Any:
            self.fs.invalidate_cache()
            return self.fs.info(key, **self._deadline())

        try:
            return object_info(with_retries(request, key))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted."""
        listing = self._listing(folder)
        if listing is None:
            if self.look(folder) is None:
                raise FileNotFoundError(2, "No such file or directory", folder)
            raise NotADirectoryError(20, "Not a directory", folder)
        return list(listing)

    def after(self, key: str, count: int) -> list[tuple[str, int]]:
        """The next objects of the same kind in a listed folder, with their sizes: readers go through them in turn."""
        folder, kind = _parent(key), _name(key).rpartition(".")[2]
        with self._lock:
            listing = self._listings.get(folder) or {}
            known = self._turns.get(folder)
            if known is None or known[0] is not listing:
                known = self._turns[folder] = listing, list(listing), {name: n for n, name in enumerate(listing)}
        _, names, places = known
        at = places.get(_name(key), len(names))
        return [
            (f"{folder}/{name}", listing[name].size)
            for name in names[at + 1 : at + 1 + count]
            if name.rpartition(".")[2] == kind and not listing[name].is_folder
        ]

    def below(self, folder: str) -> list[str]:
        """Every object below a folder, by path relative to it, sorted: one listing, however deep."""
        everything = self.everything(folder)
        begun = {name.rpartition(UPLOAD_JOURNAL)[0] for name in everything if UPLOAD_JOURNAL in name}
        half_done = tuple(at for at in begun if at + COMPLETION_MARKER not in everything)
        found = {
            name: one
            for name, one in everything.items()
            if not _is_own(name) and not (half_done and name.startswith(half_done))
        }
        with self._lock:
            self._remember(folder, found)
        return sorted(found)

    def everything(self, folder: str) -> dict[str, ObjectInfo]:
        """Every object below a folder, by path relative to it, as it is now: our notes and half-done folders too."""
        prefix = self._path(folder) + "/"
        found: dict[str, ObjectInfo] = {}
        try:
            entries = with_retries(lambda: self._find(folder), folder)
        except FileNotFoundError:
            return found
        for name, entry in entries.items():
            inside = _relative(name, prefix)
            if inside:
                found[inside] = object_info(entry)
        return found

    def is_half_done(self, folder: str) -> bool:
        """Whether a folder is one that ucp has begun to write, and has not made whole."""
        self._listing(folder)
        with self._lock:
            return folder in self._half_done

    def _find(self, folder: str) -> dict[str, Any]:
        self.fs.invalidate_cache()
        found: dict[str, Any] = self.fs.find(folder, detail=True, **self._deadline(pages=10))
        return found

    def _remember(self, folder: str, found: dict[str, ObjectInfo]) -> None:
        """Every folder that a listing of everything below shows."""
        if not found:
            return
        listings: dict[str, dict[str, ObjectInfo]] = {folder: {}}
        for inside in sorted(found):
            at, names = folder, inside.split("/")
            for name in names[:-1]:
                listings.setdefault(at, {})[name] = ObjectInfo(True)
                at = f"{at}/{name}"
            listings.setdefault(at, {})[names[-1]] = found[inside]
        self._listings.update(listings)

    def _listing(self, folder: str) -> dict[str, ObjectInfo] | None:
        with self._lock:
            if folder in self._listings:
                return self._listings[folder]
        return self._list(folder)

    def _list(self, folder: str) -> dict[str, ObjectInfo] | None:
        def request() -> Any:
            self.fs.invalidate_cache()
            return self.fs.ls(folder, detail=True, **self._deadline(pages=10))

        listing: dict[str, ObjectInfo] | None = None
        prefix = self._path(folder) + "/"
        try:
            entries = with_retries(request, folder)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        for entry in entries:
            name = _relative(entry["name"], prefix)
            if name is None:  # the listing of an object is the object
                continue
            listing = {} if listing is None else listing
            if name and "/" not in name:
                listing[name] = object_info(entry)
        half_done = (
            listing is not None
            and COMPLETION_MARKER not in listing
            and any(n.startswith(UPLOAD_JOURNAL) for n in listing)
        )
        if listing is not None:  # what is not whole is not there
            listing = {} if half_done else {name: listing[name] for name in sorted(listing) if not _is_own(name)}
        with self._lock:
            self._listings[folder] = listing
            (self._half_done.add if half_done else self._half_done.discard)(folder)
        return listing

    def _path(self, key: str) -> str:
        """The key as the file system spells it in listings."""
        path: str = self.fs._strip_protocol(key)
        return path.rstrip("/")

    @cached_property
    def _is_async(self) -> bool:
        return bool(getattr(self.fs, "async_impl", False))

    def _deadline(self, pages: int = 1) -> dict[str, Any]:
        """How long a request may take, for file systems that let us say so. Listings are many requests in one."""
        return {"timeout": pages * settings.REMOTE_TIMEOUT_SECONDS} if self._is_async else {}


def _file_system(url: str) -> Any:
    scheme = url.partition(":/")[0]
    install = "install what the store needs: pip install 'universal-checkpoint[remote]'"
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)[0]
    except ImportError as error:
        raise UsageError(f"{url}: {error}", hint=install) from error
    except ValueError as error:
        if "not known" in str(error):
            raise UsageError(
                f"{url}: fsspec knows no {scheme}://", hint=f"a folder of that name is ./{scheme}:/…; else {install}"
            ) from error
        raise StorageError(
            f"{url}: {error}", hint="see docs/object-storage.md for how stores are configured"
        ) from error


def object_info(entry: dict[str, Any]) -> ObjectInfo:
    if entry.get("type") == "directory":
        return ObjectInfo(True)
    # Stores tell apart what an object holds in different ways, and some tell times in different ways too.
    mark = next((entry[mark] for mark in _VERSION_FIELDS if entry.get(mark)), "")
    mark = mark.timestamp() if isinstance(mark, datetime) else mark
    return ObjectInfo(False, int(entry.get("size") or 0), crc32(str(mark).strip('"').encode()))


def _relative(name: str, prefix: str) -> str | None:
    """What stands after a folder's `prefix` in a listed name; empty for the folder itself, None for something else."""
    if name.rstrip("/") + "/" == prefix:
        return "" if name.endswith("/") else None
    return name[len(prefix) :].rstrip("/") if name.startswith(prefix) else None


def _is_own(inside: str) -> bool:
    return inside.startswith(OWN_PREFIX) or f"/{OWN_PREFIX}" in inside


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _name(key: str) -> str:
    return key.rpartition("/")[2]


T = TypeVar("T")

_MAX_UPLOAD_PARTS: Final = 9_000  # of an upload; S3 takes 10,000

_stores: dict[tuple[str, str], ObjectStore] = {}
_stores_lock = threading.Lock()


def object_store(scheme: str, first: str) -> ObjectStore:
    """The store of all URLs `scheme//first/…`; `scheme` ends with a colon."""
    with _stores_lock:
        known = _stores.get((scheme, first))
        if known is None:
            known = _stores[scheme, first] = ObjectStore(f"{scheme}//{first}")
        return known


class ObjectStore(ObjectListings):
    """A bucket, or what a scheme has in its place: what is there, and its bytes. Keys are URLs. Thread-safe."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.index = RangeCache(
            self.fetch, self.submit, settings.REMOTE_INDEX_BLOCK_BYTES, settings.REMOTE_INDEX_CACHE_BYTES
        )

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(settings.REMOTE_CONNECTIONS, thread_name_prefix="ucp-remote")

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
                raise _ShortTransferError(f"{len(data)} of {stop - start} bytes came")
            return data

        try:
            return with_retries(request, f"{key}: cannot read bytes [{start}, {stop})")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: is gone", hint="was it removed while it was read?") from error

    def get(self, key: str) -> bytes | None:
        """A small object, whole and as it is now; None where there is none."""

        def request() -> bytes:
            self.fs.invalidate_cache()
            data: bytes = self.fs.cat_file(key, **self._deadline())
            return data

        try:
            return with_retries(request, f"{key}: cannot be read")
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, whole."""
        self._write(lambda: self.fs.pipe_file(key, data), key)

    def upload(self, file: Path, key: str, streams: int = 1) -> ObjectInfo:
        """Copy a local file to an object, a large one in parts, `streams` at once. Gives what the store says of it."""
        size = file.stat().st_size
        how = {"chunksize": upload_part_bytes(size), "max_concurrency": streams}
        # What a store's own client does not name, it would hand on to whoever sends the request.
        taken = signature(getattr(self.fs, "_put_file", self.fs.put_file)).parameters
        how = {name: value for name, value in how.items() if name in taken}

        def request() -> ObjectInfo:
            self.fs.put_file(str(file), key, **how)
            self.fs.invalidate_cache()
            arrived = object_info(self.fs.info(key))
            if arrived.size != size:
                raise _ShortTransferError(f"{arrived.size} of {size} bytes arrived")
            return arrived

        return self._write(request, key)

    def _write(self, request: Callable[[], T], key: str) -> T:
        try:
            answer = with_retries(request, f"{key}: cannot be written")
        except FileNotFoundError as error:
            raise StorageError(f"{key}: cannot be written: {error}", hint=f"is {self.url} there?") from error
        self.changed(key)
        return answer

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are gone already are no matter."""
        for key in keys:
            with suppress(FileNotFoundError):
                with_retries(partial(self.fs.rm_file, key), f"{key}: cannot be removed")
            self.changed(key)


def upload_part_bytes(size: int) -> int:
    """Bytes of each part of an upload of `size` bytes: whole units that all stores take, and no more than 10,000."""
    unit = 256 * settings.KIB
    return max(settings.REMOTE_PART_BYTES, -(-size // _MAX_UPLOAD_PARTS // unit) * unit)


class _ShortTransferError(OSError):
    """Fewer bytes went over than should."""
