"""What the checks of a deep pass share, so that every byte is read once.

The ledger of a deep pass: which bytes were read by whom, and what their checksums come to.

Checks read in the order that suits them (a master beside its weight, a copy beside the other), each byte once. Whoever
reads tells the ledger; what nobody needed is read at the end, and by then every recorded checksum can be compared.

Numbers that should not be there, counted over all blocks and threads, and what is said about them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ucp.checks.findings import Finding
from ucp.checks.raw_values import all_valid, bits_of, is_mask, negative, not_finite, scannable
from ucp.checks.spans import ChecksumSpan, RunningDigest, StateBytes
from ucp.containers.crc32 import crc32, crc32_combine
from ucp.core.dtypes import BY_NAME
from ucp.core.mesh import Rank
from ucp.core.optimizers import NON_NEGATIVE
from ucp.read.casting import RawArray


class SpanChecksum:
    """How much of one span was read. CRCs of pieces are put together at the end; other digests go front to back."""

    __slots__ = ("_at", "_digest", "_found", "_known", "_lock", "_pieces", "span")

    def __init__(self, span: ChecksumSpan) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._digest: RunningDigest | None = span.digest() if span.digest is not None else None
        self._at = span.start
        self._found: str | None = None  # a digest that was computed elsewhere
        self._pieces: list[tuple[int, int, int]] = []
        self._known = 0  # pieces that the parent has

    @property
    def is_sequential(self) -> bool:
        return self._digest is not None

    def follow(self, start: int, data: memoryview) -> None:
        """Take in bytes of a span whose digest goes front to back; those that come out of turn are read again."""
        assert self._digest is not None
        with self._lock:
            if start <= self._at < start + len(data):
                self._digest.update(data[self._at - start :])
                self._at = start + len(data)

    def add(self, start: int, stop: int, crc: int) -> None:
        """Bytes `[start, stop)` have this CRC."""
        with self._lock:
            self._pieces.append((start, stop, crc))

    def begin(self) -> None:
        """In a fork: what was read up to now is known."""
        self._known = self._at if self._digest is not None else len(self._pieces)

    def told(self) -> Any:
        """In a fork: pieces that were read since, or a digest; None for nothing.

        A digest that goes front to back stays in its process. If it came to an end it is told; if not, and that is only
        where reading failed, the parent knows nothing of it and reads from the front.
        """
        if self._digest is None:
            return self._pieces[self._known :] or None
        if self._at < self.span.stop or self._known == self._at:
            return None
        return self._digest.hexdigest()

    def hear(self, told: Any) -> None:
        """In the parent: what a fork has told."""
        if isinstance(told, str):
            self._found, self._at = told, self.span.stop
        else:
            self._pieces += [(start, stop, crc) for start, stop, crc in told]

    def rest(self) -> Iterator[tuple[int, int]]:
        """Ranges that nobody has read."""
        if self._digest is not None:
            if self._at < self.span.stop:
                yield self._at, self.span.stop
            return
        at = self.span.start
        for start, stop, _ in self._settled():
            if start > at:
                yield at, start
            at = stop
        if at < self.span.stop:
            yield at, self.span.stop

    def found(self) -> str:
        """The checksum of the whole span, once all of it was read."""
        if self._found is not None:
            return self._found
        if self._digest is not None:
            return self._digest.hexdigest()
        crc = 0
        at = self.span.start
        for start, stop, piece in self._settled():
            assert start == at
            crc = crc32_combine(crc, piece, stop - start) if crc or at > self.span.start else piece
            at = stop
        assert at == self.span.stop
        return f"{crc:08x}"

    def _settled(self) -> Iterator[tuple[int, int, int]]:
        """Pieces in order; one that overlaps what came before it counts as not read."""
        at = self.span.start
        for piece in sorted(self._pieces):
            if piece[0] >= at:
                yield piece
                at = piece[1]


class ChecksumCoverage:
    """The tracks of all spans, by file. Spans of one file do not overlap and are added before anything is read."""

    def __init__(self) -> None:
        self._all: list[SpanChecksum] = []
        self._tracks: dict[str, list[SpanChecksum]] = {}
        self._starts: dict[str, list[int]] = {}

    def add(self, span: ChecksumSpan) -> SpanChecksum:
        track = SpanChecksum(span)
        self._all.append(track)
        self._tracks.setdefault(span.file, []).append(track)
        return track

    def close(self) -> None:
        """All spans are known."""
        for file, tracks in self._tracks.items():
            tracks.sort(key=lambda track: track.span.start)
            self._starts[file] = [track.span.start for track in tracks]

    def begin(self) -> None:
        """As `Shared.begin`."""
        for track in self._all:
            track.begin()

    def told(self) -> Any:
        """As `Shared.told`: tracks by number, and what became of each."""
        return [(number, told) for number, track in enumerate(self._all) if (told := track.told()) is not None] or None

    def hear(self, told: Any) -> None:
        """As `Shared.hear`."""
        for number, news in told:
            self._all[number].hear(news)

    def within(self, file: str, start: int, stop: int) -> Iterator[SpanChecksum]:
        """The tracks that share bytes with `[start, stop)`."""
        starts = self._starts.get(file)
        if starts is None:
            return
        tracks = self._tracks[file]
        for number in range(max(0, bisect_right(starts, start) - 1), len(tracks)):
            span = tracks[number].span
            if span.start >= stop:
                return
            if span.stop > start:
                yield tracks[number]


class ReadRecorder:
    """What one task has read, until it hands it to the ledger: neighbouring blocks make one piece. One thread's own."""

    __slots__ = ("_last", "_ledger", "_open")

    def __init__(self, ledger: ChecksumCoverage) -> None:
        self._ledger = ledger
        self._last: dict[str, SpanChecksum] = {}
        self._open: dict[SpanChecksum, tuple[int, int, int]] = {}

    def take(self, file: str, start: int, data: memoryview) -> None:
        """Bytes of a file from `start` on were read, for the first time."""
        stop = start + len(data)
        last = self._last.get(file)
        if last is not None and last.span.start <= start and stop <= last.span.stop:
            self._add(last, start, data)
            return
        for track in self._ledger.within(file, start, stop):
            self._last[file] = track
            lo, hi = max(start, track.span.start), min(stop, track.span.stop)
            self._add(track, lo, data if hi - lo == len(data) else data[lo - start : hi - start])

    def _add(self, track: SpanChecksum, start: int, data: memoryview) -> None:
        if track.is_sequential:
            track.follow(start, data)
            return
        known = self._open.get(track)
        if known is not None and known[1] != start:
            track.add(*known)
            known = None
        first, crc = (start, 0) if known is None else (known[0], known[2])
        self._open[track] = (first, start + len(data), crc32(data, crc) if track.span.expected else 0)

    def close(self) -> None:
        """Hand over what is left."""
        for track, piece in self._open.items():
            track.add(*piece)
        self._open.clear()


