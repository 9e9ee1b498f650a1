"""Files written by `torch.save`: where each tensor's bytes are, without loading them and without torch.

The file is a zip archive of uncompressed entries: `<prefix>/data.pkl` describes the objects, `<prefix>/data/<key>`
holds one storage each. The prefix is chosen by the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.containers.crc32 import crc32
from ucp.containers.inert import TensorRef
from ucp.containers.pickle_reader import LoadedPickle, load_pickle
from ucp.containers.zip_directory import (
    COPY_AGAIN,
    LOCAL_HEADER_BYTES,
    LOCAL_SIGNATURE,
    Read,
    ZipEntry,
    locate_payload,
    read_directory,
)
from ucp.errors import IntegrityError, NotUnderstoodError, UnsafeError
from ucp.storage.storage import PositionalFile, storage_of

_RESAVE: Final = (
    "re-save it with torch 1.6 or newer, on a machine where you trust the file: "
    "torch.save(torch.load(path, weights_only=False), new_path)"
)
_TINY: Final = 64  # bytes of a storage with a few numbers
_TINY_SPAN: Final = 512  # after a header: alignment, a tiny storage, its descriptor
_GAP: Final = 4096  # reading over a gap of this size is cheaper than a second read after it
# The first pickle of the old format is the number 0x1950a86a20f9469cfc6c.
_LEGACY_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class TorchFile:
    """Index of one torch file. The constructor reads only the zip directory; `tree` reads the pickle.

    `start` and `stop` (bytes, half-open) select an archive inside a larger file; all positions stay absolute.
    """

    def __init__(self, path: Path, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        self._where = str(path)
        self._payloads: dict[str, int] = {}
        self._tiny: dict[str, bytes] = {}
        with _open(path) as opened:
            self.size = opened.size
            stop = opened.size if stop is None else stop
            if not 0 <= start <= stop <= opened.size:
                raise IntegrityError(
                    f"{path}: bytes [{start}, {stop}) are needed, but it has {opened.size}", hint=COPY_AGAIN
                )
            _check_is_zip(opened.read, start, stop, self._where)
            self.entries = read_directory(opened.read, start, stop, self._where)
        self._prefix = self._find_prefix()

    @cached_property
    def byteorder(self) -> str:
        """`little` or `big`; files of older torch versions do not record it and are little-endian."""
        return self._read_start()[1]

    @property
    def tree(self) -> Any:
        """The inert tree of the file's objects."""
        return self.pickle.tree

    @cached_property
    def pickle(self) -> LoadedPickle:
        """The inert tree, with the names of all globals in the file."""
        data, byteorder = self._read_start()
        if byteorder != "little":
            raise NotUnderstoodError(
                f"{self.path}: was written on a {byteorder}-endian machine",
                hint="load and save it again with torch on a little-endian machine",
            )
        return load_pickle(data, self._where)

    def payload(self, entry: ZipEntry) -> int:
        """Byte offset in the file of the entry's data."""
        known = self._payloads.get(entry.name)
        if known is None:
            self._locate_all()
            known = self._payloads[entry.name]
        return known

    def position(self, ref: TensorRef) -> int:
        """Byte offset in the file of the first element of `ref`; checks that all elements are inside its storage."""
        storage = ref.storage
        entry = self.entries.get(f"{self._prefix}/data/{storage.key}")
        if entry is None:
            raise self._damaged(f"storage {storage.key!r} is not in the file")
        if storage.nbytes != entry.size:
            raise self._damaged(f"storage {storage.key!r} should have {storage.nbytes} bytes, but has {entry.size}")
        if not entry.stored:
            raise NotUnderstoodError(f"{self.path}: zip entry {entry.name!r} is compressed", hint=_RESAVE)
        start = self.payload(entry)
        if 0 in ref.shape:
            return start
        last = ref.offset
        for length, stride in zip(ref.shape, ref.strides, strict=True):
            last += (length - 1) * stride
        if (last + 1) * ref.dtype.itemsize > entry.size:
            raise self._damaged(
                f"a tensor of {ref.dtype} {ref.shape} at element {ref.offset} with strides {ref.strides} "
                f"extends beyond storage {storage.key!r} of {entry.size} bytes"
            )
        return start + ref.offset * ref.dtype.itemsize

    def crc(self, ref: TensorRef) -> int:
        """The recorded CRC-32 of a tensor's storage; 0 if torch computed none."""
        entry = self.entries.get(f"{self._prefix}/data/{ref.storage.key}")
        return 0 if entry is None else entry.crc

    def number(self, ref: TensorRef) -> bytes | None:
        """The bytes of a one-element tensor, if they were read together with the headers."""
        at = self.position(ref)
        data = self._tiny.get(f"{self._prefix}/data/{ref.storage.key}")
        if data is None or ref.numel != 1:
            return None
        skip = at - self._payloads[f"{self._prefix}/data/{ref.storage.key}"]
        return data[skip : skip + ref.dtype.itemsize]

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self.path}: {what}", hint=COPY_AGAIN)

    def _find_prefix(self) -> str:
        """The part of entry names before `/data.pkl`, taken from the first entry as torch does."""
        first = next(iter(self.entries), "")
        prefix = first.split("/", 1)[0]
        if f"{prefix}/constants.pkl" in self.entries or any(
            name.startswith(f"{prefix}/code/") for name in self.entries
        ):
            raise NotUnderstoodError(
                f"{self.path}: is a TorchScript program, not a checkpoint",
                hint="load it with torch.jit.load and save its state_dict() with torch.save",
            )
        if f"{prefix}/data.pkl" not in self.entries:
            raise NotUnderstoodError(
                f"{self.path}: is a zip archive, but was not written by torch.save (it has no data.pkl)"
            )
        return prefix

    def _read_start(self) -> tuple[bytes, str]:
        """The bytes of data.pkl, and the byte order."""
        pickled = self.entries[f"{self._prefix}/data.pkl"]
        order = self.entries.get(f"{self._prefix}/byteorder")
        with _open(self.path) as opened:
            data = self._read_entry(opened.read, pickled, settings.MAX_PICKLE_BYTES)
            byteorder = self._read_entry(opened.read, order, 16) if order is not None else b"little"
        return data, byteorder.decode("ascii", "replace").strip()

    def _read_entry(self, read: Read, entry: ZipEntry, limit: int) -> bytes:
        if not entry.stored:
            raise NotUnderstoodError(f"{self.path}: zip entry {entry.name!r} is compressed", hint=_RESAVE)
        if entry.size > limit:
            raise UnsafeError(f"{self.path}: zip entry {entry.name!r} has {entry.size} bytes, the limit is {limit}")
        data = read(locate_payload(read, entry, self._where), entry.size)
        # These entries decide how all others are read, so check their CRC now. torch writes 0 if it computes none.
        if entry.crc and crc32(data, 0) != entry.crc:
            raise self._damaged(f"zip entry {entry.name!r} does not have the checksum recorded in the directory")
        return data

    def _locate_all(self) -> None:
        """Read all local headers while the file is open, and the data of tiny entries next to them."""
        with _open(self.path) as opened:
            spans = list(_spans(self.entries.values()))
            opened.prefetch((start, stop - start) for start, stop, _ in spans)
            for start, stop, entries in spans:
                data = opened.read(start, stop - start)

                def read(offset: int, size: int, data: bytes = data, start: int = start) -> bytes:
                    return data[offset - start : offset - start + size]

                for entry in entries:
                    at = self._payloads[entry.name] = locate_payload(read, entry, self._where)
                    if entry.size <= _TINY and at + entry.size <= stop:
                        self._tiny[entry.name] = read(at, entry.size)


