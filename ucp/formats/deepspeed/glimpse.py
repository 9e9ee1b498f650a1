"""A look at the first bytes of a torch file: does it hold a pickle that was read before?

torch writes the pickle as the first entry of the archive. Nothing here replaces the checks of the archive's directory:
they are made when the place of a tensor is asked for. Only the end of the file is looked at at once, so that a
truncated file is noticed before any work is done.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ucp.errors import StorageError
from ucp.files.local import read_at
from ucp.files.paths import RemotePath
from ucp.files.torchzip import TorchFile

if TYPE_CHECKING:
    from ucp.files.remote_reading import IndexFile

_HEADER: Final = struct.Struct("<4s5H3L2H")  # local header of a zip entry
_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22


class Glimpse:
    """A file open for the length of a `with` block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._remote: IndexFile | None = None
        self._fd = -1
        try:
            if isinstance(path, RemotePath):
                self._remote = path.indexed()
            else:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        self._size = os.fstat(self._fd).st_size if self._remote is None else self._remote.size
        try:
            self._start = self._find_start()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Glimpse:
        return self

    def __exit__(self, *_: object) -> None:
        if self._remote is None:
            os.close(self._fd)

    def _read(self, offset: int, size: int) -> bytes:
        if self._remote is not None:
            return self._remote.read_at_most(offset, size)
        try:
            return read_at(self._fd, offset, size)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot read bytes at {offset}: {error.strerror}") from error

    def _find_start(self) -> int:
        """Byte where the first entry's data starts, if that entry is an uncompressed data.pkl; else -1."""
        head = self._read(0, 1024)
        if len(head) < _HEADER.size:
            return -1
        signature, _, _, method, _, _, _, _, _, name_length, extra_length = _HEADER.unpack_from(head)
        name = head[_HEADER.size : _HEADER.size + name_length]
        if signature != b"PK\x03\x04" or method != 0 or not name.endswith(b"/data.pkl"):
            return -1
        return _HEADER.size + int(name_length) + int(extra_length)

    def starts_with(self, pickled: bytes) -> bool:
        """Whether the archive is whole at its end and its first entry is this pickle."""
        if self._start < 0 or self._size < _END_SIZE:
            return False
        if self._read(self._size - _END_SIZE, 4) != _END:
            return False
        # Pickles end with a stop mark, so one cannot be the beginning of a longer one.
        return bool(pickled) and self._read(self._start, len(pickled)) == pickled

    def pickle_of(self, archive: TorchFile) -> bytes:
        """The bytes of the pickle, to recognise it elsewhere; empty where it is not the first entry."""
        entry = next(iter(archive.entries.values()))
        if self._start < 0 or not entry.name.endswith("/data.pkl") or entry.header_offset != 0:
            return b""
        return self._read(self._start, entry.size)
