"""ZeRO off: the optimizer numbers its parameters and names none. Finds the names, by value where it can, else by shape.

By value: a master weight rounded to the module's dtype is the module's weight, bit for bit. By shape: groups are lists
of the model's parameters in the model's order, so every group is a subsequence of the module; if only one way of
dealing the names out fits all shapes, it is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp.files.local import SourceFiles
from ucp.formats.deepspeed.stored import Run, Stored
from ucp.model.box import Shape
from ucp.model.dtypes import DType

SAMPLE: Final = 1024  # elements of a tensor that are compared before names are believed to match
_BLOCK: Final = 1 << 20
_MAX_WAYS: Final = 20_000  # half-dealt states kept at a time; beyond it nothing is decided


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter of the module that the optimizer may own."""

    name: str
    shape: Shape
    weight: Stored | None


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimizer group: its master weight where there is one, else the shapes of its states."""

    master: Stored | None = None
    shape: Shape | None = None  # of the master
    states: frozenset[Shape] = frozenset()

    def fits(self, shape: Shape) -> bool:
        """Whether a parameter of this shape can be meant: a state has it, or rows and columns of it (Adafactor)."""
        if self.shape is not None:
            return self.shape == shape
        if not self.states or shape in self.states:
            return True
        rows, columns = shape[:-1], (*shape[:-2], *shape[-1:])
        kept = ((*rows, 1), (*shape[:-2], 1, *shape[-1:]))  # with the dimension that was summed over
        return len(shape) > 1 and (self.states >= {rows, columns} or self.states >= set(kept))


def match_by_value(
    source: SourceFiles, groups: Sequence[Sequence[Slot]], candidates: Sequence[Candidate]
) -> list[list[str]] | None:
    """Names of every group's slots by comparing samples, or None when a slot has no master or none that fits."""
    unused: dict[tuple[Shape, bytes], list[str]] = {}
    dtypes: dict[Shape, DType] = {}
    for candidate in candidates:
        if candidate.weight is not None:
            sample = _sample(source, candidate.weight)
            unused.setdefault((candidate.shape, sample), []).append(candidate.name)
            dtypes[candidate.shape] = candidate.weight.dtype
    dealt: list[list[str]] = []
    for group in groups:
        names: list[str] = []
        for slot in group:
            if slot.master is None or slot.shape is None or slot.shape not in dtypes:
                return None
            sample = rounded(_sample(source, slot.master), slot.master.dtype, dtypes[slot.shape])
            fitting = unused.get((slot.shape, sample))
            if not fitting:
                return None
            names.append(fitting.pop(0))
        dealt.append(names)
    return dealt


def match_by_shape(groups: Sequence[Sequence[Slot]], candidates: Sequence[Candidate]) -> list[list[str]] | None:
    """Names of every group's slots when exactly one way of dealing the module out in order fits; else None.

    A candidate that goes to no group is a frozen parameter.
    """
    frozen = len(candidates) - sum(map(len, groups))
    if frozen < 0:
        return None
    start = ((0,) * len(groups), frozen)
    # state → (number of ways, capped at 2; the state before and the group that took the name)
    ways: dict[Any, tuple[int, Any]] = {start: (1, None)}
    history: list[dict[Any, tuple[int, Any]]] = []
    for candidate in candidates:
        after: dict[Any, tuple[int, Any]] = {}
        for state, (count, _) in ways.items():
            for taker, following in _choices(state, groups, candidate.shape):
                known = after.get(following)
                after[following] = (2, None) if known or count > 1 else (1, (state, taker))
        if not after or len(after) > _MAX_WAYS:
            return None
        history.append(after)
        ways = after
    end = (tuple(map(len, groups)), 0)
    if ways.get(end, (0, None))[0] != 1:
        return None
    return _retrace(end, history, candidates, len(groups))


