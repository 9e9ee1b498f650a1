"""Plain torch modules with their optimizer: alone, under DDP, or sharded as DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ucp.errors import UsageError
from ucp.model.box import Shape
from ucp.model.layout import Mesh, Rank
from ucp.model.region import Region
from ucp.train.dtensors import is_dtensor, local_box
from ucp.train.live import Held, LiveJob, Share, Stepped, plain_name
from ucp.train.talk import world


def describe_module(model: Any, optimizer: Any) -> LiveJob:
    """The job of a torch module and its optimizer (or None)."""
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
    rank, size = world()
    sharded = any(is_dtensor(p) for p in module.parameters())
    job = LiveJob(
        "FSDP2 module" if sharded else wrapper,
        Mesh(dp=size, zero=3 if sharded else 0),
        Rank(dp=rank),
        shapes=shapes_of(module),
        aliases=aliases_of(module),
        attributes=dict(named_parameters(module)),
        optimizer=optimizer,
    )
    if optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise UsageError(
                        f"group {number} of the optimizer has a parameter of shape {list(p.shape)} that the module"
                        " lacks",
                        hint="give the optimizer of this module, made after it was wrapped or sharded",
                    )
                name = names[id(p)]
                job.stepped.append(Stepped(p, share_of(name, p), [name], number))
    add_resting(job, module)
    return job


def share_of(name: str, tensor: Any) -> list[Share]:
    """What of a parameter a whole tensor or DTensor holds: one share, or none."""
    if not is_dtensor(tensor):
        return [Share(name, Region.all_of(tuple(tensor.shape)))]
    box = local_box(tensor, name)
    return [Share(name, Region.of((box,)))] if box.numel else []


def add_resting(job: LiveJob, module: Any) -> None:
    """Add what the optimizer does not step: frozen parameters and persistent buffers."""
    trained = {name for stepped in job.stepped for name in stepped.names}
    for name, p in named_parameters(module):
        if name not in trained:
            job.frozen.extend(Held(share, p) for share in share_of(name, p))
    add_buffers(job, module)


def add_buffers(job: LiveJob, module: Any) -> None:
    """Add persistent buffers."""
    for name, buffer in persistent_buffers(module):
        job.buffers.extend(Held(share, buffer) for share in share_of(name, buffer))


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters under their first name, without what wrappers add to it."""
    for name, p in module.named_parameters():
        yield plain_name(name), p


def names_of(module: Any) -> dict[int, str]:
    """id of a parameter → its name."""
    return {id(p): name for name, p in named_parameters(module)}


def aliases_of(module: Any) -> dict[str, tuple[str, ...]]:
    """Name → further names of the same tensor, where a module ties weights."""
    first = names_of(module)
    others: dict[str, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if plain_name(name) != first[id(p)]:
            others.setdefault(first[id(p)], []).append(plain_name(name))
    return {name: tuple(found) for name, found in others.items()}


def persistent_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Buffers that a state dict would hold."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def shapes_of(module: Any) -> dict[str, Shape]:
    """Name → shape of every parameter and persistent buffer; of the whole where ZeRO-3 has cut it."""
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
