"""The directory of a zip archive, read and checked without opening any entry.

Only the form that torch writes is accepted: one volume, entries one after the other, zip64 or not. Python's zipfile
is correct too, but takes several times as long as everything else for a small file, and checks less.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

from ucp import settings
from ucp.errors import IntegrityError, UnsafeError

Read = Callable[[int, int], bytes]
"""`read(offset, size)`: exactly `size` bytes of the file from byte `offset`."""

LOCAL_SIGNATURE: Final = b"PK\x03\x04"
COPY_AGAIN: Final = "the file was copied or written incompletely; copy it again from where it is whole"

_ENTRY_SIGNATURE: Final = b"PK\x01\x02"
_END_SIGNATURE: Final = b"PK\x05\x06"
_END64_SIGNATURE: Final = b"PK\x06\x06"
_LOCATOR_SIGNATURE: Final = b"PK\x06\x07"

# signature, disk, directory's disk, entries here, entries, directory size, directory offset, comment length
END: Final = struct.Struct("<4s4H2LH")
# signature, disk, offset of the zip64 end record, disks
LOCATOR: Final = struct.Struct("<4sLQL")
# signature, size of record, versions, disk, directory's disk, entries here, entries, directory size, directory offset
END64: Final = struct.Struct("<4sQ2H2L4Q")
# signature, flags, method, crc, packed size, size, lengths of name, extra and comment, disk, header offset
_ENTRY: Final = struct.Struct("<4s4xHH4xLLLHHHH6xL")
# signature, flags, method, packed size, size, lengths of name and extra
_LOCAL: Final = struct.Struct("<4s2xHH8xLLHH")
LOCAL_HEADER_BYTES: Final = _LOCAL.size  # before the name

_LONGEST_TAIL: Final = 0xFFFF + END.size + LOCATOR.size + END64.size
_FIRST_LOOK: Final = 16 * 1024
_IN_ZIP64_16: Final = 0xFFFF
_IN_ZIP64_32: Final = 0xFFFFFFFF
_FLAG_ENCRYPTED: Final = 0x1
_FLAG_SIZES_FOLLOW: Final = 0x8
_FLAG_UTF8: Final = 0x800
_NOT_TORCH: Final = "this file was not written by torch.save; find out where it comes from"


class ZipEntry(NamedTuple):
    """One entry of the directory.

    `header_offset` is the byte of its local header in the file; `size` the bytes of its data as they lie in the file;
    `stored` says that they are not compressed; `end` is the byte that they must not pass, where the next thing starts.
    """

    name: str
    header_offset: int
    size: int
    crc: int
    stored: bool
    raw_name: bytes
    sizes_follow: bool
    end: int


_Unbounded = tuple[str, int, int, int, bool, bytes, bool]
"""The fields of a `ZipEntry` without its `end`."""


class _End(NamedTuple):
    """The end record of the archive: number of entries, and the position of the directory in the file."""

    entries: int
    start: int
    size: int


def read_directory(read: Read, start: int, stop: int, where: str) -> dict[str, ZipEntry]:
    """All entries of the archive that fills bytes [start, stop) of a file, in the directory's order."""
    look = min(_FIRST_LOOK, stop - start)
    tail = read(stop - look, look)
    at = look - END.size
    if at < 0 or tail[at : at + 4] != _END_SIGNATURE or tail[-2:] != b"\0\0":
        look = min(_LONGEST_TAIL, stop - start)
        tail = read(stop - look, look)
        at = _search_end(tail)
        if at < 0:
            raise IntegrityError(f"{where}: truncated, the zip directory at the end is missing", hint=COPY_AGAIN)
    tail_start = stop - look

    def read_again(position: int, size: int) -> bytes:
        """Like `read`, but from the tail if it contains the bytes."""
        at = position - tail_start
        return tail[at : at + size] if at >= 0 else read(position, size)

    end = _read_end(read_again, tail, tail_start, at, start, where)
    if end.size > settings.MAX_ZIP_DIRECTORY_BYTES:
        limit = settings.MAX_ZIP_DIRECTORY_BYTES
        raise UnsafeError(f"{where}: its zip directory claims {end.size} bytes, the limit is {limit}", hint=_NOT_TORCH)
    return _by_name(_parse(read_again(end.start, end.size), end, start, where), end, where)


def _search_end(tail: bytes) -> int:
    """Position in `tail` of an end record whose comment ends exactly at the end of the file; -1 if there is none."""
    at = tail.rfind(_END_SIGNATURE)
    while at >= 0:
        if at + END.size <= len(tail) and at + END.size + END.unpack_from(tail, at)[-1] == len(tail):
            return at
        at = tail.rfind(_END_SIGNATURE, 0, at)
    return -1


def _read_end(read: Read, tail: bytes, tail_start: int, at: int, start: int, where: str) -> _End:
    """The end record at byte `at` of the tail, or the zip64 record that a locator before it points at."""
    claims = END.unpack_from(tail, at)[1:7]
    position = tail_start + at
    locator_at = at - LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == _LOCATOR_SIGNATURE:
        # torch always writes the zip64 record, even if nothing needs it.
        position = start + LOCATOR.unpack_from(tail, locator_at)[2]
        if position + END64.size > tail_start + locator_at:
            raise IntegrityError(f"{where}: its zip64 directory locator points outside the file", hint=COPY_AGAIN)
        claims = _widen(read(position, END64.size), claims, where)
    disk, directory_disk, here, entries, size, offset = claims
    if disk or directory_disk or here != entries:
        raise IntegrityError(f"{where}: its zip archive claims to span several volumes", hint=COPY_AGAIN)
    if start + offset + size != position:
        raise IntegrityError(
            f"{where}: its zip directory claims bytes [{offset}, {offset + size}), but ends at byte {position - start}",
            hint=COPY_AGAIN,
        )
    return _End(entries, start + offset, size)


