"""Ranks of plain torch jobs: alone, DDP, FSDP2 on one- and two-dimensional meshes. The model is that of the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import ucp
from tests.interop import model as gpt
from tests.interop.spec import Spec
from tests.training.deepspeed_ranks import report_json, spec_of


def build(spec: Spec, kind: str) -> tuple[Any, Any]:
    """Model and optimizer: `ddp`, `fsdp`, `hsdp` (replicated shards), `fsdp+tp` (strided shards)."""
    torch.manual_seed(1000 + spec.seed)
    module = gpt.Gpt(spec, gpt.Tp())
    gpt.fill(module, spec, gpt.Tp())
    for name, p in module.named_parameters():
        p.requires_grad_(not any(part in name for part in spec.frozen))
    if kind == "ddp":
        model: Any = nn.parallel.DistributedDataParallel(module)
    elif kind == "plain":
        model = module
    else:
        model = shard(module, kind)
    groups = gpt.parameter_groups(model, spec)
    return model, gpt.OPTIMIZERS[spec.optimizer](groups, lr=spec.lr)


def shard(module: nn.Module, kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    else:
        whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in module.blocks:
            plain_linear(block.mlp, "up")
            plain_linear(block.mlp, "down")
            parallelize_module(
                block,
                whole["tp"],
                {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Replicate())},
            )
        mesh = whole["dp"]
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    # Matrices outside the blocks by columns where that comes out even, to have a cut that is not row-major.
    fully_shard(
        module,
        mesh=mesh,
        shard_placement_fn=lambda p: Shard(1 if p.dim() > 1 and p.shape[1] % mesh.size(-1) == 0 else 0),
    )
    return module


def plain_linear(module: nn.Module, name: str) -> None:
    """torch's tensor parallelism supports only its own Linear: one with the same parameters."""
    old = getattr(module, name)
    new = nn.Linear(old.weight.shape[1], old.weight.shape[0])
    new.weight, new.bias = old.weight, old.bias
    setattr(module, name, new)


def train(model: Any, optimizer: Any, spec: Spec, kind: str, first: int, steps: int) -> list[str]:
    """Losses of this rank, as hex. Ranks of one tensor-parallel group see the same data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "fsdp+tp":
        rank, world = rank // 2, world // 2
    losses = []
    for step in range(first, first + steps):
        tokens, targets = gpt.global_batch(spec, step)
        per = spec.batch // world
        mine = slice(rank * per, (rank + 1) * per)
        loss = model(tokens[mine], targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def write_state(model: Any, optimizer: Any, folder: Path, rank: int) -> None:
    """All full tensors, with the keys of the references of engines."""
    module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state = {}
    for name, p in module.named_parameters():
        state[f"{name}|weight"] = whole(p)
        for kind, value in optimizer.state.get(p, {}).items():
            state[f"{name}|{kind}"] = whole(value)
    persistent = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name in persistent:
            state[f"{name}|weight"] = whole(buffer)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / f"rank{rank:02d}.safetensors")


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone().contiguous()


def train_and_save(
    out: Path, rank: int, *, spec: dict[str, Any], kind: str, steps: int, more: int = 0
) -> dict[str, Any]:
    """Train, save with `torch.distributed.checkpoint` and with `ucp`, write the reference state, and continue."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    made = spec_of(spec)
    model, optimizer = build(made, kind)
    train(model, optimizer, made, kind, 0, steps)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(out / "dcp"))
    write_state(model, optimizer, out / "reference", rank)
    handle = ucp.save(out / "atoms", model, optimizer, client_state={"epoch": 3}, asynchronous=kind == "fsdp")
    losses = train(model, optimizer, made, kind, steps, more)
    handle.wait()
    return {"rank": rank, "losses_after": losses}


def load(
    out: Path, rank: int, *, spec: dict[str, Any], kind: str, path: str, first: int = 0, steps: int = 0, used: int = 0
) -> dict[str, Any]:
    """Build a job (and use it), load into it, write the reference state, and continue training."""
    made = spec_of(spec)
    model, optimizer = build(made, kind)
    train(model, optimizer, made, kind, 50, used)
    report = ucp.load_into(path, model, optimizer)
    write_state(model, optimizer, out / "loaded", rank)
    hyper = [{k: v for k, v in g.items() if k in ("lr", "weight_decay", "betas")} for g in optimizer.param_groups]
    losses = train(model, optimizer, made, kind, first, steps)
    return {"rank": rank, "report": report_json(report), "hyper": hyper, "losses": losses}
