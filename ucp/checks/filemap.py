"""The index turned around: for each file, which parameter's state lies at which bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucp.checks.tasks import Context
from ucp.model.checkpoint import Atom, Fragment, Parameter, Role
from ucp.model.dtypes import DType
from ucp.model.layout import Rank


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes `[start, stop)` of a file that are part of one state of one parameter."""

    start: int
    stop: int
    parameter: str
    kind: str
    dtype: DType
    rank: Rank
    role: Role = "trained"
    stateless: bool = False  # nothing but a weight is known of the parameter: it may be a buffer


class FileMap:
    """Every byte range that an atom takes up, replicas included. A strided view counts as its span."""

    def __init__(self, context: Context | None) -> None:
        self._held: dict[str, list[Held]] = {}
        self._starts: dict[str, list[int]] = {}
        self._stops: dict[str, list[int]] = {}  # the furthest so far
        if context is None:
            return
        for atom in context.atoms():
            parameter = context.checkpoint.parameters[atom.name]
            for cover in (atom.fragments, *atom.replicas):
                for fragment in cover:
                    if fragment.inline is None and fragment.region.numel:
                        self._held.setdefault(fragment.file, []).append(held_by(fragment, atom, parameter))
        for file, ranges in self._held.items():
            ranges.sort(key=lambda held: (held.start, held.stop))
            self._starts[file] = [held.start for held in ranges]
            self._stops[file] = list(accumulate((held.stop for held in ranges), max))

    @property
    def files(self) -> list[str]:
        return list(self._held)

    def of(self, file: str) -> Sequence[Held]:
        """All that atoms take up of a file, in order of its first byte."""
        return self._held.get(file, ())

    def between(self, file: str, start: int, stop: int) -> Sequence[Held]:
        """What overlaps bytes `[start, stop)` of a file, in order of its first byte."""
        if file not in self._held:
            return ()
        first = bisect_right(self._stops[file], start)
        last = bisect_left(self._starts[file], stop)
        return [held for held in self._held[file][first:last] if held.stop > start]


def held_by(fragment: Fragment, atom: Atom, parameter: Parameter) -> Held:
    """The bytes that a fragment of an atom of a parameter takes up."""
    start = fragment.offset
    stateless = len(parameter.atoms) == 1
    rank, role = fragment.rank, parameter.role
    return Held(start, start + _span(fragment), atom.name, atom.kind, fragment.dtype, rank, role, stateless)


def _span(fragment: Fragment) -> int:
    """Bytes from a fragment's first element to the end of its last."""
    if fragment.strides is None:
        return fragment.nbytes
    shape = fragment.region.boxes[0].shape
    last = sum((n - 1) * stride for n, stride in zip(shape, fragment.strides, strict=True))
    return (last + 1) * fragment.dtype.itemsize
