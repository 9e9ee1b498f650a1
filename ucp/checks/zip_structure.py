"""The zip structure of a torch file: every byte of the archive that is not data of a member.

Loaders ignore most of these bytes (alignment, dates, data descriptors), so damage to them breaks nothing. But if a bit
flipped there, the storage flips bits. An archive contains most facts twice, in its directory and next to each member,
and its writer does the rest in the same way for every member: any disagreement is damage.
"""

from __future__ import annotations

import struct
from collections import Counter, namedtuple
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ucp.containers.torch_file import TorchFile
from ucp.containers.zip_directory import LOCATOR, Read, ZipEntry

_ALIGNMENT_FIELD: Final = 0x4246  # "FB", with which torch aligns the data of each member
_ZIP64_FIELD: Final = 1
_MAX_32_BIT: Final = 0xFFFFFFFF
_ZIP64_VERSIONS: Final = (0x031E, 45)  # written by torch; other writers write the same number twice

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_END_BYTES: Final = 22
_END64: Final = struct.Struct("<4sQ2H")  # signature, size of the rest, versions
_END64_BYTES: Final = 56


# The header before the data of a member, and an entry of the central directory.
_ZipLocalHeader = namedtuple(
    "_ZipLocalHeader", "signature needed flags method time date crc packed size name_length extra_length"
)
_ZipDirectoryHeader = namedtuple(
    "_ZipDirectoryHeader",
    "signature made needed flags method time date crc packed size name_length extra_length comment_length disk"
    " internal external offset",
)


class ZipDefect(NamedTuple):
    """Bytes `[start, stop)` of the file that contradict the rest of the archive."""

    start: int
    stop: int
    what: str


@dataclass(slots=True)
class _WriterConventions:
    """Values that a writer uses throughout an archive; the members that deviate from the majority are defects."""

    observed: dict[str, list[tuple[Hashable, ZipDefect]]] = field(default_factory=dict)

    def add(self, topic: str, value: Hashable, defect: ZipDefect) -> None:
        """Record the value of a member, and the defect to report if others have another value."""
        self.observed.setdefault(topic, []).append((value, defect))

    def defects(self) -> Iterator[ZipDefect]:
        for values in self.observed.values():
            usual = Counter(value for value, _ in values).most_common(1)[0][0]
            yield from (defect for value, defect in values if value != usual)


def structure_bytes(archive: TorchFile, start: int, stop: int) -> int:
    """Number of bytes of the archive at `[start, stop)` that are not data of a member."""
    return stop - start - sum(entry.size for entry in archive.entries.values())


def structure_defects(read: Read, archive: TorchFile, start: int, stop: int) -> Iterator[ZipDefect]:
    """All defects in the structure of the archive at bytes `[start, stop)`, which could be opened."""
    entries = list(archive.entries.values())
    directory = max((entry.end for entry in entries), default=start)
    tail = read(directory, stop - directory)
    conventions = _WriterConventions()
    centrals, end = _centrals(tail, entries)
    for entry, (central, position) in zip(entries, centrals, strict=True):
        yield from _check_central(entry, central, directory + position, tail, position, start, conventions)
    yield from _check_end(tail, end, directory)
    known = {entry.header_offset: (entry, central) for entry, (central, _) in zip(entries, centrals, strict=True)}
    previous: ZipEntry | None = None
    at = start
    for offset in sorted(known):
        entry, central = known[offset]
        payload = archive.payload(entry)
        between = read(at, payload - at)
        yield from _check_trailer(previous, between[: offset - at], at)
        yield from _check_local(entry, central, between[offset - at :], offset, start, conventions)
        previous, at = entry, payload + entry.size
    yield from _check_trailer(previous, read(at, directory - at), at)
    yield from conventions.defects()


def _centrals(tail: bytes, entries: Sequence[ZipEntry]) -> tuple[list[tuple[_ZipDirectoryHeader, int]], int]:
    """The entries of the directory with their offsets in `tail`, and the offset of their end."""
    found: list[tuple[_ZipDirectoryHeader, int]] = []
    at = 0
    for _ in entries:
        central = _ZipDirectoryHeader._make(_CENTRAL.unpack_from(tail, at))
        found.append((central, at))
        at += _CENTRAL.size + central.name_length + central.extra_length + central.comment_length
    return found, at


def _check_central(
    entry: ZipEntry,
    central: _ZipDirectoryHeader,
    position: int,
    tail: bytes,
    at: int,
    start: int,
    conventions: _WriterConventions,
) -> Iterator[ZipDefect]:
    odd = ZipDefect(position, position + _CENTRAL.size, f"the directory's entry of {entry.name}")
    conventions.add("central", (central.made, central.needed, central.internal, central.external), odd)
    conventions.add("flags of filled members" if entry.size else "flags of empty members", central.flags, odd)
    extra_at = at + _CENTRAL.size + central.name_length
    extra = tail[extra_at : extra_at + central.extra_length]
    yield from _check_extra(entry, extra, position - at + extra_at, start, conventions)


