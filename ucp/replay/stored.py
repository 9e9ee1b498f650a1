"""States that a log holds as such: absolute values (FULL) and differences (DIFF), which shorten or replace a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.log.codecs import DTYPES, Bits, apply_difference
from ucp.log.frames import FrameType
from ucp.log.kinds import BUFFER, parse_own
from ucp.log.reader import StoredBlock, Stream
from ucp.log.walk import FrameRef
from ucp.model.box import Shape
from ucp.model.dtypes import DType
from ucp.replay.stretch import PARAM

# Names under which a log may keep the tensor that the optimizer updates.
PARAM_NAMES = frozenset({PARAM, "master", "weight"})

# What reaching a state costs, in updates by a kernel that cost the same.
_FULL_COST = 2
_DIFF_COST = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored value after `step`; a difference to the value after `base_step` where that is not None."""

    step: int
    base_step: int | None
    ref: FrameRef
    row: Any


@dataclass(frozen=True, slots=True)
class Chain:
    """How a state after `step` is put together: an absolute value (`full`; None: the base's), then all differences."""

    step: int
    full: Entry | None
    differences: tuple[Entry, ...]


class StoredStates:
    """All FULL and DIFF blocks of one stream."""

    def __init__(self, stream: Stream, kinds: Sequence[str]) -> None:
        self._stream = stream
        self._entries: dict[tuple[int, str], list[Entry]] = {}
        for frame in (FrameType.FULL, FrameType.DIFF):
            for ref, table, base_step in stream.states(frame):
                for row in table:
                    kind = kinds[int(row["state"])]
                    key = int(row["block"]), PARAM if kind in PARAM_NAMES else kind
                    since = base_step if frame is FrameType.DIFF else None
                    self._entries.setdefault(key, []).append(Entry(ref.header.step, since, ref, row))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def kinds(self, block: int, last: int) -> dict[str, DType]:
        """The states of a block that are stored up to a step, with their element types; not those of another shape."""
        found = {
            kind: entries[0]
            for (held, kind), entries in self._entries.items()
            if held == block and kind != BUFFER and parse_own(kind) is None and _first_step(entries) <= last
        }
        return {kind: DTYPES[int(entry.row["dtype"])] for kind, entry in found.items()}

    def own(self, block: int, last: int) -> dict[str, tuple[Shape, StoredBlock]]:
        """States with a shape of their own of the tensor that begins with a block, as they are after `last`."""
        found = {}
        for held, name in self._entries:
            told = parse_own(name) if held == block else None
            newest = self.newest(held, name, last) if told is not None else None
            if told is not None and newest is not None:
                found[told[0]] = told[1], newest
        return found

    def newest(self, block: int, kind: str, last: int) -> StoredBlock | None:
        """The newest absolute value up to a step."""
        entries = [e for e in self._entries.get((block, kind), ()) if e.step <= last and e.base_step is None]
        if not entries:
            return None
        entry = max(entries, key=lambda entry: entry.step)
        return self._stream.read_entry(entry.ref, entry.row)

    def best(
        self, block: int, kinds: Sequence[str], start: int, last: int, replays: bool
    ) -> Mapping[str, Chain] | None:
        """Chains that bring all `kinds` of a block to one same step; None where to begin with the base is better.

        `start` is the base's step. The newest step up to `last` is taken at which following the chains costs less than
        replaying would. Where nothing `replays` the steps after it, only chains that lead to `last` will do.
        """
        reached = [self._reach(block, kind, start, last) for kind in kinds]
        common = sorted(set.intersection(*(set(one) for one in reached))) if reached else []
        for step in reversed(common):
            chains = {kind: one[step] for kind, one in zip(kinds, reached, strict=True)}
            if step == start or (not replays and step < last):
                return None
            cost = max((c.full is not None) * _FULL_COST + len(c.differences) * _DIFF_COST for c in chains.values())
            if not replays or cost < step - start:
                return chains
        return None

    def _reach(self, block: int, kind: str, start: int, last: int) -> dict[int, Chain]:
        """Every step that stored states lead to, with the shortest chain."""
        found: dict[int, Chain] = {start: Chain(start, None, ())}
        for entry in sorted(self._entries.get((block, kind), ()), key=lambda entry: entry.step):
            if not start <= entry.step <= last:
                continue
            if entry.base_step is None:
                found[entry.step] = Chain(entry.step, entry, ())
            elif entry.base_step in found:
                before = found[entry.base_step]
                chain = Chain(entry.step, before.full, (*before.differences, entry))
                known = found.get(entry.step)
                if known is None or len(known.differences) > len(chain.differences):
                    found[entry.step] = chain
        return found

    def follow(self, chain: Chain, base: Bits | None) -> Bits:
        """The bit patterns at the end of a chain; `base` are those that it begins with, where it has no own."""
        start = base if chain.full is None else self._bits(chain.full)
        assert start is not None
        deltas = [self._bits(entry) for entry in chain.differences]
        return apply_difference(start, fold(deltas)) if deltas else start

    def _bits(self, entry: Entry) -> Bits:
        return self._stream.read_entry(entry.ref, entry.row).bits()


def _first_step(entries: Sequence[Entry]) -> int:
    return min(entry.step for entry in entries)


def fold(deltas: Sequence[Bits]) -> Bits:
    """One difference that does what all of these do one after the other: neighbours first, then neighbours of those."""
    level = list(deltas)
    while len(level) > 1:
        pairs = [apply_difference(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = [*pairs, *level[len(pairs) * 2 :]]
    return level[0]
