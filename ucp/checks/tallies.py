"""Numbers that should not be there, counted over all blocks and threads, and what is said about them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from ucp.checks.filemap import Held
from ucp.checks.findings import Finding
from ucp.checks.values import SECOND_MOMENTS, bits_of, is_mask, negative, not_finite, quite_right, scannable
from ucp.engine.casting import RawArray
from ucp.model.dtypes import BY_NAME
from ucp.model.layout import Rank

_WHAT: Final = {
    "finite": ("NaN or infinite", "training that goes on from here will not recover"),
    "second-moments": ("below zero", "a sum of squares cannot be: the bytes are damaged"),
}


@dataclass(slots=True)
class _Tally:
    count: int = 0
    first: int = 0  # byte of the file
    known: int = 0  # of the count, to the parent

    @property
    def news(self) -> tuple[int, int]:
        return self.count - self.known, self.first


class Tallies:
    """What was found in every held range and in the padding of every span. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str, Held], _Tally] = {}
        self._padding: dict[tuple[str, str], _Tally] = {}

    def look(self, file: str, held: Held, data: RawArray, at: int) -> bool:
        """Look at bytes of one held range that start at byte `at` of the file: whole elements. Is all right?"""
        # Buffers hold what they like: masks are made of infinities.
        if held.role == "buffer" or not scannable(held.dtype) or not data.size:
            return True
        squares = held.kind in SECOND_MOMENTS
        bits = bits_of(data, held.dtype)
        if quite_right(bits, held.dtype, squares):
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
            _take(self._padding.setdefault((file, title), _Tally()), count, first)

    def _take(self, key: tuple[str, str, Held], count: int, first: int) -> None:
        if count:
            with self._lock:
                _take(self._values.setdefault(key, _Tally()), count, first)

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
            held = Held(**{**fields, "dtype": BY_NAME[fields["dtype"]], "rank": Rank(*fields["rank"])})
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


def _take(tally: _Tally, count: int, first: int) -> None:
    tally.first = first if not tally.count else min(first, tally.first)
    tally.count += count
