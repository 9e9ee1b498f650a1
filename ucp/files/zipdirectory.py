"""The directory of a zip archive, read and checked without opening any entry.

Only what torch writes is accepted: one volume, entries stored as they are, one after the other. Zip64 is understood.
Python's zipfile is correct too, but costs several times the read of a small checkpoint file and trusts more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ucp import tunables
from ucp.errors import IntegrityError, UnsafeError

Read = Callable[[int, int], bytes]
"""`read(offset, size)`: exactly `size` bytes of the file from byte `offset`."""

_END: Final = struct.Struct("<4s4H2LH")
_END64_LOCATOR: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_ENTRY: Final = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")

LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_END_SIGNATURE: Final = b"PK\x05\x06"
_LONGEST_COMMENT: Final = 0xFFFF
_FIRST_LOOK = 16 * 1024
_IN_ZIP64_16: Final = 0xFFFF
_IN_ZIP64_32: Final = 0xFFFFFFFF
_FLAG_ENCRYPTED: Final = 1
_FLAG_SIZES_FOLLOW: Final = 8
_FLAG_UTF8: Final = 0x800

COPY_AGAIN: Final = "the file was copied or written incompletely; copy it again from where it is whole"


class ZipEntry(NamedTuple):
    """One entry of the directory. `header_offset` is the byte of its local header in the file, `size` its data's bytes.

    `end` is the byte that its data must not pass: the next entry's header, or the directory.
    """

    name: str
    header_offset: int
    size: int
    crc: int
    stored: bool
    raw_name: bytes
    sizes_follow: bool
    end: int


@dataclass(frozen=True, slots=True)
class _End:
    """What the record at the end of the archive says: number of entries, and the directory's bytes in the file."""

    entries: int
    start: int
    size: int


def read_directory(read: Read, start: int, stop: int, where: str) -> dict[str, ZipEntry]:
    """All entries of the archive that fills bytes [start, stop) of a file, in the directory's order."""
    look = min(_FIRST_LOOK, stop - start)
    tail = read(stop - look, look)
    end, tail = _find_end(read, tail, start, stop, where)
    if end.size > tunables.MAX_ZIP_DIRECTORY_BYTES:
        raise UnsafeError(
            f"{where}: its zip directory claims {end.size} bytes, the limit is {tunables.MAX_ZIP_DIRECTORY_BYTES}"
        )
    tail_start = stop - len(tail)
    directory = (
        tail[end.start - tail_start : end.start - tail_start + end.size]
        if end.start >= tail_start
        else read(end.start, end.size)
    )
    entries = _parse(directory, end, start, where)
    return _bounded(entries, end, where)


def _find_end(read: Read, tail: bytes, start: int, stop: int, where: str) -> tuple[_End, bytes]:
    """The end record, and the tail of the file that was read to find it."""
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != _END_SIGNATURE or tail[-2:] != b"\0\0":
        look = min(stop - start, _LONGEST_COMMENT + _END.size + _END64_LOCATOR.size + _END64.size)
        tail = read(stop - look, look)
        at = _search_end(tail)
        if at < 0:
            raise IntegrityError(f"{where}: truncated, the zip directory at the end is missing", hint=COPY_AGAIN)
    claims = _END.unpack_from(tail, at)[1:7]
    position = stop - len(tail) + at
    locator_at = at - _END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        # torch always writes the zip64 record, also where nothing needs it.
        position = start + _END64_LOCATOR.unpack_from(tail, locator_at)[2]
        if position + _END64.size > stop - len(tail) + locator_at:
            raise IntegrityError(f"{where}: its zip64 directory locator points outside the file", hint=COPY_AGAIN)
        claims = _read_end64(read, tail, position, stop, claims, where)
    disk, directory_disk, here, entries, size, offset = claims
    if disk or directory_disk or here != entries:
        raise IntegrityError(f"{where}: its zip archive claims to span several volumes", hint=COPY_AGAIN)
    if start + offset + size != position:
        raise IntegrityError(
            f"{where}: its zip directory should lie at bytes [{offset}, {offset + size}), but ends at {position - start}",
            hint=COPY_AGAIN,
        )
    return _End(entries, start + offset, size), tail


def _search_end(tail: bytes) -> int:
    """Where in `tail` an end record starts whose comment reaches the end of the file exactly; -1 if none does."""
    at = tail.rfind(_END_SIGNATURE)
    while at >= 0:
        if at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail):
            return at
        at = tail.rfind(_END_SIGNATURE, 0, at)
    return -1


def _read_end64(
    read: Read, tail: bytes, position: int, stop: int, narrow: tuple[int, ...], where: str
) -> tuple[int, int, int, int, int, int]:
    """The claims of the zip64 end record at byte `position`; those of the narrow record must agree where they fit it."""
    at = position - (stop - len(tail))
    record = tail[at : at + _END64.size] if at >= 0 else read(position, _END64.size)
    signature, _, _, _, disk, directory_disk, here, entries, size, offset = _END64.unpack(record)
    wide = (disk, directory_disk, here, entries, size, offset)
    saturated = (_IN_ZIP64_16,) * 4 + (_IN_ZIP64_32,) * 2
    if signature != b"PK\x06\x06" or any(n not in (w, s) for n, w, s in zip(narrow, wide, saturated, strict=True)):
        raise IntegrityError(f"{where}: its zip64 directory record is missing or contradicts itself", hint=COPY_AGAIN)
    return wide