def _check_is_zip(read: Read, start: int, stop: int, where: str) -> None:
    """Raise an error that explains what the file is, if it does not start like a zip archive."""
    if stop == start:
        raise IntegrityError(f"{where}: is empty", hint=COPY_AGAIN)
    head = read(start, min(stop - start, 512))
    if head.startswith(LOCAL_SIGNATURE):
        return
    if _LEGACY_MAGIC in head[:16] or head[257:262] == b"ustar":
        raise NotUnderstoodError(f"{where}: is in the old torch format, from before torch 1.6", hint=_RESAVE)
    if len(head) < 4 and LOCAL_SIGNATURE.startswith(head):
        raise IntegrityError(f"{where}: truncated after {len(head)} bytes", hint=COPY_AGAIN)
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        raise NotUnderstoodError(f"{where}: is a bare pickle, not written by torch.save")
    if not any(head):
        raise IntegrityError(
            f"{where}: starts with {len(head)} zero bytes; its data never reached the disk", hint=COPY_AGAIN
        )
    raise NotUnderstoodError(f"{where}: was not written by torch.save (it does not start like a zip archive)")


def _spans(entries: Iterable[ZipEntry]) -> Iterator[tuple[int, int, list[ZipEntry]]]:
    """Ranges `[start, stop)` of the file that contain the local headers of some entries and all of tiny entries."""
    start = stop = 0
    held: list[ZipEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        end = entry.header_offset + LOCAL_HEADER_BYTES + len(entry.raw_name)
        if entry.size <= _TINY:
            end = max(end, min(entry.end, end + _TINY_SPAN))
        if held and entry.header_offset - stop <= _GAP:
            held.append(entry)
        else:
            if held:
                yield start, stop, held
            start, held = entry.header_offset, [entry]
        stop = end
    if held:
        yield start, stop, held


def _open(path: Path) -> PositionalFile:
    """Open a file for the time of a `with` block: an index of many ranks keeps no file open."""
    opened = storage_of(path).open(path)
    opened.prefetch_ends()
    return opened
