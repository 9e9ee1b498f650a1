"""ZeRO off: the optimizer numbers its parameters and names none. Finds the names, by value where it can, else by shape.

By value: a master weight rounded to the module's dtype is the module's weight, bit for bit. By shape: see `dealing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ucp.files.local import SourceFiles
from ucp.formats.dealing import deal, states_fit
from ucp.formats.deepspeed.stored import Run, Stored
from ucp.model.box import Shape
from ucp.model.dtypes import DType

SAMPLE: Final = 1024  # elements of a tensor that are compared before names are believed to match
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter of the module that the optimizer may own."""

    name: str
    shape: Shape
    weight: Stored | None
    degree: int = 0  # expert-parallel degree of its layer; 0 where it is dense


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimizer group: its master weight where there is one, else the shapes of its states."""

    master: Stored | None = None
    shape: Shape | None = None  # of the master
    states: tuple[Shape, ...] = ()
    degree: int = 0  # expert-parallel degree after which its group is named; 0 where it is not

    def fits(self, shape: Shape) -> bool:
        """Whether a parameter of this shape can be meant."""
        return self.shape == shape if self.shape is not None else states_fit(self.states, shape)


def match_by_name(
    groups: Sequence[Sequence[Slot]], told: Sequence[Sequence[str]], candidates: Sequence[Candidate]
) -> list[list[str]] | None:
    """The names that the groups tell themselves, when every slot has one of its own that the module has too."""
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    names = [name for group in told for name in group]
    if [len(group) for group in groups] != [len(group) for group in told] or len(set(names)) != len(names):
        return None
    slots = [slot for group in groups for slot in group]
    if not all(name in shapes and slot.fits(shapes[name]) for slot, name in zip(slots, names, strict=True)):
        return None
    return [list(group) for group in told]


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

    Groups that are named after an expert-parallel degree have experts of that degree, and the others have none.
    """
    degrees = [next((slot.degree for slot in group), 0) for group in groups]
    dealt: list[list[str]] = [[] for _ in groups]
    for degree in sorted(set(degrees)):
        among = [candidate for candidate in candidates if not any(degrees) or candidate.degree == degree]
        members = [number for number, own in enumerate(degrees) if own == degree]
        tests = [[slot.fits for slot in groups[number]] for number in members]
        found = deal(tests, [(candidate.name, candidate.shape) for candidate in among])
        if found is None:
            return None
        for number, names in zip(members, found, strict=True):
            dealt[number] = names
    return dealt


def match_in_order(groups: Sequence[Sequence[Slot]], candidates: Sequence[Candidate]) -> list[list[str]] | None:
    """The module's names in its order, group after group, when exactly one way of leaving the rest out fits."""
    fits = [slot.fits for group in groups for slot in group]
    dealt = deal([fits], [(candidate.name, candidate.shape) for candidate in candidates])
    if dealt is None:
        return None
    names = iter(dealt[0])
    return [[next(names) for _ in group] for group in groups]


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


def rounds_to(source: SourceFiles, master: Stored, weight: Stored) -> bool | None:
    """Whether the first elements of a master weight round to those of the weight; None where that cannot be told."""
    first, second = next(iter(master.runs()), None), next(iter(weight.runs()), None)
    if first is None or second is None or first.strides or second.strides or first.inline or second.inline:
        return None
    count = min(first.stop, second.stop, SAMPLE)
    made = rounded(source.read(first.file, first.offset, count * master.dtype.itemsize), master.dtype, weight.dtype)
    return made == source.read(second.file, second.offset, count * weight.dtype.itemsize) if made else None


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
