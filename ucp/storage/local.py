"""Positional reads and writes on local files, and the files of a checkpoint wherever they are."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from io import RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ucp import settings
from ucp.core.checkpoint import COMPUTED, ComputedFiles
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UnsafeError, storage_errors
from ucp.storage.storage import FolderEntry, PositionalFile, storage_of

if TYPE_CHECKING:
    from typing_extensions import Self

_PR_SET_PDEATHSIG: Final = 1
_NOBODY: Final = 65534
_MAX_POINTER_BYTES: Final = 4096
_MAX_VECTORS: Final = 1024  # buffers per `preadv` (IOV_MAX of Linux)


class SourceFiles:
    """Read-only access to the files of a checkpoint, wherever they are. Thread-safe."""

    def __init__(self, root: Path, max_open: int | None = None, computed: ComputedFiles | None = None) -> None:
        """`computed` are files that exist only in memory; the others are below `root`."""
        self.root = root
        self.computed = computed
        storage = storage_of(root)
        self.is_remote = storage.is_remote
        self._reader = storage.read_ranges(root, max_open)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `file` at byte `offset`; a file that ends too early is an integrity error."""
        if self.computed is not None and file.startswith(COMPUTED):
            self.computed.read_into(file, offset, target)
        else:
            self._reader.read_into(file, offset, target)

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        """Fill one target after the other, `nbytes` bytes in all, with consecutive bytes of `file` from `offset` on."""
        if len(targets) == 1:
            self.read_into(file, offset, targets[0])
        elif self.computed is not None and file.startswith(COMPUTED):
            scatter_bytes(self.read(file, offset, nbytes), targets)
        else:
            self._reader.scatter(file, offset, targets, nbytes)

    def read(self, file: str, offset: int, size: int) -> bytes:
        """`size` bytes of `file` from byte `offset`."""
        if not file.startswith(COMPUTED):
            return self._reader.read(file, offset, size)
        data = bytearray(size)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close all open files; the next read opens them again."""
        self._reader.close()

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scatter_bytes(data: bytes, targets: Iterable[memoryview]) -> None:
    """Copy consecutive bytes of `data` into one target after the other."""
    view, start = memoryview(data), 0
    for target in targets:
        target[:] = view[start : start + len(target)]
        start += len(target)


class RandomAccessFile:
    """A local file or an object, open for positional reads. `size` is in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = storage_of(path).open(path)
        self.size = self._file.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read_at_most(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`, fewer only if the file ends."""
        return self._file.read_at_most(offset, size)


class LocalStorage:
    """The file systems of this machine; a `Storage`. A folder appears when it is complete, so none is unfinished."""

    is_remote = False

    def scan(self, folder: Path) -> AbstractContextManager[Iterable[FolderEntry]]:
        return os.scandir(folder)

    def list(self, folder: Path) -> Iterator[tuple[str, int]]:
        for base, _, names in os.walk(folder):
            for name in sorted(names):
                file = Path(base) / name
                yield file.relative_to(folder).as_posix(), file.stat().st_size

    def open(self, path: Path) -> LocalFile:
        return LocalFile(path)

    def read_ranges(self, root: Path, max_open: int | None = None) -> LocalReader:
        return LocalReader(root, max_open)

    def is_unfinished(self, folder: Path) -> bool:
        del folder
        return False


LOCAL: Final = LocalStorage()


class LocalFile(PositionalFile):
    """A local file, open for positional reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_for_reading(path)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        data = self.read_at_most(offset, size)
        if len(data) < size:
            raise IntegrityError(
                f"{self.path}: ends at byte {offset + len(data)}, but {size} bytes at {offset} are needed",
                hint="the file was copied or written incompletely; copy it again from where it is whole",
            )
        return data

    def read_at_most(self, offset: int, size: int) -> bytes:
        try:
            return read_at(self._fd, offset, size)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read bytes at {offset}: {error.strerror}") from error


class LocalReader:
    """Positional reads of local files. Keeps files open, and closes the least recently used. Thread-safe."""

    def __init__(self, root: Path, max_open: int | None = None) -> None:
        """`max_open` files stay open; the default is `MAX_OPEN_FILES`."""
        self.root = root
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _SourceDescriptor] = OrderedDict()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        self._read(file, offset, [target], len(target))

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        if len(targets) <= _MAX_VECTORS:
            self._read(file, offset, targets, nbytes)
            return
        for first in range(0, len(targets), _MAX_VECTORS):
            some = targets[first : first + _MAX_VECTORS]
            nbytes = sum(map(len, some))
            self._read(file, offset, some, nbytes)
            offset += nbytes

    def read(self, file: str, offset: int, size: int) -> bytes:
        handle = self._acquire(file)
        try:
            data = os.pread(handle.fd, size, offset)
        except OSError as error:
            raise self._cannot_read(file, offset, error) from error
        finally:
            self._release(handle)
        if len(data) == size:
            return data
        block = bytearray(size)  # the system call was cut short, or the file ends
        self._read(file, offset, [memoryview(block)], size)
        return bytes(block)

    def _read(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        handle = self._acquire(file)
        try:
            done = os.preadv(handle.fd, targets, offset)
            while done < nbytes:
                count = os.preadv(handle.fd, list(_skip_bytes(targets, done)), offset + done) if done else 0
                if count == 0:
                    raise IntegrityError(
                        f"{self.root / file}: ends at byte {offset + done}, but bytes"
                        f" [{offset}, {offset + nbytes}) are needed",
                        hint="the file is truncated or was changed while it was read; restore it and try again",
                    )
                done += count
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

    def _acquire(self, file: str) -> _SourceDescriptor:
        with self._lock:
            handle = self._open.get(file)
            if handle is not None:
                self._open.move_to_end(file)
                handle.users += 1
                return handle
            handle = self._open[file] = _SourceDescriptor(_open_for_reading(self.root / file), users=1)
            excess = len(self._open) - (settings.MAX_OPEN_FILES if self._max_open is None else self._max_open)
            if excess > 0:
                idle = (name for name, other in self._open.items() if other.users == 0)
                for name in list(islice(idle, excess)):
                    os.close(self._open.pop(name).fd)
            return handle

    def _release(self, handle: _SourceDescriptor) -> None:
        with self._lock:
            handle.users -= 1


@dataclass(slots=True)
class _SourceDescriptor:
    fd: int
    users: int


def _skip_bytes(targets: Sequence[memoryview], count: int) -> Iterator[memoryview]:
    """The targets without their first `count` bytes."""
    for target in targets:
        if count < len(target):
            yield target[count:]
        count = max(0, count - len(target))


def _open_for_reading(path: Path) -> int:
    try:
        return open_regular(path)
    except SpecialFileError:
        raise NotUnderstoodError(f"{path}: is not a file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error


class SpecialFileError(OSError):
    """A pipe, socket, device or folder in the place of a regular file."""


def open_regular(path: str | Path, flags: int = 0) -> int:
    """A descriptor of a regular file, for reading. A pipe or a device is an OSError: reading could block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SpecialFileError(errno.EINVAL, "is not a regular file", str(path))
    return fd


def open_binary(path: Path) -> IO[bytes]:
    """A regular file or an object of a store, open for reading without a buffer."""
    if storage_of(path).is_remote:
        return path.open("rb", buffering=0)
    return open(path, "rb", buffering=0, opener=open_regular)


def read_pointer(path: Path) -> str | None:
    """The content of a file that names the newest step, such as `latest`; None if there is none.

    Everything but a name, and a newline after it, is an error: a crash may have left an empty file, or zeros.
    """
    if not (path.exists() or path.is_symlink()):
        return None
    try:
        with open_binary(path) as file:
            data = file.read(_MAX_POINTER_BYTES)
    except (SpecialFileError, FileNotFoundError):
        problem = "is not a regular file"
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    else:
        text = data.decode("utf-8", "replace").removesuffix("\n")
        if text and text == text.strip() and text.isprintable() and len(data) < _MAX_POINTER_BYTES:
            return text
        problem = f"contains {data[:40]!r}" if data else "is empty"
    raise InconsistentError(
        f"{path}: should name a step, but {problem}", hint="choose a step with --tag, or write its name into the file"
    )


def newer_steps(step: Path) -> list[Path]:
    """Folders next to a step folder whose names have a larger number after the same word."""
    word = step.name.rstrip("0123456789")
    number = step.name[len(word) :]
    others = [path for path in step.parent.iterdir() if path.name.startswith(word)] if number else []
    numbers = {path: path.name[len(word) :] for path in others}
    return sorted(path for path, other in numbers.items() if other.isdecimal() and int(other) > int(number))


def read_at(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes from byte `offset`, fewer only if the file ends: one system call may return fewer."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def positional_reader(file: IO[bytes] | RawIOBase) -> Callable[[int, int], bytes]:
    """A function `read(offset, size)` for an open local file or object; returns fewer bytes only if the file ends."""
    if hasattr(file, "read_at_most"):
        read: Callable[[int, int], bytes] = file.read_at_most
        return read
    fd = file.fileno()
    return lambda offset, size: read_at(fd, offset, size)


def write_all(fd: int, offset: int, data: memoryview | bytes) -> None:
    """Write all of `data` at byte `offset`. System calls end at multiples of `WRITE_BYTES`."""
    view = memoryview(data)
    done, size = 0, len(view)
    while done < size:
        limit = settings.WRITE_BYTES - (offset + done) % settings.WRITE_BYTES
        done += os.pwrite(fd, view[done : done + limit], offset + done)


def make_file(path: Path, size: int, mode: int = 0o644) -> None:
    """Create a file of this size, and its folders, to be filled in place; an existing file keeps its bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, flags, mode)
    try:
        with storage_errors(path, f"cannot allocate {size:,} bytes"):
            os.ftruncate(fd, size)
            if size >= settings.PREALLOCATE_FILE_BYTES:
                _reserve(fd, size)
    finally:
        os.close(fd)


def check_own_folder(folder: Path) -> None:
    """Refuse to write into a folder that another user made, or that contains links, which would be followed."""
    status = folder.lstat()
    user = os.geteuid()
    # Root of another machine writes as this user to a shared file system.
    is_own = status.st_uid == user or (user == 0 and status.st_uid == _NOBODY)
    links = [folder] if not stat.S_ISDIR(status.st_mode) else []
    for parent, folders, files in os.walk(folder):
        links += [Path(parent, name) for name in (*folders, *files) if os.path.islink(os.path.join(parent, name))]
    if links or not is_own:
        what = f"{links[0]}: is a link or not a folder" if links else f"{folder}: belongs to another user"
        raise UnsafeError(f"{what}, and writing there could change other files", hint=f"remove {folder} and start over")


def free_bytes(folder: Path) -> int:
    """Free space of a folder's file system that this user may use."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_tree(folder: Path) -> None:
    """Remove a folder and everything in it, ignoring errors."""
    import shutil  # imports three decompressors

    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on disk."""
    for base, _, files in os.walk(folder):
        for name in files:
            sync(Path(base) / name)
        sync(Path(base))


def _reserve(fd: int, size: int) -> None:
    """Reserve the blocks of a file if the file system can: writing is then a quarter cheaper.

    Not `os.posix_fallocate`, which writes into every block if the file system cannot.
    """
    try:
        fallocate = _libc().fallocate64
    except (OSError, AttributeError):  # not Linux
        return
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0 and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that forked it ends."""
    parent = os.getppid()
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # the parent ended before the call


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