def _choices(state: Any, groups: Sequence[Sequence[Slot]], shape: Shape) -> list[tuple[int | None, Any]]:
    """Who may take the next name: a group whose next slot has its shape, or nobody while frozen ones are left."""
    positions, frozen = state
    found: list[tuple[int | None, Any]] = []
    for g, at in enumerate(positions):
        if at < len(groups[g]) and groups[g][at].fits(shape):
            found.append((g, ((*positions[:g], at + 1, *positions[g + 1 :]), frozen)))
    if frozen:
        found.append((None, (positions, frozen - 1)))
    return found


def _retrace(
    end: Any, history: Sequence[Mapping[Any, tuple[int, Any]]], candidates: Sequence[Candidate], groups: int
) -> list[list[str]]:
    dealt: list[list[str]] = [[] for _ in range(groups)]
    state = end
    for candidate, after in zip(reversed(candidates), reversed(history), strict=True):
        state, taker = after[state][1]
        if taker is not None:
            dealt[taker].append(candidate.name)
    return [names[::-1] for names in dealt]


def find_copies(source: SourceFiles, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Name → earlier name with the very same values (tied weights, saved twice). Constants do not count."""
    seen: dict[tuple[Shape, bytes], Candidate] = {}
    copies: dict[str, str] = {}
    for candidate in candidates:
        if candidate.weight is None:
            continue
        sample = _sample(source, candidate.weight)
        size = candidate.weight.dtype.itemsize
        if len(sample) <= size or sample == sample[:size] * (len(sample) // size):
            continue
        first = seen.setdefault((candidate.shape, sample), candidate)
        if first is not candidate and first.weight is not None and _equal(source, first.weight, candidate.weight):
            copies[candidate.name] = first.name
    return copies


def _sample(source: SourceFiles, stored: Stored) -> bytes:
    """The first elements of a tensor that lies whole and contiguous in one file; empty otherwise."""
    run = _only_run(stored)
    if run is None:
        return b""
    return source.read(run.file, run.offset, min(run.stop, SAMPLE) * stored.dtype.itemsize)


def looks_equal(source: SourceFiles, a: Stored, b: Stored) -> bool:
    """Whether the first elements of two tensors are the same, as far as both have them in one piece."""
    first, second = next(iter(a.runs()), None), next(iter(b.runs()), None)
    if first is None or second is None or a.dtype != b.dtype or first.strides or second.strides:
        return True
    size = min(first.stop, second.stop, SAMPLE) * a.dtype.itemsize
    return source.read(first.file, first.offset, size) == source.read(second.file, second.offset, size)


def _only_run(stored: Stored) -> Run | None:
    runs = list(stored.runs()) if stored.count == 1 else []
    return runs[0] if runs and runs[0].strides is None and runs[0].inline is None else None


def _equal(source: SourceFiles, a: Stored, b: Stored) -> bool:
    first, second = _only_run(a), _only_run(b)
    if first is None or second is None or a.dtype != b.dtype or first.stop != second.stop:
        return False
    nbytes = first.stop * a.dtype.itemsize
    return all(
        source.read(first.file, first.offset + at, min(_BLOCK, nbytes - at))
        == source.read(second.file, second.offset + at, min(_BLOCK, nbytes - at))
        for at in range(0, nbytes, _BLOCK)
    )


def rounded(data: bytes, source: DType, target: DType) -> bytes:
    """Elements of dtype `source` rounded to `target` as the framework does it (to nearest, ties to even)."""
    if source == target:
        return data
    if source.name != "float32" or target.name not in ("bfloat16", "float16"):
        return b""
    import numpy as np

    if target.name == "float16":
        with np.errstate(over="ignore"):
            halves: bytes = np.frombuffer(data, dtype="<f4").astype("<f2").tobytes()
            return halves
    bits = np.frombuffer(data, dtype="<u4")
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    brains: bytes = np.where(nan, np.uint32(0x7FC0), (bits + up) >> 16).astype("<u2").tobytes()
    return brains
