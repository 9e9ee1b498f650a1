"""States and buffers that a log contains as such: absolute values (FULL) and differences (DIFF).

States shorten a replay, or replace it if the optimizer cannot be replayed. Buffers, and states that do not have the
parameter's shape, are put into the base's index as computed files; a shadow does the same with those that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.core.box import Shape
from ucp.core.checkpoint import COMPUTED, WEIGHT, Atom, ComputedFiles, ForkableFiles, Fragment, Parameter
from ucp.core.dtypes import DType, scalar_data
from ucp.core.region import Region
from ucp.log.codecs import DTYPES, Bits, EncodedBlock, apply_difference
from ucp.log.frames import FrameType
from ucp.log.reader import EpochSpan, LogStream
from ucp.log.stream_recovery import FrameRef
from ucp.log.stream_schema import BUFFER, PARAM, parse_shaped_kind

# Names under which a log may contain the tensor that the optimizer updates.
PARAM_NAMES: Final = frozenset({PARAM, "master", "weight"})

# Cost of reaching a state, in kernel updates that cost the same.
_FULL_COST: Final = 2
_DIFF_COST: Final = 8


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A logged value after `step`; a difference from the value after `base_step` unless that is None."""

    step: int
    base_step: int | None
    ref: FrameRef
    row: Any


@dataclass(frozen=True, slots=True)
class DiffChain:
    """How to compute a state after `step`: an absolute value (`full`; None: the base's), then all differences."""

    step: int
    full: LoggedValue | None
    differences: tuple[LoggedValue, ...]


class LoggedStates:
    """All FULL and DIFF blocks of one stream."""

    def __init__(self, stream: LogStream, kinds: Sequence[str]) -> None:
        self._stream = stream
        self._values: dict[tuple[int, str], list[LoggedValue]] = {}
        for frame in (FrameType.FULL, FrameType.DIFF):
            for ref, table, base_step in stream.states(frame):
                for row in table:
                    kind = kinds[int(row["state"])]
                    key = int(row["block"]), PARAM if kind in PARAM_NAMES else kind
                    since = base_step if frame is FrameType.DIFF else None
                    self._values.setdefault(key, []).append(LoggedValue(ref.header.step, since, ref, row))

    def __bool__(self) -> bool:
        return bool(self._values)

    def kinds(self, block: int, last: int) -> dict[str, DType]:
        """The states of a block that are logged up to a step, with their dtypes; only those of the block's shape."""
        found = {
            kind: values[0]
            for (held, kind), values in self._values.items()
            if held == block
            and kind != BUFFER
            and parse_shaped_kind(kind) is None
            and min(value.step for value in values) <= last
        }
        return {kind: DTYPES[int(value.row["dtype"])] for kind, value in found.items()}

    def shaped(self, block: int, last: int) -> dict[str, tuple[Shape, EncodedBlock]]:
        """States that do not have the parameter's shape, after `last`, of the tensor that starts with a block."""
        found = {}
        for held, name in self._values:
            parsed = parse_shaped_kind(name) if held == block else None
            newest = self.newest(held, name, last) if parsed is not None else None
            if parsed is not None and newest is not None:
                kind, shape = parsed
                found[kind] = shape, newest
        return found

    def newest(self, block: int, kind: str, last: int) -> EncodedBlock | None:
        """The newest absolute value up to a step."""
        values = [v for v in self._values.get((block, kind), ()) if v.step <= last and v.base_step is None]
        if not values:
            return None
        value = max(values, key=lambda value: value.step)
        return self._stream.read_entry(value.ref, value.row)

    def best(
        self, block: int, kinds: Sequence[str], start: int, last: int, replays: bool
    ) -> Mapping[str, DiffChain] | None:
        """Chains that bring all `kinds` of a block to the same step; None if starting from the base is better.

        `start` is the base's step. The result is for the newest step up to `last` at which following the chains costs
        less than replaying. Without a kernel that `replays` the steps after it, only chains to `last` itself will do.
        """
        reached = [self._reachable(block, kind, start, last) for kind in kinds]
        common = sorted(set.intersection(*(set(one) for one in reached))) if reached else []
        for step in reversed(common):
            chains = {kind: one[step] for kind, one in zip(kinds, reached, strict=True)}
            if step == start or (not replays and step < last):
                return None
            cost = max((c.full is not None) * _FULL_COST + len(c.differences) * _DIFF_COST for c in chains.values())
            if not replays or cost < step - start:
                return chains
        return None

    def _reachable(self, block: int, kind: str, start: int, last: int) -> dict[int, DiffChain]:
        """Every step that logged values lead to, with the shortest chain."""
        found: dict[int, DiffChain] = {start: DiffChain(start, None, ())}
        for value in sorted(self._values.get((block, kind), ()), key=lambda value: value.step):
            if not start <= value.step <= last:
                continue
            if value.base_step is None:
                found[value.step] = DiffChain(value.step, value, ())
            elif value.base_step in found:
                before = found[value.base_step]
                chain = DiffChain(value.step, before.full, (*before.differences, value))
                known = found.get(value.step)
                if known is None or len(known.differences) > len(chain.differences):
                    found[value.step] = chain
        return found

    def follow(self, chain: DiffChain, base: Bits | None) -> Bits:
        """The bit patterns at the end of a chain; `base` are those to start with if the chain has no `full`."""
        start = base if chain.full is None else self._bits(chain.full)
        assert start is not None
        deltas = [self._bits(value) for value in chain.differences]
        return apply_difference(start, fold_differences(deltas)) if deltas else start

    def _bits(self, value: LoggedValue) -> Bits:
        return self._stream.read_entry(value.ref, value.row).bits()


