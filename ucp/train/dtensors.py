"""DTensors: which box of the whole this rank's local tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucp.errors import UsageError
from ucp.model.box import Box, Shape


def is_dtensor(tensor: Any) -> bool:
    """Is this a torch DTensor?"""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def local_box(tensor: Any, name: str) -> Box:
    """The box of the whole that this rank holds; without elements where none is left for it."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        raise UsageError(f"parameter {name}: this rank is not part of the device mesh of its DTensor")
    box = box_of(tuple(tensor.shape), tensor.placements, tuple(mesh.shape), tuple(place), name)
    found = tuple(tensor._local_tensor.shape)
    if found != box.shape and 0 not in (*found, *box.shape):
        raise UsageError(
            f"parameter {name}: its DTensor {_told(tensor.placements)} over a mesh of {list(mesh.shape)} holds a local"
            f" tensor of shape {list(found)} where {list(box.shape)} was expected",
        )
    return box


def box_of(shape: Shape, placements: Sequence[Any], mesh: Sequence[int], place: Sequence[int], name: str = "?") -> Box:
    """The box at `place` of a mesh of sizes `mesh`, for placements one a mesh dimension.

    torch cuts as `torch.chunk` does (chunks of `ceil(size / ranks)`, the last ones shorter or empty), mesh dimension by
    mesh dimension. A strided shard is one that was cut after the later ones, as FSDP does over tensor parallelism.
    """
    start, size = [0] * len(shape), list(shape)
    plain = [i for i, placement in enumerate(placements) if _kind(placement) == "Shard"]
    strided = [i for i, placement in enumerate(placements) if _kind(placement) == "_StridedShard"]
    for i, placement in enumerate(placements):
        if i not in plain and i not in strided and _kind(placement) != "Replicate":
            raise UsageError(
                f"parameter {name}: DTensor placement {placement} is not supported",
                hint="load into parameters that are sharded or replicated",
            )
    _check_strided(placements, mesh, plain, strided, name)
    for i in (*plain, *reversed(strided)):
        dim = placements[i].dim % len(shape)
        chunk = -(-size[dim] // mesh[i])
        first = min(place[i] * chunk, size[dim])
        start[dim] += first
        size[dim] = min(chunk, size[dim] - first)
    return Box(tuple(start), tuple(size))


def _check_strided(
    placements: Sequence[Any], mesh: Sequence[int], plain: Sequence[int], strided: Sequence[int], name: str
) -> None:
    """A strided shard must be cut after exactly those cuts of its dimension that stand to its right."""
    for i in strided:
        later = 1
        for j in (*plain, *strided):
            if j > i and placements[j].dim == placements[i].dim:
                later *= mesh[j]
        if placements[i].split_factor != later:
            raise UsageError(
                f"parameter {name}: DTensor placements {_told(placements)} over a mesh of {list(mesh)} are cut in an"
                " order that is not supported"
            )
        if any(j < i and placements[j].dim == placements[i].dim for j in plain):
            raise UsageError(f"parameter {name}: DTensor placements {_told(placements)} are not supported")


def _kind(placement: Any) -> str:
    return type(placement).__name__


def _told(placements: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"
