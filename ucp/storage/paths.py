"""Paths of checkpoints, on this machine or in an object store. Readers use the same `Path` interface for both.

`s3://bucket/run/step100` is a `RemotePath`: a path whose files are objects. It supports what readers do with a path
(list, stat, open for reading) and refuses everything else. The object store is imported when it is first used, so that
commands that stay on this machine do not pay for it.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UnsafeError, UsageError

if TYPE_CHECKING:
    from ucp.storage.object_store import ObjectInfo, ObjectStore
    from ucp.storage.remote_files import RemoteIndexFile
    from ucp.storage.storage import FolderEntry


# `s3://bucket/key`, which pathlib turns into `s3:/bucket/key`. A single letter is a drive of another system. Patterns
# are compiled when there is something to match: most paths have no colon.
_URL: Final = r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.-]+)*:/"
_LOCAL: Final = r"(?:file|local):/+"
_SHADOWS: Final = ("shadow:/", "shm:/", "gloo:/")

# Prefix of the names that ucp gives its journals and notes. They are not part of a folder's contents.
OWN_PREFIX: Final = ".ucp-"
UPLOAD_JOURNAL: Final = ".ucp-journal-"  # prefix of folders: what was written so far
COMPLETION_MARKER: Final = ".ucp-complete.json"  # the folder is complete


def is_shadow(name: str | os.PathLike[str]) -> bool:
    """Whether a name is the address of a shadow, which is reached over a connection and has no files."""
    return str(name).startswith(_SHADOWS)


def is_url(name: str | os.PathLike[str]) -> bool:
    """Whether a name is the URL of an object or a folder in an object store."""
    if isinstance(name, RemotePath):
        return True
    text = os.fspath(name)
    if ":/" not in text or is_shadow(text):
        return False
    return re.match(_URL, text) is not None and re.match(_LOCAL, text) is None


def parse_path(name: str | os.PathLike[str]) -> Path:
    """The path for what a user has typed. Cached listings below a URL are discarded."""
    if not is_url(name):
        text = os.fspath(name)
        if text == "":  # an unset shell variable, not the current folder
            raise UsageError("the path is empty")
        local = re.match(_LOCAL, text) if ":/" in text else None
        return Path(name) if local is None else Path("/", text[local.end() :])
    path = name if isinstance(name, RemotePath) else RemotePath(os.fspath(name))
    path.store.reload(path.key)
    return path


def local_path(name: str | os.PathLike[str], what: str) -> Path:
    """The path of a file or folder that must be on this machine; `what` completes the message, as in "jobs save"."""
    if is_url(name):
        raise UsageError(
            f"{os.fspath(name)}: {what} to a file system, not into an object store",
            hint="give a local folder, and upload it when it is complete",
        )
    return Path(name)


def natural_order(name: str) -> list[Any]:
    """Sort key for file names that compares numbers by value: `rank_2` before `rank_10`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def scan_folder(folder: Path) -> AbstractContextManager[Iterable[FolderEntry]]:
    """The entries of a folder, like `os.scandir`."""
    from ucp.storage.storage import storage_of

    return storage_of(folder).scan(folder)


def list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file below a folder, as its relative path and its size in bytes."""
    from ucp.storage.storage import storage_of

    return storage_of(folder).list(folder)


class RemotePath(PosixPath):
    """A path in an object store. System calls refuse it, because it has no name on this machine."""

    __slots__ = ()

    def __str__(self) -> str:
        first, *others = self.parts or ("",)
        return f"{first}//{'/'.join(others)}" if first.endswith(":") else super().__str__()  # else a relative one

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a file on this machine")

    @property
    def store(self) -> ObjectStore:
        """The store of its objects, shared by all paths with the same scheme and first name (a bucket, a host)."""
        from ucp.storage.object_store import object_store

        return object_store(self._scheme(), self._names()[0])

    @property
    def key(self) -> str:
        """The URL of its object, without `..`: a path cannot lead out of its bucket."""
        names = self._names()
        inside = posixpath.normpath("/".join(names[1:])) if len(names) > 1 else "."
        if inside == ".." or inside.startswith(("../", "/")):
            raise UnsafeError(f"{self}: leads out of {self._scheme()}//{names[0]}", hint="give a path inside of it")
        return f"{self._scheme()}//{names[0]}" + ("" if inside == "." else f"/{inside}")

    def _scheme(self) -> str:
        first = self.parts[0] if self.parts else ""
        if not first.endswith(":"):  # joined with an absolute path, which a manifest may contain
            raise UnsafeError(
                f"{'/'.join(self.parts)}: not in the object store, but referred to by a file in it",
                hint="copy all files of the checkpoint into the same folder",
            )
        return first

    def _names(self) -> tuple[str, ...]:
        return self.parts[1:] or ("",)

    def _info(self) -> ObjectInfo | None:
        return self.store.info(self.key)

    def _existing_info(self) -> ObjectInfo:
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return info

    def exists(self, **_: Any) -> bool:
        return self._info() is not None

    def is_file(self, **_: Any) -> bool:
        info = self._info()
        return info is not None and not info.is_folder

    def is_dir(self, **_: Any) -> bool:
        info = self._info()
        return info is not None and info.is_folder

    def is_symlink(self) -> bool:
        return False

    def stat(self, **_: Any) -> os.stat_result:
        """The size, and as time of modification a number that differs if the object was changed."""
        info = self._existing_info()
        mode = stat.S_IFDIR if info.is_folder else stat.S_IFREG
        status: Any = os.stat_result
        result: os.stat_result = status((mode, 0, 0, 1, 0, 0, info.size, 0, 0, 0), {"st_mtime_ns": info.stamp})
        return result

    def iterdir(self) -> Generator[RemotePath, None, None]:
        for name in self.store.list_names(self.key):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """Children whose names match; patterns with several components are not supported."""
        if "/" in pattern or "**" in pattern:
            raise NotImplementedError(pattern)
        if self.is_dir():
            yield from (child for child in self.iterdir() if fnmatchcase(child.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """All files below whose names match, in few requests."""
        for name in self.store.list_below(self.key):
            path = self / name
            if fnmatchcase(path.name, pattern):
                yield path

    def resolve(self, strict: bool = False) -> RemotePath:
        del strict
        return RemotePath(self.key)

    def absolute(self) -> RemotePath:
        return self

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """Open for reading, like `Path.open`."""
        from ucp.storage.remote_files import RemoteRawFile

        if mode not in ("r", "rt", "rb"):
            raise io.UnsupportedOperation(f"{self}: objects can only be opened for reading")
        raw = RemoteRawFile(self.indexed())
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw)
        return buffered if mode == "rb" else io.TextIOWrapper(buffered, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        with self.indexed() as file:
            return file.read(0, file.size)

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        with self.open(encoding=encoding, errors=errors, newline=newline) as file:
            return str(file.read())

    def indexed(self) -> RemoteIndexFile:
        """Open for small positional reads, as an index needs them."""
        from ucp.storage.remote_files import RemoteIndexFile

        info = self._existing_info()
        if info.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        return RemoteIndexFile(self, info.size)
