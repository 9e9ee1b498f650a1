"""Blocks of objects, kept for a while: many small reads become few range requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ucp import settings

Fetch = Callable[[str, int, int], bytes]
"""`fetch(key, start, stop)`: bytes `[start, stop)` of an object."""
Submit = Callable[[Callable[[], None]], Any]
"""`submit(work)`: do it soon, in another thread."""


class _CachedRange:
    """Adjacent blocks that one request brings: bytes `[start, stop)` of an object."""

    __slots__ = ("data", "key", "start", "stop", "used")

    def __init__(self, key: str, start: int, stop: int) -> None:
        self.key = key
        self.start = start
        self.stop = stop
        self.used = 0  # bytes that were asked for
        self.data: Future[bytes] = Future()


class RangeCache:
    """Aligned blocks of objects, the least recently used of which are let go. Thread-safe.

    Missing blocks beside each other come in one request, and several requests at once. Blocks that were let go before
    they were used up are not fetched again: what is wanted of them is then read exactly, so that little memory costs
    requests and never more than twice the bytes.
    """

    def __init__(self, fetch: Fetch, submit: Submit, block: int, capacity: int, ahead: int = 0) -> None:
        """`block` and `capacity` are in bytes; a reader that goes through an object has `ahead` blocks fetched."""
        self._fetch = fetch
        self._submit = submit
        self._block = block
        self._capacity = capacity
        self._ahead = ahead
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], _CachedRange] = {}
        self._runs: OrderedDict[int, _CachedRange] = OrderedDict()  # by identity, least recently used first
        self._bytes = 0
        self._wasted: set[tuple[str, int]] = set()

    def read(self, key: str, size: int, offset: int, target: memoryview) -> None:
        """Fill `target` from byte `offset` of an object of `size` bytes, which must have them."""
        if not target:
            return
        stop = offset + len(target)
        numbers = range(offset // self._block, -(-stop // self._block))
        with self._lock:
            if any((key, number) in self._wasted for number in numbers):
                step = settings.REMOTE_REQUEST_BYTES
                new = runs = [_CachedRange(key, at, min(at + step, stop)) for at in range(offset, stop, step)]
            else:
                new, runs = self._runs_for(key, size, numbers)
            ahead = self._next(key, size, numbers) if self._ahead else []
        for run in (*new[1:], *ahead):
            self._submit(partial(self._load, run))
        if new:
            self._load(new[0])
        for run in runs:
            low, high = max(offset, run.start), min(stop, run.stop)
            target[low - offset : high - offset] = memoryview(run.data.result())[low - run.start : high - run.start]
            run.used += high - low

    def expect(self, key: str, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Byte ranges `(offset, length)` will be read soon: begin to fetch them, and short gaps with them."""
        numbers: list[int] = []
        for offset, length in sorted(ranges):
            stop = -(-min(size, offset + length) // self._block)
            start = offset // self._block
            if numbers and start <= numbers[-1] + 1 + settings.REMOTE_GAP_BYTES // self._block:
                start = numbers[-1] + 1
            numbers += range(start, stop)
        with self._lock:
            new, _ = self._runs_for(key, size, numbers)
        for run in new:
            self._submit(partial(self._load, run))

    def forget(self, key: str) -> None:
        """Let go of an object's blocks, and of those of everything below."""
        with self._lock:
            for run in list(self._runs.values()):
                if run.key == key or run.key.startswith(key + "/"):
                    self._drop(run)
            self._wasted = {at for at in self._wasted if at[0] != key and not at[0].startswith(key + "/")}

    def _runs_for(self, key: str, size: int, numbers: Iterable[int]) -> tuple[list[_CachedRange], list[_CachedRange]]:
        """(runs to load, all runs that have these blocks)."""
        new: list[_CachedRange] = []
        runs: list[_CachedRange] = []
        for number in numbers:
            run = self._held.get((key, number))
            if run is None:
                start, stop = number * self._block, min(size, (number + 1) * self._block)
                last = new[-1] if new else None
                if last is not None and last.stop == start and stop - last.start <= settings.REMOTE_REQUEST_BYTES:
                    run, last.stop = last, stop
                else:
                    run = _CachedRange(key, start, stop)
                    new.append(run)
                    self._runs[id(run)] = run
                self._held[key, number] = run
                self._bytes += stop - start
            else:
                self._runs.move_to_end(id(run))
            if not runs or runs[-1] is not run:
                runs.append(run)
        self._evict(runs)
        return new, runs

    def _next(self, key: str, size: int, numbers: range) -> list[_CachedRange]:
        """What a reader will want that comes from the block before: the blocks after these."""
        if (key, numbers.start - 1) not in self._held and len(numbers) < 2:
            return []
        stop = min(numbers.stop + self._ahead, -(-size // self._block))
        after = range(numbers.stop, stop)
        if any((key, number) in self._wasted for number in after):
            return []
        return self._runs_for(key, size, after)[0]

    def _load(self, run: _CachedRange) -> None:
        try:
            data = self._fetch(run.key, run.start, run.stop)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the blocks raises it
            with self._lock:
                if id(run) in self._runs:
                    self._drop(run)
            run.data.set_exception(error)
        else:
            run.data.set_result(data)

    def _evict(self, keep: list[_CachedRange]) -> None:
        if self._bytes <= self._capacity:
            return
        for run in list(self._runs.values()):
            if self._bytes <= self._capacity:
                return
            if run not in keep:
                if run.used < run.stop - run.start:
                    self._wasted.update((run.key, number) for number in self._numbers(run))
                self._drop(run)

    def _drop(self, run: _CachedRange) -> None:
        del self._runs[id(run)]
        for number in self._numbers(run):
            self._held.pop((run.key, number), None)
        self._bytes -= run.stop - run.start

    def _numbers(self, run: _CachedRange) -> range:
        return range(run.start // self._block, -(-run.stop // self._block))
