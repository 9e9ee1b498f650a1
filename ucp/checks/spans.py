"""Byte ranges of files: which state of which parameter is stored there, and which checksum covers them."""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Final

from ucp import settings
from ucp.checks.tasks import CheckContext
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import Atom, Fragment, Parameter, Rank, Role
from ucp.core.dtypes import DType
from ucp.core.findings import Finding
from ucp.errors import NotUnderstoodError
from ucp.formats.registry import RecordedChecksum, RunningDigest
from ucp.storage.local import open_binary

# The zip64 locator (signature, offset of its record) and the end record (signature, bytes and offset of the directory).
_TAIL: Final = struct.Struct("<4s4xQ4x4s8xLL2x")
_END_BYTES: Final = 22
_END_SIGNATURE: Final = b"PK\5\6"
_ZIP64_RECORD_BYTES: Final = 56


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
    maybe_buffer: bool = False  # the parameter has only a weight, so it may be a buffer

    @staticmethod
    def of(fragment: Fragment, atom: Atom, parameter: Parameter) -> StateBytes:
        """The bytes of a fragment. A strided fragment counts from its first element to its last."""
        nbytes = fragment.nbytes
        if fragment.strides is not None:
            shape = fragment.region.boxes[0].shape
            last = sum((n - 1) * stride for n, stride in zip(shape, fragment.strides, strict=True))
            nbytes = (last + 1) * fragment.dtype.itemsize
        start, only_weight = fragment.offset, len(parameter.atoms) == 1
        rank, role = fragment.rank, parameter.role
        return StateBytes(start, start + nbytes, atom.name, atom.kind, fragment.dtype, rank, role, only_weight)


class FileMap:
    """The inverted index: for each file, the byte ranges of all states stored in it, replicas included."""

    def __init__(self, context: CheckContext | None) -> None:
        """An empty map if `context` is None."""
        self._states: dict[str, list[StateBytes]] = {}
        self._starts: dict[str, list[int]] = {}
        self._stops: dict[str, list[int]] = {}  # running maximum
        if context is None:
            return
        for atom in context.atoms():
            parameter = context.checkpoint.parameters[atom.name]
            for cover in (atom.fragments, *atom.replicas):
                for fragment in cover:
                    if fragment.inline is None and fragment.region.numel:
                        self._states.setdefault(fragment.file, []).append(StateBytes.of(fragment, atom, parameter))
        for file, states in self._states.items():
            states.sort(key=lambda state: (state.start, state.stop))
            self._starts[file] = [state.start for state in states]
            self._stops[file] = list(accumulate((state.stop for state in states), max))

    @property
    def files(self) -> list[str]:
        return list(self._states)

    def in_file(self, file: str) -> Sequence[StateBytes]:
        """All states in a file, ordered by their first byte."""
        return self._states.get(file, ())

    def between(self, file: str, start: int, stop: int) -> Sequence[StateBytes]:
        """States that overlap bytes `[start, stop)` of a file, ordered by their first byte."""
        if file not in self._states:
            return ()
        first = bisect_right(self._stops[file], start)
        last = bisect_left(self._starts[file], stop)
        return [state for state in self._states[file][first:last] if state.stop > start]


@dataclass(frozen=True, slots=True)
class ChecksumSpan:
    """Bytes `[start, stop)` of a file that one recorded checksum covers: a member of a torch file, a part of an atom
    file.

    `expected` is None if the writer recorded no checksum; `digest` creates the running checksum, None for CRC-32.
    """

    check: str
    file: str
    start: int
    stop: int
    title: str
    expected: str | None
    digest: Callable[[], RunningDigest] | None
    states: Sequence[StateBytes] = ()  # stored in the span
    padding: int = 0  # gaps of at most this many elements between states are padding of a flat buffer

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


def checksum_spans(checksums: Iterable[RecordedChecksum], file_map: FileMap) -> Iterator[ChecksumSpan]:
    """The spans of checksums that the format records."""
    for checksum in checksums:
        file, start, stop = checksum.file, checksum.start, checksum.stop
        states = file_map.between(file, start, stop)
        title = f"bytes [{start}, {stop})"
        yield ChecksumSpan("manifest-checksums", file, start, stop, title, checksum.hexdigest, checksum.new, states)


