"""Functions for the ranks of tests of `ucp.record`: train, record, and save the gradients that the optimizer got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import ucp
from tests.interop.ds_rank import build, train
from tests.training import torch_ranks
from tests.training.deepspeed_ranks import spec_of
from ucp.errors import StorageError
from ucp.training.adapters import describe_job


class Witness:
    """Saves, independently of the recorder, every tensor that the inner optimizer updates, and its states."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.job = describe_job(model, optimizer)
        self.seen: dict[str, torch.Tensor] = {}
        self.step = 0
        self.calls = 0
        self.job.optimizer.register_step_pre_hook(self._before)

    def _before(self, optimizer: Any, *_: Any) -> None:
        self.calls += 1
        number = {id(stepped.key): i for i, stepped in enumerate(self.job.stepped)}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local = getattr(p.grad, "_local_tensor", p.grad)
                    self.seen[f"{self.step + 1}/{number[id(p)]}/grad"] = local.detach().clone().reshape(-1)
                    self.seen[f"{self.step + 1}/{number[id(p)]}/lr"] = torch.tensor(group["lr"], dtype=torch.float64)

    def places(self) -> list[list[Any]]:
        """For each stepped tensor: (name, first element in it, start and stop of the interval of the parameter)."""
        return [
            [[self.job.logical_name(s.name), s.start, s.region.start, s.region.stop] for s in stepped.slices]
            for stepped in self.job.stepped
        ]


def engine(
    out: Path,
    rank: int,
    *,
    spec: dict[str, Any],
    steps: int,
    options: dict[str, Any] | None = None,
    overflow_at: int | None = None,
    doubled_at: int | None = None,
) -> dict[str, Any]:
    """Train a DeepSpeed engine under a recorder; with `overflow_at`, the loss of that step is not a number.

    With `doubled_at`, the gradients of that step are doubled after the backward pass.
    """
    made = spec_of(spec)
    live, place = build(made, dist.get_world_size(), rank, universal=False)
    witness = Witness(live)
    recorder = ucp.record(out / "run", live, **(options or {}))
    skipped = []
    for step in range(1, steps + 1):
        before = live.skipped_steps
        if step == overflow_at:
            spoil(live)
        if step == doubled_at:
            double(live)
        train(live, made, place, 1)
        witness.step = step
        if live.skipped_steps > before:
            skipped.append(step)
    recorder.flush()
    stats = recorder.stats()
    recorder.close()
    save_file(witness.seen, out / f"witness{rank:02d}.safetensors")
    return {
        "rank": rank,
        **place,
        "skipped": skipped,
        "stats": stats,
        "calls": witness.calls,
        "places": witness.places(),
        "class": type(live.optimizer).__name__,
    }


def double(live: Any) -> None:
    """Double the averaged gradients when the next step begins, once, in a way that autograd does not count."""
    original = live.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for some in live.optimizer.averaged_gradients.values():
            for gradient in some:
                gradient.data.mul_(2)
        live.optimizer.step = original
        return original(*args, **kwargs)

    live.optimizer.step = step


def spoil(live: Any) -> None:
    """Make the next backward pass produce NaN, once."""
    p = next(p for p in live.module.parameters() if p.requires_grad)

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * float("nan")

    handle = p.register_hook(poison)


def module(
    out: Path, rank: int, *, spec: dict[str, Any], kind: str, steps: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a torch module (DDP, FSDP2) under a recorder."""
    made = spec_of(spec)
    model, optimizer = torch_ranks.build(made, kind)
    witness = Witness(model, optimizer)
    with ucp.record(out / "run", model, optimizer, **(options or {})) as recorder:
        for step in range(1, steps + 1):
            torch_ranks.train(model, optimizer, made, kind, step - 1, 1)
            witness.step = step
        stats = recorder.stats()
    save_file(witness.seen, out / f"witness{rank:02d}.safetensors")
    return {"rank": rank, "stats": stats, "places": witness.places(), "skipped": []}


def topk(
    out: Path, rank: int, *, spec: dict[str, Any], steps: int, base: str | None = None, feedback: bool = True
) -> dict[str, Any]:
    """Train DDP with top-k compression under a recorder; from `base` of step 3 on, with or without error feedback."""
    made = spec_of(spec)
    model, optimizer = torch_ranks.build(made, "ddp")
    hook = ucp.TopK(model, fraction=0.02)
    first = 0
    if base is not None:
        first = ucp.load_into(Path(base) / "atoms", model, optimizer).step or 0
        if feedback:
            hook.load(base)
    witness = Witness(model, optimizer)
    options: dict[str, Any] = {"compressed": hook, "base_every": 3, "keep_bases": None, "step": first}
    with ucp.record(out / "run", model, optimizer, **options) as recorder:
        for step in range(first + 1, steps + 1):
            witness.step = step - 1
            torch_ranks.train(model, optimizer, made, "ddp", step - 1, 1)
        stats = recorder.stats()
    save_file(witness.seen, out / f"witness{rank:02d}.safetensors")
    torch_ranks.write_state(model, optimizer, out / "end", rank)
    return {"rank": rank, "stats": stats, "places": witness.places(), "skipped": []}


def failing(out: Path, rank: int, *, at: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a DDP job with a recorder that stops on an error, which the last rank gets after step `at`."""
    torch.manual_seed(1)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    recorder = ucp.record(out / "run", net, optimizer, on_error="stop", **options)
    stopped = None
    for step in range(1, 13):
        if step == at + 1 and rank == dist.get_world_size() - 1:
            recorder._writer._batches.error = StorageError("the disk of this rank is full")
        optimizer.zero_grad()
        net(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        if recorder.error is not None and stopped is None:
            stopped = step
    recorder.close()
    return {"stopped": stopped, "error": str(recorder.error)}
