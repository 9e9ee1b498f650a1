"""The ledger of a deep pass: which bytes were read by whom, and what their checksums come to.

Checks read in the order that suits them (a master beside its weight, a copy beside the other), each byte once. Whoever
reads tells the ledger; what nobody needed is read at the end, and by then every recorded checksum can be compared.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from ucp.checks.spans import Digest, Span
from ucp.files.crc import crc32, crc32_combine


class Track:
    """How much of one span was read. CRCs of pieces are put together at the end; other digests go front to back."""

    __slots__ = ("_at", "_digest", "_found", "_known", "_lock", "_pieces", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._digest: Digest | None = span.digest() if span.digest is not None else None
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


class Ledger:
    """The tracks of all spans, by file. Spans of one file do not overlap and are added before anything is read."""

    def __init__(self) -> None:
        self._all: list[Track] = []
        self._tracks: dict[str, list[Track]] = {}
        self._starts: dict[str, list[int]] = {}

    def add(self, span: Span) -> Track:
        track = Track(span)
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

    def within(self, file: str, start: int, stop: int) -> Iterator[Track]:
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


class Notebook:
    """What one task has read, until it hands it to the ledger: neighbouring blocks make one piece. One thread's own."""

    __slots__ = ("_last", "_ledger", "_open")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last: dict[str, Track] = {}
        self._open: dict[Track, tuple[int, int, int]] = {}

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

    def _add(self, track: Track, start: int, data: memoryview) -> None:
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