def torch_spans(
    root: Path, file: str, file_map: FileMap, padding: int = 0
) -> Iterator[Finding | ChecksumSpan | TorchArchive]:
    """The archives of a torch file and their nonempty members; nothing for any other file.

    `padding` is the largest number of elements that this checkpoint's flat buffers are padded with in one place.
    """
    path = root / file
    if not _is_zip(path):
        return
    archives: list[TorchArchive] = []
    for start, stop in archive_ranges(path):
        try:
            archives.append(TorchArchive(file, start, stop, TorchFile(path, start, stop)))
        except NotUnderstoodError:
            continue  # a zip archive that torch did not write
    yield from archives
    members = [(archive.index, entry) for archive in archives for entry in archive.index.entries.values()]
    filled = [(archive, entry) for archive, entry in members if entry.size and entry.stored]
    # With torch.serialization.set_crc32_options(False) torch writes 0 for every CRC of the archive. A single 0 among
    # others is a CRC like any other.
    has_crcs = any(entry.crc for _, entry in filled)
    if filled and not has_crcs:
        yield Finding(
            "zip-crc",
            "note",
            f"{file}: was saved without CRCs, so damage to its bytes cannot be detected",
            file,
            hint="torch.serialization.set_crc32_options(True) before torch.save records them",
        )
    for archive, entry in filled:
        start = archive.payload(entry)
        stop = start + entry.size
        yield ChecksumSpan(
            "zip-crc",
            file,
            start,
            stop,
            f"member {entry.name}" + (f" at byte {start}" if len(archives) > 1 else ""),
            f"{entry.crc:08x}" if has_crcs else None,
            None,
            file_map.between(file, start, stop),
            padding if "/data/" in entry.name else 0,
        )


def plain_spans(root: Path, file: str, file_map: FileMap) -> Iterator[ChecksumSpan]:
    """The stored states of a file without checksums (safetensors files of others, zarr chunks), to scan their values.

    Adjacent states make one span, unless an element would cross the end of a block of that span.
    """
    if not (root / file).is_file():
        return  # computed on reading, or reported by another check
    run: list[StateBytes] = []
    stop = 0
    for state in file_map.in_file(file):
        if not run or state.start > stop or (state.start - run[0].start) % state.dtype.itemsize:
            if state.start < stop:
                continue  # these bytes are scanned already, as elements of another size
            if run:
                yield _plain_span(file, run, stop)
            run = []
        run.append(state)
        stop = max(stop, state.stop)
    if run:
        yield _plain_span(file, run, stop)


def _plain_span(file: str, run: Sequence[StateBytes], stop: int) -> ChecksumSpan:
    start = run[0].start
    return ChecksumSpan("finite", file, start, stop, f"bytes [{start}, {stop})", None, None, tuple(run))


def archive_ranges(path: Path) -> list[tuple[int, int]]:
    """Bytes `[start, stop)` of each archive in a file: one from `torch.save`, many end to end in data files of DCP.

    They are found from the back, because the records at the end of an archive contain its length. Zeros may precede an
    archive, to align its data to a page. If that does not account for the whole file, it counts as one archive, and
    opening it reports what is wrong.
    """
    ranges: list[tuple[int, int]] = []
    with open_binary(path) as file:
        size = stop = file.seek(0, os.SEEK_END)
        while stop >= _TAIL.size:
            file.seek(stop - _TAIL.size)
            signature, zip64_offset, last, length, offset = _TAIL.unpack(file.read(_TAIL.size))
            if last != _END_SIGNATURE:
                break
            if signature == b"PK\6\7":  # the zip64 record precedes its locator, and has its offset in the archive
                start = stop - _TAIL.size - _ZIP64_RECORD_BYTES - zip64_offset
            else:
                start = stop - _END_BYTES - length - offset
            if not 0 <= start < stop:
                break
            ranges.append((start, stop))
            stop = _end_before(file, start)
    return list(reversed(ranges)) if ranges and stop == 0 else [(0, size)]


def _end_before(file: IO[bytes], start: int) -> int:
    """The end of the archive before byte `start`, without the zeros that follow it; 0 if there is none."""
    length = min(start, settings.DATA_ALIGNMENT + _END_BYTES)
    file.seek(start - length)
    data = file.read(length)
    if not data.strip(b"\0"):
        return start - length
    end = data.rfind(_END_SIGNATURE) + _END_BYTES
    return start - length + end if end >= _END_BYTES and not data[end:].strip(b"\0") else start


def _is_zip(path: Path) -> bool:
    try:
        with open_binary(path) as file:
            return file.read(settings.DATA_ALIGNMENT).lstrip(b"\0").startswith(b"PK\x03\x04")
    except OSError:
        return False
