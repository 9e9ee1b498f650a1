"""Files that every thread opens for itself: the kernel reads ahead for each reader of a file on its own."""

from __future__ import annotations

import threading
from pathlib import Path

from ucp import tunables
from ucp.files.local import SourceFiles


class ThreadFiles(SourceFiles):
    """Like `SourceFiles`, with descriptors of its own in each of at most `jobs` threads."""

    def __init__(self, root: Path, jobs: int) -> None:
        super().__init__(root)
        self._share = max(4, tunables.OPEN_FILES // max(1, jobs))
        self._mine = threading.local()
        self._all: list[SourceFiles] = []
        self._new = threading.Lock()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        if self._remote is not None:  # which all threads share
            super().read_into(file, offset, target)
            return
        files: SourceFiles | None = getattr(self._mine, "files", None)
        if files is None:
            files = self._mine.files = SourceFiles(self.root, self._share)
            with self._new:
                self._all.append(files)
        files.read_into(file, offset, target)

    def close(self) -> None:
        for files in self._all:
            files.close()
