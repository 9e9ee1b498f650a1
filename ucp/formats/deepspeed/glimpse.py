"""A look at the first bytes of a torch file: does it hold a pickle that was read before?

torch writes the pickle as the first entry of the archive. Nothing here replaces the checks of the archive's directory:
they are made when the place of a tensor is asked for. Only the end of the file is looked at at once, so that a
truncated file is noticed before any work is done.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from ucp.files.opened import OpenedFile
from ucp.files.torchzip import TorchFile

_HEADER: Final = struct.Struct("<4s5H3L2H")  # local header of a zip entry
_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22


class Glimpse(OpenedFile):
    """A file open for the length of a `with` block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._head = b""  # what was read of the first entry
        self.saved_as = ""  # torch names the archive after the file that it first was; empty where that cannot be seen
        try:
            self._start = self._find_start()
        except BaseException:
            self.close()
            raise

    def _find_start(self) -> int:
        """Byte where the first entry's data starts, if that entry is an uncompressed data.pkl; else -1."""
        head = self.read_at_most(0, 1024)
        if len(head) < _HEADER.size:
            return -1
        signature, _, _, method, _, _, _, _, _, name_length, extra_length = _HEADER.unpack_from(head)
        name = head[_HEADER.size : _HEADER.size + name_length]
        if signature != b"PK\x03\x04" or method != 0 or not name.endswith(b"/data.pkl"):
            return -1
        self.saved_as = name.removesuffix(b"/data.pkl").decode(errors="replace")
        return _HEADER.size + int(name_length) + int(extra_length)

    def starts_with(self, pickled: bytes) -> bool:
        """Whether the archive is whole at its end and its first entry is this pickle."""
        if self._start < 0 or self.size < _END_SIZE or not pickled:
            return False
        if len(self._head) < len(pickled):
            self._head = self.read_at_most(self._start, len(pickled))
        # Pickles end with a stop mark, so one cannot be the beginning of a longer one.
        return self._head.startswith(pickled) and self.read_at_most(self.size - _END_SIZE, 4) == _END

    def pickle_of(self, archive: TorchFile) -> bytes:
        """The bytes of the pickle, to recognise it elsewhere; empty where it is not the first entry."""
        entry = next(iter(archive.entries.values()))
        if self._start < 0 or not entry.name.endswith("/data.pkl") or entry.header_offset != 0:
            return b""
        return self.read_at_most(self._start, entry.size)
