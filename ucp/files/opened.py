"""A file that is read here and there for a while, on this machine or in an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucp.errors import StorageError
from ucp.files.local import read_at
from ucp.files.paths import RemotePath

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ucp.files.remote_reading import IndexFile


class OpenedFile:
    """A file open for positional reads, until it is closed or the `with` block ends. `size` is in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._remote: IndexFile | None = None
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