def _parse(directory: bytes, end: _End, start: int, where: str) -> list[ZipEntry]:
    if end.entries * _ENTRY.size > len(directory):
        raise IntegrityError(
            f"{where}: its zip directory of {end.size} bytes claims {end.entries} entries", hint=COPY_AGAIN
        )
    entries: list[ZipEntry] = []
    at = 0
    unpack, fixed = _ENTRY.unpack_from, _ENTRY.size
    for number in range(end.entries):
        if at + fixed > len(directory):
            raise IntegrityError(f"{where}: its zip directory ends inside entry {number}", hint=COPY_AGAIN)
        (signature, _, _, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length,
         disk, _, _, offset) = unpack(directory, at)  # fmt: skip
        name_at = at + fixed
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if signature != b"PK\x01\x02" or at > len(directory):
            raise IntegrityError(f"{where}: entry {number} of its zip directory is damaged", hint=COPY_AGAIN)
        raw_name = directory[name_at:extra_at]
        if packed == _IN_ZIP64_32 or size == _IN_ZIP64_32 or offset == _IN_ZIP64_32:
            extra = directory[extra_at : extra_at + extra_length]
            size, packed, offset = _zip64_values(extra, size, packed, offset, number, where)
        name = _decode(raw_name, flags, number, where)
        if flags & _FLAG_ENCRYPTED or disk:
            raise IntegrityError(f"{where}: zip entry {name!r} is encrypted or on another volume", hint=COPY_AGAIN)
        stored = method == 0
        if stored and packed != size:
            raise IntegrityError(
                f"{where}: zip entry {name!r} is stored, but claims {packed} bytes for {size}", hint=COPY_AGAIN
            )
        entries.append(
            ZipEntry(name, start + offset, packed, crc, stored, raw_name, bool(flags & _FLAG_SIZES_FOLLOW), 0)
        )
    if at != len(directory):
        raise IntegrityError(f"{where}: its zip directory holds {len(directory) - at} bytes too many", hint=COPY_AGAIN)
    return entries


def _zip64_values(extra: bytes, size: int, packed: int, offset: int, number: int, where: str) -> tuple[int, int, int]:
    """Replace the values that do not fit 32 bits by those of the zip64 extra field, in its fixed order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            values = list(struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            needed = (size, packed, offset).count(_IN_ZIP64_32)
            if at + 4 + length > len(extra) or len(values) < needed:
                break
            wide = iter(value for (value,) in values)
            size, packed, offset = (next(wide) if value == _IN_ZIP64_32 else value for value in (size, packed, offset))
            return size, packed, offset
        at += 4 + length
    raise IntegrityError(f"{where}: entry {number} of its zip directory lacks its zip64 sizes", hint=COPY_AGAIN)


def _decode(raw: bytes, flags: int, number: int, where: str) -> str:
    try:
        name = raw.decode("utf-8" if flags & _FLAG_UTF8 else "cp437")
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{where}: the name of zip entry {number} is damaged", hint=COPY_AGAIN) from error
    if not name or "\0" in name:
        raise IntegrityError(f"{where}: the name of zip entry {number} is damaged", hint=COPY_AGAIN)
    return name


def _bounded(entries: list[ZipEntry], end: _End, where: str) -> dict[str, ZipEntry]:
    """The entries by name, each with its `end`; refuses duplicate names and entries that share bytes (zip bombs)."""
    by_offset = sorted(range(len(entries)), key=lambda index: entries[index].header_offset)
    limit = end.start
    for index in reversed(by_offset):
        entry = entries[index]
        if entry.header_offset + _LOCAL.size + len(entry.raw_name) + entry.size > limit:
            if limit == end.start:
                raise IntegrityError(
                    f"{where}: zip entry {entry.name!r} reaches past the archive's data", hint=COPY_AGAIN
                )
            raise UnsafeError(
                f"{where}: zip entry {entry.name!r} overlaps another entry",
                hint="this file was not written by torch.save",
            )
        entries[index] = entry._replace(end=limit)
        limit = entry.header_offset
    result = {entry.name: entry for entry in entries}
    if len(result) != len(entries):
        seen: set[str] = set()
        twice = next(entry.name for entry in entries if entry.name in seen or seen.add(entry.name))  # type: ignore[func-returns-value]
        raise UnsafeError(f"{where}: zip entry {twice!r} appears twice", hint="this file was not written by torch.save")
    return result


def locate_payload(read: Read, entry: ZipEntry, where: str) -> int:
    """Byte of the file where the entry's data starts, after a check of its local header against the directory."""
    header = read(entry.header_offset, _LOCAL.size + len(entry.raw_name))
    signature, _, flags, method, _, _, _, packed, size, name_length, extra_length = _LOCAL.unpack_from(header)
    if signature != LOCAL_SIGNATURE or header[_LOCAL.size :] != entry.raw_name or name_length != len(entry.raw_name):
        raise IntegrityError(f"{where}: zip entry {entry.name!r} is not where the directory says", hint=COPY_AGAIN)
    if (method == 0) is not entry.stored or bool(flags & _FLAG_SIZES_FOLLOW) is not entry.sizes_follow:
        raise IntegrityError(
            f"{where}: the header of zip entry {entry.name!r} contradicts the directory", hint=COPY_AGAIN
        )
    if not entry.sizes_follow and _IN_ZIP64_32 not in (packed, size) and (packed, size)[0] != entry.size:
        raise IntegrityError(
            f"{where}: the header of zip entry {entry.name!r} contradicts the directory", hint=COPY_AGAIN
        )
    payload = entry.header_offset + _LOCAL.size + name_length + int(extra_length)
    if payload + entry.size > entry.end:
        raise IntegrityError(
            f"{where}: the data of zip entry {entry.name!r} reaches into the next entry", hint=COPY_AGAIN
        )
    return payload
