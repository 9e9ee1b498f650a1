"""The storage protocol: what readers of checkpoints need of a place that holds files.

A storage is chosen by the type of a path (`storage_of`), and imported when it is first used, so that a command that
stays on this machine does not import the client of an object store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ucp.storage.paths import RemotePath

if TYPE_CHECKING:
    from typing_extensions import Self


class FolderEntry(Protocol):
    """A name in a folder, like `os.DirEntry`."""

    @property
    def name(self) -> str: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def stat(self) -> os.stat_result: ...


class RangeReader(Protocol):
    """Positional reads of the files below one folder, given by relative path. Thread-safe."""

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from byte `offset` on; a file that ends too early is an integrity error."""

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        """Fill one target after the other, `nbytes` bytes in all, with consecutive bytes from `offset` on."""

    def read(self, file: str, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset` on."""

    def close(self) -> None:
        """Release what is open."""
        return


class PositionalFile(Protocol):
    """One open file of `size` bytes. Closed at the end of a `with` block."""

    size: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset` on; a file that ends earlier is an integrity error."""

    def read_at_most(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset` on, fewer only if the file ends."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Byte ranges `(offset, length)` will be read soon."""
        del ranges

    def prefetch_ends(self) -> None:
        """The first and the last bytes will be read soon, then those of the next files in the folder."""
        return

    def close(self) -> None:
        """Close the file."""
        return


class Storage(Protocol):
    """A place that holds files. Paths are those that `parse_path` returns."""

    is_remote: bool  # over connections, which forked processes cannot share

    def scan(self, folder: Path) -> AbstractContextManager[Iterable[FolderEntry]]:
        """The entries of a folder, like `os.scandir`."""

    def list(self, folder: Path) -> Iterator[tuple[str, int]]:
        """Every file below a folder, as its relative path and its size in bytes."""

    def open(self, path: Path) -> PositionalFile:
        """Open one file for a few small reads."""

    def read_ranges(self, root: Path, max_open: int | None = None) -> RangeReader:
        """Read ranges of many files; at most `max_open` stay open, if the storage opens files at all."""

    def is_unfinished(self, folder: Path) -> bool:
        """Whether ucp has started to write this folder and has not finished: its contents are hidden."""


def storage_of(path: Path) -> Storage:
    """The storage that a path belongs to."""
    if isinstance(path, RemotePath):
        from ucp.storage.remote_files import REMOTE

        return REMOTE
    from ucp.storage.local import LOCAL

    return LOCAL
