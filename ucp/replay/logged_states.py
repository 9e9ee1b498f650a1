"""States that a log holds as such: absolute values (FULL) and differences (DIFF), which shorten or replace a replay.

What a log holds as it is: buffers, and states with a shape of their own. Offered as computed files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucp.core.box import Shape
from ucp.core.checkpoint import COMPUTED, WEIGHT, Atom, ComputedFiles, ForkableFiles, Fragment, Parameter
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.log.codecs import DTYPES, Bits, EncodedBlock, apply_difference
from ucp.log.frames import FrameType
from ucp.log.reader import EpochSpan, LogStream
from ucp.log.stream_recovery import FrameRef
from ucp.log.stream_schema import BUFFER, PARAM, parse_shaped_kind

# Names under which a log may keep the tensor that the optimizer updates.
PARAM_NAMES = frozenset({PARAM, "master", "weight"})

# What reaching a state costs, in updates by a kernel that cost the same.
_FULL_COST = 2
_DIFF_COST = 8


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A stored value after `step`; a difference to the value after `base_step` where that is not None."""

    step: int
    base_step: int | None
    ref: FrameRef
    row: Any


@dataclass(frozen=True, slots=True)
class DiffChain:
    """How a state after `step` is put together: an absolute value (`full`; None: the base's), then all differences."""

    step: int
    full: LoggedValue | None
    differences: tuple[LoggedValue, ...]


class LoggedStates:
    """All FULL and DIFF blocks of one stream."""

    def __init__(self, stream: LogStream, kinds: Sequence[str]) -> None:
        self._stream = stream
        self._entries: dict[tuple[int, str], list[LoggedValue]] = {}
        for frame in (FrameType.FULL, FrameType.DIFF):
            for ref, table, base_step in stream.states(frame):
                for row in table:
                    kind = kinds[int(row["state"])]
                    key = int(row["block"]), PARAM if kind in PARAM_NAMES else kind
                    since = base_step if frame is FrameType.DIFF else None
                    self._entries.setdefault(key, []).append(LoggedValue(ref.header.step, since, ref, row))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def kinds(self, block: int, last: int) -> dict[str, DType]:
        """The states of a block that are stored up to a step, with their element types; not those of another shape."""
        found = {
            kind: entries[0]
            for (held, kind), entries in self._entries.items()
            if held == block and kind != BUFFER and parse_shaped_kind(kind) is None and _first_step(entries) <= last
        }
        return {kind: DTYPES[int(entry.row["dtype"])] for kind, entry in found.items()}

    def own(self, block: int, last: int) -> dict[str, tuple[Shape, EncodedBlock]]:
        """States with a shape of their own of the tensor that begins with a block, as they are after `last`."""
        found = {}
        for held, name in self._entries:
            told = parse_shaped_kind(name) if held == block else None
            newest = self.newest(held, name, last) if told is not None else None
            if told is not None and newest is not None:
                found[told[0]] = told[1], newest
        return found

    def newest(self, block: int, kind: str, last: int) -> EncodedBlock | None:
        """The newest absolute value up to a step."""
        entries = [e for e in self._entries.get((block, kind), ()) if e.step <= last and e.base_step is None]
        if not entries:
            return None
        entry = max(entries, key=lambda entry: entry.step)
        return self._stream.read_entry(entry.ref, entry.row)

    def best(
        self, block: int, kinds: Sequence[str], start: int, last: int, replays: bool
    ) -> Mapping[str, DiffChain] | None:
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

    def _reach(self, block: int, kind: str, start: int, last: int) -> dict[int, DiffChain]:
        """Every step that stored states lead to, with the shortest chain."""
        found: dict[int, DiffChain] = {start: DiffChain(start, None, ())}
        for entry in sorted(self._entries.get((block, kind), ()), key=lambda entry: entry.step):
            if not start <= entry.step <= last:
                continue
            if entry.base_step is None:
                found[entry.step] = DiffChain(entry.step, entry, ())
            elif entry.base_step in found:
                before = found[entry.base_step]
                chain = DiffChain(entry.step, before.full, (*before.differences, entry))
                known = found.get(entry.step)
                if known is None or len(known.differences) > len(chain.differences):
                    found[entry.step] = chain
        return found

    def follow(self, chain: DiffChain, base: Bits | None) -> Bits:
        """The bit patterns at the end of a chain; `base` are those that it begins with, where it has no own."""
        start = base if chain.full is None else self._bits(chain.full)
        assert start is not None
        deltas = [self._bits(entry) for entry in chain.differences]
        return apply_difference(start, fold_differences(deltas)) if deltas else start

    def _bits(self, entry: LoggedValue) -> Bits:
        return self._stream.read_entry(entry.ref, entry.row).bits()


def _first_step(entries: Sequence[LoggedValue]) -> int:
    return min(entry.step for entry in entries)


def fold_differences(deltas: Sequence[Bits]) -> Bits:
    """One difference that does what all of these do one after the other: neighbours first, then neighbours of those."""
    level = list(deltas)
    while len(level) > 1:
        pairs = [apply_difference(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = [*pairs, *level[len(pairs) * 2 :]]
    return level[0]


class LoggedFiles:
    """Values of a log by the names of their computed files; all others are `inner`'s."""

    def __init__(self, values: Mapping[str, EncodedBlock], inner: ComputedFiles) -> None:
        self.identity = inner.identity
        self.inner = inner
        self._values = values

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        found = self._values.get(file)
        if found is None:
            self.inner.read_into(file, offset, target)
        else:
            target[:] = found.bits().tobytes()[offset : offset + len(target)]

    def before_fork(self) -> bool:
        """As `ForkableFiles.before_fork`. Values were read with the log."""
        return isinstance(self.inner, ForkableFiles) and self.inner.before_fork()

    def in_fork(self, workers: int) -> None:
        """As `ForkableFiles.in_fork`."""
        assert isinstance(self.inner, ForkableFiles)
        self.inner.in_fork(workers)


def logged_atom(name: str, kind: str, shape: Shape, value: EncodedBlock, file: str) -> Atom:
    """An atom that is in the log as it is: a number itself, anything else as a computed file."""
    region = Region.all_of(shape)
    if not shape:
        data = value.bits().tobytes()
        return Atom(name, kind, shape, value.dtype, (Fragment(region, "", 0, value.dtype, inline=data),))
    return Atom(name, kind, shape, value.dtype, (Fragment(region, file, 0, value.dtype),), computed=True)


def with_buffers(
    parameters: Mapping[str, Parameter], span: EpochSpan, stored: Mapping[int, LoggedStates]
) -> tuple[dict[str, Parameter], dict[str, EncodedBlock]]:
    """Parameters with the buffers as they are after the span, and the values of those that have changed."""
    found = dict(parameters)
    values: dict[str, EncodedBlock] = {}
    buffers = span.epoch.manifest.buffers
    for number, stream in span.epoch.streams.items():
        for block in stream.schema.buffers:
            name = buffers[block.parameter].name
            held = found.get(name)
            atom = None if held is None else held.atoms.get(WEIGHT)
            value = stored[number].newest(block.id, BUFFER, span.last)
            if held is None or atom is None or value is None:
                continue  # left out of the base, or not changed
            file = f"{COMPUTED}epoch-{span.epoch.number:06d}/stream-{number:05d}/buffer-{block.id:04d}@{span.last}"
            values[file] = value
            fragments = (Fragment(Region.all_of(atom.shape), file, 0, value.dtype),)
            changed = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            found[name] = replace(held, atoms={**held.atoms, WEIGHT: changed})
    return found, values