def fold_differences(deltas: Sequence[Bits]) -> Bits:
    """One difference with the effect of all of these in order: neighbours are added first, then their sums."""
    level = list(deltas)
    while len(level) > 1:
        pairs = [apply_difference(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = [*pairs, *level[len(pairs) * 2 :]]
    return level[0]


# Values as atoms of the base's index --------------------------------------------------------------------------------


def shaped_atom(
    name: str, kind: str, shape: Shape, dtype: DType, *, file: str = "", inline: bytes | None = None
) -> Atom:
    """An atom that does not have its parameter's shape: a number with its bytes `inline`, or a computed file."""
    fragment = Fragment(Region.all_of(shape), file if inline is None else "", 0, dtype, inline=inline)
    return Atom(name, kind, shape, dtype, (fragment,), computed=inline is None)


def with_number(atom: Atom, number: float) -> Atom | None:
    """A one-element atom with another value; None if its dtype or shape does not allow that."""
    data = scalar_data(number, atom.dtype) if atom.numel == 1 else None
    return None if data is None else shaped_atom(atom.name, atom.kind, atom.shape, atom.dtype, inline=data)


def set_buffer(parameters: dict[str, Parameter], name: str, file: str, dtype: DType) -> bool:
    """Let a buffer be read from a computed file; False if the base was saved without it."""
    buffer = parameters.get(name)
    atom = None if buffer is None else buffer.atoms.get(WEIGHT)
    if buffer is None or atom is None:
        return False
    fragments = (Fragment(Region.all_of(atom.shape), file, 0, dtype),)
    changed = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
    parameters[name] = replace(buffer, atoms={**buffer.atoms, WEIGHT: changed})
    return True


def set_logged_buffers(
    parameters: dict[str, Parameter], span: EpochSpan, logged: Mapping[int, LoggedStates]
) -> dict[str, EncodedBlock]:
    """Set the buffers that have changed to their values after the span; returns these by computed file."""
    values: dict[str, EncodedBlock] = {}
    buffers = span.epoch.manifest.buffers
    for number, stream in span.epoch.streams.items():
        for block in stream.schema.buffers:
            value = logged[number].newest(block.id, BUFFER, span.last)
            file = f"{COMPUTED}epoch-{span.epoch.number:06d}/stream-{number:05d}/buffer-{block.id:04d}@{span.last}"
            if value is not None and set_buffer(parameters, buffers[block.parameter].name, file, value.dtype):
                values[file] = value
    return values


class LoggedFiles:
    """Values of a log as computed files; all other files are those of `inner`."""

    def __init__(self, values: Mapping[str, EncodedBlock], inner: ComputedFiles) -> None:
        self.identity = inner.identity
        self.inner = inner
        self._values = values

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        found = self._values.get(file)
        if found is None:
            self.inner.read_into(file, offset, target)
        else:
            target[:] = found.bits().tobytes()[offset : offset + len(target)]

    def before_fork(self) -> bool:
        return isinstance(self.inner, ForkableFiles) and self.inner.before_fork()

    def in_fork(self, workers: int) -> None:
        assert isinstance(self.inner, ForkableFiles)
        self.inner.in_fork(workers)
