"""Adapter for torch modules with their optimizer: plain, DDP, or sharded as DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Mesh, Rank
from ucp.core.region import Region
from ucp.errors import UsageError
from ucp.formats.dcp.optimizer_keys import strip_wrappers
from ucp.training.collectives import rank_and_size
from ucp.training.live_job import LiveJob, LiveTensor, ParamSlice, SteppedTensor


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def local_box(tensor: Any, name: str) -> Box:
    """The box of the full tensor that this rank holds; empty if the rank holds no elements."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"parameter {name}: this rank is not part of the device mesh of its DTensor")
    box = box_of(tuple(tensor.shape), tensor.placements, tuple(mesh.shape), tuple(coordinate), name)
    found = tuple(tensor._local_tensor.shape)
    if found != box.shape and 0 not in (*found, *box.shape):
        placements = _format_placements(tensor.placements)
        raise UsageError(
            f"parameter {name}: the local tensor of its DTensor {placements} on a mesh of {list(mesh.shape)} has an"
            f" unexpected shape (expected {list(box.shape)}, found {list(found)})",
        )
    return box


def box_of(
    shape: Shape, placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int], name: str = "?"
) -> Box:
    """The box at `coordinate` of a mesh with sizes `mesh`, given one placement per mesh dimension.

    torch splits like `torch.chunk` (chunks of `ceil(size / ranks)`, the last ones shorter or empty), one mesh dimension
    after the other. A `_StridedShard` is split after the mesh dimensions to its right: FSDP over tensor parallelism.
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
        first = min(coordinate[i] * chunk, size[dim])
        start[dim] += first
        size[dim] = min(chunk, size[dim] - first)
    return Box(tuple(start), tuple(size))


def _check_strided(
    placements: Sequence[Any], mesh: Sequence[int], plain: Sequence[int], strided: Sequence[int], name: str
) -> None:
    """Refuse a `_StridedShard` whose split factor is not the product of the splits of its dim to its right."""
    for i in strided:
        later = 1
        for j in (*plain, *strided):
            if j > i and placements[j].dim == placements[i].dim:
                later *= mesh[j]
        if placements[i].split_factor != later:
            raise UsageError(
                f"parameter {name}: DTensor placements {_format_placements(placements)} on a mesh of"
                f" {list(mesh)} have a split order that is not supported"
            )
        if any(j < i and placements[j].dim == placements[i].dim for j in plain):
            raise UsageError(f"parameter {name}: DTensor placements {_format_placements(placements)} are not supported")


def _kind(placement: Any) -> str:
    return type(placement).__name__


def _format_placements(placements: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"


def describe_module(model: Any, optimizer: Any) -> LiveJob:
    """Describe a torch module and its optimizer (or None) as a `LiveJob`."""
    from torch.nn.parallel import DistributedDataParallel

    wrapper = "torch module"
    module = model
    while True:
        if isinstance(module, DistributedDataParallel):
            wrapper, module = "DDP module", module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            break
    _refuse_fsdp1(module)
    names = names_of(module)
    rank, size = rank_and_size()
    sharded = any(is_dtensor(p) for p in module.parameters())
    job = LiveJob(
        "FSDP2 module" if sharded else wrapper,
        Mesh(dp=size, zero=3 if sharded else 0),
        Rank(dp=rank),
        shapes=shapes_of(module),
        aliases=aliases_of(module),
        parameters=dict(named_parameters(module)),
        optimizer=optimizer,
    )
    if optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise UsageError(
                        f"param group {number} of the optimizer has a parameter of shape {list(p.shape)} that is not in"
                        " the module",
                        hint="pass the optimizer of this module, created after the module was wrapped or sharded",
                    )
                name = names[id(p)]
                job.stepped.append(SteppedTensor(p, slice_of(name, p), [name], number))
    add_untrained(job, module)
    return job


def slice_of(name: str, tensor: Any) -> list[ParamSlice]:
    """The slice of a parameter in a whole tensor or DTensor: a list of one, or empty without elements."""
    if not is_dtensor(tensor):
        return [ParamSlice(name, Region.all_of(tuple(tensor.shape)))]
    box = local_box(tensor, name)
    return [ParamSlice(name, Region.of((box,)))] if box.numel else []


def add_untrained(job: LiveJob, module: Any) -> None:
    """Add what the optimizer does not update: frozen parameters and persistent buffers."""
    trained = {name for stepped in job.stepped for name in stepped.names}
    for name, p in named_parameters(module):
        if name not in trained:
            job.frozen.extend(LiveTensor(param_slice, p) for param_slice in slice_of(name, p))
    add_buffers(job, module)


def add_buffers(job: LiveJob, module: Any) -> None:
    for name, buffer in persistent_buffers(module):
        job.buffers.extend(LiveTensor(param_slice, buffer) for param_slice in slice_of(name, buffer))


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters under their first name, without the prefixes of module wrappers."""
    for name, p in module.named_parameters():
        yield strip_wrappers(name), p


def names_of(module: Any) -> dict[int, str]:
    """`id(parameter)` → its name."""
    return {id(p): name for name, p in named_parameters(module)}


def aliases_of(module: Any) -> dict[str, tuple[str, ...]]:
    """Name → further names of the same tensor, for tied weights."""
    first = names_of(module)
    others: dict[str, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if strip_wrappers(name) != first[id(p)]:
            others.setdefault(first[id(p)], []).append(strip_wrappers(name))
    return {name: tuple(found) for name, found in others.items()}


def persistent_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Buffers that a state dict would contain."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield strip_wrappers(f"{prefix}.{name}" if prefix else name), buffer


def shapes_of(module: Any) -> dict[str, Shape]:
    """Name → shape of every parameter and persistent buffer; for ZeRO-3, of the unpartitioned parameter."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named_parameters(module)}
    shapes.update({name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)})
    return shapes


def _refuse_fsdp1(module: Any) -> None:
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UsageError(
                "the module is wrapped with FSDP1, whose flat parameters are not supported",
                hint="use fully_shard (FSDP2), or load a `dcp` folder with torch's own state-dict functions",
            )
