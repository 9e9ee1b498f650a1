"""A cache of byte ranges of objects: many small reads become few range requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ucp import settings

Fetch = Callable[[str, int, int], bytes]
"""`fetch(key, start, stop)` returns bytes `[start, stop)` of an object."""
Submit = Callable[[Callable[[], None]], Any]
"""`submit(work)` runs something soon, in another thread."""


@dataclass(slots=True, eq=False)
class _CachedRange:
    """Adjacent blocks that one request fetches: bytes `[start, stop)` of an object."""

    key: str
    start: int
    stop: int
    used: int = 0  # bytes that were read
    data: Future[bytes] = field(default_factory=Future)


class RangeCache:
    """Aligned blocks of objects, the least recently used of which are evicted. Thread-safe.

    Adjacent missing blocks are fetched in one request, and several requests run at once. If a block was evicted before
    all of it was read, it is not fetched again: later reads of it request exactly the bytes they need. So a small cache
    costs more requests, but never more than twice the bytes.
    """

    def __init__(self, fetch: Fetch, submit: Submit, block: int, capacity: int, ahead: int = 0) -> None:
        """`block` and `capacity` are in bytes; for a sequential reader, `ahead` blocks are fetched in advance."""
        self._fetch = fetch
        self._submit = submit
        self._block = block
        self._capacity = capacity
        self._ahead = ahead
        self._lock = threading.Lock()
        self._blocks: dict[tuple[str, int], _CachedRange] = {}
        self._ranges: OrderedDict[int, _CachedRange] = OrderedDict()  # by identity, least recently used first
        self._bytes = 0
        self._wasted: set[tuple[str, int]] = set()  # blocks that were evicted before they were read

    def read(self, key: str, size: int, offset: int, target: memoryview) -> None:
        """Fill `target` from byte `offset` of an object of `size` bytes, which must be long enough."""
        if not target:
            return
        stop = offset + len(target)
        numbers = range(offset // self._block, -(-stop // self._block))
        with self._lock:
            if any((key, number) in self._wasted for number in numbers):
                step = settings.REMOTE_REQUEST_BYTES
                new = ranges = [_CachedRange(key, at, min(at + step, stop)) for at in range(offset, stop, step)]
            else:
                new, ranges = self._ranges_for(key, size, numbers)
            ahead = self._ranges_ahead(key, size, numbers) if self._ahead else []
        for one in (*new[1:], *ahead):
            self._submit(partial(self._load, one))
        if new:
            self._load(new[0])
        for one in ranges:
            low, high = max(offset, one.start), min(stop, one.stop)
            target[low - offset : high - offset] = memoryview(one.data.result())[low - one.start : high - one.start]
            one.used += high - low

    def prefetch(self, key: str, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Start to fetch byte ranges `(offset, length)`, and short gaps between them, which will be read soon."""
        numbers: list[int] = []
        for offset, length in sorted(ranges):
            stop = -(-min(size, offset + length) // self._block)
            start = offset // self._block
            if numbers and start <= numbers[-1] + 1 + settings.REMOTE_GAP_BYTES // self._block:
                start = numbers[-1] + 1
            numbers += range(start, stop)
        with self._lock:
            new, _ = self._ranges_for(key, size, numbers)
        for one in new:
            self._submit(partial(self._load, one))

    def discard(self, key: str) -> None:
        """Drop the blocks of an object, and of all objects below."""
        with self._lock:
            for one in list(self._ranges.values()):
                if one.key == key or one.key.startswith(key + "/"):
                    self._drop(one)
            self._wasted = {at for at in self._wasted if at[0] != key and not at[0].startswith(key + "/")}

    def _ranges_for(self, key: str, size: int, numbers: Iterable[int]) -> tuple[list[_CachedRange], list[_CachedRange]]:
        """(ranges to load, all ranges that contain these blocks)."""
        new: list[_CachedRange] = []
        ranges: list[_CachedRange] = []
        for number in numbers:
            one = self._blocks.get((key, number))
            if one is None:
                start, stop = number * self._block, min(size, (number + 1) * self._block)
                last = new[-1] if new else None
                if last is not None and last.stop == start and stop - last.start <= settings.REMOTE_REQUEST_BYTES:
                    one, last.stop = last, stop
                else:
                    one = _CachedRange(key, start, stop)
                    new.append(one)
                    self._ranges[id(one)] = one
                self._blocks[key, number] = one
                self._bytes += stop - start
            else:
                self._ranges.move_to_end(id(one))
            if not ranges or ranges[-1] is not one:
                ranges.append(one)
        self._evict(ranges)
        return new, ranges

    def _ranges_ahead(self, key: str, size: int, numbers: range) -> list[_CachedRange]:
        """What a sequential reader will want next: a reader is sequential if the block before these is cached."""
        if (key, numbers.start - 1) not in self._blocks and len(numbers) < 2:
            return []
        stop = min(numbers.stop + self._ahead, -(-size // self._block))
        after = range(numbers.stop, stop)
        if any((key, number) in self._wasted for number in after):
            return []
        return self._ranges_for(key, size, after)[0]

    def _load(self, one: _CachedRange) -> None:
        try:
            data = self._fetch(one.key, one.start, one.stop)
        except BaseException as error:  # noqa: BLE001 - raised in the threads that wait for the range
            with self._lock:
                if id(one) in self._ranges:
                    self._drop(one)
            one.data.set_exception(error)
        else:
            one.data.set_result(data)

    def _evict(self, keep: list[_CachedRange]) -> None:
        if self._bytes <= self._capacity:
            return
        for one in list(self._ranges.values()):
            if self._bytes <= self._capacity:
                return
            if one not in keep:
                if one.used < one.stop - one.start:
                    self._wasted.update((one.key, number) for number in self._numbers(one))
                self._drop(one)

    def _drop(self, one: _CachedRange) -> None:
        del self._ranges[id(one)]
        for number in self._numbers(one):
            self._blocks.pop((one.key, number), None)
        self._bytes -= one.stop - one.start

    def _numbers(self, one: _CachedRange) -> range:
        return range(one.start // self._block, -(-one.stop // self._block))
