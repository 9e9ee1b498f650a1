"""The index turned around: for each file, which parameter's state lies at which bytes.

Spans: what one recorded checksum covers. A member of a torch file, or a part of a file of atoms.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import xxhash

from ucp import settings
from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import Atom, Fragment, Parameter, Role
from ucp.core.dtypes import DType
from ucp.core.mesh import Rank
from ucp.errors import NotUnderstoodError
from ucp.formats.atoms import manifest as manifests


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes `[start, stop)` of a file that are part of one state of one parameter."""

    start: int
    stop: int
    parameter: str
    kind: str
    dtype: DType
    rank: Rank
    role: Role = "trained"
    stateless: bool = False  # nothing but a weight is known of the parameter: it may be a buffer


class FileMap:
    """Every byte range that an atom takes up, replicas included. A strided view counts as its span."""

    def __init__(self, context: CheckContext | None) -> None:
        self._held: dict[str, list[StateBytes]] = {}
        self._starts: dict[str, list[int]] = {}
        self._stops: dict[str, list[int]] = {}  # the furthest so far
        if context is None:
            return
        for atom in context.atoms():
            parameter = context.checkpoint.parameters[atom.name]
            for cover in (atom.fragments, *atom.replicas):
                for fragment in cover:
                    if fragment.inline is None and fragment.region.numel:
                        self._held.setdefault(fragment.file, []).append(state_bytes(fragment, atom, parameter))
        for file, ranges in self._held.items():
            ranges.sort(key=lambda held: (held.start, held.stop))
            self._starts[file] = [held.start for held in ranges]
            self._stops[file] = list(accumulate((held.stop for held in ranges), max))

    @property
    def files(self) -> list[str]:
        return list(self._held)

    def of(self, file: str) -> Sequence[StateBytes]:
        """All that atoms take up of a file, in order of its first byte."""
        return self._held.get(file, ())

    def between(self, file: str, start: int, stop: int) -> Sequence[StateBytes]:
        """What overlaps bytes `[start, stop)` of a file, in order of its first byte."""
        if file not in self._held:
            return ()
        first = bisect_right(self._stops[file], start)
        last = bisect_left(self._starts[file], stop)
        return [held for held in self._held[file][first:last] if held.stop > start]


def state_bytes(fragment: Fragment, atom: Atom, parameter: Parameter) -> StateBytes:
    """The bytes that a fragment of an atom of a parameter takes up."""
    start = fragment.offset
    stateless = len(parameter.atoms) == 1
    rank, role = fragment.rank, parameter.role
    return StateBytes(start, start + _span(fragment), atom.name, atom.kind, fragment.dtype, rank, role, stateless)


def _span(fragment: Fragment) -> int:
    """Bytes from a fragment's first element to the end of its last."""
    if fragment.strides is None:
        return fragment.nbytes
    shape = fragment.region.boxes[0].shape
    last = sum((n - 1) * stride for n, stride in zip(shape, fragment.strides, strict=True))
    return (last + 1) * fragment.dtype.itemsize


# The zip64 locator (signature, offset of its record) and the end record (signature, bytes and offset of the directory).
_TAIL: Final = struct.Struct("<4s4xQ4x4s8xLL2x")
_END_BYTES: Final = 22
_END_SIGNATURE: Final = b"PK\5\6"


class RunningDigest(Protocol):
    """A running checksum that cannot be put together from those of parts."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def crc_text(crc: int) -> str:
    """A CRC-32 for messages and comparison."""
    return f"{crc:08x}"


@dataclass(frozen=True, slots=True)
class ChecksumSpan:
    """Bytes `[start, stop)` of a file under one checksum; `expected` is None where the writer recorded none.

    `digest` makes the running checksum; None stands for CRC-32.
    """

    check: str
    file: str
    start: int
    stop: int
    title: str
    expected: str | None
    digest: Callable[[], RunningDigest] | None
    held: Sequence[StateBytes] = ()  # which parameters lie in it
    padding: int = 0  # elements: up to so many between what parameters hold of a storage are padding

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A torch archive at bytes `[start, stop)` of a file."""

    file: str
    start: int
    stop: int
    index: TorchFile


def manifest_spans(root: Path, held: FileMap) -> Iterator[ChecksumSpan]:
    """What a manifest has checksums of. Files that are missing or too short are another check's finding."""
    for file, entry in manifests.load_manifest(root)["files"].items():
        path = root / file
        size = path.stat().st_size if path.is_file() else -1
        for start, nbytes, digest in entry["parts"]:
            stop = start + nbytes
            if stop <= size:
                title = f"bytes [{start}, {stop})"
                inside = held.between(file, start, stop)
                yield ChecksumSpan("manifest-checksums", file, start, stop, title, digest, xxhash.xxh3_128, inside)


