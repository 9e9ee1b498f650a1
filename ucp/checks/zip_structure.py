"""The frame of a torch file: every byte of a zip archive that is no member's data.

No loader looks at most of these bytes (alignment, dates, data descriptors), so damage to them breaks nothing. But a
file in which a bit of the frame flipped is a file in which bits flip. An archive says most things twice, in its
directory and around each member, and says the rest the same way for every member: what disagrees is damage.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ucp.containers.torch_file import TorchFile
from ucp.containers.zip_directory import ZipEntry

Read = Callable[[int, int], bytes]
"""`read(offset, size)`: exactly `size` bytes of the file from byte `offset`."""

_ALIGNMENT_FIELD: Final = 0x4246  # "FB", as torch pads the start of each member's data
_ZIP64_FIELD: Final = 1
_FULL: Final = 0xFFFFFFFF
_WIDE_VERSIONS: Final = (0x031E, 45)  # as torch writes them; others write the same number twice

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_END_BYTES: Final = 22
_LOCATOR: Final = struct.Struct("<4sLQL")  # signature, disk, offset of the zip64 end record, disks
_END64: Final = struct.Struct("<4sQ2H")  # signature, size of the rest, versions
_END64_BYTES: Final = 56


class _ZipLocalHeader(NamedTuple):
    """The header before a member's data."""

    signature: bytes
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    size: int
    name_length: int
    extra_length: int


class _ZipDirectoryHeader(NamedTuple):
    """An entry of the directory."""

    signature: bytes
    made: int
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    size: int
    name_length: int
    extra_length: int
    comment_length: int
    disk: int
    internal: int
    external: int
    offset: int


class ZipDefect(NamedTuple):
    """Bytes `[start, stop)` of the file that are not what the rest of the archive says."""

    start: int
    stop: int
    what: str


@dataclass(slots=True)
class _WriterConventions:
    """What the writer did the same way everywhere; the few that differ are defects."""

    seen: dict[str, list[tuple[Hashable, ZipDefect]]] = field(default_factory=dict)

    def add(self, habit: str, value: Hashable, otherwise: ZipDefect) -> None:
        self.seen.setdefault(habit, []).append((value, otherwise))

    def defects(self) -> Iterator[ZipDefect]:
        for told in self.seen.values():
            usual = Counter(value for value, _ in told).most_common(1)[0][0]
            yield from (defect for value, defect in told if value != usual)


def frame_bytes(archive: TorchFile, start: int, stop: int) -> int:
    """How many bytes of `[start, stop)` are no member's data."""
    return stop - start - sum(entry.size for entry in archive.entries.values())


def frame_defects(read: Read, archive: TorchFile, start: int, stop: int) -> Iterator[ZipDefect]:
    """Everything that is wrong with the frame of the archive at bytes `[start, stop)`, which could be opened."""
    entries = list(archive.entries.values())
    directory = max((entry.end for entry in entries), default=start)
    tail = read(directory, stop - directory)
    habits = _WriterConventions()
    centrals, at = _centrals(tail, entries)
    for entry, (central, position) in zip(entries, centrals, strict=True):
        yield from _check_central(entry, central, directory + position, tail, position, start, habits)
    yield from _check_end(tail, at, directory)
    known = {entry.header_offset: (entry, central) for entry, (central, _) in zip(entries, centrals, strict=True)}
    previous: ZipEntry | None = None
    behind = start
    for offset in sorted(known):
        entry, central = known[offset]
        payload = archive.payload(entry)
        frame = read(behind, payload - behind)
        yield from _check_trailer(previous, frame[: offset - behind], behind)
        yield from _check_local(entry, central, frame[offset - behind :], offset, start, habits)
        previous, behind = entry, payload + entry.size
    yield from _check_trailer(previous, read(behind, directory - behind), behind)
    yield from habits.defects()


def _centrals(tail: bytes, entries: Sequence[ZipEntry]) -> tuple[list[tuple[_ZipDirectoryHeader, int]], int]:
    """The directory's entries with their places in `tail`, and where they end."""
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
    habits: _WriterConventions,
) -> Iterator[ZipDefect]:
    odd = ZipDefect(position, position + _CENTRAL.size, f"the directory's entry of {entry.name}")
    habits.add("central", (central.made, central.needed, central.internal, central.external), odd)
    habits.add("flags of filled members" if entry.size else "flags of empty members", central.flags, odd)
    extra_at = at + _CENTRAL.size + central.name_length
    extra = tail[extra_at : extra_at + central.extra_length]
    yield from _check_extra(entry, extra, position - at + extra_at, start, habits)


