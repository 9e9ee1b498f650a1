"""Tensors of the trees to be written, described by the regions of atoms that fill them; and the states of a group.

Nothing is read here except scalars such as `step`, which a flat group has only once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, new_tensor
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Parameter, state_of_kind
from ucp.core.dtypes import DType, scalar_value
from ucp.core.optimizers import COUNTERS
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.formats.sharded.slicer import TargetSlice
from ucp.storage.local import SourceFiles

Segment = RegionContent | ZeroContent


def flat_tensor(dtype: DType, segments: Iterable[Segment]) -> NewTensor:
    """A one-dimensional tensor of consecutive segments; neighbouring zeros are joined."""
    joined: list[Segment] = []
    for segment in segments:
        if not segment.numel:
            continue
        if isinstance(segment, ZeroContent) and joined and isinstance(joined[-1], ZeroContent):
            joined[-1] = ZeroContent(joined[-1].numel + segment.numel)
        else:
            joined.append(segment)
    return new_tensor(dtype, (sum(segment.numel for segment in joined),), *joined)


def shaped_tensor(atom: Atom, region: Region, shape: Shape) -> NewTensor:
    """A region of an atom in the given shape."""
    if region.numel != prod(shape):
        raise AssertionError(f"{atom}: a region of {region.numel} elements cannot have shape {shape}")
    return new_tensor(atom.dtype, shape, *((RegionContent(atom, region),) if region.numel else ()))


def whole_tensor(atom: Atom) -> NewTensor:
    """A whole atom."""
    return shaped_tensor(atom, Region.all_of(atom.shape), atom.shape)


def empty_tensor(dtype: DType) -> NewTensor:
    """The empty tensor that ZeRO-3 leaves for a parameter in the model file."""
    return new_tensor(dtype, (0,))


def segment(atom: Atom | None, region: Region) -> Segment:
    """A region of a state; zeros if the parameter does not have the state (it took no step)."""
    return RegionContent(atom, region) if atom is not None else ZeroContent(region.numel)


def is_scalar(parameter: Parameter, kind: str, atom: Atom) -> bool:
    """Whether a state is one value for the whole parameter. For a parameter without dimensions, only the name tells."""
    return not atom.shape and (bool(parameter.shape) or kind in COUNTERS)


def element_kinds(members: Iterable[TargetSlice], without: Container[str] = ()) -> dict[str, DType]:
    """Kinds of states with one value per element, with their dtype; the union over the parameters, in order.

    `without`: kinds to skip, which may have any shape.
    """
    kinds: dict[str, DType] = {}
    for member in members:
        for kind, atom in member.parameter.atoms.items():
            if kind in (WEIGHT, MASTER) or is_scalar(member.parameter, kind, atom) or kind in without:
                continue
            if atom.shape != member.parameter.shape:
                raise InconsistentError(
                    f"parameter {member.parameter.name}: '{kind}' has shape {list(atom.shape)}, which cannot be split"
                    f" like the parameter's {list(member.parameter.shape)}",
                    hint="only --zero 0 with --tp 1 can write such a state, because it stays whole there",
                )
            kinds.setdefault(kind, atom.dtype)
    return kinds


@dataclass(frozen=True, slots=True)
class TargetGroupStates:
    """The optimizer states of a flat group, without the masters: kinds and scalars, which all ranks share."""

    kinds: dict[str, DType]  # states with one value per element
    scalars: dict[str, Any]

    def entries(self, tensors: dict[str, NewTensor]) -> dict[str, Any]:
        """The group's entry of the optimizer's `state`, as torch orders it: the step, the tensors, other scalars."""
        first = {kind: value for kind, value in self.scalars.items() if kind == "step"}
        return {state_of_kind(kind): value for kind, value in {**first, **tensors, **self.scalars}.items()}


class ScalarStates:
    """Reads scalars such as `step`, and checks that all parameters of a group have the same value."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[tuple[str, int, bytes | None], bytes] = {}

    def of(self, members: Iterable[TargetSlice]) -> dict[str, Any]:
        """Kind → number (if the source stores an integer) or tensor."""
        found: dict[str, tuple[str, bytes, Atom]] = {}
        for member in members:
            for kind, atom in member.parameter.atoms.items():
                if not is_scalar(member.parameter, kind, atom):
                    continue
                data = self._bytes(atom)
                first = found.setdefault(kind, (member.parameter.name, data, atom))
                if first[1] != data:
                    mine, other = scalar_value(data, atom.dtype), scalar_value(first[1], first[2].dtype)
                    raise InconsistentError(
                        f"'{kind}' of {member.parameter.name} is {mine}, that of {first[0]} in the same optimizer group"
                        f" is {other}: a flat group has one value",
                        hint="this target needs equal values in a group; use --zero 0",
                    )
        return {kind: _number_or_tensor(data, atom) for kind, (_, data, atom) in found.items()}

    def group(self, members: Sequence[TargetSlice]) -> TargetGroupStates:
        """Every state of a flat group."""
        return TargetGroupStates(element_kinds(members), self.of(members))

    def each(self, member: TargetSlice) -> dict[str, Any]:
        """The scalars of one parameter."""
        return self.of([member])

    def _bytes(self, atom: Atom) -> bytes:
        fragment = atom.fragments[0]
        key = (fragment.file, fragment.offset, fragment.inline)
        if key not in self._known:
            inline = fragment.inline
            size = fragment.dtype.itemsize
            self._known[key] = self._files.read(fragment.file, fragment.offset, size) if inline is None else inline
        return self._known[key]


def _number_or_tensor(data: bytes, atom: Atom) -> Any:
    return scalar_value(data, atom.dtype) if atom.dtype.family == "int" else whole_tensor(atom)
