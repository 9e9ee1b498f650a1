"""Tensors of a tree that is to be written: their elements come from atoms, or are zero.

Optimizer states of a group: which kinds there are, and the scalars that all its parameters share.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, new_tensor
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Parameter, state_of_kind
from ucp.core.dtypes import DType
from ucp.core.optimizers import COUNTERS
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.formats.sharded.slicer import TargetSlice
from ucp.storage.local import SourceFiles

Segment = RegionContent | ZeroContent


def flat_tensor(dtype: DType, segments: Iterable[Segment]) -> NewTensor:
    """A one-dimensional tensor of segments laid end to end; neighbouring zeros are joined."""
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
    """All of an atom."""
    return shaped_tensor(atom, Region.all_of(atom.shape), atom.shape)


def empty_tensor(dtype: DType) -> NewTensor:
    """What ZeRO-3 leaves of a parameter in the model file."""
    return new_tensor(dtype, (0,))


def segment(atom: Atom | None, region: Region) -> Segment:
    """Part of a state; zero where a parameter never got one (it took no step)."""
    return RegionContent(atom, region) if atom is not None else ZeroContent(region.numel)


_FORMATS = {"int64": "<q", "float32": "<f", "float64": "<d", "int32": "<i"}


def is_scalar(parameter: Parameter, kind: str, atom: Atom) -> bool:
    """Is this state one value for all of the parameter? Where that has no dimensions, only the name tells."""
    return not atom.shape and (bool(parameter.shape) or kind in COUNTERS)


def element_kinds(members: Iterable[TargetSlice], without: Container[str] = ()) -> dict[str, DType]:
    """Kinds that have one value an element, with their dtype; the union over the parameters, in order.

    `without`: kinds that are written in another way, and may have any shape.
    """
    kinds: dict[str, DType] = {}
    for member in members:
        for kind, atom in member.parameter.atoms.items():
            if kind in (WEIGHT, MASTER) or is_scalar(member.parameter, kind, atom) or kind in without:
                continue
            if atom.shape != member.parameter.shape:
                raise InconsistentError(
                    f"parameter {member.parameter.name}: '{kind}' has shape {list(atom.shape)}, which cannot be cut"
                    f" like the parameter's {list(member.parameter.shape)}",
                    hint="only --zero 0 with --tp 1 keeps such a state: it is written whole there",
                )
            kinds.setdefault(kind, atom.dtype)
    return kinds


@dataclass(frozen=True, slots=True)
class TargetGroupStates:
    """What the optimizer has of a flat group besides the masters. All ranks have the same; their shares differ."""

    kinds: dict[str, DType]  # states with one value an element
    scalars: dict[str, Any]

    def entries(self, shares: dict[str, NewTensor]) -> dict[str, Any]:
        """The group's entry of the optimizer's `state`, as torch orders it: the step, the tensors, other scalars."""
        first = {kind: value for kind, value in self.scalars.items() if kind == "step"}
        return {state_of_kind(kind): value for kind, value in {**first, **shares, **self.scalars}.items()}


class ScalarStates:
    """Scalars such as `step`: one value for a whole group, checked to be the same for all its parameters."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[tuple[str, int, bytes | None], bytes] = {}

    def of(self, members: Iterable[TargetSlice]) -> dict[str, Any]:
        """Kind → plain number (as files that keep plain numbers do) or tensor."""
        found: dict[str, tuple[str, bytes, Atom]] = {}
        for member in members:
            for kind, atom in member.parameter.atoms.items():
                if not is_scalar(member.parameter, kind, atom):
                    continue
                data = self._bytes(atom)
                first = found.setdefault(kind, (member.parameter.name, data, atom))
                if first[1] != data:
                    raise InconsistentError(
                        f"'{kind}' of {member.parameter.name} is {_unpack_number(data, atom.dtype)}, that of {first[0]} in the"  # noqa: E501
                        f" same optimizer group is {_unpack_number(first[1], first[2].dtype)}: a flat group has one value",  # noqa: E501
                        hint="the target needs equal values in a group; keep --zero 0",
                    )
        return {kind: _scalar_value(data, atom) for kind, (_, data, atom) in found.items()}

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


def _scalar_value(data: bytes, atom: Atom) -> Any:
    if atom.dtype.family == "int":
        return _unpack_number(data, atom.dtype)
    return whole_tensor(atom)


def _unpack_number(data: bytes, dtype: DType) -> Any:
    return struct.unpack(_FORMATS[dtype.name], data)[0] if dtype.name in _FORMATS else data.hex()
