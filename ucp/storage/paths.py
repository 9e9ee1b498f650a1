"""Paths of checkpoints: on this machine, or in an object store. Readers see the same `Path` either way.

`s3://bucket/run/step100` is a `RemotePath`: a path whose files are objects. It answers what readers ask of a path
(list, look at, open for reading) from the store, and refuses everything else. The store itself is imported at the
first question, so that nobody pays for it who stays on this machine.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UnsafeError, UsageError

if TYPE_CHECKING:
    from typing import Protocol

    from ucp.storage.object_store import ObjectInfo, ObjectStore
    from ucp.storage.remote_files import RemoteIndexFile, RemoteReader

    class FolderEntry(Protocol):
        """What a folder holds under a name."""

        @property
        def name(self) -> str: ...
        def is_file(self) -> bool: ...
        def is_dir(self) -> bool: ...
        def stat(self) -> os.stat_result: ...


# `s3://bucket/key`; pathlib makes `s3:/bucket/key` of it. One letter alone is a drive of another system. Patterns are
# compiled when there is something to match: most paths have no colon.
_URL: Final = r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.-]+)*:/"
_LOCAL: Final = r"(?:file|local):/+"
_SHADOWS: Final = ("shadow:/", "shm:/", "gloo:/")

# Names of our own that say how far the writing of a folder is begin so. They are no part of what it holds.
OWN_PREFIX: Final = ".ucp-"
UPLOAD_JOURNAL: Final = ".ucp-journal-"  # beginning of the names of folders: what was written so far
COMPLETION_MARKER: Final = ".ucp-complete.json"  # the folder is whole


def is_shadow(name: str | os.PathLike[str]) -> bool:
    """Whether a name is the address of a shadow, which is asked over a connection and holds no files."""
    return str(name).startswith(_SHADOWS)


def is_url(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of something in an object store."""
    if isinstance(name, RemotePath):
        return True
    text = os.fspath(name)
    if ":/" not in text or is_shadow(text):
        return False
    return re.match(_URL, text) is not None and re.match(_LOCAL, text) is None


def parse_path(name: str | os.PathLike[str]) -> Path:
    """The path that a user means. What was known of the objects below a URL is looked up again."""
    if not is_url(name):
        text = os.fspath(name)
        if text == "":  # an unset variable, which does not mean the current folder
            raise UsageError("the path is empty")
        local = re.match(_LOCAL, text) if ":/" in text else None
        return Path(name) if local is None else Path("/", text[local.end() :])
    path = name if isinstance(name, RemotePath) else RemotePath(os.fspath(name))
    path.store.forget(path.key)
    return path


def local_path(name: str | os.PathLike[str], what: str) -> Path:
    """The path of a file or folder that has to be on this machine, because `what` happens there."""
    if is_url(name):
        raise UsageError(
            f"{os.fspath(name)}: {what} to a file system, not into an object store",
            hint="give a folder, and copy it there when it is whole",
        )
    return Path(name)


def scan_folder(folder: Path) -> AbstractContextManager[Iterable[FolderEntry]]:
    """What a folder holds, as `os.scandir`."""
    if isinstance(folder, RemotePath):
        return nullcontext(list(folder.iterdir()))
    return os.scandir(folder)


def list_files(root: Path) -> Iterator[tuple[str, int]]:
    """Every file below `root`, as its path relative to it and its size in bytes."""
    if isinstance(root, RemotePath):
        for path in root.rglob("*"):
            if path.is_file():
                yield path.relative_to(root).as_posix(), path.stat().st_size
        return
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            file = Path(folder) / name
            yield file.relative_to(root).as_posix(), file.stat().st_size


class RemotePath(PosixPath):
    """A path in an object store. The system's own calls refuse it: it has no name on this machine."""

    __slots__ = ()

    def __str__(self) -> str:
        first, *others = self.parts or ("",)
        return f"{first}//{'/'.join(others)}" if first.endswith(":") else super().__str__()  # else a relative one

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no file of this machine")

    @property
    def store(self) -> ObjectStore:
        """Where its objects are: all paths with the same scheme and first name (a bucket, a host) share one."""
        from ucp.storage.object_store import object_store

        return object_store(self._scheme(), self._names()[0])

    @property
    def key(self) -> str:
        """The URL of its object, without `..`: a path leads to nothing outside the bucket that it begins with."""
        names = self._names()
        inside = posixpath.normpath("/".join(names[1:])) if len(names) > 1 else "."
        if inside == ".." or inside.startswith(("../", "/")):
            raise UnsafeError(f"{self}: leads out of {self._scheme()}//{names[0]}", hint="name a path inside of it")
        return f"{self._scheme()}//{names[0]}" + ("" if inside == "." else f"/{inside}")

    def _scheme(self) -> str:
        first = self.parts[0] if self.parts else ""
        if not first.endswith(":"):  # joined with a path of some machine, which a manifest may name
            raise UnsafeError(
                f"{'/'.join(self.parts)}: is not in the object store, but something there points at it",
                hint="copy what belongs to the checkpoint into the same folder",
            )
        return first

    def _names(self) -> tuple[str, ...]:
        return self.parts[1:] or ("",)

    def _found(self) -> ObjectInfo | None:
        return self.store.look(self.key)

    def _existing(self) -> ObjectInfo:
        found = self._found()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return found

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        return self._found() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        found = self._found()
        return found is not None and not found.is_folder

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        found = self._found()
        return found is not None and found.is_folder

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, and as time of modification a number that is another one when the object is."""
        del follow_symlinks
        found = self._existing()
        mode = stat.S_IFDIR if found.is_folder else stat.S_IFREG
        status: Any = os.stat_result
        result: os.stat_result = status((mode, 0, 0, 1, 0, 0, found.size, 0, 0, 0), {"st_mtime_ns": found.stamp})
        return result

    def iterdir(self) -> Generator[RemotePath, None, None]:
        for name in self.store.names(self.key):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """Children whose names match; patterns of several names are not known here."""
        if "/" in pattern or "**" in pattern:
            raise NotImplementedError(pattern)
        if self.is_dir():
            yield from (child for child in self.iterdir() if fnmatchcase(child.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """All files below, in few requests, whose names match."""
        for name in self.store.below(self.key):
            path = self / name
            if fnmatchcase(path.name, pattern):
                yield path

    def is_half_done(self) -> bool:
        """Whether ucp has begun to write this folder, and has not made it whole: nothing is seen in it."""
        return self.store.is_half_done(self.key)

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
        """Open for reading, as `Path.open`."""
        from ucp.storage.remote_files import RemoteRawFile

        if mode not in ("r", "rt", "rb"):
            raise io.UnsupportedOperation(f"{self}: objects are opened for reading only")
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
        """Open for the small positional reads that an index takes."""
        from ucp.storage.remote_files import RemoteIndexFile

        found = self._existing()
        if found.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        return RemoteIndexFile(self, found.size)

    def reads(self) -> RemoteReader:
        """Positional reads of any file below, for slabs."""
        from ucp.storage.remote_files import RemoteReader

        return RemoteReader(self)