def _widen(record: bytes, narrow: tuple[int, ...], where: str) -> tuple[int, ...]:
    """The values of the zip64 end record; those of the 32-bit record must agree if they fit into it."""
    signature, _, _, _, *wide = END64.unpack(record)
    saturated = (_IN_ZIP64_16,) * 4 + (_IN_ZIP64_32,) * 2
    if signature != _END64_SIGNATURE or any(
        claim not in (true, full) for claim, true, full in zip(narrow, wide, saturated, strict=True)
    ):
        raise IntegrityError(f"{where}: its zip64 directory record is missing or contradicts itself", hint=COPY_AGAIN)
    return tuple(wide)


def _parse(directory: bytes, end: _End, start: int, where: str) -> list[_Unbounded]:
    """The entries, in the order of the directory."""
    fixed, total, unpack = _ENTRY.size, len(directory), _ENTRY.unpack_from
    if end.entries * fixed > total:
        raise IntegrityError(
            f"{where}: its zip directory of {total} bytes claims {end.entries} entries", hint=COPY_AGAIN
        )
    entries = []
    at = 0
    for number in range(end.entries):
        if at + fixed > total:
            raise _damaged(number, where)
        signature, flags, method, crc, packed, size, name_length, extra_length, rest, disk, offset = unpack(
            directory, at
        )
        extra_at = at + fixed + name_length
        raw_name = directory[at + fixed : extra_at]
        at = extra_at + extra_length + rest
        if signature != _ENTRY_SIGNATURE or at > total or disk or flags & _FLAG_ENCRYPTED or not raw_name:
            raise _damaged(number, where)
        if _IN_ZIP64_32 in (packed, size, offset):
            extra = directory[extra_at : extra_at + extra_length]
            size, packed, offset = _zip64_values(extra, size, packed, offset, number, where)
        if method == 0 and packed != size:
            raise _damaged(number, where)
        try:
            name = raw_name.decode("utf-8" if flags & _FLAG_UTF8 else "cp437")
        except UnicodeDecodeError:
            raise _damaged(number, where) from None
        follow = flags & _FLAG_SIZES_FOLLOW != 0
        entries.append((name, start + offset, packed, crc, method == 0, raw_name, follow))
    if at != total:
        raise IntegrityError(f"{where}: its zip directory has {total - at} bytes too many", hint=COPY_AGAIN)
    return entries


def _damaged(number: int, where: str) -> IntegrityError:
    return IntegrityError(f"{where}: entry {number} of its zip directory is damaged", hint=COPY_AGAIN)


def _zip64_values(extra: bytes, size: int, packed: int, offset: int, number: int, where: str) -> tuple[int, int, int]:
    """Replace values that do not fit into 32 bits by those of the zip64 extra field, which are in this order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            if at + 4 + length > len(extra) or len(wide) < (size, packed, offset).count(_IN_ZIP64_32):
                break
            size, packed, offset = (wide.pop(0) if n == _IN_ZIP64_32 else n for n in (size, packed, offset))
            return size, packed, offset
        at += 4 + length
    raise _damaged(number, where)


def _by_name(entries: list[_Unbounded], end: _End, where: str) -> dict[str, ZipEntry]:
    """The entries by name, each with its `end`; refuses duplicate names and entries that share bytes (zip bombs)."""
    offsets = sorted([entry[1] for entry in entries])
    offsets.append(end.start)
    following = dict(pairwise(offsets))
    header_bytes = _LOCAL.size
    bounded: dict[str, ZipEntry] = {}
    for entry in entries:
        name, header_offset, size, _, _, raw_name, _ = entry
        limit = following[header_offset]
        if header_offset + header_bytes + len(raw_name) + size > limit:
            if limit == end.start or header_offset + size > end.start:
                raise IntegrityError(f"{where}: zip entry {name!r} extends beyond the archive's data", hint=COPY_AGAIN)
            raise UnsafeError(f"{where}: zip entry {name!r} overlaps another", hint=_NOT_TORCH)
        bounded[name] = ZipEntry._make((*entry, limit))
    if len(following) != len(entries):
        raise UnsafeError(f"{where}: two of its zip entries overlap", hint=_NOT_TORCH)
    if len(bounded) != len(entries):
        twice, _ = Counter(entry[0] for entry in entries).most_common(1)[0]
        raise UnsafeError(f"{where}: zip entry {twice!r} appears twice", hint=_NOT_TORCH)
    return bounded


def locate_payload(read: Read, entry: ZipEntry, where: str) -> int:
    """Byte offset in the file of the entry's data; checks its local header against the directory."""
    length = len(entry.raw_name)
    header = read(entry.header_offset, _LOCAL.size + length)
    signature, flags, method, packed, size, name_length, extra_length = _LOCAL.unpack_from(header)
    if signature != LOCAL_SIGNATURE or name_length != length or header[_LOCAL.size :] != entry.raw_name:
        raise IntegrityError(
            f"{where}: zip entry {entry.name!r} is not at the position given in the directory", hint=COPY_AGAIN
        )
    follow = flags & _FLAG_SIZES_FOLLOW != 0
    claims_size = not follow and _IN_ZIP64_32 not in (packed, size)
    if (method == 0) is not entry.stored or follow is not entry.sizes_follow or (claims_size and packed != entry.size):
        raise IntegrityError(f"{where}: zip entry {entry.name!r} contradicts the directory", hint=COPY_AGAIN)
    payload: int = entry.header_offset + _LOCAL.size + length + extra_length
    if payload + entry.size > entry.end:
        raise IntegrityError(f"{where}: the data of zip entry {entry.name!r} overlaps the next entry", hint=COPY_AGAIN)
    return payload