def torch_spans(
    root: Path, file: str, held: FileMap, padding: int = 0
) -> Iterator[Finding | ChecksumSpan | TorchArchive]:
    """Every archive of a torch file, and every member that holds bytes; nothing where the file is of another kind.

    `padding` is the most elements that a flat buffer of this checkpoint is padded with in one place.
    With `torch.serialization.set_crc32_options(False)` torch writes 0 for every CRC of the archive. A single 0 among
    others is no such file, and has to fit its bytes like any other.
    """
    path = root / file
    if not _is_zip(path):
        return
    archives: list[TorchArchive] = []
    for start, stop in archive_ranges(path):
        try:
            archives.append(TorchArchive(file, start, stop, TorchFile(path, start, stop)))
        except NotUnderstoodError:
            continue  # a zip archive of someone else's
    yield from archives
    members = [(archive.index, entry) for archive in archives for entry in archive.index.entries.values()]
    filled = [(archive, entry) for archive, entry in members if entry.size and entry.stored]
    recorded = any(entry.crc for _, entry in filled)
    if filled and not recorded:
        yield Finding(
            "zip-crc",
            "note",
            f"{file}: was saved without CRCs, so damage to its bytes cannot be seen",
            file,
            hint="torch.serialization.set_crc32_options(True) before torch.save records them",
        )
    for archive, entry in filled:
        begin = archive.payload(entry)
        end = begin + entry.size
        yield ChecksumSpan(
            "zip-crc",
            file,
            begin,
            end,
            f"member {entry.name}" + (f" at byte {begin}" if len(archives) > 1 else ""),
            crc_text(entry.crc) if recorded else None,
            None,
            held.between(file, begin, end),
            padding if "/data/" in entry.name else 0,
        )


def plain_spans(root: Path, file: str, held: FileMap) -> Iterator[ChecksumSpan]:
    """What atoms take up of a file that records no checksums (safetensors of others, chunks of zarr).

    Its numbers are looked at all the same. Neighbours make one span as long as no element is cut in two where a block
    of the span ends.
    """
    if not (root / file).is_file():
        return  # made when it is read, or another check's finding
    run: list[StateBytes] = []
    stop = 0
    for item in held.of(file):
        if not run or item.start > stop or (item.start - run[0].start) % item.dtype.itemsize:
            if item.start < stop:
                continue  # bytes that are looked at already, as elements of another size
            if run:
                yield _plain_span(file, run, stop)
            run = []
        run.append(item)
        stop = max(stop, item.stop)
    if run:
        yield _plain_span(file, run, stop)


def _plain_span(file: str, run: Sequence[StateBytes], stop: int) -> ChecksumSpan:
    start = run[0].start
    return ChecksumSpan("finite", file, start, stop, f"bytes [{start}, {stop})", None, None, tuple(run))


def archive_ranges(path: Path) -> list[tuple[int, int]]:
    """Bytes `[start, stop)` of each archive in a file: torch.save writes one, data files of DCP are many end to end.

    Found from the back: the records at the end of an archive say how long it is. Zeros may stand before an archive, so
    that its elements begin a page. What this does not explain is left to the reader of archives to complain about.
    """
    ranges: list[tuple[int, int]] = []
    with path.open("rb", buffering=0) as file:
        size = stop = file.seek(0, os.SEEK_END)
        while stop >= _TAIL.size:
            file.seek(stop - _TAIL.size)
            signature, wide_at, last, length, offset = _TAIL.unpack(file.read(_TAIL.size))
            if last != _END_SIGNATURE:
                break
            if signature == b"PK\6\7":  # the zip64 record, 56 bytes before its locator, says where it is in the archive
                start = stop - _TAIL.size - 56 - wide_at
            else:
                start = stop - _END_BYTES - length - offset
            if not 0 <= start < stop:
                break
            ranges.append((start, stop))
            stop = _end_before(file, start)
    return list(reversed(ranges)) if ranges and stop == 0 else [(0, size)]


def _end_before(file: BinaryIO, start: int) -> int:
    """Where the archive ends that lies before byte `start`, which zeros may follow; 0 where there is none."""
    look = min(start, settings.DATA_ALIGNMENT + _END_BYTES)
    file.seek(start - look)
    data = file.read(look)
    if not data.strip(b"\0"):
        return start - look
    end = data.rfind(_END_SIGNATURE) + _END_BYTES
    return start - look + end if end >= _END_BYTES and not data[end:].strip(b"\0") else start


def _is_zip(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(settings.DATA_ALIGNMENT).lstrip(b"\0").startswith(b"PK\x03\x04")
    except OSError:
        return False
