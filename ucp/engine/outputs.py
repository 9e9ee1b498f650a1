"""The output files of one thread: positional writes, with a bounded set of open descriptors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ucp.errors import StorageError
from ucp.files.local import write_all
from ucp.model.target import OutputFile


class Outputs:
    """Files of a target, below `folder`, by number. At most `limit` are open; the longest unused is closed first."""

    def __init__(self, folder: Path, files: Sequence[OutputFile], limit: int) -> None:
        self.folder = folder
        self.files = files
        self._limit = limit
        self._open: dict[int, int] = {}  # number of the file → descriptor, longest unused first

    def path(self, number: int) -> Path:
        return self.folder / self.files[number].path

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Write all of `data` into a file at byte `offset`."""
        fd = self._descriptor(number)
        try:
            write_all(fd, offset, data)
        except OSError as error:
            raise StorageError(f"{self.path(number)}: cannot write bytes at {offset}: {error.strerror}") from error

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, number: int) -> int:
        fd = self._open.pop(number, None)
        if fd is None:
            if len(self._open) >= self._limit:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                fd = os.open(self.path(number), os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StorageError(f"{self.path(number)}: cannot be written: {error.strerror}") from error
        self._open[number] = fd
        return fd
