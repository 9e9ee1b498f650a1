"""Tensors of a tree that is to be written: their elements come from atoms, or are zero."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ucp.files.torchzip_writer import Fill, NewTensor, Zeros, new_tensor
from ucp.model.box import Shape
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import DType
from ucp.model.region import Region

Segment = Fill | Zeros


def flat_tensor(dtype: DType, segments: Iterable[Segment]) -> NewTensor:
    """A one-dimensional tensor of segments laid end to end; neighbouring zeros are joined."""
    joined: list[Segment] = []
    for segment in segments:
        if not segment.numel:
            continue
        if isinstance(segment, Zeros) and joined and isinstance(joined[-1], Zeros):
            joined[-1] = Zeros(joined[-1].numel + segment.numel)
        else:
            joined.append(segment)
    return new_tensor(dtype, (sum(segment.numel for segment in joined),), *joined)


def shaped_tensor(atom: Atom, region: Region, shape: Shape) -> NewTensor:
    """A region of an atom in the given shape."""
    if region.numel != prod(shape):
        raise AssertionError(f"{atom}: a region of {region.numel} elements cannot have shape {shape}")
    return new_tensor(atom.dtype, shape, *((Fill(atom, region),) if region.numel else ()))


def whole_tensor(atom: Atom) -> NewTensor:
    """All of an atom."""
    return shaped_tensor(atom, Region.all_of(atom.shape), atom.shape)


def empty_tensor(dtype: DType) -> NewTensor:
    """What ZeRO-3 leaves of a parameter in the model file."""
    return new_tensor(dtype, (0,))


def segment(atom: Atom | None, region: Region) -> Segment:
    """Part of a state; zero where a parameter never got one (it took no step)."""
    return Fill(atom, region) if atom is not None else Zeros(region.numel)
