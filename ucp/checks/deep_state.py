"""State that the checks of `verify --deep` share, so that every byte is read once.

Checks read in the order that suits them: a master together with its weight, a replica together with the original. They
record every block in `ChecksumCoverage` and `ValueCounts`. Bytes that no check needed are read at the end; then every
recorded checksum can be compared.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ucp.checks.raw_values import all_valid, bits_of, can_scan, is_mask, negative, not_finite
from ucp.checks.spans import ChecksumSpan, StateBytes
from ucp.containers.crc32 import crc32, crc32_combine
from ucp.core.checkpoint import Rank
from ucp.core.dtypes import BY_NAME
from ucp.core.findings import Finding
from ucp.core.optimizers import NON_NEGATIVE
from ucp.formats.registry import RunningDigest
from ucp.read.casting import RawArray

_BAD_VALUES: Final = {
    "finite": ("NaN or infinite", "training that resumes from here will not recover"),
    "second-moments": ("below zero", "a sum of squares cannot be negative: the bytes are damaged"),
}


class SpanChecksum:
    """The checksum of one span, from blocks that are read in any order and by several threads.

    CRCs of blocks are combined at the end. Other digests cannot be combined: they are fed from front to back.
    """

    __slots__ = ("_at", "_digest", "_known", "_lock", "_pieces", "_received", "span")

    def __init__(self, span: ChecksumSpan) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._digest: RunningDigest | None = span.digest() if span.digest is not None else None
        self._at = span.start
        self._received: str | None = None  # digest that a forked process computed
        self._pieces: list[tuple[int, int, int]] = []  # start, stop, CRC
        self._known = 0  # position or number of pieces that the parent process has

    @property
    def is_sequential(self) -> bool:
        return self._digest is not None

    def feed(self, start: int, data: memoryview) -> None:
        """Add bytes to a sequential digest. Bytes out of order are ignored, and read again at the end."""
        assert self._digest is not None
        with self._lock:
            if start <= self._at < start + len(data):
                self._digest.update(data[self._at - start :])
                self._at = start + len(data)

    def add(self, start: int, stop: int, crc: int) -> None:
        """Record the CRC of bytes `[start, stop)`."""
        with self._lock:
            self._pieces.append((start, stop, crc))

    def unread(self) -> Iterator[tuple[int, int]]:
        """Ranges of the span that were not read."""
        if self._digest is not None:
            if self._at < self.span.stop:
                yield self._at, self.span.stop
            return
        at = self.span.start
        for start, stop, _ in self._ordered_pieces():
            if start > at:
                yield at, start
            at = stop
        if at < self.span.stop:
            yield at, self.span.stop

    def value(self) -> str:
        """The checksum of the whole span, once all of it was read."""
        if self._received is not None:
            return self._received
        if self._digest is not None:
            return self._digest.hexdigest()
        crc = 0
        at = self.span.start
        for start, stop, piece in self._ordered_pieces():
            assert start == at
            crc = crc32_combine(crc, piece, stop - start) if crc or at > self.span.start else piece
            at = stop
        assert at == self.span.stop
        return f"{crc:08x}"

    def _ordered_pieces(self) -> Iterator[tuple[int, int, int]]:
        """Pieces in order; one that overlaps an earlier one counts as not read."""
        at = self.span.start
        for piece in sorted(self._pieces):
            if piece[0] >= at:
                yield piece
                at = piece[1]

    def mark_known(self) -> None:
        self._known = self._at if self._digest is not None else len(self._pieces)

    def changes(self) -> Any:
        """New pieces, or a finished digest. A digest that was not finished (because a read failed) stays in its
        process: the parent reads that span from the front."""
        if self._digest is None:
            return self._pieces[self._known :] or None
        if self._at < self.span.stop or self._known == self._at:
            return None
        return self._digest.hexdigest()

    def merge_changes(self, changes: Any) -> None:
        if isinstance(changes, str):
            self._received, self._at = changes, self.span.stop
        else:
            self._pieces += [(start, stop, crc) for start, stop, crc in changes]


class ChecksumCoverage:
    """The checksums of all spans, by file. Spans of a file do not overlap, and are added before anything is read.

    Merged over processes (see `ForkMergeable`).
    """

    def __init__(self) -> None:
        self._all: list[SpanChecksum] = []
        self._by_file: dict[str, list[SpanChecksum]] = {}
        self._starts: dict[str, list[int]] = {}

    def add(self, span: ChecksumSpan) -> SpanChecksum:
        checksum = SpanChecksum(span)
        self._all.append(checksum)
        self._by_file.setdefault(span.file, []).append(checksum)
        return checksum

    def seal(self) -> None:
        """Call when all spans were added."""
        for file, checksums in self._by_file.items():
            checksums.sort(key=lambda checksum: checksum.span.start)
            self._starts[file] = [checksum.span.start for checksum in checksums]

    def overlapping(self, file: str, start: int, stop: int) -> Iterator[SpanChecksum]:
        """Checksums of the spans that overlap bytes `[start, stop)`."""
        starts = self._starts.get(file)
        if starts is None:
            return
        checksums = self._by_file[file]
        for number in range(max(0, bisect_right(starts, start) - 1), len(checksums)):
            span = checksums[number].span
            if span.start >= stop:
                return
            if span.stop > start:
                yield checksums[number]

    def mark_known(self) -> None:
        for checksum in self._all:
            checksum.mark_known()

    def changes(self) -> Any:
        return [(number, new) for number, one in enumerate(self._all) if (new := one.changes()) is not None] or None

    def merge_changes(self, changes: Any) -> None:
        for number, new in changes:
            self._all[number].merge_changes(new)


class ReadRecorder:
    """Records what one task reads: joins adjacent blocks before they are added to the coverage. For one thread."""

    __slots__ = ("_coverage", "_last", "_open")

    def __init__(self, coverage: ChecksumCoverage) -> None:
        self._coverage = coverage
        self._last: dict[str, SpanChecksum] = {}
        self._open: dict[SpanChecksum, tuple[int, int, int]] = {}

    def record(self, file: str, start: int, data: memoryview) -> None:
        """Record bytes of a file, read from byte `start` for the first time."""
        stop = start + len(data)
        last = self._last.get(file)
        if last is not None and last.span.start <= start and stop <= last.span.stop:
            self._add(last, start, data)
            return
        for checksum in self._coverage.overlapping(file, start, stop):
            self._last[file] = checksum
            lo, hi = max(start, checksum.span.start), min(stop, checksum.span.stop)
            self._add(checksum, lo, data if hi - lo == len(data) else data[lo - start : hi - start])

    def _add(self, checksum: SpanChecksum, start: int, data: memoryview) -> None:
        if checksum.is_sequential:
            checksum.feed(start, data)
            return
        piece = self._open.get(checksum)
        if piece is not None and piece[1] != start:
            checksum.add(*piece)
            piece = None
        first, crc = (start, 0) if piece is None else (piece[0], piece[2])
        self._open[checksum] = (first, start + len(data), crc32(data, crc) if checksum.span.expected else 0)

    def close(self) -> None:
        """Add the pieces that are still open."""
        for checksum, piece in self._open.items():
            checksum.add(*piece)
        self._open.clear()


@dataclass(slots=True)
class _ValueCount:
    count: int = 0
    first: int = 0  # byte of the file
    known: int = 0  # part of `count` that the parent process has

    def add(self, count: int, first: int) -> None:
        self.first = first if not self.count else min(first, self.first)
        self.count += count


class ValueCounts:
    """Counts invalid values of every stored state, and nonzero padding of every span. Shared by threads.

    Merged over processes (see `ForkMergeable`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str, StateBytes], _ValueCount] = {}
        self._padding: dict[tuple[str, str], _ValueCount] = {}

    def scan(self, file: str, state: StateBytes, data: RawArray, at: int) -> bool:
        """Count invalid values in complete elements of a state, read from byte `at` of the file. True if none."""
        # Buffers may contain anything: attention masks contain infinities.
        if state.role == "buffer" or not can_scan(state.dtype) or not data.size:
            return True
        squares = state.kind in NON_NEGATIVE
        bits = bits_of(data, state.dtype)
        if all_valid(bits, state.dtype, squares) or (state.maybe_buffer and is_mask(bits, state.dtype)):
            return True
        size = state.dtype.itemsize
        count, first = not_finite(bits, state.dtype)
        self._add(("finite", file, state), count, at + first * size)
        if squares:
            count, first = negative(bits, state.dtype)
            self._add(("second-moments", file, state), count, at + first * size)
        return False

    def add_padding(self, file: str, title: str, count: int, first: int) -> None:
        """`count` bytes of a span's padding are not zero, the first of them at byte `first` of the file."""
        with self._lock:
            self._padding.setdefault((file, title), _ValueCount()).add(count, first)

    def _add(self, key: tuple[str, str, StateBytes], count: int, first: int) -> None:
        if count:
            with self._lock:
                self._values.setdefault(key, _ValueCount()).add(count, first)

    def findings(self) -> Iterator[Finding]:
        """Findings for everything that was counted."""
        for (check, file, state), counted in self._values.items():
            what, hint = _BAD_VALUES[check]
            size = state.dtype.itemsize
            yield Finding(
                check,
                "warning",
                f"parameter {state.parameter}, {state.kind}: {counted.count} of {(state.stop - state.start) // size}"
                f" elements on {state.rank} ({file}) are {what}, the first at byte {counted.first}",
                file,
                state.rank,
                state.parameter,
                state.kind,
                (counted.first, counted.first + size),
                hint=hint,
            )
        for (file, title), counted in self._padding.items():
            yield Finding(
                "padding",
                "warning",
                f"{file}, {title}: {counted.count} bytes of padding are not zero, the first at {counted.first}",
                file,
                byte_range=(counted.first, counted.first + 1),
                subject=title,
                hint="padding never gets a gradient: the file is damaged, or ucp misunderstands its layout",
            )

    def mark_known(self) -> None:
        for counted in (*self._values.values(), *self._padding.values()):
            counted.known = counted.count

    def changes(self) -> Any:
        values = [
            (check, file, {**asdict(state), "dtype": state.dtype.name}, counted.count - counted.known, counted.first)
            for (check, file, state), counted in self._values.items()
        ]
        padding = [(*key, counted.count - counted.known, counted.first) for key, counted in self._padding.items()]
        return {"values": values, "padding": padding} if values or padding else None

    def merge_changes(self, changes: Any) -> None:
        for check, file, fields, count, first in changes["values"]:
            state = StateBytes(**{**fields, "dtype": BY_NAME[fields["dtype"]], "rank": Rank(*fields["rank"])})
            self._add((check, file, state), count, first)
        for file, title, count, first in changes["padding"]:
            if count:
                self.add_padding(file, title, count, first)


@dataclass(slots=True)
class DeepState:
    """Shared by all checks of a deep pass."""

    checksums: ChecksumCoverage = field(default_factory=ChecksumCoverage)
    values: ValueCounts = field(default_factory=ValueCounts)
    # (parameter, kind) of the atoms that another check reads, so that the scan need not.
    already_read: set[tuple[str, str]] = field(default_factory=set)
