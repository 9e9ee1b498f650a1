"""What is in an object store: folders are listed once and remembered, half-done ones are not seen into."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final
from zlib import crc32

from ucp import tunables
from ucp.errors import StorageError, UsageError
from ucp.files.paths import COMPLETE, JOURNAL, OUR_NOTES
from ucp.files.remote_retry import persistently

_MARKS: Final = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "mtime", "created")


@dataclass(frozen=True, slots=True)
class Found:
    """What lies under a URL: an object of `size` bytes, or a folder. `stamp` changes when the object does."""

    is_folder: bool
    size: int = 0
    stamp: int = 0


class Listings:
    """What lies where in a store. Keys are URLs. Thread-safe.

    Readers ask for many names, and each question would be a round trip: folders are listed whole, and remembered until
    `forget`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._listings: dict[str, dict[str, Found] | None] = {}  # folder → what is in it; None: is no folder
        self._looked: dict[str, Found | None] = {}  # keys whose folder was not listed
        self._half_done: set[str] = set()
        # of folders whose files are being indexed: the listing, its names in order, and which is where
        self._turns: dict[str, tuple[dict[str, Found], list[str], dict[str, int]]] = {}
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

    def look(self, key: str) -> Found | None:
        """What lies under a key; None for nothing."""
        parent = _parent(key)
        with self._lock:
            below_opened = any(key.startswith(opened + "/") for opened in self._opened)
            if parent in self._listings:
                return (self._listings[parent] or {}).get(_name(key))
            if key in self._listings:
                return None if self._listings[key] is None else Found(True)
            if key in self._looked:
                return self._looked[key]
        if below_opened:
            listing = self._list(parent)
            return (listing or {}).get(_name(key))
        found = self._ask(key)
        with self._lock:
            self._looked[key] = found
        return found

    def _ask(self, key: str) -> Found | None:
        def request() -> Any:
            self.fs.invalidate_cache()
            return self.fs.info(key, **self._deadline())

        try:
            return found_of(persistently(request, key))
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
        begun = {name.rpartition(JOURNAL)[0] for name in everything if JOURNAL in name}
        half_done = tuple(at for at in begun if at + COMPLETE not in everything)
        found = {
            name: one
            for name, one in everything.items()
            if not _is_ours(name) and not (half_done and name.startswith(half_done))
        }
        with self._lock:
            self._remember(folder, found)
        return sorted(found)

    def everything(self, folder: str) -> dict[str, Found]:
        """Every object below a folder, by path relative to it, as it is now: our notes and half-done folders too."""
        prefix = self._path(folder) + "/"
        found: dict[str, Found] = {}
        try:
            entries = persistently(lambda: self._find(folder), folder)
        except FileNotFoundError:
            return found
        for name, entry in entries.items():
            inside = _relative(name, prefix)
            if inside:
                found[inside] = found_of(entry)
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

    def _remember(self, folder: str, found: dict[str, Found]) -> None:
        """Every folder that a listing of everything below shows."""
        if not found:
            return
        listings: dict[str, dict[str, Found]] = {folder: {}}
        for inside in sorted(found):
            at, names = folder, inside.split("/")
            for name in names[:-1]:
                listings.setdefault(at, {})[name] = Found(True)
                at = f"{at}/{name}"
            listings.setdefault(at, {})[names[-1]] = found[inside]
        self._listings.update(listings)

    def _listing(self, folder: str) -> dict[str, Found] | None:
        with self._lock:
            if folder in self._listings:
                return self._listings[folder]
        return self._list(folder)

    def _list(self, folder: str) -> dict[str, Found] | None:
        def request() -> Any:
            self.fs.invalidate_cache()
            return self.fs.ls(folder, detail=True, **self._deadline(pages=10))

        listing: dict[str, Found] | None = None
        prefix = self._path(folder) + "/"
        try:
            entries = persistently(request, folder)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        for entry in entries:
            name = _relative(entry["name"], prefix)
            if name is None:  # the listing of an object is the object
                continue
            listing = {} if listing is None else listing
            if name and "/" not in name:
                listing[name] = found_of(entry)
        half_done = listing is not None and COMPLETE not in listing and any(n.startswith(JOURNAL) for n in listing)
        if listing is not None:  # what is not whole is not there
            listing = {} if half_done else {name: listing[name] for name in sorted(listing) if not _is_ours(name)}
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
        return {"timeout": pages * tunables.REMOTE_TIMEOUT_SECONDS} if self._is_async else {}


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


def found_of(entry: dict[str, Any]) -> Found:
    if entry.get("type") == "directory":
        return Found(True)
    # Stores tell apart what an object holds in different ways, and some tell times in different ways too.
    mark = next((entry[mark] for mark in _MARKS if entry.get(mark)), "")
    mark = mark.timestamp() if isinstance(mark, datetime) else mark
    return Found(False, int(entry.get("size") or 0), crc32(str(mark).strip('"').encode()))


def _relative(name: str, prefix: str) -> str | None:
    """What stands after a folder's `prefix` in a listed name; empty for the folder itself, None for something else."""
    if name.rstrip("/") + "/" == prefix:
        return "" if name.endswith("/") else None
    return name[len(prefix) :].rstrip("/") if name.startswith(prefix) else None


def _is_ours(inside: str) -> bool:
    return inside.startswith(OUR_NOTES) or f"/{OUR_NOTES}" in inside


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _name(key: str) -> str:
    return key.rpartition("/")[2]