_WHAT: Final = {
    "finite": ("NaN or infinite", "training that goes on from here will not recover"),
    "second-moments": ("below zero", "a sum of squares cannot be: the bytes are damaged"),
}


@dataclass(slots=True)
class _ValueCount:
    count: int = 0
    first: int = 0  # byte of the file
    known: int = 0  # of the count, to the parent

    @property
    def news(self) -> tuple[int, int]:
        return self.count - self.known, self.first


class ValueCounts:
    """What was found in every held range and in the padding of every span. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str, StateBytes], _ValueCount] = {}
        self._padding: dict[tuple[str, str], _ValueCount] = {}

    def look(self, file: str, held: StateBytes, data: RawArray, at: int) -> bool:
        """Look at bytes of one held range that start at byte `at` of the file: whole elements. Is all right?"""
        # Buffers hold what they like: masks are made of infinities.
        if held.role == "buffer" or not scannable(held.dtype) or not data.size:
            return True
        squares = held.kind in NON_NEGATIVE
        bits = bits_of(data, held.dtype)
        if all_valid(bits, held.dtype, squares):
            return True
        if held.stateless and is_mask(bits, held.dtype):
            return True
        size = held.dtype.itemsize
        count, first = not_finite(bits, held.dtype)
        self._take(("finite", file, held), count, at + first * size)
        if squares:
            count, first = negative(bits, held.dtype)
            self._take(("second-moments", file, held), count, at + first * size)
        return False

    def pad(self, file: str, title: str, count: int, first: int) -> None:
        """`count` bytes of a span's padding are not zero, the first of them at byte `first` of the file."""
        with self._lock:
            _take(self._padding.setdefault((file, title), _ValueCount()), count, first)

    def _take(self, key: tuple[str, str, StateBytes], count: int, first: int) -> None:
        if count:
            with self._lock:
                _take(self._values.setdefault(key, _ValueCount()), count, first)

    def begin(self) -> None:
        """As `Shared.begin`."""
        for tally in (*self._values.values(), *self._padding.values()):
            tally.known = tally.count

    def told(self) -> Any:
        """As `Shared.told`: what was counted, by kind, and where the first of it is."""
        values = [
            (check, file, {**asdict(held), "dtype": held.dtype.name}, *tally.news)
            for (check, file, held), tally in self._values.items()
        ]
        padding = [(*key, *tally.news) for key, tally in self._padding.items()]
        return {"values": values, "padding": padding} if values or padding else None

    def hear(self, told: Any) -> None:
        """As `Shared.hear`."""
        for check, file, fields, count, first in told["values"]:
            held = StateBytes(**{**fields, "dtype": BY_NAME[fields["dtype"]], "rank": Rank(*fields["rank"])})
            self._take((check, file, held), count, first)
        for file, title, count, first in told["padding"]:
            if count:
                self.pad(file, title, count, first)

    def findings(self) -> Iterator[Finding]:
        """What is to be said when everything was looked at."""
        for (check, file, held), tally in self._values.items():
            what, hint = _WHAT[check]
            size = held.dtype.itemsize
            yield Finding(
                check,
                "warning",
                f"parameter {held.parameter}, {held.kind}: {tally.count} of {(held.stop - held.start) // size} elements"
                f" on {held.rank} ({file}) are {what}, the first at byte {tally.first}",
                file,
                held.rank,
                held.parameter,
                held.kind,
                (tally.first, tally.first + size),
                hint=hint,
            )
        for (file, title), tally in self._padding.items():
            yield Finding(
                "padding",
                "warning",
                f"{file}, {title}: {tally.count} bytes of padding are not zero, the first at {tally.first}",
                file,
                byte_range=(tally.first, tally.first + 1),
                subject=title,
                hint="padding never gets a gradient: the file was damaged or the layout is not what ucp takes it for",
            )


def _take(tally: _ValueCount, count: int, first: int) -> None:
    tally.first = first if not tally.count else min(first, tally.first)
    tally.count += count


@dataclass(slots=True)
class DeepState:
    """`elsewhere` has (parameter, kind) of the atoms that are read by a check of its own and need no scan."""

    ledger: ChecksumCoverage = field(default_factory=ChecksumCoverage)
    tallies: ValueCounts = field(default_factory=ValueCounts)
    elsewhere: set[tuple[str, str]] = field(default_factory=set)
