"""What one rank of a plain torch job does: build, `dcp.load`, train, `dcp.save`, and write down the live state.

The same tiny GPT as the DeepSpeed jobs, so that a checkpoint can go from one to the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.spec import Spec


@dataclass(frozen=True)
class TorchJob:
    """One run of one world. `layout`: `fsdp2`, `hsdp` (two replicas), `ddp` or `plain` (one process)."""

    world: int
    layout: str
    out: str
    spec: Spec = field(default_factory=lambda: Spec(dtype="fp32"))
    steps: int = 0
    first_step: int = 0  # number of the first batch
    load: str | None = None
    save: str | None = None
    model_key: str | None = "model"  # None: the model's tensors stand at the top, as torchtitan has them
    optimizer_key: str = "optim"
    flattened: bool = False
    steps_after: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TorchJob:
        fields = json.loads(text)
        return cls(**{**fields, "spec": Spec(**{**fields["spec"], "frozen": tuple(fields["spec"]["frozen"])})})


def run_rank(job: TorchJob, rank: int) -> None:
    """Do the job's work in an initialised world; rank 0 leaves `loaded`/`final` states and a report in the folder."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    from tests.interop import model as gpt

    spec = job.spec
    model, wrapped = _build(job)
    optimizer = gpt.OPTIMIZERS[spec.optimizer](gpt.parameter_groups(model, spec), lr=spec.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    options = StateDictOptions(flatten_optimizer_state_dict=job.flattened)

    def state() -> dict[str, Any]:
        own = get_model_state_dict(wrapped)
        return {
            **(own if job.model_key is None else {job.model_key: own}),
            job.optimizer_key: get_optimizer_state_dict(wrapped, optimizer, options=options),
        }

    report: dict[str, Any] = {}
    if job.load is not None:
        asked = state()
        dcp.load(asked, checkpoint_id=job.load)
        optim = asked.pop(job.optimizer_key)
        set_model_state_dict(wrapped, asked if job.model_key is None else asked[job.model_key])
        set_optimizer_state_dict(wrapped, optimizer, optim, options=options)
        _export(model, optimizer, Path(job.out) / "loaded", rank)
        report["loaded_groups"] = _groups(optimizer)
    report["losses"] = _train(job, wrapped, optimizer, scheduler, job.first_step, job.steps)
    if job.save is not None:
        extra = {"train_state": {"step": job.first_step + job.steps}, "scheduler": scheduler.state_dict()}
        dcp.save({**state(), **extra}, checkpoint_id=job.save)
    _export(model, optimizer, Path(job.out) / "final", rank)
    report["groups"] = _groups(optimizer)
    report["losses_after"] = _train(job, wrapped, optimizer, scheduler, job.first_step + job.steps, job.steps_after)
    if rank == 0:
        (Path(job.out) / "report.json").write_text(json.dumps(report))
    dist.barrier()


def _build(job: TorchJob) -> tuple[Any, Any]:
    """The model with its parameters as the optimizer sees them, and what is called in training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from tests.interop import model as gpt

    model = gpt.Gpt(job.spec, gpt.Tp())
    gpt.fill(model, job.spec, gpt.Tp())
    for name, p in model.named_parameters():
        if any(part in name for part in job.spec.frozen):
            p.requires_grad_(False)
    if job.layout == "ddp":
        return model, DistributedDataParallel(model)
    if job.layout == "plain":
        return model, model
    if job.layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (job.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def _train(job: TorchJob, model: Any, optimizer: Any, scheduler: Any, first: int, steps: int) -> dict[str, str]:
    import torch.distributed as dist

    from tests.interop import model as gpt

    losses = {}
    for number in range(first, first + steps):
        tokens, targets = gpt.global_batch(job.spec, number)
        size = job.spec.batch // job.world
        mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        loss = model(tokens[mine], targets[mine])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        every: list[Any] = [None] * job.world
        dist.all_gather_object(every, float(loss.detach()))
        losses[str(number)] = (sum(every) / job.world).hex()
    return losses


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _export(model: Any, optimizer: Any, folder: Path, rank: int) -> None:
    """`name|weight`, `name|exp_avg`, … of the whole model, from the live tensors."""
    import torch
    from safetensors.torch import save_file

    def whole(value: Any) -> torch.Tensor:
        tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        return tensor.detach().clone().contiguous()

    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"{name}|weight"] = whole(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}|{kind}"] = whole(value)
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            state[f"{name}|weight"] = whole(buffer)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "state.safetensors")
