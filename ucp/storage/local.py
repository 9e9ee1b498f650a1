"""Positional reads and writes on local files, with a bounded set of open descriptors shared by all threads.

A file that is read here and there for a while, on this machine or in an object store.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from io import RawIOBase
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final

from ucp import settings
from ucp.core.checkpoint import COMPUTED, ComputedFiles
from ucp.errors import IntegrityError, StorageError
from ucp.storage.paths import RemotePath

if TYPE_CHECKING:
    from typing_extensions import Self

    from ucp.storage.remote_files import RemoteIndexFile


_PR_SET_PDEATHSIG: Final = 1
_MAX_VECTORS: Final = 1024  # that Linux takes in one call


class SourceFiles:
    """Read-only access to the files below a checkpoint's root. Thread-safe; closes descriptors long unused."""

    def __init__(self, root: Path, keep: int | None = None, computed: ComputedFiles | None = None) -> None:
        """`keep` is how many descriptors stay open (`MAX_OPEN_FILES`); `computed` has the files that do not exist."""
        self.root = root
        self.computed = computed
        self._keep = keep
        self._remote = root.reads() if isinstance(root, RemotePath) else None
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _SourceDescriptor] = OrderedDict()

    @property
    def is_remote(self) -> bool:
        return self._remote is not None

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `file` at byte `offset`; a file that ends too early is an integrity error."""
        if self.computed is not None and file.startswith(COMPUTED):
            self.computed.read_into(file, offset, target)
        elif self._remote is not None:
            self._remote.read_into(file, offset, target)
        else:
            self._read(file, offset, [target], len(target))

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        """Fill one target after the other, `nbytes` bytes in all, from `file`, beginning at byte `offset`."""
        if len(targets) == 1:
            self.read_into(file, offset, targets[0])
        elif self._remote is not None or (self.computed is not None and file.startswith(COMPUTED)):
            data, at = memoryview(self.read(file, offset, nbytes)), 0
            for target in targets:
                target[:] = data[at : at + len(target)]
                at += len(target)
        elif len(targets) <= _MAX_VECTORS:
            self._read(file, offset, targets, nbytes)
        else:
            for first in range(0, len(targets), _MAX_VECTORS):
                some = targets[first : first + _MAX_VECTORS]
                nbytes = sum(map(len, some))
                self._read(file, offset, some, nbytes)
                offset += nbytes

    def _read(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        handle = self._acquire(file)
        try:
            done = os.preadv(handle.fd, targets, offset)
            while done < nbytes:
                got = os.preadv(handle.fd, list(_skip_bytes(targets, done)), offset + done) if done else 0
                if got == 0:
                    raise IntegrityError(
                        f"{self.root / file}: ends at byte {offset + done}, but bytes"
                        f" [{offset}, {offset + nbytes}) are needed",
                        hint="the file is truncated or was changed while it was read; restore it and try again",
                    )
                done += got
        except OSError as error:
            raise self._cannot_read(file, offset, error) from error
        finally:
            self._release(handle)

    def read(self, file: str, offset: int, size: int) -> bytes:
        """`size` bytes of `file` from byte `offset`."""
        if self._remote is None and not file.startswith(COMPUTED):
            found = self._read_small(file, offset, size)
            if len(found) == size:
                return found
        data = bytearray(size)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)

    def _read_small(self, file: str, offset: int, size: int) -> bytes:
        """At most `size` bytes, in one call: fewer where the file ends, or where the system pleases."""
        handle = self._acquire(file)
        try:
            return os.pread(handle.fd, size, offset)
        except OSError as error:
            raise self._cannot_read(file, offset, error) from error
        finally:
            self._release(handle)

    def _cannot_read(self, file: str, offset: int, error: OSError) -> StorageError:
        return StorageError(f"{self.root / file}: cannot read bytes at {offset}: {error.strerror}")

    def close(self) -> None:
        with self._lock:
            for handle in self._open.values():
                os.close(handle.fd)
            self._open.clear()

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self, file: str) -> _SourceDescriptor:
        with self._lock:
            handle = self._open.get(file)
            if handle is None:
                handle = self._open[file] = _SourceDescriptor(_open_for_reading(self.root / file))
                handle.users += 1
                self._evict()  # not this one, which is in use now
            else:
                self._open.move_to_end(file)
                handle.users += 1
            return handle

    def _release(self, handle: _SourceDescriptor) -> None:
        with self._lock:
            handle.users -= 1

    def _evict(self) -> None:
        excess = len(self._open) - (settings.MAX_OPEN_FILES if self._keep is None else self._keep)
        if excess <= 0:
            return
        idle = (file for file, handle in self._open.items() if handle.users == 0)
        for file in list(islice(idle, excess)):
            os.close(self._open.pop(file).fd)


def _skip_bytes(targets: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """What is left of the targets after `done` bytes."""
    for target in targets:
        if done < len(target):
            yield target[done:]
        done = max(0, done - len(target))


class _SourceDescriptor:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


def _open_for_reading(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error


def read_at(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes from byte `offset`, fewer only where the file ends. The system may give fewer at a time."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def positional_reader(file: IO[bytes] | RawIOBase) -> Callable[[int, int], bytes]:
    """`read(offset, size)` on an open file, wherever it is: fewer bytes only where it ends."""
    if hasattr(file, "read_at_most"):
        read: Callable[[int, int], bytes] = file.read_at_most
        return read
    fd = file.fileno()
    return lambda offset, size: read_at(fd, offset, size)


def write_all(fd: int, offset: int, data: memoryview | bytes) -> None:
    """Write all of `data` at byte `offset`, however many calls that takes. Calls end at multiples of `WRITE_BYTES`."""
    view = memoryview(data)
    done, size = 0, len(view)
    while done < size:
        some = settings.WRITE_BYTES - (offset + done) % settings.WRITE_BYTES
        done += os.pwrite(fd, view[done : done + some], offset + done)


def allocate(fd: int, size: int) -> None:
    """Give a file its size, and on file systems that can its blocks: writing into reserved blocks costs a quarter less.

    Not `os.posix_fallocate`, which where the file system cannot writes into every block.
    """
    os.ftruncate(fd, size)
    if size >= settings.PREALLOCATE_FILE_BYTES:
        _reserve(fd, size)


def make_file(path: Path, size: int, mode: int = 0o644) -> None:
    """A file of this size below folders that are made, to be filled in place; one that is there keeps its bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, flags, mode)
    try:
        allocate(fd, size)
    except OSError as error:
        raise StorageError(f"{path}: cannot get {size:,} bytes: {error.strerror}") from error
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """What the file system of a folder has room for, as far as we may use it."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as the system lets us."""
    import shutil  # which loads three decompressors

    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    try:
        fallocate = _libc().fallocate64
    except (OSError, AttributeError):  # no Linux
        return
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0 and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that forked it ends."""
    parent = os.getppid()
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # it was too late


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class RandomAccessFile:
    """A file open for positional reads, until it is closed or the `with` block ends. `size` is in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._remote: RemoteIndexFile | None = None
        self._fd = -1
        try:
            if isinstance(path, RemotePath):
                self._remote = path.indexed()
            else:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self._fd).st_size if self._remote is None else self._remote.size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._remote is None:
            os.close(self._fd)

    def read_at_most(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`, fewer where the file ends."""
        if self._remote is not None:
            return self._remote.read_at_most(offset, size)
        try:
            return read_at(self._fd, offset, size)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read bytes at {offset}: {error.strerror}") from error