def _check_local(
    entry: ZipEntry,
    central: _ZipDirectoryHeader,
    header: bytes,
    position: int,
    start: int,
    conventions: _WriterConventions,
) -> Iterator[ZipDefect]:
    local = _ZipLocalHeader._make(_LOCAL.unpack_from(header))
    in_header = (local.needed, local.flags, local.method, local.time, local.date)
    in_directory = (central.needed, central.flags, central.method, central.time, central.date)
    if in_header != in_directory or local.crc not in ((0, entry.crc) if entry.sizes_follow else (entry.crc,)):
        yield ZipDefect(position, position + _LOCAL.size, f"the header of {entry.name}")
    elif not entry.sizes_follow:
        if local.packed != local.size or local.size not in (min(entry.size, _MAX_32_BIT), _MAX_32_BIT):
            yield ZipDefect(position, position + _LOCAL.size, f"the sizes in the header of {entry.name}")
    else:
        odd = ZipDefect(position, position + _LOCAL.size, f"the sizes or CRC in the header of {entry.name}")
        sizes = tuple(_size_form(size, entry.size) for size in (local.packed, local.size))
        conventions.add("sizes in headers", (sizes, local.crc == 0) if sizes[0] == sizes[1] else entry.name, odd)
    extra_at = _LOCAL.size + local.name_length
    yield from _check_extra(entry, header[extra_at:], position + extra_at, start, conventions)


def _size_form(recorded: int, actual: int) -> str:
    """How a header records the size of its member: after the data, here (or in the zip64 field if too large)."""
    if recorded == 0:
        return "follows"
    return "recorded" if recorded in (min(actual, _MAX_32_BIT), _MAX_32_BIT) else "wrong"


def _check_extra(
    entry: ZipEntry, extra: bytes, position: int, start: int, conventions: _WriterConventions
) -> Iterator[ZipDefect]:
    """Extra fields: those that torch writes have known contents, others must occur in every member."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        content = extra[at + 4 : at + 4 + length]
        field_at = position + at
        if tag == _ALIGNMENT_FIELD and content:
            usual = Counter(content).most_common(1)[0][0]  # alignment repeats one byte
            defect = ZipDefect(field_at + 4, field_at + 4 + len(content), f"the alignment before {entry.name}")
            conventions.add("alignment", usual, defect)
            if content.count(usual) != len(content):
                yield defect
        elif tag == _ALIGNMENT_FIELD:
            pass
        elif tag == _ZIP64_FIELD:
            values = {value for (value,) in struct.iter_unpack("<Q", content[: length // 8 * 8])}
            if length % 8 or not values <= {0, entry.size, entry.header_offset - start}:
                yield ZipDefect(field_at, field_at + 4 + length, f"the sizes of {entry.name}")
        else:
            conventions.add("extra fields", tag, ZipDefect(field_at, field_at + 4, f"an extra field of {entry.name}"))
        at += 4 + length
    if extra:
        fields = ZipDefect(position, position + len(extra), f"the extra fields of {entry.name}")
        conventions.add("extra fields", _ALIGNMENT_FIELD, fields)
        if at != len(extra):
            yield fields


def _check_trailer(entry: ZipEntry | None, trailer: bytes, position: int) -> Iterator[ZipDefect]:
    """What follows the data of a member: CRC and sizes, if its header does not contain them."""
    if entry is None:
        forms = [b""]
        what = "the bytes before the first member"
    else:
        what = f"the CRC or sizes after {entry.name}"
        narrow = struct.pack("<LLL", entry.crc, entry.size & _MAX_32_BIT, entry.size & _MAX_32_BIT)
        wide = struct.pack("<LQQ", entry.crc, entry.size, entry.size)
        forms = [b"PK\7\10" + narrow, b"PK\7\10" + wide, narrow, wide] if entry.sizes_follow else [b""]
    if not any(trailer.startswith(form) and not any(trailer[len(form) :]) for form in forms):
        yield ZipDefect(position, position + len(trailer), what)


def _check_end(tail: bytes, at: int, directory: int) -> Iterator[ZipDefect]:
    """The zip64 records after the directory, apart from the fields that were checked when the archive was opened."""
    locator_at = len(tail) - _END_BYTES - LOCATOR.size
    if tail[at : at + 4] != b"PK\6\6" or locator_at < at:
        return
    what = "the records after the directory"
    _, rest, made, needed = _END64.unpack_from(tail, at)
    _, disk, _, disks = LOCATOR.unpack_from(tail, locator_at)
    versions = (made, needed) == _ZIP64_VERSIONS or made == needed
    if at + 12 + rest != locator_at or rest != _END64_BYTES - 12 or not versions or disk or disks != 1:
        yield ZipDefect(directory + at, directory + len(tail), what)