def _check_local(
    entry: ZipEntry, central: _ZipDirectoryHeader, header: bytes, position: int, start: int, habits: _WriterConventions
) -> Iterator[ZipDefect]:
    local = _ZipLocalHeader._make(_LOCAL.unpack_from(header))
    said = (local.needed, local.flags, local.method, local.time, local.date)
    listed = (central.needed, central.flags, central.method, central.time, central.date)
    if said != listed or local.crc not in ((0, entry.crc) if entry.sizes_follow else (entry.crc,)):
        yield ZipDefect(position, position + _LOCAL.size, f"the header of {entry.name}")
    elif not entry.sizes_follow:
        if local.packed != local.size or local.size not in (min(entry.size, _FULL), _FULL):
            yield ZipDefect(position, position + _LOCAL.size, f"the sizes in the header of {entry.name}")
    else:
        odd = ZipDefect(position, position + _LOCAL.size, f"the sizes or CRC in the header of {entry.name}")
        sizes = tuple(_class(size, entry.size) for size in (local.packed, local.size))
        habits.add("sizes in headers", (sizes, local.crc == 0) if sizes[0] == sizes[1] else entry.name, odd)
    extra_at = _LOCAL.size + local.name_length
    yield from _check_extra(entry, header[extra_at:], position + extra_at, start, habits)


def _class(said: int, true: int) -> str:
    """How a header says the size of its member: not at all, as it is (or elsewhere, if too long)."""
    if said == 0:
        return "follows"
    return "said" if said == min(true, _FULL) or said == _FULL else "wrong"


def _check_extra(
    entry: ZipEntry, extra: bytes, position: int, start: int, habits: _WriterConventions
) -> Iterator[ZipDefect]:
    """Fields laid end to end: those that torch writes have known contents, others must be everyone's."""
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            break
        tag, length = struct.unpack_from("<HH", extra, at)
        content = extra[at + 4 : at + 4 + length]
        where = position + at
        if tag == _ALIGNMENT_FIELD:
            yield from _check_filler(entry, content, where + 4, habits)
        elif tag == _ZIP64_FIELD:
            values = {value for (value,) in struct.iter_unpack("<Q", content[: length // 8 * 8])}
            if length % 8 or not values <= {0, entry.size, entry.header_offset - start}:
                yield ZipDefect(where, where + 4 + length, f"the sizes of {entry.name}")
        else:
            habits.add("extra fields", tag, ZipDefect(where, where + 4, f"an extra field of {entry.name}"))
        at += 4 + length
    if extra:
        fields = ZipDefect(position, position + len(extra), f"the extra fields of {entry.name}")
        habits.add("extra fields", _ALIGNMENT_FIELD, fields)
        if at != len(extra):
            yield fields


def _check_filler(entry: ZipEntry, filler: bytes, position: int, habits: _WriterConventions) -> Iterator[ZipDefect]:
    """Alignment is the same byte over and over."""
    if not filler:
        return
    usual = Counter(filler).most_common(1)[0][0]
    odd = ZipDefect(position, position + len(filler), f"the alignment before {entry.name}")
    habits.add("alignment", usual, odd)
    if filler.count(usual) != len(filler):
        yield odd


def _check_trailer(entry: ZipEntry | None, trailer: bytes, position: int) -> Iterator[ZipDefect]:
    """What follows a member's data: CRC and sizes, where the header left them out."""
    if entry is None:
        forms = [b""]
        what = "what stands before the first member"
    else:
        what = f"the CRC or sizes behind {entry.name}"
        narrow = struct.pack("<LLL", entry.crc, entry.size & _FULL, entry.size & _FULL)
        wide = struct.pack("<LQQ", entry.crc, entry.size, entry.size)
        forms = [b"PK\7\10" + narrow, b"PK\7\10" + wide, narrow, wide] if entry.sizes_follow else [b""]
    if not any(trailer.startswith(form) and not any(trailer[len(form) :]) for form in forms):
        yield ZipDefect(position, position + len(trailer), what)


def _check_end(tail: bytes, at: int, directory: int) -> Iterator[ZipDefect]:
    """The records behind the directory, beyond what was checked to open the archive."""
    locator_at = len(tail) - _END_BYTES - _LOCATOR.size
    if tail[at : at + 4] != b"PK\6\6" or locator_at < at:
        return
    what = "the records behind the directory"
    _, rest, made, needed = _END64.unpack_from(tail, at)
    _, disk, _, disks = _LOCATOR.unpack_from(tail, locator_at)
    versions = (made, needed) == _WIDE_VERSIONS or made == needed
    if at + 12 + rest != locator_at or rest != _END64_BYTES - 12 or not versions or disk or disks != 1:
        yield ZipDefect(directory + at, directory + len(tail), what)
